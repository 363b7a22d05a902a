"""The way out of a query tile: final scaling, lse, and O through shared memory and TMA.

Lives here: what the compute role does after its last KV tile. Not here: the main loop
(`compute.py`). Invariant: a row that saw no key is written as exact zeros with lse -inf (or the
sink), whatever its registers held.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cutlass_dsl import select_

from fovea.kernels.device.scheduler import Tile
from fovea.kernels.device.score import Scalars, exponent_scale
from fovea.kernels.device.softmax import (
    LN_2,
    LOG2_E,
    ROWS_PER_THREAD,
    add_lanes,
    columns_per_thread,
    finite_reference,
    register_idx,
)
from fovea.kernels.sm90.forward.arguments import Outputs, SharedTiles
from fovea.kernels.sm90.wgmma import element_type
from fovea.plan.roles import WARP_SIZE, WARPGROUP_THREADS
from fovea.plan.sm90 import WARPGROUP_ROWS

_STORE_BARRIER = 4  # named barriers 4..6, one per consumer; 1..3 are the turnstile


@cute.jit
def run(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    scalars: Scalars,
    shared: SharedTiles,
    products,
    state,
    tile: Tile,
):
    """Write the results of one query tile.

    Run by every consumer warpgroup, each for its 64 rows. Signals: q_empty, once O has left shared
    memory. Owns: its slice of sO (which is its slice of sQ).
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    consumer = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP_THREADS) - 1
    first_row = tile.m_idx * plan.tile_m + consumer * WARPGROUP_ROWS
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        _finish_row(plan, outputs, scalars, products.acc_o, state, tile, first_row, thread, row)
    _stage_output(plan, shared, products, thread, consumer)
    _store_output(plan, outputs, shared, tile, consumer)


@cute.jit
def _finish_row(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    scalars: Scalars,
    acc_o: cute.Tensor,
    state,
    tile: Tile,
    first_row: cutlass.Int32,
    thread: cutlass.Int32,
    row: cutlass.Constexpr,
):
    """Divide a row of O by its sum and write its lse and maximum."""
    features = plan.features
    lane = thread % WARP_SIZE
    q_idx = first_row + 16 * (thread // WARP_SIZE) + lane // 4 + 8 * row
    scale_log2 = exponent_scale(plan, scalars)
    row_max = state.row_max[row]
    is_dead = row_max == -cutlass.Float32.inf
    reference = finite_reference(row_max) * scale_log2
    row_sum = add_lanes(state.row_sum[row])
    factor = cutlass.Float32(1.0)
    if cutlass.const_expr(features.sink):
        # The sink joins the reference, or 2^(sink - reference) could overflow.
        sink_log2 = outputs.mSink[tile.head].to(cutlass.Float32) * LOG2_E
        joined = select_(is_dead, sink_log2, cute.arch.fmax(reference, sink_log2))
        factor = cute.math.exp2(reference - joined, fastmath=True)
        row_sum = row_sum * factor + cute.math.exp2(sink_log2 - joined, fastmath=True)
        reference = joined
    # A true division would call a subroutine and spill the accumulator around it.
    inverse = factor * cute.arch.rcp_approx(row_sum)
    for column in cutlass.range_constexpr(columns_per_thread(acc_o)):
        idx = register_idx(row, column)
        # A row without keys is written as zero, not multiplied by it.
        acc_o[idx] = select_(is_dead, cutlass.Float32(0.0), acc_o[idx] * inverse)
    lse = (reference + cute.math.log2(row_sum, fastmath=True)) * LN_2
    if cutlass.const_expr(not features.sink):
        lse = select_(is_dead, cutlass.Float32(-cutlass.Float32.inf), lse)
    if lane % 4 == 0 and q_idx < outputs.mLSE.shape[2]:
        outputs.mLSE[tile.batch, tile.head, q_idx] = lse
        if cutlass.const_expr(features.max_score):
            natural = row_max if features.modifies_score else row_max * scalars.scale
            outputs.mMaxScore[tile.batch, tile.head, q_idx] = natural


@cute.jit
def _stage_output(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    products,
    thread: cutlass.Int32,
    consumer: cutlass.Int32,
):
    """Round O and store it to shared memory, four 8x8 matrices an instruction."""
    # Another warp of the warpgroup may still be reading Q rows that this warp would overwrite.
    _warpgroup_barrier(consumer)
    dtype = element_type(plan)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    copy = cute.make_tiled_copy_C(atom, products.output).get_slice(thread)
    rounded = cute.make_rmem_tensor(products.acc_o.layout, dtype)
    rounded.store(products.acc_o.load().to(dtype))
    target = copy.partition_D(shared.sO[None, None, consumer])
    cute.copy(atom, copy.retile(rounded), target)


@cute.jit
def _store_output(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    shared: SharedTiles,
    tile: Tile,
    consumer: cutlass.Int32,
):
    """Send the staged O to global memory; rows past the end are cut off by the copy engine."""
    # The copy engine reads through the async proxy what stmatrix wrote through the generic one.
    cute.arch.fence_view_async_shared()
    _warpgroup_barrier(consumer)
    warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    if warp_in_group == 0:
        gO = cute.local_tile(
            outputs.mO[None, None, tile.head, tile.batch],
            (WARPGROUP_ROWS, plan.head_dim_v),
            (tile.m_idx * plan.num_consumers + consumer, 0),
        )
        tOsO, tOgO = cpasync.tma_partition(
            outputs.atom_o,
            0,
            cute.make_layout(1),
            cute.group_modes(shared.sO[None, None, consumer], 0, 2),
            cute.group_modes(gO, 0, 2),
        )
        cute.copy(outputs.atom_o, tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(shared.q.empty + consumer)


def _warpgroup_barrier(consumer: cutlass.Int32) -> None:
    cute.arch.barrier(
        barrier_id=_STORE_BARRIER + consumer, number_of_threads=WARPGROUP_THREADS
    )
