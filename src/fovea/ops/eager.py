"""The quick path: plain tensors, no transform, no mode, nobody who has to see an operator.

Lives here: the test for that, and one autograd function straight over the backend. Not here: every
other call (`functions.py`). Invariant: what is saved for the backward goes through autograd
(version checks, saved-tensor hooks, freed after use), and the scalars of the forward are kept
beside it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fovea import dispatch
from fovea.dispatch import Choice
from fovea.mods.trace import TracedMod
from fovea.ops.batched_grads import each_of_batch, is_batched
from fovea.ops.functions import differentiable_backward, keep_dynamo_out
from fovea.ops.program import pack
from fovea.problem import (
    AttentionProblem,
    Causal,
    ForwardResult,
    GradientNeeds,
    Varlen,
    Window,
)
from fovea.tiling.block_lists import BlockLists

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})

_num_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]
_has_transform = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
_is_profiling = torch._C._autograd._profiler_enabled  # pyright: ignore
# Stands where a tensor was in a problem that autograd keeps.
_PLACE = torch.empty(0)


def is_plain(tensors: list[Tensor | None]) -> bool:
    """Return whether nothing but autograd may watch a call on these tensors (`tensors_of`).

    A profiler counts as a watcher: it should show the operator's name.
    """
    if _num_modes() or _has_transform() or _is_profiling():
        return False
    if forward_ad._current_level >= 0:  # pyright: ignore
        return False
    for tensor in tensors:
        if tensor is not None and type(tensor) not in _PLAIN_TYPES:
            return False
    first = tensors[0]
    return first is not None and (first.is_cpu or first.is_cuda)


def needs_gradient(problem: AttentionProblem) -> bool:
    """Return whether autograd has to record this call."""
    if not torch.is_grad_enabled():
        return False
    if problem.q.requires_grad or problem.k.requires_grad or problem.v.requires_grad:
        return True
    if problem.sink is not None and problem.sink.requires_grad:
        return True
    if problem.score_mod is not None:
        for capture in problem.score_mod.captures:
            if capture.requires_grad:
                return True
    return False


def tensors_of(problem: AttentionProblem) -> list[Tensor | None]:
    """Return every tensor of a problem, in the order that `problem_of` takes them."""
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


class Facts(NamedTuple):
    """A problem without its tensors, for autograd to keep: those it saves itself.

    `_PLACE` stands in the place of a scale or softcap that is a tensor; mods are their fields
    without captures, and how many those were; block lists are (block_q, block_kv, seqlen_q,
    seqlen_kv, batch, heads), varlen the two lengths.
    """

    causal: Causal | None
    window: Window
    softcap: float | Tensor | None
    scale: float | Tensor
    has_default_scale: bool
    mods: tuple[tuple[Any, ...] | None, ...]
    lists: tuple[int, ...] | None
    lengths: tuple[int, int] | None
    deterministic: tuple[bool, bool]
    wants: tuple[bool, bool]


def facts_of(problem: AttentionProblem) -> Facts:
    """Return what is left of a problem without its tensors."""
    score_mod, mask_mod, block_mod = problem.score_mod, problem.mask_mod, problem.block_mask_mod
    lists, varlen = problem.block_lists, problem.varlen
    return Facts(
        problem.causal,
        problem.window,
        _PLACE if isinstance(problem.softcap, Tensor) else problem.softcap,
        _PLACE if isinstance(problem.scale, Tensor) else problem.scale,
        problem.has_default_scale,
        (
            None if score_mod is None else _facts_of_mod(score_mod),
            None if mask_mod is None else _facts_of_mod(mask_mod),
            None if block_mod is None else _facts_of_mod(block_mod),
        ),
        None
        if lists is None
        else (
            *(lists.block_q, lists.block_kv, lists.seqlen_q, lists.seqlen_kv),
            *(lists.batch, lists.heads),
        ),
        None if varlen is None else (varlen.max_seqlen_q, varlen.max_seqlen_kv),
        (problem.deterministic, problem.deterministic_warns),
        (problem.wants_lse, problem.wants_max_score),
    )


def _facts_of_mod(mod: TracedMod) -> tuple[Any, ...]:
    return (mod.graph, mod.scalars, mod.specialised, mod.source, len(mod.captures))


def _mod_of(facts: tuple[Any, ...] | None, rest: Iterator[Any]) -> TracedMod | None:
    if facts is None:
        return None
    graph, scalars, specialised, source, num_captures = facts
    return TracedMod(
        graph=graph,
        captures=tuple(next(rest) for _ in range(num_captures)),
        scalars=scalars,
        specialised=specialised,
        source=source,
    )


def problem_of(facts: Facts, tensors: list[Any]) -> AttentionProblem:
    """Return the problem that `facts_of` and `tensors_of` took apart."""
    rest = iter(tensors)
    q, k, v, sink = next(rest), next(rest), next(rest), next(rest)
    scale = next(rest) if facts.scale is _PLACE else facts.scale
    softcap = next(rest) if facts.softcap is _PLACE else facts.softcap
    mods = [_mod_of(mod, rest) for mod in facts.mods]
    lists = None if facts.lists is None else _lists_of(facts.lists, rest)
    varlen = None if facts.lengths is None else _varlen_of(facts.lengths, rest)
    return AttentionProblem(
        q=q,
        k=k,
        v=v,
        sink=sink,
        causal=facts.causal,
        window=facts.window,
        softcap=softcap,
        scale=scale,
        has_default_scale=facts.has_default_scale,
        score_mod=mods[0],
        mask_mod=mods[1],
        block_mask_mod=mods[2],
        block_lists=lists,
        varlen=varlen,
        deterministic=facts.deterministic[0],
        deterministic_warns=facts.deterministic[1],
        wants_lse=facts.wants[0],
        wants_max_score=facts.wants[1],
    )


def _lists_of(facts: tuple[int, ...], rest: Iterator[Any]) -> BlockLists:
    block_q, block_kv, seqlen_q, seqlen_kv, batch, heads = facts
    return BlockLists(
        kv_num_blocks=next(rest),
        kv_indices=next(rest),
        full_kv_num_blocks=next(rest),
        full_kv_indices=next(rest),
        q_num_blocks=next(rest),
        q_indices=next(rest),
        full_q_num_blocks=next(rest),
        full_q_indices=next(rest),
        block_q=block_q,
        block_kv=block_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        batch=batch,
        heads=heads,
    )


def _varlen_of(lengths: tuple[int, int], rest: Iterator[Any]) -> Varlen:
    cu_seqlens_q, cu_seqlens_kv, seqused_q = next(rest), next(rest), next(rest)
    return Varlen(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=lengths[0],
        max_seqlen_kv=lengths[1],
        seqused_q=seqused_q,
        seqused_kv=next(rest),
        page_table=next(rest),
    )


class _Recorded(torch.autograd.Function):
    """(problem, choice, tensors, q, k, v, sink, *captures) -> out, lse, max_score or None."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        problem: AttentionProblem = args[0]
        choice: Choice = args[1]
        result = dispatch.forward(problem, choice)
        ctx.set_materialize_grads(False)
        if result.max_score is not None:
            ctx.mark_non_differentiable(result.max_score)
        ctx.save_for_backward(result.out, result.lse, *args[2])
        # Without the tensors: holding them here would go around autograd's hooks and checks.
        ctx.facts = facts_of(problem)
        ctx.choice = choice
        return result.out, result.lse, result.max_score

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse, _ = grads
        flags = ctx.needs_input_grad[3:]
        if dout is None and dlse is None:
            return (None,) * (3 + len(flags))
        if is_batched(grads):
            return each_of_batch(partial(_Recorded.backward, ctx), grads)
        out, lse, *tensors = ctx.saved_tensors
        problem = problem_of(ctx.facts, tensors)
        if torch.is_grad_enabled() or not is_plain(tensors):
            packed = pack(problem, ctx.choice.backend)
            results = differentiable_backward(packed, (dout, dlse, out, lse), list(flags))
            return (
                *(None, None, None),
                *(g if f else None for g, f in zip(results, flags, strict=True)),
            )
        needs = GradientNeeds(*flags[:4], score_captures=tuple(flags[4:]))
        found = dispatch.backward(
            problem, ctx.choice, out=out, lse=lse, dout=dout, dlse=dlse, needs=needs
        )
        return (
            *(None, None, None),
            found.dq,
            found.dk,
            found.dv,
            found.dsink,
            *found.score_captures,
        )


keep_dynamo_out(_Recorded.backward)

# Function.apply without its argument binding and functorch checks, which `is_plain` has done.
_record = cast(Any, super(torch.autograd.Function, _Recorded)).apply


def attend(
    problem: AttentionProblem, choice: Choice, tensors: list[Tensor | None]
) -> ForwardResult:
    """Run a plain problem, recorded by autograd where a gradient is needed."""
    if not needs_gradient(problem):
        return dispatch.forward(problem, choice)
    captures = () if problem.score_mod is None else problem.score_mod.captures
    outputs = _record(problem, choice, tensors, *tensors[:4], *captures)
    return ForwardResult(*outputs)
