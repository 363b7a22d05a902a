"""The loads of one query tile through the copy engine: Q, and K and V of every KV tile.

Lives here: the TMA views of a query tile, and the order of its loads. Not here: which tile comes
next (`load.py`), how pages are cut into boxes (`page_loads.py`), packed rows of Q (`queries.py`).
Invariant: stages are filled in the order in which the products use them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.cluster import Rank
from fovea.kernels.device.kv_walk import Walk, kv_tile
from fovea.kernels.device.pages import PagedOperand, fill_from_pages
from fovea.kernels.device.pipeline import Ring, expect_bytes, stage_of, wait_empty
from fovea.kernels.device.sequences import bounded
from fovea.kernels.portable.tensors import TmaLoads
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm100.forward.page_loads import k_boxes, paged_operands, v_boxes
from fovea.kernels.sm100.forward.streams import rows_of
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
def load_tile(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    walk: Walk,
    item: cutlass.Int32,
    kv_use: cutlass.Int32,
):
    """Load one query tile and the KV tiles it visits, part by part, in the order of the products.

    K runs ahead of V by as many tiles as are multiplied with Q before the first product with V; in
    a ring of both, V of a tile lies before K of the next, which is multiplied after it.
    """
    views = _views(plan, problem, tma, shared, walk)
    ahead = STREAMS if plan.splits_keys else 1 - plan.shares_ring
    for index in cutlass.range(walk.visits + ahead, unroll=1):
        if index == 0:
            _load_q(plan, tma, shared, views, item, 0)
        if index < walk.visits:
            n_idx = kv_tile(walk, index, problem.block_lists, plan)
            for part in cutlass.range_constexpr(plan.k_parts):
                use = plan.k_use(kv_use + index, part)
                _load_k(plan, tma, shared, views, n_idx, use, part)
        if cutlass.const_expr(not plan.splits_keys):
            if index == 0:
                _load_q(plan, tma, shared, views, item, 1)
        if index >= ahead:
            n_idx = kv_tile(walk, index - ahead, problem.block_lists, plan)
            for part in cutlass.range_constexpr(plan.v_parts):
                use = plan.v_use(kv_use + index - ahead, part)
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
