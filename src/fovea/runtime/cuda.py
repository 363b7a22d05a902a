"""Running a problem on a CUDA device.

Lives here: from a problem to its launcher, and the launch. Not here: how an artifact is found or
made (`compile/cache.py`), the order of arguments (`arguments.py`). Invariant: a launch goes to the
tensors' device and its current stream, and the host never waits for the device.
"""

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch

from fovea.arch import Arch, arch_of
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan, needs_wide_integers
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import AttentionProblem, ForwardResult
from fovea.runtime.arguments import Prepared, forward_call, prepare
from fovea.runtime.module import Launcher, load
from fovea.runtime.trivial import trivial_forward


class _Ready(NamedTuple):
    """A variant opened on a device, and what calls of one layout share."""

    launcher: Launcher
    prepared: Prepared


# By everything that decides the two. Bounded, since a server may see a new length in every call.
_ready: dict[tuple[Hashable, ...], _Ready] = {}
_READY_LIMIT = 4096


def forward(problem: AttentionProblem) -> ForwardResult:
    """Run the forward of a problem that `plan.select.unsupported` has nothing against."""
    ready = _ready_for(problem)
    if isinstance(ready, ForwardResult):
        return ready
    call = forward_call(problem, ready.prepared)
    ready.launcher(*call.arguments)
    if call.padded_out is not None:
        call.out.copy_(call.padded_out[..., : call.out.shape[-1]])
    return ForwardResult(call.out, call.lse, call.max_score)


def launch_of(problem: AttentionProblem) -> tuple[Launcher, tuple[Any, ...]]:
    """Return the launcher of a problem that needs one, and ready arguments: for measurements."""
    ready = _ready_for(problem)
    assert isinstance(ready, _Ready)
    return ready.launcher, forward_call(problem, ready.prepared).arguments


def _ready_for(problem: AttentionProblem) -> _Ready | ForwardResult:
    """Return what runs a problem, or its result where that needs no kernel."""
    key = _key(problem)
    ready = _ready.get(key)
    if ready is None:
        trivial = trivial_forward(problem)
        if trivial is not None:
            return trivial
        ready = _make_ready(problem)
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = ready
    return ready


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


def _make_ready(problem: AttentionProblem) -> _Ready:
    arch = arch_of(problem.device)
    assert arch is not None, problem.device
    plan = forward_plan(problem, arch)
    launcher = _launcher(plan, arch, problem.device)
    return _Ready(launcher, prepare(problem, plan, _num_sms(problem.device)))


@functools.cache
def _launcher(plan: ForwardPlan, arch: Arch, device: torch.device) -> Launcher:
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    return load(get_artifact(ForwardVariant(plan), target), device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    cuda = cast(Any, torch.cuda)  # its functions have no types
    return cuda.get_device_properties(device).multi_processor_count
