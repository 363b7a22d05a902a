"""The load role: one thread fills Q, K and V through the copy engine.

Lives here: the order of loads, and the announcement of each query tile to the compute role. Not
here: the barriers' arithmetic (`device/pipeline.py`) and which KV tiles a query tile visits
(`device/kv_walk.py`). Invariant: it visits the same tiles in the same order as the compute role, so
stages and phases agree without any message.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.kv_walk import (
    Walk,
    kv_tile,
    make_walk,
    pause_walk,
    reorder,
    visit_word,
)
from fovea.kernels.device.pipeline import expect_bytes, stage_of, wait_empty
from fovea.kernels.device.scheduler import decode_tile, num_tiles
from fovea.kernels.device.values import select
from fovea.kernels.device.work import (
    PAUSE,
    STOP,
    Work,
    announce,
    await_verdict,
    draw_tile,
    from_first_lane,
)
from fovea.kernels.sm90.forward.arguments import Problem, SharedTiles, TmaLoads


class _TileViews(NamedTuple):
    """TMA partitions of one query tile: (smem, gmem) of Q, K and V."""

    tQsQ: cute.Tensor
    tQgQ: cute.Tensor
    tKsK: cute.Tensor
    tKgK: cute.Tensor
    tVsV: cute.Tensor
    tVgV: cute.Tensor


@cute.jit
def run(plan: cutlass.Constexpr, problem: Problem, tma: TmaLoads, shared: SharedTiles):
    """Announce and load every tile that this CTA works on.

    Run by one warp. Waits on: work_empty, q_empty, k_empty, v_empty. Signals: work_full, and
    q_full, k_full, v_full through the copy engine. Owns: sQ, sK, sV while a stage is empty.
    """
    q_use = cutlass.Int32(0)
    kv_use = cutlass.Int32(0)
    use = cutlass.Int32(0)
    fresh, _, _ = cute.arch.block_idx()
    tile_number = cutlass.Int32(0)
    while use >= 0:
        tile_number, is_redo = _next_work(plan, problem, shared, use, fresh, tile_number)
        tile = decode_tile(cutlass.max(tile_number, 0), problem.order)
        tile = reorder(tile, problem.order, problem.block_lists)
        walk = make_walk(tile, problem.band, problem.block_lists, plan)
        has_loads = tile_number >= 0
        if cutlass.const_expr(plan.looks_ahead):
            has_loads = tile_number != STOP
            if tile_number == PAUSE:
                walk = pause_walk(walk, problem.order, problem.band, plan)
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
                drawn = _draw(plan, problem, fresh)
            _load_tile(plan, problem, tma, shared, walk, q_use, kv_use)
            kv_use += walk.visits
            q_use += plan.num_consumers
            if is_fresh:
                fresh = _drawn(plan, drawn)


@cute.jit
def _next_work(
    plan: cutlass.Constexpr,
    problem: Problem,
    shared: SharedTiles,
    use: cutlass.Int32,
    fresh: cutlass.Int32,
    last: cutlass.Int32,
):
    """Return the tile to announce and the redo word: 0, or 1 + the slot whose flags say which rows.

    A redo that a slot's last tile asked for comes before fresh tiles. When those are used up, the
    tile announced `last` has to be heard too before the CTA may stop; but the compute role looks
    ahead to the next announcement before it gives that verdict, so it is told to pause.
    """
    edge = plan.work_edge
    verdict = await_verdict(shared.work, use, edge)
    tile_number = fresh
    is_redo = cutlass.Int32(0)
    if verdict.wants_redo:
        tile_number = verdict.tile_number
        is_redo = 1 + stage_of(use, edge)
    elif fresh >= num_tiles(problem.order):
        tile_number = select(last == PAUSE, cutlass.Int32(STOP), cutlass.Int32(PAUSE))
    return tile_number, is_redo


@cute.jit
def _draw(plan: cutlass.Constexpr, problem: Problem, last: cutlass.Int32) -> cutlass.Int32:
    """Return the next fresh tile: from the grid's counter where tiles differ in work.

    Where that is so, lane 0 alone has the answer.
    """
    grid, _, _ = cute.arch.grid_dim()
    number = last + grid
    if cutlass.const_expr(plan.is_dynamic):
        number = grid + draw_tile(problem.counter)
    return number


def _drawn(plan, number: cutlass.Int32) -> cutlass.Int32:
    """Return what `_draw` gave, in every lane."""
    return from_first_lane(number) if plan.is_dynamic else number


@cute.jit
def _load_tile(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    walk: Walk,
    q_use: cutlass.Int32,
    kv_use: cutlass.Int32,
):
    """Load one query tile and the KV tiles it visits."""
    views = _views(plan, problem, tma, shared, walk)
    _load_q(plan, tma, shared, views, q_use)
    # K runs one tile ahead of V, as the products that need them do.
    n_idx = kv_tile(walk, cutlass.Int32(0), problem.block_lists, plan)
    _load_k(plan, tma, shared, views, walk, cutlass.Int32(0), kv_use, n_idx)
    for visit in cutlass.range(1, walk.visits, unroll=1):
        next_idx = kv_tile(walk, visit, problem.block_lists, plan)
        _load_k(plan, tma, shared, views, walk, visit, kv_use, next_idx)
        _load_v(plan, tma, shared, views, kv_use + visit - 1, n_idx)
        n_idx = next_idx
    _load_v(plan, tma, shared, views, kv_use + walk.visits - 1, n_idx)


@cute.jit
def _views(
    plan: cutlass.Constexpr, problem: Problem, tma: TmaLoads, shared: SharedTiles, walk: Walk
) -> _TileViews:
    """Return the TMA partitions of a query tile; KV heads are shared by groups of query heads."""
    kv_head = walk.head // problem.group_size
    gQ = cute.local_tile(
        tma.mQ[None, None, walk.head, walk.batch],
        (plan.tile_m // plan.num_consumers, plan.head_dim),
        (None, 0),
    )
    gQ = cute.domain_offset((0, 0, walk.m_idx * plan.num_consumers), gQ)
    gK = cute.local_tile(
        tma.mK[None, None, kv_head, walk.batch], (plan.tile_n, plan.head_dim), (None, 0)
    )
    gV = cute.local_tile(
        tma.mV[None, None, kv_head, walk.batch], (plan.head_dim_v, plan.tile_n), (0, None)
    )
    tQsQ, tQgQ = _partition(tma.atom_q, shared.sQ, gQ)
    tKsK, tKgK = _partition(tma.atom_k, shared.sK, gK)
    tVsV, tVgV = _partition(tma.atom_v, shared.sV, gV)
    return _TileViews(tQsQ, tQgQ, tKsK, tKgK, tVsV, tVgV)


def _partition(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return (smem, gmem) views with the box in mode 0 and the stage or tile in mode 1."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )


@cute.jit
def _load_q(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    views: _TileViews,
    q_use: cutlass.Int32,
):
    """Load Q of every consumer; each waits only for the consumer that had the memory before."""
    for consumer in cutlass.range_constexpr(plan.num_consumers):
        use = q_use + consumer
        wait_empty(shared.q, use, plan.q_edge)
        with cute.arch.elect_one():
            expect_bytes(shared.q, use, plan.q_edge)
        cute.copy(
            tma.atom_q,
            views.tQgQ[None, consumer],
            views.tQsQ[None, stage_of(use, plan.q_edge)],
            tma_bar_ptr=shared.q.full + stage_of(use, plan.q_edge),
        )


@cute.jit
def _load_k(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    views: _TileViews,
    walk: Walk,
    visit: cutlass.Int32,
    first_use: cutlass.Int32,
    n_idx: cutlass.Int32,
):
    """Load the K tile of a visit into its stage, and say which one it is.

    The arrival that announces the bytes also releases that word to the consumers.
    """
    use = first_use + visit
    stage = stage_of(use, plan.k_edge)
    wait_empty(shared.k, use, plan.k_edge)
    with cute.arch.elect_one():
        if cutlass.const_expr(plan.features.block_lists):
            shared.visits[stage] = visit_word(walk, visit, n_idx)
        expect_bytes(shared.k, use, plan.k_edge)
    cute.copy(
        tma.atom_k,
        views.tKgK[None, n_idx],
        views.tKsK[None, stage],
        tma_bar_ptr=shared.k.full + stage,
    )


@cute.jit
def _load_v(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    views: _TileViews,
    use: cutlass.Int32,
    n_idx: cutlass.Int32,
):
    """Load one V tile into the stage of its use."""
    wait_empty(shared.v, use, plan.v_edge)
    with cute.arch.elect_one():
        expect_bytes(shared.v, use, plan.v_edge)
    stage = stage_of(use, plan.v_edge)
    cute.copy(
        tma.atom_v,
        views.tVgV[None, n_idx],
        views.tVsV[None, stage],
        tma_bar_ptr=shared.v.full + stage,
    )
