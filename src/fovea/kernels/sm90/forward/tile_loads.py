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
from fovea.kernels.device.kv_walk import Walk, kv_tile, uses_of, visit_word
from fovea.kernels.device.pipeline import Ring, expect_bytes, stage_of, wait_empty
from fovea.kernels.device.shared_walk import Takers, Union, takers
from fovea.kernels.sm90.forward.arguments import Problem, SharedTiles, TmaLoads


class _Operand(NamedTuple):
    """TMA partitions of K or V: (smem, gmem), and of the half that the other CTA loads for both."""

    smem: cute.Tensor
    gmem: cute.Tensor
    smem_beside: cute.Tensor | None
    gmem_beside: cute.Tensor | None


@cute.jit
def load_tile(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    rank: Rank | None,
    walk: Walk,
    union: Union | None,
    q_use: cutlass.Int32,
    kv_use: cutlass.Int32,
):
    """Load one query tile and the KV tiles it visits."""
    _load_q(plan, problem, tma, shared, walk, q_use)
    k, v = _kv_views(plan, problem, tma, shared, rank, walk)
    n_idx, to = _next_tile(plan, problem, walk, union, cutlass.Int32(0))
    _load_k(plan, tma, shared, k, rank, walk, cutlass.Int32(0), kv_use, n_idx, to)
    for visit in cutlass.range(1, uses_of(plan, walk), unroll=1):
        next_idx, next_to = _next_tile(plan, problem, walk, union, visit)
        _load_k(plan, tma, shared, k, rank, walk, visit, kv_use, next_idx, next_to)
        _load_v(plan, tma, shared, v, rank, kv_use + visit - 1, n_idx, to)
        n_idx, to = next_idx, next_to
    _load_v(plan, tma, shared, v, rank, kv_use + uses_of(plan, walk) - 1, n_idx, to)


def _next_tile(plan, problem: Problem, walk: Walk, union: Union | None, use: cutlass.Int32) -> Any:
    """Return the KV tile of a use of the rings, and in a cluster who takes it."""
    if plan.cluster == 1:
        return kv_tile(walk, use, problem.block_lists, plan), None
    n_idx = union.end - 1 - use
    return n_idx, takers(walk, union, n_idx)


@cute.jit
def _load_q(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    walk: Walk,
    q_use: cutlass.Int32,
):
    """Load Q of every consumer; each waits only for the consumer that had the memory before."""
    gQ = cute.local_tile(
        tma.mQ[None, None, walk.head, walk.batch],
        (plan.tile_m // plan.num_consumers, plan.head_dim),
        (None, 0),
    )
    gQ = cute.domain_offset((0, 0, walk.m_idx * plan.num_consumers), gQ)
    tQsQ, tQgQ = _partition(tma.atom_q, shared.sQ, gQ, 0, 1)
    for consumer in cutlass.range_constexpr(plan.num_consumers):
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
def _kv_views(
    plan: cutlass.Constexpr,
    problem: Problem,
    tma: TmaLoads,
    shared: SharedTiles,
    rank: Rank | None,
    walk: Walk,
) -> tuple[_Operand, _Operand]:
    """Return the TMA partitions of K and V; KV heads are shared by groups of query heads."""
    kv_head = walk.head // problem.group_size
    gK = cute.local_tile(
        tma.mK[None, None, kv_head, walk.batch], (plan.tile_n, plan.head_dim), (None, 0)
    )
    gV = cute.local_tile(
        tma.mV[None, None, kv_head, walk.batch], (plan.head_dim_v, plan.tile_n), (0, None)
    )
    k = _operand(plan, tma.atom_k, shared.sK, gK, rank)
    v = _operand(plan, tma.atom_v, shared.sV, gV, rank)
    return k, v


def _operand(
    plan, atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor, rank: Rank | None
) -> _Operand:
    if plan.cluster == 1:
        return _Operand(*_partition(atom, smem, gmem, 0, 1), None, None)
    own = _partition(atom, smem, gmem, rank.own, plan.cluster)
    return _Operand(*own, *_partition(atom, smem, gmem, rank.other, plan.cluster))


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
    tma: TmaLoads,
    shared: SharedTiles,
    k: _Operand,
    rank: Rank | None,
    walk: Walk,
    visit: cutlass.Int32,
    first_use: cutlass.Int32,
    n_idx: cutlass.Int32,
    to: Takers | None,
):
    """Load the K tile of a visit into its stage, and say which one it is.

    The arrival that announces the bytes also releases that word to the consumers.
    """
    use = first_use + visit
    wait_empty(shared.k, use, plan.k_edge)
    if cutlass.const_expr(plan.features.block_lists):
        with cute.arch.elect_one():
            shared.visits[stage_of(use, plan.k_edge)] = visit_word(walk, visit, n_idx)
    _fill(plan, tma.atom_k, shared.k, plan.k_edge, k, rank, use, n_idx, to)


@cute.jit
def _load_v(
    plan: cutlass.Constexpr,
    tma: TmaLoads,
    shared: SharedTiles,
    v: _Operand,
    rank: Rank | None,
    use: cutlass.Int32,
    n_idx: cutlass.Int32,
    to: Takers | None,
):
    """Load one V tile into the stage of its use."""
    wait_empty(shared.v, use, plan.v_edge)
    _fill(plan, tma.atom_v, shared.v, plan.v_edge, v, rank, use, n_idx, to)


@cute.jit
def _fill(
    plan: cutlass.Constexpr,
    atom: cute.CopyAtom,
    ring: Ring,
    edge: cutlass.Constexpr,
    operand: _Operand,
    rank: Rank | None,
    use: cutlass.Int32,
    n_idx: cutlass.Int32,
    to: Takers | None,
):
    """Fill the stage of a use, which is free in every CTA that shares it."""
    stage = stage_of(use, edge)
    barrier = ring.full + stage
    source, target = operand.gmem[None, n_idx], operand.smem[None, stage]
    if cutlass.const_expr(plan.cluster == 1):
        with cute.arch.elect_one():
            expect_bytes(ring, use, edge)
        cute.copy(atom, source, target, tma_bar_ptr=barrier)
    elif to.own:
        with cute.arch.elect_one():
            expect_bytes(ring, use, edge)
        if to.other:
            everyone = cutlass.Int16(2**plan.cluster - 1)
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=everyone)
        else:
            this = cutlass.Int16(1) << rank.own.to(cutlass.Int16)
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=this)
            cute.copy(
                atom,
                operand.gmem_beside[None, n_idx],
                operand.smem_beside[None, stage],
                tma_bar_ptr=barrier,
                mcast_mask=this,
            )
    else:
        pass_over(ring, use, edge)
