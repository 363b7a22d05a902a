"""The order of a kernel that starts while the one before it ends: it waits before it reads."""

import re

import torch

from fovea.arch import ARCHS
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan
from fovea.problem import Request, make_dense

WAIT = "griddepcontrol.wait"
TRIGGER = "griddepcontrol.launch_dependents"
MEMORY = re.compile(r"\b(ld|st|atom|red)(\.\w+)*\.global|cp\.async|cp\.reduce")


def entries(ptx: str) -> dict[str, str]:
    """Return the body of each kernel of a module."""
    parts = ptx.split(".visible .entry ")[1:]
    return {part.split("(", 1)[0]: part for part in parts}


def test_kernels_of_few_queries_touch_memory_only_behind_their_wait():
    q, k = (torch.empty(2, seqlen, 2, 128, dtype=torch.bfloat16) for seqlen in (1, 4096))
    plan = forward_plan(make_dense(q, k, k, Request(causal="bottom_right")), ARCHS["sm90"])
    target = CompileTarget(arch=ARCHS["sm90"].target, host_triple=native_host_triple())
    artifact = get_artifact(ForwardVariant(plan), target)
    ptx = artifact.ptx if isinstance(artifact.ptx, str) else artifact.ptx.decode()

    kernels = entries(ptx)
    assert len(kernels) == 2  # the forward and the merge
    for name, body in kernels.items():
        first = MEMORY.search(body)
        assert first is not None, name
        assert body.index(TRIGGER) < body.index(WAIT) < first.start(), name
