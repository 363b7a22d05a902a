"""Member masks that differ between the lanes that execute an instruction together."""

import numpy as np
import pytest

from fovea import emulator

LANE = np.arange(32)
KERNEL = """.version 8.5
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .reg .b64 %o, %w; .reg .b32 %t, %r, %x; .reg .f32 %f; .reg .pred %p, %q;
    ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %w, %t, 4; add.u64 %o, %o, %w;
    setp.lt.u32 %p, %t, 16; selp.b32 %x, {low}, {high}, %p;
    {body}
    st.global.u32 [%o], %r;
    ret;
}}
"""


def run(body: str, low: str = "0xffff", high: str = "0xffff0000") -> list[int]:
    """Return the `%r` of each lane; `%x` is the mask of its half of the warp."""
    out = np.zeros(32, np.uint32)
    text = KERNEL.format(body=body, low=low, high=high)
    emulator.load_ptx(text).launch("k", 1, 32, args=[out])
    return out.tolist()


HALF = np.where(LANE < 16, 0xFFFF, 0xFFFF0000)


# what an H200 gives, but for the minimum of floats, which it has not
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("setp.eq.u32 %q, %t, %t; vote.sync.ballot.b32 %r, %q, %x;", HALF),
        ("setp.eq.u32 %q, %t, 3; vote.sync.any.pred %q, %q, %x; selp.b32 %r, 1, 0, %q;", LANE < 16),
        ("shfl.sync.bfly.b32 %r, %t, 5, 31, %x;", LANE ^ 5),
        ("match.any.sync.b32 %r, 3, %x;", HALF),
        ("match.all.sync.b32 %r|%q, 3, %x;", HALF),
        ("redux.sync.add.u32 %r, %t, %x;", np.where(LANE < 16, 0x78, 0x178)),
        ("redux.sync.add.u32 %t, %t, %x; mov.u32 %r, %t;", np.where(LANE < 16, 0x78, 0x178)),
        ("elect.sync %r|%q, %x;", LANE // 16 * 16),
        ("elect.sync _|%q, %x; selp.b32 %r, 1, 0, %q;", LANE % 16 == 0),
        ("cvt.rn.f32.u32 %f, %t; redux.sync.max.f32 %f, %f, %x; cvt.rni.u32.f32 %r, %f;",
         np.where(LANE < 16, 15, 31)),
        ("bar.warp.sync %x; mov.u32 %r, %t;", LANE),
    ],
)  # fmt: skip
def test_each_group_of_lanes_gets_its_own_result(body, expected):
    assert run(body) == expected.astype(int).tolist()


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ("-1", "0xffff0000", "0xffffffff but only lanes 0x0000ffff"),
        ("0xffff", "-1", "0xffffffff but only lanes 0xffff0000"),
        ("0xffff", "0xfff80000", "lane 18, which member mask 0xfff80000 leaves out"),
        ("0xffff", "0xffff", "lane 31, which member mask 0x0000ffff leaves out"),
    ],
)
@pytest.mark.parametrize("body", ["bar.warp.sync %x; mov.u32 %r, 1;", "activemask.b32 %r;"
                                  "shfl.sync.idx.b32 %r, %t, 0, 31, %x;"])  # fmt: skip
def test_mask_that_names_other_lanes_than_those_with_that_mask_is_a_fault(body, low, high, message):
    with pytest.raises(emulator.IllegalOperand, match=message) as caught:
        run(body, low, high)
    assert caught.value.where.line == 9


def test_lane_that_reads_from_another_group_is_a_fault():
    with pytest.raises(emulator.IllegalOperand, match="lane 0 reads from lane 20"):
        run("shfl.sync.idx.b32 %r, %t, 20, 31, %x;")


def test_mask_that_nobody_wrote_is_reported():
    with pytest.raises(emulator.Fault) as caught:
        run(".reg .b32 %n; shfl.sync.idx.b32 %r, %t, 0, 31, %n;")
    assert caught.value.where.line == 9
