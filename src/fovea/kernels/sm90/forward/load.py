"""The load role: one warp decides which query tile comes next, announces it and loads it.

Lives here: the sequence of query tiles, and the agreement on it inside a cluster. Not here: the
loads of one tile (`tile_loads.py`), which KV tiles it visits (`device/kv_walk.py`). Invariant: it
visits the same tiles in the same order as the compute role, so stages and phases agree without any
message.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import Rank, cluster_rank
from fovea.kernels.device.kv_walk import make_walk, pause_walk, reorder, uses_of
from fovea.kernels.device.masking import Band
from fovea.kernels.device.next_work import next_work, share_of, total_tiles
from fovea.kernels.device.scheduler import decode_tile, split_of
from fovea.kernels.device.sequences import Place, band_of_sequence, find_tile
from fovea.kernels.device.shared_walk import unite
from fovea.kernels.device.values import from_lane
from fovea.kernels.device.work import (
    PAUSE,
    STOP,
    Work,
    announce,
    draw_tile,
)
from fovea.kernels.portable.tensors import TmaLoads
from fovea.kernels.sm90.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm90.forward.tile_loads import Part, finish_tile, load_tile


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
    total = total_tiles(problem.order, problem.sequences)
    while use >= 0:
        tile_number, is_redo = next_work(
            plan, shared.work, shared.mailbox, rank, use, fresh, tile_number, total
        )
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
            its = _slice_of_v(plan, problem, tma, tile_number)
            last = load_tile(plan, problem, its, shared, part, walk, q_use, kv_use)
            # The later a CTA draws, the fewer tiles wait for one that is busy when others are done.
            # The answer takes a while, and so does the last V, whose stage has to be freed first.
            is_fresh = (is_redo == 0) & (tile_number >= 0)
            drawn = fresh
            if is_fresh:
                drawn = _draw(plan, problem, rank, fresh)
            finish_tile(plan, last)
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
        share = share_of(plan, problem, cutlass.max(tile_number, 0))
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
    return from_lane(number, cutlass.Int32(0)) if plan.is_dynamic else number
