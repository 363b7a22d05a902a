"""Running a problem on a CUDA device.

Lives here: from a problem to its launcher, and the launch. Not here: how an artifact is found or
made (`compile/cache.py`), the order of arguments (`arguments.py`). Invariant: a launch goes to the
tensors' device and its current stream, and the host never waits for the device.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fovea.arch import Arch, arch_of
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan, needs_wide_integers
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import AttentionProblem, ForwardResult, Results
from fovea.problem.parts import Numbers, numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch
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
    return ForwardResult(*launch(tensors_of(problem), numbers_of(problem)))


def launch_of(
    problem: AttentionProblem,
) -> Callable[[Sequence[Tensor | None], Numbers, bool], Results] | None:
    """Return what launches calls like this one, None where they need no kernel.

    It takes (tensors, numbers, keeps_lse); without `keeps_lse` the lse is overwritten by a later
    launch.
    """
    launch = _launch(problem)
    if launch is None:
        return None
    device, lse_shape, is_dynamic = launch.device, launch.lse_shape, launch.is_dynamic

    def run(tensors: Sequence[Tensor | None], numbers: Numbers, keeps_lse: bool) -> Results:
        memory = stream_memory(device) if is_dynamic or not keeps_lse else None
        if memory is None:
            return launch(tensors, numbers)
        return launch(
            tensors,
            numbers,
            None if keeps_lse else memory.scratch(lse_shape),
            memory.counter() if is_dynamic else None,
        )

    return run


def arguments_of(problem: AttentionProblem) -> tuple[Launcher, tuple[Any, ...]]:
    """Return the launcher of a problem that needs one, and ready arguments: for measurements."""
    launch = _launch(problem)
    assert launch is not None
    recorded: list[tuple[Any, ...]] = []
    recorder = copy.copy(launch)
    recorder.launcher = lambda *arguments: recorded.append(arguments)
    recorder(tensors_of(problem), numbers_of(problem))
    return launch.launcher, recorded[0]


def _launch(problem: AttentionProblem) -> ForwardLaunch | None:
    """Return the launch of problems like this one, None where they need no kernel."""
    if is_trivial(problem):
        return None
    key = _key(problem)
    found = _launches.get(key)
    if found is None:
        arch = arch_of(problem.device)
        assert arch is not None, problem.device
        plan = forward_plan(problem, arch)
        launcher = _launcher(plan, arch, problem.device)
        found = ForwardLaunch(problem, plan, _num_sms(problem.device), launcher)
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
        *(problem.causal, problem.window, problem.wants_max_score),
        *(problem.softcap is None, problem.sink is None, problem.scale > 0),
        *(None if mod is None else mod.graph for mod in mods),
        mods != (None, None, None) and needs_wide_integers(problem),
        lists and (lists.block_q, lists.block_kv, lists.full_kv_num_blocks is None),
    )


@functools.cache
def _launcher(plan: ForwardPlan, arch: Arch, device: torch.device) -> Launcher:
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    return load(get_artifact(ForwardVariant(plan), target), device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    cuda = cast(Any, torch.cuda)  # its functions have no types
    return cuda.get_device_properties(device).multi_processor_count
