"""The load role: one warp decides which query tile comes next, announces it and loads it.

Lives here: the sequence of query tiles, and the agreement on it inside a cluster. Not here: the
loads of one tile (`tile_loads.py`), which KV tiles it visits (`device/kv_walk.py`). Invariant: it
visits the same tiles in the same order as the compute role, so stages and phases agree without any
message.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import Rank, cluster_rank, receive, send
from fovea.kernels.device.kv_walk import Share, make_walk, pause_walk, reorder, uses_of
from fovea.kernels.device.masking import Band
from fovea.kernels.device.pipeline import stage_of
from fovea.kernels.device.scheduler import decode_tile, num_tiles, split_of
from fovea.kernels.device.sequences import Place, band_of_sequence, find_tile, packed_tiles
from fovea.kernels.device.shared_walk import unite
from fovea.kernels.device.values import select
from fovea.kernels.device.work import (
    PAUSE,
    STOP,
    Verdict,
    Work,
    announce,
    await_verdict,
    draw_tile,
    from_first_lane,
)
from fovea.kernels.sm90.forward.arguments import Problem, SharedTiles, TmaLoads
from fovea.kernels.sm90.forward.tile_loads import Part, load_tile


@cute.jit
def run(plan: cutlass.Constexpr, problem: Problem, tma: TmaLoads, shared: SharedTiles):
    """Announce and load every tile that this CTA works on.

    Run by one warp. Waits on: work_empty, q_empty, k_empty, v_empty. Signals: work_full, and
    q_full, k_full, v_full through the copy engine. Owns: sQ, sK, sV while a stage is empty.
    """
    q_use = cutlass.Int32(0)
    kv_use = cutlass.Int32(0)
    use = cutlass.Int32(0)
    rank = None
    if cutlass.const_expr(plan.cluster > 1):
        rank = cluster_rank()
    fresh = cute.arch.block_idx()[0] // plan.cluster
    tile_number = cutlass.Int32(0)
    total = _total_tiles(problem)
    while use >= 0:
        tile_number, is_redo = _next_work(plan, shared, rank, use, fresh, tile_number, total)
        walk, part = _walk(plan, problem, rank, tile_number)
        has_loads = tile_number >= 0
        if cutlass.const_expr(plan.looks_ahead):
            # A pause without a tile before it, in a CTA that finds no work at all, has nobody who
            # looks ahead to it.
            has_loads = has_loads | ((tile_number == PAUSE) & (use > 0))
        announce(shared.work, use, Work(tile_number, is_redo, walk), plan.work_edge)
        if tile_number == STOP:
            use = cutlass.Int32(-1)
        else:
            use += 1
        if has_loads:
            # Drawn before the loads and read after them: the counter's answer takes a while.
            is_fresh = (is_redo == 0) & (tile_number >= 0)
            drawn = fresh
            if is_fresh:
                drawn = _draw(plan, problem, rank, fresh)
            its = _slice_of_v(plan, problem, tma, tile_number)
            load_tile(plan, problem, its, shared, part, walk, q_use, kv_use)
            kv_use += uses_of(plan, walk)
            q_use += plan.num_consumers
            if is_fresh:
                fresh = _drawn(plan, drawn)


def _slice_of_v(plan, problem: Problem, tma: TmaLoads, tile_number: cutlass.Int32) -> TmaLoads:
    """Return the loads of a query tile, whose V begins at the first column of its slice."""
    if plan.v_slices == 1:
        return tma
    column = split_of(cutlass.max(tile_number, 0), problem.order) * plan.head_dim_v
    behind = (0,) * (cute.rank(tma.mV) - 1)
    return tma._replace(mV=cute.domain_offset((column, *behind), tma.mV))


def _share(plan, problem: Problem, tile_number: cutlass.Int32) -> Share | None:
    """Return which part of its keys a packed tile works on."""
    if not plan.packs_heads:
        return None
    num_splits = problem.packing.partials.num_splits
    return Share(problem.group_size, split_of(tile_number, problem.order), num_splits)


@cute.jit
def _total_tiles(problem: Problem) -> cutlass.Int32:
    """Return the number of query tiles of the call, or pairs of them in a cluster."""
    total = cutlass.Int32(0)
    if cutlass.const_expr(problem.sequences is None):
        total = cutlass.Int32(num_tiles(problem.order))
    else:
        total = packed_tiles(problem.sequences, problem.order)
    return total


@cute.jit
def _place(problem: Problem, tile_number: cutlass.Int32) -> tuple[Place, Band]:
    """Return the query tile with this number, its sequence and the sequence's band."""
    band = problem.band
    if cutlass.const_expr(problem.sequences is None):
        tile = decode_tile(tile_number, problem.order)
        lists, ranges = problem.block_lists, problem.key_ranges
        place = Place(reorder(tile, problem.order, lists, ranges), ())
    else:
        place = find_tile(tile_number, problem.sequences, problem.order)
        band = band_of_sequence(problem.band, place.sequence)
    return place, band


