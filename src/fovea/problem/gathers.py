"""The extents of captured tensors against the positions that index them.

Lives here: what the sizes of a call alone prove wrong, on every device and without a sync. Not
here: which indices can be judged so (`mods/gathers.py`), indices that come out of tensors
(`mods/evaluate.py`). Invariant: what raises is asked for at a position that the call has and that
neither band nor, for a score_mod, another mask may hide.
"""

from functools import partial
from typing import cast

import torch

from fovea.errors import invalid
from fovea.mods.divisors import check_divisors
from fovea.mods.gathers import Place, Reach, check_reach, direct_gathers, places
from fovea.mods.trace import TracedMod
from fovea.problem.value import AttentionProblem
from fovea.tiling.bounds import Band


def check_gathers(problem: AttentionProblem) -> None:
    """Raise GatherError where a mod indexes a captured tensor beyond its end for certain.

    Not judged: positions that may be hidden by block lists or by a mask beside a score_mod, and the
    lengths of packed sequences, which lie in tensors.
    """
    for name in ("score_mod", "mask_mod", "block_mask_mod"):
        mod = getattr(problem, name)
        if mod is not None:
            for heads in mod.heads:
                _check_heads(name, mod, heads, problem.heads_q)
    if torch.compiler.is_compiling():
        return  # sizes and numbers are symbols there; the operator checks again when it runs
    for name in ("score_mod", "mask_mod", "block_mask_mod"):
        mod = getattr(problem, name)
        if mod is not None:
            check_divisors(name, mod)
    if problem.mask_mod is not None:
        is_open = problem.block_lists is None
        _check_mod("mask_mod", problem.mask_mod, problem, is_open=is_open)
    if problem.score_mod is not None:
        is_open = problem.block_lists is None and problem.mask_mod is None
        _check_mod("score_mod", problem.score_mod, problem, is_open=is_open)
    if problem.block_mask_mod is not None:
        _check_mod("block_mask.mask_mod", problem.block_mask_mod, problem, is_open=False)


def _check_heads(name: str, mod: TracedMod, heads: int, heads_q: int) -> None:
    if heads_q > heads:
        raise ValueError(
            invalid(
                f"heads of {name}{f' ({mod.source})' if mod.source else ''}",
                heads,
                f"at least the {heads_q} query heads of this call",
                "make the mod for that many heads",
            )
        )


def _check_mod(name: str, mod: TracedMod, problem: AttentionProblem, *, is_open: bool) -> None:
    for gather in direct_gathers(mod.graph):
        extent = mod.captures[gather.capture].shape[gather.dimension]
        if gather.is_plain and extent >= _size(problem, gather.position):
            continue
        reach = _range(problem, gather.position, is_open=is_open)
        if reach is not None:
            probes = partial(_places, problem, gather.position)
            check_reach(name, mod, gather, reach, probes)


def _places(problem: AttentionProblem, position: str, value: int) -> list[Place]:
    """Return some places inside the band where a position has that value."""
    last = {"b": problem.batch - 1, "h": problem.heads_q - 1}
    if problem.varlen is not None:
        return places(last | {"q_idx": 0, "kv_idx": 0}, position, value)
    seqlen_q, seqlen_kv = problem.seqlen_q, problem.seqlen_kv
    band = Band.of(problem.causal, problem.window, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    found = places(last | {"q_idx": seqlen_q - 1, "kv_idx": seqlen_kv - 1}, position, value)
    for q_idx in (value,) if position == "q_idx" else (0, seqlen_q - 1):
        for kv_idx in (band.first_key(q_idx), band.end_key(q_idx, seqlen_kv) - 1):
            found.append({**found[0], "q_idx": q_idx, "kv_idx": cast(int, kv_idx), position: value})
    return [
        place
        for place in found
        if band.first_key(place["q_idx"])
        <= place["kv_idx"]
        < band.end_key(place["q_idx"], seqlen_kv)
    ]


def _size(problem: AttentionProblem, position: str) -> int:
    match position:
        case "b":
            return problem.batch
        case "h":
            return problem.heads_q
        case "q_idx":
            return problem.seqlen_q
        case _:
            return problem.seqlen_kv


def _range(problem: AttentionProblem, position: str, *, is_open: bool) -> Reach | None:
    """Return the values of a position that the mod is sure to be asked for; None for none."""
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        return None
    if position == "h":
        return 0, problem.heads_q - 1
    if problem.varlen is not None:  # a sequence may be empty, and the maxima may be larger
        return None
    if position == "b":
        return 0, problem.batch - 1
    if not is_open:
        return None
    seqlen_q, seqlen_kv = problem.seqlen_q, problem.seqlen_kv
    band = Band.of(problem.causal, problem.window, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    if position == "q_idx":
        found = band.first_query(0), band.end_query(seqlen_kv - 1, seqlen_q) - 1
    else:
        found = band.first_key(0), band.end_key(seqlen_q - 1, seqlen_kv) - 1
    return cast(Reach, found) if found[0] <= found[1] else None
