"""The quick path: plain tensors, no transform, no mode, nobody who has to see an operator.

Lives here: the test for that, and one autograd function straight over the backend. Not here: every
other call (`functions.py`). Invariant: what is saved for the backward goes through autograd
(version checks, saved-tensor hooks, freed after use), and the scalars of the forward are kept
beside it.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fovea import dispatch
from fovea.dispatch import Choice
from fovea.mods.trace import TracedMod
from fovea.ops.functions import differentiable_backward
from fovea.ops.program import pack
from fovea.problem import AttentionProblem, ForwardResult, GradientNeeds, Varlen
from fovea.tiling.block_lists import BlockLists

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PLAIN_DEVICES = ("cpu", "cuda")

_num_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]
_has_transform = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
_is_profiling = torch._C._autograd._profiler_enabled  # pyright: ignore
# Stands where a tensor was in a problem that autograd keeps.
_PLACE = torch.empty(0)


def is_plain(problem: AttentionProblem) -> bool:
    """Return whether nothing but autograd may watch this call.

    A profiler counts as a watcher: it should show the operator's name.
    """
    if _num_modes() or _has_transform() or _is_profiling():
        return False
    if problem.q.device.type not in _PLAIN_DEVICES:
        return False
    return all(t is None or type(t) in _PLAIN_TYPES for t in tensors_of(problem))


def needs_gradient(problem: AttentionProblem) -> bool:
    """Return whether autograd has to record this call."""
    if not torch.is_grad_enabled():
        return False
    if problem.q.requires_grad or problem.k.requires_grad or problem.v.requires_grad:
        return True
    if problem.sink is not None and problem.sink.requires_grad:
        return True
    mod = problem.score_mod
    return mod is not None and any(capture.requires_grad for capture in mod.captures)


def tensors_of(problem: AttentionProblem) -> list[Tensor | None]:
    """Return every tensor of a problem, in the order that `with_tensors` takes them."""
    tensors: list[Tensor | None] = [problem.q, problem.k, problem.v, problem.sink]
    if isinstance(problem.scale, Tensor):
        tensors.append(problem.scale)
    if isinstance(problem.softcap, Tensor):
        tensors.append(problem.softcap)
    for mod in (problem.score_mod, problem.mask_mod, problem.block_mask_mod):
        if mod is not None:
            tensors.extend(mod.captures)
    if problem.block_lists is not None:
        tensors.extend(problem.block_lists.tensors())
    if problem.varlen is not None:
        varlen = problem.varlen
        tensors.extend((varlen.cu_seqlens_q, varlen.cu_seqlens_kv, varlen.seqused_q))
        tensors.extend((varlen.seqused_kv, varlen.page_table))
    return tensors


def with_tensors(problem: AttentionProblem, tensors: list[Any]) -> AttentionProblem:
    """Return the problem with other tensors in the places of `tensors_of`."""
    rest = iter(tensors)
    q, k, v, sink = next(rest), next(rest), next(rest), next(rest)
    changes: dict[str, Any] = {"q": q, "k": k, "v": v, "sink": sink}
    if isinstance(problem.scale, Tensor):
        changes["scale"] = next(rest)
    if isinstance(problem.softcap, Tensor):
        changes["softcap"] = next(rest)
    for name in ("score_mod", "mask_mod", "block_mask_mod"):
        mod = cast(TracedMod | None, getattr(problem, name))
        if mod is not None and mod.captures:
            changes[name] = replace(mod, captures=tuple(next(rest) for _ in mod.captures))
    if problem.block_lists is not None:
        changes["block_lists"] = _lists_with_tensors(problem.block_lists, rest)
    if problem.varlen is not None:
        changes["varlen"] = Varlen(
            cu_seqlens_q=next(rest),
            cu_seqlens_kv=next(rest),
            max_seqlen_q=problem.varlen.max_seqlen_q,
            max_seqlen_kv=problem.varlen.max_seqlen_kv,
            seqused_q=next(rest),
            seqused_kv=next(rest),
            page_table=next(rest),
        )
    return replace(problem, **changes)


def _lists_with_tensors(lists: BlockLists, rest: Any) -> BlockLists:
    return BlockLists(
        kv_num_blocks=next(rest),
        kv_indices=next(rest),
        full_kv_num_blocks=next(rest),
        full_kv_indices=next(rest),
        q_num_blocks=next(rest),
        q_indices=next(rest),
        full_q_num_blocks=next(rest),
        full_q_indices=next(rest),
        block_q=lists.block_q,
        block_kv=lists.block_kv,
        seqlen_q=lists.seqlen_q,
        seqlen_kv=lists.seqlen_kv,
        batch=lists.batch,
        heads=lists.heads,
    )


class _Recorded(torch.autograd.Function):
    """(problem, choice, q, k, v, sink, *captures) -> out, lse, max_score or None."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        problem: AttentionProblem = args[0]
        choice: Choice = args[1]
        result = dispatch.forward(problem, choice)
        ctx.set_materialize_grads(False)
        if result.max_score is not None:
            ctx.mark_non_differentiable(result.max_score)
        tensors = tensors_of(problem)
        ctx.save_for_backward(result.out, result.lse, *tensors)
        # Without its tensors: holding them here would go around autograd's hooks and checks.
        ctx.problem = with_tensors(problem, [_PLACE] * len(tensors))
        ctx.choice = choice
        return result.out, result.lse, result.max_score

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse, _ = grads
        flags = ctx.needs_input_grad[2:]
        if dout is None and dlse is None:
            return (None,) * (2 + len(flags))
        out, lse, *tensors = ctx.saved_tensors
        problem = with_tensors(ctx.problem, tensors)
        if torch.is_grad_enabled() or not is_plain(problem):
            packed = pack(problem, ctx.choice.backend)
            results = differentiable_backward(packed, (dout, dlse, out, lse), list(flags))
            return (None, None, *(g if f else None for g, f in zip(results, flags, strict=True)))
        needs = GradientNeeds(*flags[:4], score_captures=tuple(flags[4:]))
        found = dispatch.backward(
            problem, ctx.choice, out=out, lse=lse, dout=dout, dlse=dlse, needs=needs
        )
        return (None, None, found.dq, found.dk, found.dv, found.dsink, *found.score_captures)


# Function.apply without its argument binding and functorch checks, which `is_plain` has done.
_record = super(torch.autograd.Function, _Recorded).apply


def attend(problem: AttentionProblem, choice: Choice) -> ForwardResult:
    """Run a plain problem, recorded by autograd where a gradient is needed."""
    if not needs_gradient(problem):
        return dispatch.forward(problem, choice)
    captures = () if problem.score_mod is None else problem.score_mod.captures
    outputs = _record(problem, choice, problem.q, problem.k, problem.v, problem.sink, *captures)
    return ForwardResult(*outputs)