@cute.jit
def _walk(plan: cutlass.Constexpr, problem: Problem, rank: Rank | None, tile_number: cutlass.Int32):
    """Return the walk to announce, and in a cluster what it is part of."""
    place, band = _place(problem, cutlass.max(tile_number, 0))
    tile, sequence = place
    lists = problem.block_lists
    part = None
    if cutlass.const_expr(plan.cluster == 1):
        share = _share(plan, problem, cutlass.max(tile_number, 0))
        walk = make_walk(tile, band, lists, plan, share, sequence, problem.key_ranges)
    else:
        first = tile.m_idx * plan.cluster
        own, other = tile._replace(m_idx=first + rank.own), tile._replace(m_idx=first + rank.other)
        walk = make_walk(own, band, lists, plan, None, sequence)
        beside = make_walk(other, band, lists, plan, None, sequence)
        if cutlass.const_expr(plan.looks_ahead):
            if tile_number == PAUSE:
                beside = pause_walk(beside, problem.order, band, plan)
    if cutlass.const_expr(plan.looks_ahead):
        if tile_number == PAUSE:
            walk = pause_walk(walk, problem.order, band, plan)
    if cutlass.const_expr(plan.cluster > 1):
        walk, union = unite(walk, beside)
        part = Part(rank, union)
    return walk, part


@cute.jit
def _next_work(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    rank: Rank | None,
    use: cutlass.Int32,
    fresh: cutlass.Int32,
    last: cutlass.Int32,
    total: cutlass.Int32,
):
    """Return the tile to announce and the redo word: 0, or 1 + the slot whose flags say which rows.

    The first CTA of a cluster decides for both, once it has heard the other's verdict; a redo of
    either is one of both.
    """
    verdict = await_verdict(shared.work, use, plan.work_edge)
    if cutlass.const_expr(plan.cluster == 1):
        tile_number, is_redo = _decide(plan, use, fresh, last, total, verdict)
    else:
        said = select(verdict.wants_redo, cutlass.Int32(1), cutlass.Int32(0))
        tile_number, is_redo = last, cutlass.Int32(0)
        if rank.is_first:
            heard, _ = receive(shared.mailbox, use)
            both = verdict._replace(wants_redo=verdict.wants_redo | (heard != 0))
            tile_number, is_redo = _decide(plan, use, fresh, last, total, both)
            send(shared.mailbox, rank, tile_number, is_redo)
        else:
            send(shared.mailbox, rank, said, cutlass.Int32(0))
            tile_number, is_redo = receive(shared.mailbox, use)
    return tile_number, is_redo


@cute.jit
def _decide(
    plan: cutlass.Constexpr,
    use: cutlass.Int32,
    fresh: cutlass.Int32,
    last: cutlass.Int32,
    total: cutlass.Int32,
    verdict: Verdict,
):
    """Return the tile to announce and the redo word.

    A redo that a slot's last tile asked for comes before fresh tiles. When those are used up, the
    tile announced `last` has to be heard too before the CTA may stop; but the compute role looks
    ahead to the next announcement before it gives that verdict, so it is told to pause.
    """
    tile_number = fresh
    is_redo = cutlass.Int32(0)
    if verdict.wants_redo:
        tile_number = verdict.tile_number
        is_redo = 1 + stage_of(use, plan.work_edge)
    elif fresh >= total:
        tile_number = select(last == PAUSE, cutlass.Int32(STOP), cutlass.Int32(PAUSE))
    return tile_number, is_redo


@cute.jit
def _draw(
    plan: cutlass.Constexpr, problem: Problem, rank: Rank | None, last: cutlass.Int32
) -> cutlass.Int32:
    """Return the next fresh tile: from the grid's counter where tiles differ in work.

    Where that is so, lane 0 alone has the answer. The second CTA of a cluster is told, and draws
    none.
    """
    clusters = cute.arch.grid_dim()[0] // plan.cluster
    number = last + clusters
    if cutlass.const_expr(plan.is_dynamic):
        if cutlass.const_expr(plan.cluster == 1):
            number = clusters + draw_tile(problem.counter)
        elif rank.is_first:
            number = clusters + draw_tile(problem.counter)
    return number


def _drawn(plan, number: cutlass.Int32) -> cutlass.Int32:
    """Return what `_draw` gave, in every lane."""
    return from_first_lane(number) if plan.is_dynamic else number
