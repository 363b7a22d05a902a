"""Cycles of an instruction on the pipes."""

import pytest

from fovea.costs.pipes import PipeCycles, pipe_cycles


@pytest.mark.parametrize(
    ("kind", "opcode", "expected"),
    [
        ("mufu", "ex2.approx.ftz.f32", PipeCycles(issue=1, mufu=8)),
        ("alu", "fma.rn.f32", PipeCycles(issue=1, fma=1)),
        ("alu", "fma.rn.f32x2", PipeCycles(issue=1, fma=2)),
        ("alu", "max.f32", PipeCycles(issue=1, alu=2)),
        ("alu", "cvt.rn.bf16x2.f32", PipeCycles(issue=1, alu=2)),
        ("alu", "add.s32", PipeCycles(issue=1, fma=1)),
        ("alu", "mov.b32", PipeCycles()),
        ("alu", "add.s64", PipeCycles()),
        ("memory", "ld.shared.f32", PipeCycles(issue=1)),
        ("sync", "mbarrier.try_wait.parity.shared.b64", PipeCycles()),
        ("control", "bra", PipeCycles()),
    ],
)
def test_an_instruction_takes_its_pipes(kind, opcode, expected):
    assert pipe_cycles(kind, opcode.split(".")[0], opcode) == expected
