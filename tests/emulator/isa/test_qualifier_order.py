"""Qualifiers in another order than the manual's: which mean the same, and which do not."""

import numpy as np
import pytest

from fovea.emulator import UnsupportedForm, load_ptx
from fovea.emulator.isa import find


@pytest.mark.parametrize(
    ("opcode", "manual", "operands"),
    [
        ("ld.global.acquire.gpu.b32", "ld.acquire.gpu.global.b32", 2),
        ("ld.global.volatile.u32", "ld.volatile.global.u32", 2),
        ("ld.global.weak.u32", "ld.weak.global.u32", 2),
        ("ld.v2.global.u32", "ld.global.v2.u32", 2),
        ("st.global.release.gpu.u32", "st.release.gpu.global.u32", 2),
        ("st.cs.global.u32", "st.global.cs.u32", 2),
        ("atom.add.acquire.cta.u32", "atom.acquire.cta.add.u32", 3),
        ("atom.exch.acquire.cta.b32", "atom.acquire.cta.exch.b32", 3),
        ("atom.cas.acq_rel.sys.global.b64", "atom.acq_rel.sys.global.cas.b64", 4),
        ("atom.add.noftz.relaxed.gpu.f16", "atom.relaxed.gpu.add.noftz.f16", 3),
        ("red.or.release.gpu.global.b32", "red.release.gpu.global.or.b32", 2),
        ("red.add.global.u32", "red.global.add.u32", 2),
        ("fma.ftz.rn.f32", "fma.rn.ftz.f32", 4),
        ("ex2.ftz.approx.f32", "ex2.approx.ftz.f32", 2),
        ("cvt.ftz.rn.f16.f32", "cvt.rn.ftz.f16.f32", 2),
        ("setp.and.eq.u32", "setp.eq.and.u32", 4),
        ("redux.add.sync.u32", "redux.sync.add.u32", 3),
        ("vote.ballot.sync.b32", "vote.sync.ballot.b32", 3),
        ("prmt.f4e.b32", "prmt.b32.f4e", 4),
        ("mbarrier.arrive.b64.shared", "mbarrier.arrive.shared.b64", 2),
        ("cp.async.shared.global.ca", "cp.async.ca.shared.global", 3),
        ("fence.gpu.acq_rel", "fence.acq_rel.gpu", 0),
        ("add.u32.cc", "add.cc.u32", 3),
    ],
)
def test_opcode_in_another_order_is_the_one_of_the_manual(opcode, manual, operands):
    found = find(opcode, operands, 1, "sm_90a")
    expected = find(manual, operands, 1, "sm_90a")
    assert expected.opcode == manual
    assert (found.opcode, found.entry, found.modifiers) == (
        manual, expected.entry, expected.modifiers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("mul.u32.wide", 3),
        ("shf.wrap.l.b32", 4),
        ("mbarrier.shared.arrive.b64", 2),
        ("cp.async.tensor.bulk.2d.global.shared::cta.bulk_group", 2),
        ("bar.0.sync", 0),
        ("atom.add.add.u32", 3),
        ("add.u32.f32", 3),
    ],
)
def test_part_of_a_mnemonic_keeps_its_place(opcode, operands):
    with pytest.raises(UnsupportedForm):
        find(opcode, operands, 1, "sm_90a")


def test_spaces_and_types_say_by_their_order_which_operand_they_speak_of():
    assert find("cvt.f16.f32.rn", 2, 1, "sm_90a").opcode == "cvt.rn.f16.f32"
    opcode = "cp.async.bulk.bulk_group.global.shared::cta"
    assert find(opcode, 3, 1, "sm_90a").opcode == "cp.async.bulk.global.shared::cta.bulk_group"
    with pytest.raises(UnsupportedForm):
        find("cp.async.bulk.bulk_group.shared::cta.global", 3, 1, "sm_90a")


def test_kernel_of_reordered_opcodes_runs():
    text = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o)
{
    .reg .b64 %o; .reg .b32 %a; .reg .f32 %f;
    ld.param.u64 %o, [o];
    atom.add.release.gpu.global.u32 %a, [%o], 5;
    red.add.relaxed.gpu.global.u32 [%o], %a;
    ld.global.acquire.gpu.b32 %a, [%o];
    cvt.f32.u32.rn %f, %a; fma.ftz.rn.f32 %f, %f, %f, %f;
    st.global.release.gpu.f32 [%o], %f;
    ret;
}
"""
    out = np.full(1, 7, np.uint32)
    load_ptx(text).launch("k", 1, 1, args=[out])
    assert out.view(np.float32)[0] == 19 * 19 + 19
