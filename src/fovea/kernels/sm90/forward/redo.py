"""The test that ends an optimistic tile: which rows must be computed again.

Lives here: the judgement of a row and the flags it leaves. Not here: how a redo is announced
(`device/work.py`), computed (`compute.py`) and written (`epilogue.py`). Invariant: a row that
passes has the result that the online form would have had, up to rounding; others are redone.

Keeping the first tile's maximum as the reference loses nothing while the row's sum stays well
inside the range of its numbers, since relative precision does not depend on the reference. A row
that saw nothing in its first tile has reference 0: its sum may be too small as well as too large.
A soft cap is that of small scores until here: a row with one beyond is redone too.
The idea and its worth: docs/notes/hopper_forward.md.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.masking import Band
from fovea.kernels.device.score import Scalars, is_beyond_small_cap
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    add_lanes,
    columns_per_thread,
    huge_reference,
    register_idx,
    row_in_warpgroup,
)
from fovea.kernels.device.values import select
from fovea.kernels.device.work import demand_redo
from fovea.kernels.sm90.forward.arguments import SharedTiles
from fovea.plan.numerics import OPTIMISTIC_SUM_LEAST, OPTIMISTIC_SUM_LIMIT
from fovea.plan.roles import WARP_SIZE, WARPS_PER_WARPGROUP
from fovea.plan.sm90_tiles import WARPGROUP_ROWS


@cute.jit
def judge(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    scalars: Scalars,
    acc_o: cute.Tensor,
    state,
    band: Band,
    finish,
):
    """Flag the rows to be redone, and ask for the redo if there is one.

    Run by every consumer warpgroup on its unnormalised output.
    """
    fails = cutlass.Boolean(False)
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        in_group = row_in_warpgroup(finish.thread, row)
        is_bad = _is_bad(plan, scalars, acc_o, state, row, finish.walk.visits > 1)
        # Rows past the end are never stored, so whatever became of them is right.
        is_bad = is_bad & (finish.first_row + in_group < band.seqlen_q)
        fails = fails | is_bad
        if finish.thread % 4 == 0:
            slot_rows = finish.slot * plan.tile_m + finish.consumer * WARPGROUP_ROWS
            shared.work.flags[slot_rows + in_group] = cutlass.Uint8(is_bad)
    if cute.arch.vote_any_sync(fails):
        if cute.arch.lane_idx() == 0:
            warp = finish.consumer * WARPS_PER_WARPGROUP + finish.thread // WARP_SIZE
            demand_redo(shared.work, finish.slot, warp, plan.work_edge)


def _is_bad(
    plan, scalars: Scalars, acc_o: cute.Tensor, state, row: int, is_long: cutlass.Boolean
) -> cutlass.Boolean:
    """Return whether a row's sums came too near overflow or underflow.

    A row without a visible key sums to 0 and is computed again too, as it might be one whose terms
    all vanished. Of a huge reference the tiles behind the first have inexact exponents. The first
    tile alone (`is_long` is false) has its own maximum and needs no doubt.
    """
    # 0 * o is NaN where o is infinite or NaN, and 0 elsewhere.
    probes = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
    for column in range(columns_per_thread(acc_o)):
        probe = probes[column % 2]
        value = acc_o[register_idx(row, column)]
        probes[column % 2] = cute.math.fma(value, cutlass.Float32(0.0), probe)
    if state.peak is not None:
        is_beyond = is_beyond_small_cap(state.peak[row], scalars)
        probes[0] = select(is_beyond, cutlass.Float32.inf, probes[0])
    row_sum = add_lanes(state.row_sum[row] + probes[0] + probes[1])
    # A comparison with NaN is false, so its negation catches NaN too.
    fits = row_sum < OPTIMISTIC_SUM_LIMIT
    vanishes = row_sum < OPTIMISTIC_SUM_LEAST
    is_huge = cute.math.absf(state.reference[row]) >= huge_reference(plan)
    return (fits ^ cutlass.Boolean(True)) | ((vanishes | is_huge) & is_long)
