"""Running a problem on a CUDA device.

Lives here: from a problem to its launcher, and the launch. Not here: how an artifact is found or
made (`compile/cache.py`), the order of arguments (`arguments.py`). Invariant: a launch goes to the
tensors' device and its current stream, and the host never waits for the device.
"""

import functools

import torch

from fovea.arch import Arch, arch_of
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import AttentionProblem, ForwardResult
from fovea.runtime.arguments import forward_call
from fovea.runtime.module import Launcher, load
from fovea.runtime.trivial import trivial_forward


def forward(problem: AttentionProblem) -> ForwardResult:
    """Run the forward of a problem that `plan.select.unsupported` has nothing against."""
    arch = arch_of(problem.device)
    assert arch is not None, problem.device
    trivial = trivial_forward(problem)
    if trivial is not None:
        return trivial
    plan = forward_plan(problem, arch)
    launcher = _launcher(plan, arch, problem.device)
    call = forward_call(problem, plan, _num_sms(problem.device))
    launcher(*call.arguments)
    if call.padded_out is not None:
        call.out.copy_(call.padded_out[..., : call.out.shape[-1]])
    return ForwardResult(call.out, call.lse, call.max_score)


@functools.cache
def _launcher(plan: ForwardPlan, arch: Arch, device: torch.device) -> Launcher:
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    return load(get_artifact(ForwardVariant(plan), target), device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
