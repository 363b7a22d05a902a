"""mma.sync with fragments that ldmatrix loads, against numpy.

ldmatrix is recorded on silicon (`cases/memory`), so a wrong fragment of A, B or D shows here.
"""

import numpy as np
import pytest

from fovea import emulator

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"

F16 = """
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 d)
{
    .shared .align 16 .b8 sa[512]; .shared .align 16 .b8 sb[256];
    .reg .b64 %a, %b, %d, %o; .reg .b32 %t, %u, %v, %x<4>, %y<2>; .reg .pred %p; .reg .f32 %f<4>;
    ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u64 %d, [d]; mov.u32 %t, %tid.x;
    mul.wide.u32 %o, %t, 16; add.u64 %a, %a, %o;
    ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%a];
    mov.u32 %u, sa; shl.b32 %v, %t, 4; add.u32 %v, %v, %u;
    st.shared.v4.b32 [%v], {%x0, %x1, %x2, %x3};
    mul.wide.u32 %o, %t, 8; add.u64 %b, %b, %o;
    ld.global.v2.b32 {%x0, %x1}, [%b];
    mov.u32 %u, sb; shl.b32 %v, %t, 3; add.u32 %v, %v, %u; st.shared.v2.b32 [%v], {%x0, %x1};
    bar.warp.sync -1;
    and.b32 %u, %t, 15; shl.b32 %u, %u, 5; shr.u32 %v, %t, 4; shl.b32 %v, %v, 4;
    add.u32 %u, %u, %v; mov.u32 %v, sa; add.u32 %u, %u, %v;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%x0, %x1, %x2, %x3}, [%u];
    and.b32 %u, %t, 7; shl.b32 %u, %u, 5; shr.u32 %v, %t, 3; and.b32 %v, %v, 1;
    shl.b32 %v, %v, 4; add.u32 %u, %u, %v; mov.u32 %v, sb; add.u32 %u, %u, %v;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%y0, %y1}, [%u];
    mov.f32 %f0, 0f3F800000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32
        {%f0, %f1, %f2, %f3}, {%x0, %x1, %x2, %x3}, {%y0, %y1}, {%f0, %f1, %f2, %f3};
    mul.wide.u32 %o, %t, 8; add.u64 %d, %d, %o;
    st.global.v2.f32 [%d], {%f0, %f1}; st.global.v2.f32 [%d+256], {%f2, %f3};
    ret;
}
"""


@pytest.mark.parametrize("exact", [False, True])
def test_m16n8k16_f16_equals_numpy(exact: bool) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 8, (16, 16)).astype(np.float16)
    b = rng.integers(-8, 8, (8, 16)).astype(np.float16)
    d = np.zeros((16, 8), np.float32)
    module = emulator.load_ptx(HEAD + F16.replace("KIND", "f16"))
    options = emulator.Options(exact_mma=exact)
    result = module.launch("k", 1, 32, args=[a, b, d], options=options)
    np.testing.assert_array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T + 1)
    assert result.counters["mma_flops.f16"] == 2 * 16 * 8 * 16


def test_m16n8k16_bf16_equals_numpy() -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 8, (16, 16)).astype(np.float32)
    b = rng.integers(-8, 8, (8, 16)).astype(np.float32)
    d = np.zeros((16, 8), np.float32)
    halves = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    emulator.load_ptx(HEAD + F16.replace("KIND", "bf16")).launch("k", 1, 32, args=[*halves, d])
    np.testing.assert_array_equal(d, a @ b.T + 1)


def test_wrong_number_of_registers_is_refused() -> None:
    text = HEAD + F16.replace("KIND", "f16").replace("{%y0, %y1}, {%f0", "{%y0}, {%f0")
    with pytest.raises(emulator.PtxError, match="b has 1 registers, the shape needs 2"):
        emulator.load_ptx(text).launch("k", 1, 32, args=[np.zeros(512, np.uint8)] * 3)
