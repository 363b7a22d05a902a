"""The way out of a query tile: final scaling, lse, and O through shared memory and TMA.

Lives here: what the compute role does after its last KV tile. Not here: the main loop
(`compute.py`), the test for a redo (`redo.py`). Invariant: a row that saw no key is written as
exact zeros with lse -inf (or the sink), whatever its registers held.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.masking import Band
from fovea.kernels.device.score import Scalars
from fovea.kernels.device.sequences import bounded
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    add_lanes,
    close_row,
    columns_per_thread,
    register_idx,
    row_in_warpgroup,
    scale_row,
)
from fovea.kernels.device.values import select, warp_in_warpgroup
from fovea.kernels.portable.tensors import Outputs
from fovea.kernels.sm90.forward.arguments import SharedTiles
from fovea.kernels.sm90.forward.redo import judge
from fovea.plan.roles import WARP_SIZE, WARPGROUP_THREADS, WARPS_PER_WARPGROUP
from fovea.plan.sm90_tiles import WARPGROUP_ROWS

_ROWS_PER_WARP = WARPGROUP_ROWS // WARPS_PER_WARPGROUP
_STORE_BARRIER = 8  # named barriers 8.., one per consumer; 1.. are the turnstile


class Finish(NamedTuple):
    """Which tile is finished, by whom."""

    walk: Walk
    first_row: cutlass.Int32  # of this warpgroup
    thread: cutlass.Int32  # in this warpgroup
    consumer: cutlass.Int32
    is_redo: cutlass.Int32
    split: cutlass.Int32  # which part of the keys in packed plans, else which slice of V
    slot: cutlass.Int32  # of the announcement, and of its row flags
    q_stage: cutlass.Int32  # of this warpgroup's Q, where O is staged


@cute.jit
def run(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    scalars: Scalars,
    shared: SharedTiles,
    products,
    state,
    band: Band,
    finish: Finish,
):
    """Write the results of one query tile; of a redo, only the rows that asked for it.

    Run by every consumer warpgroup, each for its 64 rows. Signals: q_empty, once O has left shared
    memory. Owns: its slice of sO (which is its slice of sQ).
    """
    if cutlass.const_expr(plan.is_optimistic):
        if finish.is_redo == 0:
            judge(plan, shared, scalars, products.acc_o, state, band, finish)
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        is_idle = None
        if cutlass.const_expr(plan.features.varlen):
            # A tile may hold rows of its segment that are not used.
            is_idle = finish.first_row + row_in_warpgroup(finish.thread, row) >= band.seqlen_q
        head = finish.walk.head
        normalise_row(plan, outputs, scalars, products.acc_o, state, head, row, is_idle)
    if cutlass.const_expr(plan.is_optimistic):
        if finish.is_redo == 0:
            _write_tile(plan, outputs, shared, products, state, finish)
        else:
            _write_rows(plan, outputs, shared, products, state, finish)
    else:
        _write_tile(plan, outputs, shared, products, state, finish)


@cute.jit
def normalise_row(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    scalars: Scalars,
    acc_o: cute.Tensor,
    state,
    head: cutlass.Int32,
    row: cutlass.Constexpr,
    is_idle: cutlass.Boolean | None = None,
):
    """Divide a row of O by its sum; leave its lse in `row_sum` and its natural maximum.

    An idle row, which belongs to no query, has neither keys nor a sink.
    """
    features = plan.features
    sink = None
    if cutlass.const_expr(features.sink):
        sink = outputs.mSink[head].to(cutlass.Float32)
    row_sum = add_lanes(state.row_sum[row])
    if cutlass.const_expr(is_idle is not None):
        row_sum = select(is_idle, cutlass.Float32(0.0), row_sum)
    closed = close_row(state.reference[row], row_sum, sink)
    scale_row(acc_o, row, closed.inverse)
    if cute.arch.vote_any_sync(closed.is_dead):
        # A row without keys is written as zero, not multiplied by it.
        for column in cutlass.range_constexpr(columns_per_thread(acc_o)):
            idx = register_idx(row, column)
            acc_o[idx] = select(closed.is_dead, cutlass.Float32(0.0), acc_o[idx])
    nothing = cutlass.Float32(-cutlass.Float32.inf)
    state.row_sum[row] = closed.lse if is_idle is None else select(is_idle, nothing, closed.lse)
    if cutlass.const_expr(features.max_score and not features.modifies_score):
        state.row_max[row] = state.row_max[row] * scalars.scale
    if cutlass.const_expr(features.max_score and is_idle is not None):
        state.row_max[row] = select(is_idle, nothing, state.row_max[row])


@cute.jit
def _write_tile(
    plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, products, state, finish: Finish
):
    """Write every row: lse directly, O through shared memory and the copy engine."""
    _stage_output(plan, shared, products, finish)
    _store_output(plan, outputs, shared, finish)
    # After the fence of the store, which would wait for them.
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        _write_row_numbers(plan, outputs, state, finish, row)


@cute.jit
def _write_row_numbers(
    plan: cutlass.Constexpr, outputs: Outputs, state, finish: Finish, row: cutlass.Constexpr
):
    """Write lse and maximum of one row; one of the four lanes that share it does.

    Every slice of V has the same numbers, bit for bit; the first writes them.
    """
    q_idx = finish.first_row + row_in_warpgroup(finish.thread, row)
    walk = finish.walk
    if cutlass.const_expr(plan.features.varlen):
        num_rows = walk.sequence.num_rows
        place = (walk.head, walk.sequence.row_begin + q_idx)
    else:
        num_rows = outputs.mLSE.shape[2]
        place = (walk.batch, walk.head, q_idx)
    if cutlass.const_expr(plan.v_slices > 1):
        num_rows = select(finish.split == 0, num_rows, cutlass.Int32(0))
    if finish.thread % 4 == 0 and q_idx < num_rows:
        outputs.mLSE[place] = state.row_sum[row]
        if cutlass.const_expr(plan.features.max_score):
            outputs.mMaxScore[place] = state.row_max[row]


@cute.jit
def _write_rows(
    plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, products, state, finish: Finish
):
    """Write the flagged rows of a redo, a warp a row, from shared memory to global memory.

    The first attempt's store of this tile must be complete, or it could land on top of these rows.
    """
    _stage_output(plan, shared, products, finish)
    warp_in_group = warp_in_warpgroup()
    if warp_in_group == 0:
        cute.arch.cp_async_bulk_wait_group(0)
    warpgroup_barrier(finish.consumer)
    flags = (finish.is_redo - 1) * plan.tile_m + finish.consumer * WARPGROUP_ROWS
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        if shared.work.flags[flags + row_in_warpgroup(finish.thread, row)] != 0:
            _write_row_numbers(plan, outputs, state, finish, row)
    first_column = _slice(plan, finish) * plan.head_dim_v
    columns = cutlass.min(outputs.mO_rows.shape[-1] - first_column, plan.head_dim_v)
    for in_warp in cutlass.range(_ROWS_PER_WARP, unroll=1):
        in_group = warp_in_group * _ROWS_PER_WARP + in_warp
        if shared.work.flags[flags + in_group] != 0:
            gO = _row_of(plan, outputs, finish.walk, finish.first_row + in_group)
            for column in cutlass.range(cute.arch.lane_idx(), columns, WARP_SIZE, unroll=1):
                gO[first_column + column] = shared.sO[in_group, column, finish.q_stage]
    # The stage's next Q comes through the async proxy.
    cute.arch.fence_view_async_shared()
    free_unused(plan, shared, finish.consumer, finish.q_stage)


def _slice(plan, finish: Finish) -> cutlass.Int32 | int:
    """Return which slice of V a tile is of."""
    return 0 if plan.v_slices == 1 else finish.split


def _row_of(plan, outputs: Outputs, walk: Walk, q_idx: cutlass.Int32) -> cute.Tensor:
    """Return one row of O in global memory."""
    if plan.features.varlen:
        return outputs.mO_rows[walk.sequence.row_begin + q_idx, walk.head, None]
    return outputs.mO_rows[walk.batch, q_idx, walk.head, None]


@cute.jit
def free_unused(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    consumer: cutlass.Int32,
    q_stage: cutlass.Int32,
):
    """Free a Q stage that stages no output. Signals: q_empty."""
    # Every warp must be done reading it.
    warpgroup_barrier(consumer)
    warp_in_group = warp_in_warpgroup()
    if warp_in_group == 0:
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(shared.q.empty + q_stage)


@cute.jit
def _stage_output(plan: cutlass.Constexpr, shared: SharedTiles, products, finish: Finish):
    """Round O and store it to shared memory, four 8x8 matrices an instruction."""
    # Another warp of the warpgroup may still be reading Q rows that this warp would overwrite.
    warpgroup_barrier(finish.consumer)
    dtype = element_type(plan)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    copy = cute.make_tiled_copy_C(atom, products.output).get_slice(finish.thread)
    rounded = cute.make_rmem_tensor(products.acc_o.layout, dtype)
    rounded.store(products.acc_o.load().to(dtype))
    target = copy.partition_D(shared.sO[None, None, finish.q_stage])
    cute.copy(atom, copy.retile(rounded), target)


@cute.jit
def _store_output(plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, finish: Finish):
    """Send the staged O to global memory; rows past the end are cut off by the copy engine."""
    # The copy engine reads through the async proxy what stmatrix wrote through the generic one.
    cute.arch.fence_view_async_shared()
    warpgroup_barrier(finish.consumer)
    walk = finish.walk
    warp_in_group = warp_in_warpgroup()
    if warp_in_group == 0:
        if cutlass.const_expr(plan.features.varlen):
            its = walk.sequence
            mO = bounded(outputs.mO, walk.head, its.row_begin, its.num_rows)
        else:
            mO = outputs.mO[None, None, walk.head, walk.batch]
        gO = cute.local_tile(
            mO,
            (WARPGROUP_ROWS, plan.head_dim_v),
            (walk.m_idx * plan.num_consumers + finish.consumer, _slice(plan, finish)),
        )
        tOsO, tOgO = cpasync.tma_partition(
            outputs.atom_o,
            0,
            cute.make_layout(1),
            cute.group_modes(shared.sO[None, None, finish.q_stage], 0, 2),
            cute.group_modes(gO, 0, 2),
        )
        cute.copy(outputs.atom_o, tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()
    if cutlass.const_expr(not plan.frees_q_late):
        _free(shared, finish.q_stage)


def staged_after(plan, finish: Finish) -> cutlass.Int32:
    """Return the stage that `free_staged` has to free later, or -1.

    With more memory for Q nobody waits for this one yet, and the copy engine needs a while to read
    it: asking later costs nothing. A redo has staged nothing and freed its stage itself.
    """
    none = cutlass.Int32(-1)
    if not plan.frees_q_late:
        return none
    return select(finish.is_redo == 0, finish.q_stage, none)


@cute.jit
def free_staged(plan: cutlass.Constexpr, shared: SharedTiles, staged: cutlass.Int32):
    """Free the stage of the output before, once it has left shared memory. Signals: q_empty."""
    if cutlass.const_expr(plan.frees_q_late):
        if staged >= 0:
            _free(shared, staged)


@cute.jit
def _free(shared: SharedTiles, stage: cutlass.Int32):
    """Wait until the copy engine has read a stage, then hand it back. The storing warp acts."""
    warp_in_group = warp_in_warpgroup()
    if warp_in_group == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(shared.q.empty + stage)


def warpgroup_barrier(consumer: cutlass.Int32) -> None:
    """Wait for the other warps of this warpgroup."""
    cute.arch.barrier(barrier_id=_STORE_BARRIER + consumer, number_of_threads=WARPGROUP_THREADS)
