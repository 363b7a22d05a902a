"""A problem taken apart: its tensors, its run-time numbers, and the facts that calls share.

Lives here: the three parts and how they become a problem again. Not here: who keeps them
(`ops/eager.py` between forward and backward, `ops/warm.py` between calls), operator arguments
(`ops/program.py`). Invariant: facts and numbers hold no tensor of the user's, so keeping them keeps
no memory and goes around no check of autograd.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fovea.mods.graph import Graph
from fovea.mods.trace import TracedMod
from fovea.problem.known_mods import Scalars
from fovea.problem.value import AttentionProblem, Causal, Varlen, Window
from fovea.tiling.block_lists import BlockLists

# Stands where a tensor was among the numbers.
_PLACE = torch.empty(0)


class ModFacts(NamedTuple):
    """A traced mod without its captures, and how many those were."""

    graph: Graph
    specialised: tuple[str, ...]
    source: str
    heads: tuple[int, ...]
    num_captures: int


# Run-time numbers of a problem: softcap, scale, and the scalars of score_mod, mask_mod and the
# block mask's mod. A softcap or scale that is a tensor is among the tensors. A plain tuple, since
# one is made in every call.
Numbers = tuple[float | Tensor | None, float | Tensor, tuple[Scalars, Scalars, Scalars]]


NO_SCALARS: tuple[Scalars, Scalars, Scalars] = ((), (), ())


class Facts(NamedTuple):
    """What is left of a problem without tensors and numbers.

    Block lists are (block_q, block_kv, seqlen_q, seqlen_kv, batch, heads), varlen the two lengths;
    `deterministic` is (wanted, whether lacking it only warns), `wants` (lse, max_score).
    """

    causal: Causal | None
    window: Window
    has_default_scale: bool
    mods: tuple[ModFacts | None, ModFacts | None, ModFacts | None]
    lists: tuple[int, ...] | None
    lengths: tuple[int, int] | None
    deterministic: tuple[bool, bool]
    wants: tuple[bool, bool]


def tensors_of(problem: AttentionProblem) -> list[Tensor | None]:
    """Return every tensor of a problem, in the order that `problem_of` takes them.

    q, k, v, sink, captures of the three mods, scale and softcap where they are tensors, the eight
    block lists where there are any, the five bounds of a packed call.
    """
    tensors: list[Tensor | None] = [problem.q, problem.k, problem.v, problem.sink]
    for mod in (problem.score_mod, problem.mask_mod, problem.block_mask_mod):
        if mod is not None:
            tensors.extend(mod.captures)
    if isinstance(problem.scale, Tensor):
        tensors.append(problem.scale)
    if isinstance(problem.softcap, Tensor):
        tensors.append(problem.softcap)
    if problem.block_lists is not None:
        tensors.extend(problem.block_lists.tensors())
    if problem.varlen is not None:
        varlen = problem.varlen
        tensors.extend((varlen.cu_seqlens_q, varlen.cu_seqlens_kv, varlen.seqused_q))
        tensors.extend((varlen.seqused_kv, varlen.page_table))
    return tensors


def numbers_of(problem: AttentionProblem) -> Numbers:
    """Return the run-time numbers of a problem."""
    score_mod, mask_mod, block_mod = problem.score_mod, problem.mask_mod, problem.block_mask_mod
    return (
        _PLACE if isinstance(problem.softcap, Tensor) else problem.softcap,
        _PLACE if isinstance(problem.scale, Tensor) else problem.scale,
        NO_SCALARS
        if score_mod is None and mask_mod is None and block_mod is None
        else (
            () if score_mod is None else score_mod.scalars,
            () if mask_mod is None else mask_mod.scalars,
            () if block_mod is None else block_mod.scalars,
        ),
    )


def facts_of(problem: AttentionProblem) -> Facts:
    """Return what is left of a problem without its tensors and numbers."""
    lists, varlen = problem.block_lists, problem.varlen
    return Facts(
        problem.causal,
        problem.window,
        problem.has_default_scale,
        (
            _facts_of_mod(problem.score_mod),
            _facts_of_mod(problem.mask_mod),
            _facts_of_mod(problem.block_mask_mod),
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


def problem_of(facts: Facts, numbers: Numbers, tensors: Sequence[Any]) -> AttentionProblem:
    """Return the problem that `facts_of`, `numbers_of` and `tensors_of` took apart."""
    softcap, scale, scalars_of_mods = numbers
    rest = iter(tensors)
    q, k, v, sink = next(rest), next(rest), next(rest), next(rest)
    mods = [
        _mod_of(mod, scalars, rest)
        for mod, scalars in zip(facts.mods, scalars_of_mods, strict=True)
    ]
    scale = next(rest) if scale is _PLACE else scale
    softcap = next(rest) if softcap is _PLACE else softcap
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


def _facts_of_mod(mod: TracedMod | None) -> ModFacts | None:
    if mod is None:
        return None
    return ModFacts(mod.graph, mod.specialised, mod.source, mod.heads, len(mod.captures))


def _mod_of(facts: ModFacts | None, scalars: Scalars, rest: Iterator[Any]) -> TracedMod | None:
    if facts is None:
        return None
    captures = tuple([next(rest) for _ in range(facts.num_captures)])
    return TracedMod(
        graph=facts.graph,
        captures=captures,
        scalars=scalars,
        specialised=facts.specialised,
        source=facts.source,
        heads=facts.heads,
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
