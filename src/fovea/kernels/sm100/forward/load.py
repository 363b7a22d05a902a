"""The load role: one warp announces query tiles and fills Q, K and V through the copy engine.

Lives here: which query tile comes next, and its announcement to the other roles. Not here: its
loads (`tile_loads.py`), which KV tiles it visits (`device/kv_walk.py`), what a launch is asked for
(`sm100/launch_control.py`). Invariant: every role walks the tiles announced here, in order.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import receive, send
from fovea.kernels.device.kv_walk import Share, Walk, make_walk, reorder
from fovea.kernels.device.pipeline import stage_of
from fovea.kernels.device.scheduler import decode_tile, num_tiles, split_of
from fovea.kernels.device.sequences import band_of_sequence, find_tile, packed_tiles
from fovea.kernels.device.values import select
from fovea.kernels.device.work import (
    PAUSE,
    STOP,
    Verdict,
    Work,
    announce,
    await_verdict,
)
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles, TmaLoads
from fovea.kernels.sm100.forward.tile_loads import load_tile
from fovea.kernels.sm100.launch_control import DECLINED, await_cluster, request_cluster


@cute.jit
def run(plan: cutlass.Constexpr, problem: Problem, tma: TmaLoads, shared: SharedTiles):
    """Announce and load every tile that this CTA works on.

    Run by one warp. Waits on: work_empty, q_empty, k_empty, v_empty. Signals: work_full, and
    q_full, k_full, v_full through the copy engine. Owns: sQ, sK, sV while a stage is empty.
    """
    item = cutlass.Int32(0)
    kv_use = cutlass.Int32(0)
    use = cutlass.Int32(0)
    fresh = cute.arch.block_idx()[0] // plan.cluster
    requests = cutlass.Int32(0)
    tile_number = cutlass.Int32(0)
    total = total_tiles(problem)
    while use >= 0:
        tile_number, is_redo = _next_work(plan, shared, use, fresh, tile_number, total)
        walk = _walk(plan, problem, cutlass.max(tile_number, 0))
        announce(shared.work, use, Work(tile_number, is_redo, walk), plan.work_edge)
        if tile_number == STOP:
            use = cutlass.Int32(-1)
        else:
            use += 1
        if tile_number >= 0:
            # Asked before the loads and read after them: the answer takes a while.
            if is_redo == 0:
                _ask_for_tile(plan, shared)
            load_tile(plan, problem, tma, shared, walk, item, kv_use)
            kv_use += walk.visits
            item += 1
            if is_redo == 0:
                fresh, requests = _fresh_tile(plan, shared, fresh, total, requests)


@cute.jit
def total_tiles(problem: Problem) -> cutlass.Int32:
    """Return the number of query tiles of the call."""
    total = cutlass.Int32(0)
    if cutlass.const_expr(problem.sequences is None):
        total = cutlass.Int32(num_tiles(problem.order))
    else:
        total = packed_tiles(problem.sequences, problem.order)
    return total


@cute.jit
def _walk(plan: cutlass.Constexpr, problem: Problem, tile_number: cutlass.Int32) -> Walk:
    """Return the walk of the query tile with this number, in its sequence."""
    band = problem.band
    if cutlass.const_expr(problem.sequences is None):
        tile, sequence = decode_tile(tile_number, problem.order), ()
        tile = reorder(tile, problem.order, problem.block_lists)
    else:
        tile, sequence = find_tile(tile_number, problem.sequences, problem.order)
        band = band_of_sequence(problem.band, sequence)
    share = _share(plan, problem, tile_number)
    return make_walk(tile, band, problem.block_lists, plan, share, sequence)


def _share(plan, problem: Problem, tile_number: cutlass.Int32) -> Share | None:
    """Return which part of its keys a packed tile works on."""
    if not plan.packs_heads:
        return None
    num_splits = problem.packing.partials.num_splits
    return Share(problem.group_size, split_of(tile_number, problem.order), num_splits)


@cute.jit
def _next_work(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    use: cutlass.Int32,
    fresh: cutlass.Int32,
    last: cutlass.Int32,
    total: cutlass.Int32,
):
    """Return the tile to announce and the redo word: 0, or 1 + the slot whose flags say which rows.

    The first CTA of a pair decides for both, once it has heard the other's verdict; a redo of
    either is one of both.
    """
    verdict = await_verdict(shared.work, use, plan.work_edge)
    if cutlass.const_expr(plan.cluster == 1):
        tile_number, is_redo = _decide(plan, use, fresh, last, total, verdict)
    else:
        said = select(verdict.wants_redo, cutlass.Int32(1), cutlass.Int32(0))
        tile_number, is_redo = last, cutlass.Int32(0)
        mailbox, rank = shared.mailbox, shared.rank
        if rank.is_first:
            heard, _ = receive(mailbox, use)
            both = verdict._replace(wants_redo=verdict.wants_redo | (heard != 0))
            tile_number, is_redo = _decide(plan, use, fresh, last, total, both)
            send(mailbox, rank, tile_number, is_redo)
        else:
            send(mailbox, rank, said, cutlass.Int32(0))
            tile_number, is_redo = receive(mailbox, use)
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
    tile announced `last` has to be heard too before the CTA may stop: a pause goes between.
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
def _ask_for_tile(plan: cutlass.Constexpr, shared: SharedTiles):
    """Ask for a tile whose CTAs have not started, where tiles differ in work.

    The second CTA of a pair asks for none: it is told.
    """
    if cutlass.const_expr(plan.is_dynamic):
        if cutlass.const_expr(plan.cluster == 1):
            request_cluster(shared.launches)
        elif shared.rank.is_first:
            request_cluster(shared.launches)


@cute.jit
def _fresh_tile(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    last: cutlass.Int32,
    total: cutlass.Int32,
    requests: cutlass.Int32,
):
    """Return the next fresh tile, from `total` on if there is none, and the requests made so far.

    The number of tiles of packed sequences is known on the device alone, so their grid may have
    more CTAs than that. Those are taken over, too, while the last tile is multiplied: that is
    quicker than starting them.
    """
    number = last
    if cutlass.const_expr(not plan.is_dynamic):
        number = last + cute.arch.grid_dim()[0] // plan.cluster
    elif cutlass.const_expr(plan.cluster > 1):
        if shared.rank.is_first:
            number = await_cluster(shared.launches, requests, plan.cluster)
            requests += 1
    else:
        number = await_cluster(shared.launches, requests, plan.cluster)
        requests += 1
        if cutlass.const_expr(plan.features.varlen):
            while (number >= total) & (number != DECLINED):
                request_cluster(shared.launches)
                number = await_cluster(shared.launches, requests, plan.cluster)
                requests += 1
    return number, requests
