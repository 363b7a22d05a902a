"""The load role: one warp announces query tiles and fills Q, K and V through the copy engine.

Lives here: the order of loads, and the announcement of each query tile to the other roles. Not
here: the barriers' arithmetic (`device/pipeline.py`) and which KV tiles a query tile visits
(`device/kv_walk.py`). Invariant: every role walks the tiles announced here, in order.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.cluster import Rank, receive, send
from fovea.kernels.device.kv_walk import Share, Walk, kv_tile, make_walk, reorder
from fovea.kernels.device.pages import PagedOperand, fill_from_pages
from fovea.kernels.device.pipeline import Ring, expect_bytes, stage_of, wait_empty
from fovea.kernels.device.scheduler import decode_tile, num_tiles, split_of
from fovea.kernels.device.sequences import band_of_sequence, bounded, find_tile, packed_tiles
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
from fovea.kernels.sm100.forward.page_loads import k_boxes, paged_operands, v_boxes
from fovea.kernels.sm100.forward.streams import rows_of
from fovea.kernels.sm100.launch_control import DECLINED, await_cluster, request_cluster
from fovea.plan.sm100_tiles import STREAM_ROWS, STREAMS


class _Views(NamedTuple):
    """TMA partitions of one query tile: (smem, gmem) of Q, K and V.

    Global memory of K counts (KV tile, part), that of V (columns, parts of KV tiles one after the
    other). In a pair of CTAs K counts half tiles, and each CTA has half of V's columns.
    Of a paged cache there are operands instead.
    """

    tQsQ: cute.Tensor | None
    tQgQ: cute.Tensor | None
    tKsK: cute.Tensor | None
    tKgK: cute.Tensor | None
    tVsV: cute.Tensor | None
    tVgV: cute.Tensor | None
    paged_k: PagedOperand | None
    paged_v: PagedOperand | None


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
            _load_tile(plan, problem, tma, shared, walk, item, kv_use)
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


@cute.jit
def _load_tile(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    walk: Walk,
    item: cutlass.Int32,
    kv_use: cutlass.Int32,
):
    """Load one query tile and the KV tiles it visits, part by part, in the order of the products.

    K runs ahead of V by as many tiles as are multiplied with Q before the first product with V.
    """
    views = _views(plan, problem, tma, shared, walk)
    ahead = STREAMS if plan.splits_keys else 1
    for index in cutlass.range(walk.visits + ahead, unroll=1):
        if index == 0:
            _load_q(plan, tma, shared, views, item, 0)
        if index < walk.visits:
            n_idx = kv_tile(walk, index, problem.block_lists, plan)
            for part in cutlass.range_constexpr(plan.k_parts):
                use = (kv_use + index) * plan.k_parts + part
                _load_k(plan, tma, shared, views, n_idx, use, part)
        if cutlass.const_expr(not plan.splits_keys):
            if index == 0:
                _load_q(plan, tma, shared, views, item, 1)
        if index >= ahead:
            n_idx = kv_tile(walk, index - ahead, problem.block_lists, plan)
            for part in cutlass.range_constexpr(plan.v_parts):
                use = (kv_use + index - ahead) * plan.v_parts + part
                _load_v(plan, tma, shared, views, n_idx * plan.v_parts + part, use)


@cute.jit
def _load_q(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    views: _Views,
    item: cutlass.Int32,
    stream: cutlass.Constexpr,
):
    """Load Q of one stream, or of both; packed rows come from `queries.py`."""
    if cutlass.const_expr(not plan.packs_heads):
        use = item if plan.splits_keys else STREAMS * item + stream
        gmem = views.tQgQ[None, rows_of(plan, shared.rank, stream)]
        _fill(plan.q_edge, shared.q, shared.rank, tma.atom_q, gmem, views.tQsQ, use)


@cute.jit
def _load_k(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    views: _Views,
    n_idx: cutlass.Int32,
    use: cutlass.Int32,
    part: cutlass.Constexpr,
):
    """Load some columns of a K tile."""
    if cutlass.const_expr(plan.page_box > 0):
        wait_empty(shared.k, use, plan.k_edge)
        fill_from_pages(k_boxes(plan), views.paged_k, use, n_idx, part)
    else:
        half = n_idx if plan.cluster == 1 else n_idx * plan.cluster + shared.rank.own
        gmem = views.tKgK[None, half, part]
        _fill(plan.k_edge, shared.k, shared.rank, tma.atom_k, gmem, views.tKsK, use)


@cute.jit
def _load_v(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    views: _Views,
    nth_part: cutlass.Int32,
    use: cutlass.Int32,
):
    """Load some keys of V; parts count from the first key on."""
    if cutlass.const_expr(plan.page_box > 0):
        wait_empty(shared.v, use, plan.v_edge)
        fill_from_pages(v_boxes(plan), views.paged_v, use, nth_part)
    else:
        columns = cutlass.Int32(0) if plan.cluster == 1 else shared.rank.own
        gmem = views.tVgV[None, columns, nth_part]
        _fill(plan.v_edge, shared.v, shared.rank, tma.atom_v, gmem, views.tVsV, use)


@cute.jit
def _fill(
    edge: cutlass.Constexpr,
    ring: Ring,
    rank: Rank | None,
    atom: cute.CopyAtom,
    gmem: cute.Tensor,
    smem: cute.Tensor,
    use: cutlass.Int32,
):
    """Load one box into the stage of its use, once that is empty.

    In a pair the first CTA's barrier counts what comes to both: it issues the products.
    """
    stage = stage_of(use, edge)
    wait_empty(ring, use, edge)
    full = ring.full + stage
    if cutlass.const_expr(rank is None):
        with cute.arch.elect_one():
            expect_bytes(ring, use, edge)
        cute.copy(atom, gmem, smem[None, stage], tma_bar_ptr=full)
    else:
        if rank.is_first:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * edge.stage_bytes)
        cute.copy(atom, gmem, smem[None, stage], tma_bar_ptr=full)


@cute.jit
def _views(
    plan: cutlass.Constexpr, problem: Problem, tma: TmaLoads, shared: SharedTiles, walk: Walk
) -> _Views:
    """Return the TMA partitions of a query tile; KV heads are shared by groups of query heads.

    Where heads are packed, the walk's head is that of K and V.
    """
    kv_head = walk.head
    tQsQ, tQgQ = None, None
    if cutlass.const_expr(not plan.packs_heads):
        kv_head = walk.head // problem.group_size
        mQ = _rows_of_head(plan, tma.mQ, walk, walk.head, is_q=True)
        gQ = cute.local_tile(mQ, (STREAM_ROWS, plan.head_dim), (None, 0))
        gQ = cute.domain_offset((0, 0, walk.m_idx * (plan.tile_m // STREAM_ROWS)), gQ)
        tQsQ, tQgQ = _partition(tma.atom_q, shared.sQ, gQ)
    if cutlass.const_expr(plan.page_box > 0):
        operands = paged_operands(plan, problem.pages, tma, shared, walk, kv_head)
        return _Views(tQsQ, tQgQ, None, None, None, None, *operands)
    gK = cute.local_tile(
        _rows_of_head(plan, tma.mK, walk, kv_head),
        (plan.k_rows, plan.head_dim // plan.k_parts),
        (None, None),
    )
    gV = cute.local_tile(
        _rows_of_head(plan, tma.mV, walk, kv_head, is_transposed=True),
        (plan.v_columns, plan.tile_n // plan.v_parts),
        (None, None),
    )
    tKsK, tKgK = _partition(tma.atom_k, shared.sK, gK)
    tVsV, tVgV = _partition(tma.atom_v, shared.sV, gV)
    return _Views(tQsQ, tQgQ, tKsK, tKgK, tVsV, tVgV, None, None)


def _rows_of_head(
    plan,
    tensor: cute.Tensor,
    walk: Walk,
    head: cutlass.Int32,
    *,
    is_q: bool = False,
    is_transposed: bool = False,
) -> cute.Tensor:
    """Return the rows of a head, or of a packed sequence in it, cut off behind the last."""
    if not plan.features.varlen:
        return tensor[None, None, head, walk.batch]
    its = walk.sequence
    begin, length = (its.row_begin, its.seqlen_q) if is_q else (its.kv_begin, its.seqlen_kv)
    return bounded(tensor, head, begin, length, is_transposed=is_transposed)


def _partition(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return (smem, gmem) views with the box in mode 0 and the stage or tile in mode 1."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )
