"""Packed rows on their way in and out: few queries, whose heads of a group share a tile.

Lives here: the load of Q and the end of a tile in plans that pack heads. The copy engine takes no
box of (query, head) pairs unless the group divides it, so the warpgroup moves its rows itself; the
K and V of the tile are on their way meanwhile. Not here: which row is what (`device/packing.py`),
the merge of parts (`portable/combine.py`). Invariant: a launch with one part writes the results,
one with several leaves every part's sums, those of parts that saw nothing too.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.packing import Row, packed_row
from fovea.kernels.device.score import Scalars
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    add_lanes,
    column_of_register,
    columns_per_thread,
    register_idx,
    row_in_warpgroup,
)
from fovea.kernels.device.values import select
from fovea.kernels.portable.combine import Partials
from fovea.kernels.portable.tensors import Outputs
from fovea.kernels.sm90.forward.arguments import Packing, SharedTiles
from fovea.kernels.sm90.forward.epilogue import Finish, normalise_row, warpgroup_barrier
from fovea.plan.combine import IDLE_SUM, REFERENCE, ROW_MAX, ROW_SUM
from fovea.plan.roles import WARPGROUP_THREADS
from fovea.plan.sm90_tiles import WARPGROUP_ROWS

_COLUMNS = 8  # of one 16-byte load; head dimensions are multiples of it


@cute.jit
def load_queries(
    plan: cutlass.Constexpr,
    packing: Packing,
    shared: SharedTiles,
    walk: Walk,
    first_row: cutlass.Int32,
    thread: cutlass.Int32,
):
    """Fill sQ with the rows of a tile, zeros for idle ones, past the queries and past head_dim.

    Run by the consumer warpgroup. Owns: sQ, between the last product of the tile before and the
    first of this one.
    """
    dtype = element_type(plan)
    chunks = plan.head_dim // _COLUMNS
    rows_at_once = WARPGROUP_THREADS // chunks
    chunk = thread % chunks
    zero = cutlass.Float32(0.0).to(dtype)
    # Every load is issued before the first store waits for one.
    rQ = cute.make_rmem_tensor((_COLUMNS, WARPGROUP_ROWS // rows_at_once), dtype)
    for step in cutlass.range_constexpr(WARPGROUP_ROWS // rows_at_once):
        in_tile = step * rows_at_once + thread // chunks
        row = packed_row(first_row + in_tile, walk.head, packing.group_size)
        rQ[None, step].fill(zero)
        is_used = row.q_idx < _num_used(plan, packing, walk)
        if is_used & (chunk * _COLUMNS < packing.mQ.shape[-1]):
            mRow = _row_of(plan, packing.mQ, walk, row)
            cute.autovec_copy(cute.local_tile(mRow, (_COLUMNS,), (chunk,)), rQ[None, step])
    # Other warps may still be reading the rows of the tile before.
    warpgroup_barrier(cutlass.Int32(0))
    sChunks = cute.flat_divide(shared.sQ[None, None, 0], (1, _COLUMNS))
    for step in cutlass.range_constexpr(WARPGROUP_ROWS // rows_at_once):
        in_tile = step * rows_at_once + thread // chunks
        cute.autovec_copy(rQ[None, step], sChunks[0, None, in_tile, chunk])
    # The product reads through the async proxy what was written through the generic one.
    cute.arch.fence_view_async_shared()
    warpgroup_barrier(cutlass.Int32(0))


@cute.jit
def finish_tile(
    plan: cutlass.Constexpr,
    packing: Packing,
    outputs: Outputs,
    scalars: Scalars,
    products,
    state,
    finish: Finish,
):
    """Write the results of one tile, or of one part of its keys.

    Run by the consumer warpgroup, each thread for its registers.
    """
    if packing.partials.num_splits == 1:
        _write_results(plan, packing, outputs, scalars, products.acc_o, state, finish)
    else:
        _write_part(plan, packing, scalars, products.acc_o, state, finish)


def _num_used(plan, packing: Packing, walk: Walk) -> cutlass.Int32:
    """Return how many queries a walk's sequence has."""
    return walk.sequence.seqlen_q if plan.features.varlen else packing.mQ.shape[1]


def _num_written(plan, packing: Packing, walk: Walk) -> cutlass.Int32:
    """Return how many rows are written of a walk's sequence: its queries, then idle ones."""
    return walk.sequence.num_rows if plan.features.varlen else packing.mQ.shape[1]


def _row_of(plan, tensor: cute.Tensor, walk: Walk, row: Row) -> cute.Tensor:
    """Return one row of Q or O in global memory."""
    if plan.features.varlen:
        return tensor[walk.sequence.row_begin + row.q_idx, row.head, None]
    return tensor[walk.batch, row.q_idx, row.head, None]


