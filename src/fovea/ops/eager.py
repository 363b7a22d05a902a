"""The quick path: plain tensors, no transform, no mode, nobody who has to see an operator.

Lives here: the test for that, and one autograd function straight over the backend. Not here: every
other call (`functions.py`), recognising a call seen before (`warm.py`). Invariant: what is saved
for the backward goes through autograd (version checks, saved-tensor hooks, freed after use), and
the scalars of the forward are kept beside it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fovea import dispatch, env
from fovea.dispatch import Choice, Launch
from fovea.ops.batched_grads import each_of_batch, is_batched
from fovea.ops.functions import (
    differentiable_backward,
    differentiable_lse,
    keep_dynamo_out,
)
from fovea.ops.program import pack
from fovea.problem import AttentionProblem, GradientNeeds, Results
from fovea.problem.parts import Numbers, facts_of, numbers_of, problem_of, tensors_of

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})

_num_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]
_has_transform = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
_is_grad_enabled = torch.is_grad_enabled
_is_profiling = torch._C._autograd._profiler_enabled  # pyright: ignore


def is_watched() -> bool:
    """Return whether something beside autograd may watch a call on plain tensors.

    A profiler counts as a watcher: it should show the operator's name.
    """
    return bool(
        _num_modes() or _has_transform() or _is_profiling() or forward_ad._current_level >= 0  # pyright: ignore
    )


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether nothing but autograd may watch a call on these tensors (`tensors_of`)."""
    if is_watched():
        return False
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN_TYPES:
            return False
    first = tensors[0]
    return first is not None and (first.is_cpu or first.is_cuda)


class Call:
    """What calls of one kind share: all of a problem but its tensors and numbers, and its backend.

    Attributes:
        num_score_captures: tensors captured by the score_mod, the only ones with gradients.
        needs_capture_gradients: whether one of those requires grad.
        launch: runs a call on the device without building its problem; None where there is none.
    """

    __slots__ = ("choice", "facts", "launch", "needs_capture_gradients", "num_score_captures")

    def __init__(self, problem: AttentionProblem, choice: Choice, launch: Launch | None) -> None:
        self.facts = facts_of(problem)
        self.choice = choice
        self.launch = launch
        captures = () if problem.score_mod is None else problem.score_mod.captures
        self.num_score_captures = len(captures)
        self.needs_capture_gradients = any(tensor.requires_grad for tensor in captures)


def run(call: Call, numbers: Numbers, tensors: Sequence[Tensor | None], keeps_lse: bool) -> Results:
    """Run the forward of a call; without `keeps_lse` the lse may be overwritten by the next one."""
    if call.launch is None or env.check():
        return dispatch.forward(problem_of(call.facts, numbers, tensors), call.choice)
    return call.launch(tensors, numbers, keeps_lse)


class _Recorded(torch.autograd.Function):
    """(call, numbers, tensors, returns_lse, q, k, v, sink, *score captures) -> out, or with
    `returns_lse` (out, lse, max_score or None).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call, numbers, tensors, returns_lse, *_ = args
        out, lse, max_score = run(call, numbers, tensors, True)
        ctx.save_for_backward(out, lse, *tensors)
        # Without the tensors: holding them here would go around autograd's hooks and checks.
        ctx.kept = (call, numbers, returns_lse)
        if not returns_lse:
            return out
        ctx.set_materialize_grads(False)
        if max_score is not None:
            ctx.mark_non_differentiable(max_score)
        return out, lse, max_score

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse, _ = grads if len(grads) == 3 else (grads[0], None, None)
        flags = ctx.needs_input_grad[4:]
        if dout is None and dlse is None:
            return (None,) * (4 + len(flags))
        if is_batched(grads):
            return each_of_batch(partial(_Recorded.backward, ctx), grads)
        out, lse, *tensors = ctx.saved_tensors
        call, numbers, returns_lse = ctx.kept
        problem = problem_of(call.facts, numbers, tensors)
        if torch.is_grad_enabled() or not is_plain(tensors):
            packed = pack(problem, call.choice.backend)
            if torch.is_grad_enabled() and not returns_lse:
                lse = differentiable_lse(packed)  # what was saved is no output: it has no history
            results = differentiable_backward(packed, (dout, dlse, out, lse), list(flags))
            return (
                *(None, None, None, None),
                *(g if f else None for g, f in zip(results, flags, strict=True)),
            )
        needs = GradientNeeds(*flags[:4], score_captures=tuple(flags[4:]))
        found = dispatch.backward(
            problem, call.choice, out=out, lse=lse, dout=dout, dlse=dlse, needs=needs
        )
        return (
            *(None, None, None, None),
            found.dq,
            found.dk,
            found.dv,
            found.dsink,
            *found.score_captures,
        )


keep_dynamo_out(_Recorded.backward)

# Function.apply without its argument binding and functorch checks, which `is_plain` has done.
_record = cast(Any, super(torch.autograd.Function, _Recorded)).apply


def attend(call: Call, numbers: Numbers, tensors: Sequence[Any], returns_lse: bool) -> Results:
    """Run a plain call, recorded by autograd where a gradient is needed.

    Without `returns_lse` the lse is None or may be overwritten, and there is no max_score.
    """
    sink = tensors[3]
    if _is_grad_enabled() and (
        tensors[0].requires_grad
        or tensors[1].requires_grad
        or tensors[2].requires_grad
        or call.needs_capture_gradients
        or (sink is not None and sink.requires_grad)
    ):
        inputs = tensors[: 4 + call.num_score_captures]
        found = _record(call, numbers, tensors, returns_lse, *inputs)
        return found if returns_lse else (found, None, None)
    return run(call, numbers, tensors, returns_lse)


def attend_problem(problem: AttentionProblem, choice: Choice) -> tuple[Results, Call]:
    """Run a plain problem for the first time; return its results and what later calls share."""
    call = Call(problem, choice, dispatch.launch_of(problem, choice))
    # As later calls do: with another graph, second orders would differ in their last bits.
    returns_lse = problem.wants_lse or problem.wants_max_score
    return attend(call, numbers_of(problem), tensors_of(problem), returns_lse), call
