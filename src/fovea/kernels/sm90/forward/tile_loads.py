"""The loads of one query tile through the copy engine: Q once, then K and V of every KV tile.

Lives here: the TMA views of a query tile, and the order of its loads. Not here: which tile comes
next (`load.py`), the barriers' arithmetic (`device/pipeline.py`). In a cluster each CTA loads half
of a shared K or V tile into the shared memory of both. Invariant: K of a tile is loaded before V of
the one before it, so that K in its stage says that the V stages before have come as well.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.cluster import Rank, pass_over
from fovea.kernels.device.kv_walk import Walk, kv_tile, partial_block, uses_of, visit_word
from fovea.kernels.device.pages import PagedOperand, fill_from_pages
from fovea.kernels.device.pipeline import Ring, expect_bytes, stage_of, wait_empty
from fovea.kernels.device.sequences import bounded
from fovea.kernels.device.shared_walk import Takers, Union, takers
from fovea.kernels.portable.tensors import TmaLoads
from fovea.kernels.sm90.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm90.forward.page_loads import k_boxes, paged_operands, v_boxes


class Part(NamedTuple):
    """What of a cluster's work a CTA has: its rank, and the union that its walk is part of."""

    rank: Rank
    union: Union


class _Operand(NamedTuple):
    """K or V on its way into a ring: TMA partitions (smem, gmem) of what this CTA loads.

    In a cluster that is half a tile; `beside` is the half that the other CTA loads for both.
    """

    atom: cute.CopyAtom
    ring: Ring
    smem: cute.Tensor
    gmem: cute.Tensor
    smem_beside: cute.Tensor | None
    gmem_beside: cute.Tensor | None


class _Fill(NamedTuple):
    """One use of the rings: the KV tile in it, and in a cluster who takes it."""

    use: cutlass.Int32
    n_idx: cutlass.Int32
    takers: Takers | None


class LastLoad(NamedTuple):
    """What `load_tile` leaves to `finish_tile`: V of the last visit."""

    v: _Operand | PagedOperand
    part: Part | None
    fill: _Fill


@cute.jit
def load_tile(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    part: Part | None,
    walk: Walk,
    q_use: cutlass.Int32,
    kv_use: cutlass.Int32,
):
    """Load one query tile and the KV tiles it visits, all but the last V, which is returned.

    Packed rows are loaded by who reads them.
    """
    early, late = _order_of_q(plan)
    if cutlass.const_expr(early):
        _load_q(plan, problem, tma, shared, walk, q_use, early)
    k, v = _kv_operands(plan, problem, tma, shared, part, walk)
    fill = _nth_fill(plan, problem, part, walk, kv_use, cutlass.Int32(0))
    _load_k(plan, problem, shared, k, part, walk, cutlass.Int32(0), fill)
    uses = uses_of(plan, walk)
    for visit in cutlass.range(1, uses, unroll=1):
        following = _nth_fill(plan, problem, part, walk, kv_use, visit)
        _load_k(plan, problem, shared, k, part, walk, visit, following)
        _load_v(plan, v, part, fill)
        fill = following
        if cutlass.const_expr(late):
            if visit == 1:
                _load_q(plan, problem, tma, shared, walk, q_use, late)
    if cutlass.const_expr(late):
        if uses == 1:
            _load_q(plan, problem, tma, shared, walk, q_use, late)
    return LastLoad(v, part, fill)


@cute.jit
def finish_tile(plan: cutlass.Constexpr, last: LastLoad):
    """Load V of a query tile's last visit."""
    _load_v(plan, last.v, last.part, last.fill)


def _nth_fill(
    plan,
    problem: Problem,
    part: Part | None,
    walk: Walk,
    first_use: cutlass.Int32,
    nth: cutlass.Int32,
) -> _Fill:
    """Return the n-th use of the rings for a walk."""
    if plan.cluster == 1:
        return _Fill(first_use + nth, kv_tile(walk, nth, problem.block_lists, plan), None)
    n_idx = part.union.end - 1 - nth
    return _Fill(first_use + nth, n_idx, takers(walk, part.union, n_idx))


