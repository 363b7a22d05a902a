"""Running a problem on a CUDA device.

Lives here: from a problem to its launcher, and the launch. Not here: how an artifact is found or
made (`compile/cache.py`), the order of arguments (`arguments.py`). Invariant: a launch goes to the
tensors' device and its current stream, and the host never waits for the device.
"""

import copy
import functools
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

from fovea.arch import Arch, arch_of
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.forward import ForwardPlan
from fovea.plan.kernel_calls import as_kernel_call
from fovea.plan.select import forward_plan, needs_wide_integers
from fovea.problem import AttentionProblem, ForwardResult
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch, MemoryOf, has_plain_captures
from fovea.runtime.capture import is_capturing, unrelated_calls_allowed
from fovea.runtime.module import Launcher, load
from fovea.runtime.stream_memory import stream_memory
from fovea.runtime.trivial import is_trivial, trivial_forward

# By everything that decides them. Bounded, since a server may see a new length in every call.
_launches: dict[tuple[Hashable, ...], ForwardLaunch] = {}
_LIMIT = 4096


def forward(problem: AttentionProblem) -> ForwardResult:
    """Run the forward of a problem that `plan.select.unsupported` has nothing against."""
    launch = _launch(problem)
    if launch is None:
        result = trivial_forward(problem)
        assert result is not None
        return result
    out, lse, max_score = launch(tensors_of(problem), numbers_of(problem))
    return ForwardResult(out, cast(Tensor, lse), max_score)


def launch_of(problem: AttentionProblem) -> ForwardLaunch | None:
    """Return what launches eager calls like this one, None where they need no kernel.

    Launches of one stream share small memory. Those of operators, which `forward` runs, do not: a
    graph's memory may be taken back behind the back of its owner.
    """
    return _launch(problem, stream_memory)


def arguments_of(problem: AttentionProblem) -> tuple[Launcher, tuple[Any, ...]]:
    """Return the launcher of a problem that needs one, and ready arguments: for measurements."""
    launch = _launch(problem)
    assert launch is not None
    recorded: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> None:
        recorded.append(arguments)

    recorder = copy.copy(launch)
    recorder.launcher = record
    recorder(tensors_of(problem), numbers_of(problem))
    return launch.launcher, recorded[0]


def _launch(problem: AttentionProblem, memory_of: MemoryOf | None = None) -> ForwardLaunch | None:
    """Return the launch of problems like this one, None where they need no kernel."""
    if is_trivial(problem):
        return None
    arch = arch_of(problem.device)
    assert arch is not None, problem.device
    has_softcap = problem.softcap is not None
    problem = as_kernel_call(problem, arch)
    # The launch holds the number that a score_mod stood for.
    key = (*_key(problem), memory_of, None if has_softcap else problem.softcap)
    found = _launches.get(key)
    if found is None:
        plan = forward_plan(problem, arch)
        launcher = _launcher(plan, arch, problem.device)
        num_sms = _num_sms(problem.device)
        found = ForwardLaunch(problem, plan, num_sms, launcher, memory_of)
        if is_capturing():
            found.launcher = _opening(found)
        if len(_launches) >= _LIMIT:
            _launches.clear()
        _launches[key] = found
    return found


def _opening(launch: ForwardLaunch) -> Launcher:
    """Return a launcher for the first call, which may have to put the kernel on its devices."""
    launcher = launch.launcher

    def run(*arguments: Any) -> Any:
        with unrelated_calls_allowed():
            result = launcher(*arguments)
        launch.launcher = launcher
        return result

    return run


def _key(problem: AttentionProblem) -> tuple[Hashable, ...]:
    """Return all of a problem that its plan, its launcher and its layout depend on."""
    q, k, v, lists = problem.q, problem.k, problem.v, problem.block_lists
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    return (
        *(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.device),
        *(problem.causal, problem.window, problem.limits, problem.wants_max_score),
        *(problem.softcap is None, problem.sink is None, problem.scale > 0),
        *(None if mod is None else mod.graph for mod in mods),
        mods != (None, None, None) and (needs_wide_integers(problem), has_plain_captures(problem)),
        lists and (lists.block_q, lists.block_kv, lists.full_kv_num_blocks is None),
        *(problem.key_ranges is not None, problem.mask_bits is not None),
        problem.varlen and (problem.batch, problem.seqlen_q, problem.seqlen_kv),
    )


@functools.cache
def _launcher(plan: ForwardPlan, arch: Arch, device: torch.device) -> Launcher:
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    return load(get_artifact(ForwardVariant(plan), target), device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    cuda = cast(Any, torch.cuda)  # its functions have no types
    return cuda.get_device_properties(device).multi_processor_count
