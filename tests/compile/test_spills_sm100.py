"""No Blackwell kernel keeps anything in local memory, on either architecture.

Lives here: the variants of all GPU cases, of the dense benchmark shapes and of the plans that only
long calls get, compiled for sm_100a and sm_103a. Not here: Hopper's (`test_spills.py`). Two
variants run by default; `-m slow` compiles all, which takes minutes.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.arch import SM100, SM103, Arch
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan import select
from fovea.plan.forward import ForwardPlan
from fovea.problem import Request, make_dense

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

from cases import CASES, case_named

ARCHS = {"sm100": SM100, "sm103": SM103}
# Calls of many queries: head dims, causal. Small cases never get their plans.
LONG = {
    f"long {dims[0]} {dims[1]} {'causal' if causal else 'dense'} {dtype}": (dims, causal, dtype)
    for dims in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
    for causal in (False, True)
    for dtype in ("bfloat16", "float16")
}
QUICK = (("relative bias", "sm100"), ("few relative bias", "sm103"))


def _plan(name: str, arch: Arch) -> ForwardPlan | None:
    """Return the plan of a case or a long call; None where the kernels do not take it."""
    if name in LONG:
        dims, causal, dtype = LONG[name]
        q, k, v = (
            torch.empty(1, select.PAIR_QUERIES, 1, columns, dtype=getattr(torch, dtype))
            for columns in (dims[0], *dims)
        )
        return select.forward_plan(make_dense(q, k, v, Request(causal=causal)), arch)
    problem = case_named(name).build("cpu", is_small=True).problem()
    if select.unsupported(problem, arch) is not None:
        return None
    return select.forward_plan(problem, arch)


@functools.cache
def _local_bytes(variant: ForwardVariant, target: str) -> dict[str, int]:
    """Return local memory of a thread by kernel; the compiler runs once a variant."""
    compiled_for = CompileTarget(arch=target, host_triple=native_host_triple())
    kernels = get_artifact(variant, compiled_for).record.kernels
    return {name: used.stack_bytes + used.local_bytes for name, used in kernels.items()}


def _parameters() -> Iterator[Any]:
    for name in (*LONG, *(case.name for case in CASES)):
        for arch in ARCHS:
            marks = [] if (name, arch) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, arch, marks=marks)


@pytest.mark.parametrize(("name", "arch"), list(_parameters()))
def test_kernel_uses_no_local_memory(name, arch):
    plan = _plan(name, ARCHS[arch])
    if plan is None:
        pytest.skip("the kernels do not take this call")
    found = _local_bytes(ForwardVariant(plan), ARCHS[arch].target)
    assert found
    assert found == dict.fromkeys(found, 0)


def test_quick_names_exist():
    assert set(QUICK) <= {parameter.values[:2] for parameter in _parameters()}
