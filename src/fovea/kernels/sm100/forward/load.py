"""The load role: one warp announces query tiles and fills Q, K and V through the copy engine.

Lives here: which query tile comes next, and its announcement to the other roles. Not here: its
loads (`tile_loads.py`), which KV tiles it visits (`device/kv_walk.py`), what a launch is asked for
(`sm100/launch_control.py`). Invariant: every role walks the tiles announced here, in order.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import Walk, make_walk, reorder
from fovea.kernels.device.next_work import next_work, share_of, total_tiles
from fovea.kernels.device.scheduler import decode_tile
from fovea.kernels.device.sequences import band_of_sequence, find_tile
from fovea.kernels.device.work import (
    STOP,
    Work,
    announce,
)
from fovea.kernels.portable.tensors import TmaLoads
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles
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
    total = total_tiles(problem.order, problem.sequences)
    while use >= 0:
        tile_number, is_redo = next_work(
            plan, shared.work, shared.mailbox, shared.rank, use, fresh, tile_number, total
        )
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
def _walk(plan: cutlass.Constexpr, problem: Problem, tile_number: cutlass.Int32) -> Walk:
    """Return the walk of the query tile with this number, in its sequence."""
    band = problem.band
    if cutlass.const_expr(problem.sequences is None):
        tile, sequence = decode_tile(tile_number, problem.order), ()
        tile = reorder(tile, problem.order, problem.block_lists)
    else:
        tile, sequence = find_tile(tile_number, problem.sequences, problem.order)
        band = band_of_sequence(problem.band, sequence)
    share = share_of(plan, problem, tile_number)
    return make_walk(tile, band, problem.block_lists, plan, share, sequence)


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
