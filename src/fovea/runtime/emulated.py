"""Running a problem on the emulator, with CPU tensors.

Lives here: the twin of `cuda` for a machine without the GPU. Not here: opening of an artifact
(`emulated_module.py`), the emulator itself. Invariant: the plan, the artifact and the arguments are
those of a GPU; only the number of SMs, which a caller may set, is not a real machine's.
"""

import functools
import operator
from typing import Any, cast

from torch import Tensor

from fovea.arch import Arch
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.emulator import Options, Result
from fovea.errors import invalid
from fovea.plan.forward import ForwardPlan
from fovea.plan.kernel_calls import as_kernel_call
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, ForwardResult
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch
from fovea.runtime.emulated_module import EmulatedLauncher, load
from fovea.runtime.trivial import trivial_forward
from fovea.tiling.split_kv import MAX_SPLITS

# Few, so that a small problem has CTAs with several query tiles, and CTAs with none left to draw.
_NUM_SMS = 2
_MOST_SMS = 1 << 16


def forward(problem: AttentionProblem, arch: Arch) -> ForwardResult:
    """Run the forward of a problem that `plan.select.unsupported` has nothing against."""
    return emulate(problem, arch)[0]


def emulate(
    problem: AttentionProblem,
    arch: Arch,
    *,
    num_sms: int = _NUM_SMS,
    splits: int | None = None,
    options: Options | None = None,
) -> tuple[ForwardResult, tuple[Result, ...]]:
    """Run a forward and return what the emulator counted, too; nothing where no kernel ran.

    Args:
        problem: on CPU tensors.
        arch: whose kernel.
        num_sms: SMs of the machine, so CTAs of a persistent grid, which has one cluster at least.
        splits: parts of the keys, where a plan packs heads; None = what such a machine would get.
        options: schedule, seed and checks of the emulator.

    Raises:
        TypeError, ValueError: a count that is none or out of range, or parts of the keys for a
            plan that packs no heads.
    """
    num_sms = _count("num_sms", num_sms, _MOST_SMS)
    splits = None if splits is None else _count("splits", splits, MAX_SPLITS)
    trivial = trivial_forward(problem)
    if trivial is not None:
        return trivial, ()
    numbers, tensors = numbers_of(problem), tensors_of(problem)
    problem = as_kernel_call(problem, arch)
    plan = forward_plan(problem, arch)
    if splits not in (None, 1) and not plan.packs_heads:
        remedy = "leave it out, or ask for so few queries that their heads are packed"
        raise ValueError(
            invalid("splits", splits, "None or 1, as this plan packs no heads", remedy)
        )
    run = _launcher(plan, arch, options)
    results: list[Result] = []
    launch = ForwardLaunch(
        problem,
        plan,
        num_sms,
        lambda *arguments: results.extend(run(*arguments)),
        splits=splits,
    )
    out, lse, max_score = launch(tensors, numbers)
    return ForwardResult(out, cast(Tensor, lse), max_score), tuple(results)


def _count(name: str, value: object, most: int) -> int:
    """Return a count as a plain int, or raise."""
    allowed, remedy = f"an integer from 1 to {most}", "pass one of them"
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(cast(Any, value))
    except TypeError:
        raise TypeError(invalid(name, repr(value), allowed, remedy)) from None
    if not 1 <= count <= most:
        raise ValueError(invalid(name, count, allowed, remedy))
    return count


@functools.cache
def _launcher(plan: ForwardPlan, arch: Arch, options: Options | None) -> EmulatedLauncher:
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    return load(get_artifact(ForwardVariant(plan), target), options=options)