def _numbers_place(plan, walk: Walk, row: Row) -> tuple:
    """Return where lse and maximum of a row go."""
    if plan.features.varlen:
        return (row.head, walk.sequence.row_begin + row.q_idx)
    return (walk.batch, row.head, row.q_idx)


def _part_place(plan, finish: Finish, row: Row) -> tuple:
    """Return where a part of a row goes: all packed sequences are one batch entry."""
    place = _numbers_place(plan, finish.walk, row)
    return (finish.split, *((0, *place) if plan.features.varlen else place))


def _place_of(packing: Packing, finish: Finish, row: int) -> Row:
    """Return what a row of this thread is about."""
    in_tile = finish.first_row + row_in_warpgroup(finish.thread, row)
    return packed_row(in_tile, finish.walk.head, packing.group_size)


@cute.jit
def _write_results(
    plan: cutlass.Constexpr,
    packing: Packing,
    outputs: Outputs,
    scalars: Scalars,
    acc_o: cute.Tensor,
    state,
    finish: Finish,
):
    """Write O, lse and maximum of rows that have seen all of their keys."""
    walk = finish.walk
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        place = _place_of(packing, finish, row)
        is_row = place.q_idx < _num_written(plan, packing, walk)
        is_idle = None
        if cutlass.const_expr(plan.features.varlen):
            is_idle = place.q_idx >= walk.sequence.seqlen_q
        # Rows past the end read some head's sink and write nothing.
        normalise_row(plan, outputs, scalars, acc_o, state, place.head, row, is_idle)
        if is_row:
            mRow = _row_of(plan, outputs.mO_rows, walk, place)
            _write_row(acc_o, row, finish.thread, mRow, element_type(plan))
            if finish.thread % 4 == 0:
                numbers = _numbers_place(plan, walk, place)
                outputs.mLSE[numbers] = state.row_sum[row]
                if cutlass.const_expr(plan.features.max_score):
                    outputs.mMaxScore[numbers] = state.row_max[row]


@cute.jit
def _write_part(
    plan: cutlass.Constexpr,
    packing: Packing,
    scalars: Scalars,
    acc_o: cute.Tensor,
    state,
    finish: Finish,
):
    """Leave the sums of one part of the keys, with what they refer to, for the merge."""
    partials: Partials = packing.partials
    walk = finish.walk
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        place = _place_of(packing, finish, row)
        row_sum = add_lanes(state.row_sum[row])
        top = state.row_max[row]
        if cutlass.const_expr(plan.features.varlen):
            is_idle = place.q_idx >= walk.sequence.seqlen_q
            row_sum = select(is_idle, cutlass.Float32(IDLE_SUM), row_sum)
            top = select(is_idle, cutlass.Float32(-cutlass.Float32.inf), top)
        if place.q_idx < _num_written(plan, packing, walk):
            where = _part_place(plan, finish, place)
            _write_row(acc_o, row, finish.thread, partials.mOut[*where, None], cutlass.Float32)
            if finish.thread % 4 == 0:
                partials.mRows[REFERENCE, *where] = state.reference[row]
                partials.mRows[ROW_SUM, *where] = row_sum
                if cutlass.const_expr(plan.features.max_score):
                    if cutlass.const_expr(not plan.features.modifies_score):
                        top = top * scalars.scale
                    partials.mRows[ROW_MAX, *where] = top


@cute.jit
def _write_row(
    acc_o: cute.Tensor,
    row: cutlass.Constexpr,
    thread: cutlass.Int32,
    mRow: cute.Tensor,
    dtype: cutlass.Constexpr,
):
    """Write this thread's registers of a row, two columns at a time."""
    # In units of pairs: registers hold columns 8 j + 2 lane and the one beside.
    pairs = columns_per_thread(acc_o) // 2
    rounded = cute.make_rmem_tensor((2, pairs), dtype)
    is_column = cute.make_rmem_tensor((1, pairs), cutlass.Boolean)
    for pair in cutlass.range_constexpr(pairs):
        for side in cutlass.range_constexpr(2):
            rounded[side, pair] = acc_o[register_idx(row, 2 * pair + side)].to(dtype)
        is_column[pair] = column_of_register(2 * pair) + 2 * (thread % 4) < mRow.shape[0]
    word = cutlass.Uint32 if dtype.width == 16 else cutlass.Uint64
    first = cute.recast_ptr(mRow.iterator, dtype=word) + thread % 4
    mPairs = cute.make_tensor(first, cute.make_layout((1, pairs), stride=(1, 4)))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), word, num_bits_per_copy=word.width)
    cute.copy(atom, cute.recast_tensor(rounded, word), mPairs, pred=is_column)