def _order_of_q(plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the consumers whose Q comes before the first K, and those that come behind the second.

    With a spare buffer the first has been free for a while; the next frees one late, and meanwhile
    the rings fill.
    """
    consumers = tuple(range(0 if plan.packs_heads else plan.num_consumers))
    return (consumers[:1], consumers[1:]) if plan.spare_q else (consumers, ())


@cute.jit
def _load_q(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    walk: Walk,
    q_use: cutlass.Int32,
    consumers: cutlass.Constexpr,
):
    """Load Q of some consumers; each waits only for the one that had the memory before."""
    if cutlass.const_expr(plan.features.varlen):
        its = walk.sequence
        mQ = bounded(tma.mQ, walk.head, its.row_begin, its.seqlen_q)
    else:
        mQ = tma.mQ[None, None, walk.head, walk.batch]
    gQ = cute.local_tile(
        mQ,
        (plan.tile_m // plan.num_consumers, plan.head_dim),
        (None, 0),
    )
    gQ = cute.domain_offset((0, 0, walk.m_idx * plan.num_consumers), gQ)
    tQsQ, tQgQ = _partition(tma.atom_q, shared.sQ, gQ, 0, 1)
    for consumer in consumers:
        use = q_use + consumer
        wait_empty(shared.q, use, plan.q_edge)
        with cute.arch.elect_one():
            expect_bytes(shared.q, use, plan.q_edge)
        cute.copy(
            tma.atom_q,
            tQgQ[None, consumer],
            tQsQ[None, stage_of(use, plan.q_edge)],
            tma_bar_ptr=shared.q.full + stage_of(use, plan.q_edge),
        )


@cute.jit
def _kv_operands(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    part: Part | None,
    walk: Walk,
) -> Any:
    """Return K and V of a query tile; KV heads are shared by groups of query heads."""
    kv_head = walk.head
    if cutlass.const_expr(not plan.packs_heads):
        kv_head = walk.head // problem.group_size
    if cutlass.const_expr(plan.page_box > 0):
        return paged_operands(plan, problem.pages, tma, shared, walk, kv_head)
    if cutlass.const_expr(plan.features.varlen):
        its = walk.sequence
        mK = bounded(tma.mK, kv_head, its.kv_begin, its.seqlen_kv)
        mV = bounded(tma.mV, kv_head, its.kv_begin, its.seqlen_kv, is_transposed=True)
    else:
        mK = tma.mK[None, None, kv_head, walk.batch]
        mV = tma.mV[None, None, kv_head, walk.batch]
    gK = cute.local_tile(mK, (plan.tile_n, plan.head_dim), (None, 0))
    gV = cute.local_tile(mV, (plan.head_dim_v, plan.tile_n), (0, None))
    k = _operand(plan, tma.atom_k, shared.k, shared.sK, gK, part)
    v = _operand(plan, tma.atom_v, shared.v, shared.sV, gV, part)
    return k, v


def _operand(
    plan,
    atom: cute.CopyAtom,
    ring: Ring,
    smem: cute.Tensor,
    gmem: cute.Tensor,
    part: Part | None,
) -> _Operand:
    if plan.cluster == 1:
        return _Operand(atom, ring, *_partition(atom, smem, gmem, 0, 1), None, None)
    own = _partition(atom, smem, gmem, part.rank.own, plan.cluster)
    beside = _partition(atom, smem, gmem, part.rank.other, plan.cluster)
    return _Operand(atom, ring, *own, *beside)


def _partition(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor, part: cutlass.Int32 | int, parts: int
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return (smem, gmem) views with the box in mode 0 and the stage or tile in mode 1."""
    return cpasync.tma_partition(
        atom,
        part,
        cute.make_layout(parts),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )


@cute.jit
def _load_k(
    plan: cutlass.Constexpr,
    problem: Problem,
    shared: SharedTiles,
    k: _Operand,
    part: Part | None,
    walk: Walk,
    visit: cutlass.Int32,
    fill: _Fill,
):
    """Load the K tile of a visit into its stage, and say which one it is.

    The arrival that announces the bytes also releases that word to the consumers.
    """
    edge = plan.k_edge
    wait_empty(k.ring, fill.use, edge)
    partial = cutlass.Int32(0)
    if cutlass.const_expr(plan.features.block_bits):
        partial = partial_block(walk, visit, problem.block_lists)
    if cutlass.const_expr(plan.features.block_lists):
        with cute.arch.elect_one():
            stage = stage_of(fill.use, edge)
            shared.visits[stage] = visit_word(walk, visit, fill.n_idx)
            if cutlass.const_expr(plan.features.block_bits):
                shared.partials[stage] = partial
    _fill(plan, edge, k, part, fill)


@cute.jit
def _load_v(plan: cutlass.Constexpr, v: _Operand, part: Part | None, fill: _Fill):
    """Load one V tile into the stage of its use."""
    wait_empty(v.ring, fill.use, plan.v_edge)
    _fill(plan, plan.v_edge, v, part, fill)


@cute.jit
def _fill(
    plan: cutlass.Constexpr,
    edge: cutlass.Constexpr,
    operand: _Operand | PagedOperand,
    part: Part | None,
    fill: _Fill,
):
    """Fill the stage of a use, which is free in every CTA that shares it."""
    if cutlass.const_expr(plan.page_box > 0):
        boxes = v_boxes(plan) if edge.name == "v" else k_boxes(plan)
        fill_from_pages(boxes, operand, fill.use, fill.n_idx)
    else:
        _fill_from_tile(plan, edge, operand, part, fill)


@cute.jit
def _fill_from_tile(
    plan: cutlass.Constexpr,
    edge: cutlass.Constexpr,
    operand: _Operand,
    part: Part | None,
    fill: _Fill,
):
    """Fill a stage with a tile that lies in one piece, or in a cluster with both halves of one."""
    ring = operand.ring
    stage = stage_of(fill.use, edge)
    barrier = ring.full + stage
    source, target = operand.gmem[None, fill.n_idx], operand.smem[None, stage]
    if cutlass.const_expr(plan.cluster == 1):
        with cute.arch.elect_one():
            expect_bytes(ring, fill.use, edge)
        cute.copy(operand.atom, source, target, tma_bar_ptr=barrier)
    elif fill.takers.own:
        with cute.arch.elect_one():
            expect_bytes(ring, fill.use, edge)
        if fill.takers.other:
            everyone = cutlass.Int16(2**plan.cluster - 1)
            cute.copy(operand.atom, source, target, tma_bar_ptr=barrier, mcast_mask=everyone)
        else:
            this = cutlass.Int16(1) << part.rank.own.to(cutlass.Int16)
            cute.copy(operand.atom, source, target, tma_bar_ptr=barrier, mcast_mask=this)
            cute.copy(
                operand.atom,
                operand.gmem_beside[None, fill.n_idx],
                operand.smem_beside[None, stage],
                tma_bar_ptr=barrier,
                mcast_mask=this,
            )
    else:
        pass_over(ring, fill.use, edge)
