"""Declarations: alignment of pointer parameters, vector registers."""

import numpy as np
import pytest

from fovea import emulator

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def kernel(signature: str, body: str) -> str:
    """Return a module of one kernel `k`."""
    return f"{HEAD}.visible .entry k({signature})\n{{\n{body}\nret;\n}}\n"


def test_align_of_a_pointer_parameter_belongs_to_the_pointee() -> None:
    signature = ".param .u32 n, .param .u64 .ptr .global .align 1 out"
    body = """.reg .b64 %p; .reg .b32 %n; ld.param.u64 %p, [out]; ld.param.u32 %n, [n];
    st.global.b32 [%p], %n;"""
    out = np.zeros(1, np.uint32)
    module = emulator.load_ptx(kernel(signature, body))
    module.launch("k", 1, 1, args=[7, out])  # offset 4 would be a misaligned parameter load
    assert out[0] == 7


def test_large_align_of_a_pointee_leaves_parameters_where_they_are() -> None:
    signature = ".param .u64 .ptr .align 128 a, .param .u64 .ptr .shared .align 64 b, .param .u32 c"
    module = emulator.load_ptx(kernel(signature, ""))
    offsets = [p.offset for p in module._layout.kernel("k").parameters]
    assert offsets == [0, 8, 16]


def test_align_before_a_type_still_places_the_parameter() -> None:
    module = emulator.load_ptx(kernel(".param .u32 c, .param .align 64 .b8 map[128]", ""))
    assert [p.offset for p in module._layout.kernel("k").parameters] == [0, 64]


def test_vector_register_and_its_components_name_the_same_registers() -> None:
    out = np.zeros(8, np.uint32)
    body = """.reg .b64 %p; .reg .v4 .b32 abcd; .reg .v2 .b32 pair<3>; .reg .b32 %s;
    ld.param.u64 %p, [out];
    mov.b32 abcd.x, 1; mov.b32 abcd.y, 2; mov.b32 abcd.b, 3; mov.b32 abcd.w, 4;
    st.global.v4.b32 [%p], abcd;
    ld.global.v2.b32 pair2, [%p+8];
    add.u32 %s, pair2.x, pair2.g;
    st.global.b32 [%p+16], %s;"""
    emulator.load_ptx(kernel(".param .u64 out", body)).launch("k", 1, 1, args=[out])
    assert out.tolist() == [1, 2, 3, 4, 7, 0, 0, 0]


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".reg .v4 .pred v;", "no register can have type .pred x 4"),
        (".reg .v4 .b64 v;", "exceeds 128 bits"),
        (".reg .v2 .b32 v; mov.b32 v.z, 1;", r"v\.z"),
        (".reg .v2 .b32 v; .reg .b32 %a; add.u32 %a, v, 1;", "cannot be read"),
    ],
)
def test_wrong_use_of_vector_registers_is_an_error_with_its_line(
    declaration: str, message: str
) -> None:
    with pytest.raises(emulator.PtxError, match=message) as info:
        emulator.load_ptx(kernel("", declaration)).launch("k", 1, 32)
    assert info.value.line == 6


def test_vector_of_one_register_is_the_register() -> None:
    out = np.arange(4, dtype=np.uint8)
    body = """.reg .b64 %p; .reg .b16 %h;
    ld.param.u64 %p, [out]; ld.global.b8 { %h }, [ %p + 3 ]; st.global.b8 [ %p + 0 ], { %h };"""
    emulator.load_ptx(kernel(".param .u64 out", body)).launch("k", 1, 1, args=[out])
    assert out.tolist() == [3, 1, 2, 3]


def test_register_and_a_family_of_the_same_name_are_different_registers() -> None:
    # as Triton's conversion from fp8 declares them
    out = np.zeros(3, np.uint32)
    body = """.reg .b64 %p; .reg .b32 a; .reg .b32 a<2>; ld.param.u64 %p, [out];
    mov.b32 a, 7; mov.b32 a0, 8; mov.b32 a1, 9;
    st.global.b32 [%p], a; st.global.b32 [%p+4], a0; st.global.b32 [%p+8], a1;"""
    module = emulator.load_ptx(kernel(".param .u64 out", body))
    module.launch("k", 1, 1, args=[out])
    assert out.tolist() == [7, 8, 9]


@pytest.mark.parametrize("twice", [".reg .b32 a; .reg .f32 a;", ".reg .b32 a<2>; .reg .f32 a<3>;"])
def test_register_declared_twice_is_an_error_with_its_line(twice: str) -> None:
    with pytest.raises(emulator.PtxError, match="declared twice") as info:
        emulator.load_ptx(kernel("", twice))
    assert info.value.line == 6
