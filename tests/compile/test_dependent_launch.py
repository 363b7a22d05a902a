"""A kernel that starts while the one before it ends: it finds room, and waits before it reads."""

import re
from functools import cache

import pytest
import torch

from fovea.arch import ARCHS
from fovea.compile.artifact import Artifact
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.roles import REGISTERS_PER_SM
from fovea.plan.select import forward_plan
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import Request, make_dense

WAIT = "griddepcontrol.wait"
TRIGGER = "griddepcontrol.launch_dependents"
MEMORY = re.compile(r"\b(ld|st|atom|red)(\.\w+)*\.global|cp\.async|cp\.reduce")


def entries(ptx: str) -> dict[str, str]:
    """Return the body of each kernel of a module."""
    parts = ptx.split(".visible .entry ")[1:]
    return {part.split("(", 1)[0]: part for part in parts}


def plan_of_few_queries(head_dim: int) -> ForwardPlan:
    q, k = (torch.empty(2, seqlen, 2, head_dim, dtype=torch.bfloat16) for seqlen in (1, 4096))
    plan = forward_plan(make_dense(q, k, k, Request(causal="bottom_right")), ARCHS["sm90"])
    assert isinstance(plan, ForwardPlan)
    return plan


@cache
def compiled(plan: ForwardPlan) -> Artifact:
    target = CompileTarget(arch=ARCHS["sm90"].target, host_triple=native_host_triple())
    return get_artifact(ForwardVariant(plan), target)


@pytest.mark.parametrize("head_dim", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_the_merge_finds_registers_beside_the_forward(head_dim):
    plan = plan_of_few_queries(head_dim)
    assert plan.combine is not None
    registers = {name: each.registers for name, each in compiled(plan).record.kernels.items()}
    assert len(registers) == 2
    merge = next(count for name, count in registers.items() if plan.combine.name in name)
    forward = next(count for name, count in registers.items() if plan.name in name)
    assert forward * plan.threads + merge * plan.combine.threads <= REGISTERS_PER_SM


def test_kernels_of_few_queries_touch_memory_only_behind_their_wait():
    artifact = compiled(plan_of_few_queries(128))
    ptx = artifact.ptx if isinstance(artifact.ptx, str) else artifact.ptx.decode()

    kernels = entries(ptx)
    assert len(kernels) == 2  # the forward and the merge
    for name, body in kernels.items():
        first = MEMORY.search(body)
        assert first is not None, name
        assert body.index(TRIGGER) < body.index(WAIT) < first.start(), name
