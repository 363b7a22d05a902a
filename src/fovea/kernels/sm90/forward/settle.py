"""The reference of a float16 row: raised when a tile's sums say that P might not fit.

Lives here: what float16 plans do between a tile's softmax and the rounding of its P. Not here: the
softmax (`rows.py`), the judgement at the end (`redo.py`). Invariant: after it no P is beyond
float16, and P, row_sum and O of a row refer to its `reference`.

FlashAttention-4 rescales only where a row's maximum has risen far (arXiv 2603.05451). Here there is
no maximum at all: P is still float32 when it is summed, no P is greater than the sum, and so a sum
of some thousands is reason enough to scale it down with O. A row without a key so far has no
reference of its own; it gets one from the first sum that is not 0.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.ptx import bits_of
from fovea.kernels.device.softmax import ROWS_PER_THREAD, largest_of_lanes, scale_row
from fovea.kernels.device.values import select
from fovea.kernels.sm90.forward.products import Products
from fovea.kernels.sm90.forward.rows import RowState
from fovea.plan.numerics import HALF_SUM_LIMIT, OPTIMISTIC_SUM_LEAST, OPTIMISTIC_SUM_LIMIT

_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23


@cute.jit
def settle(products: Products, state: RowState, scale_log2: cutlass.Float32):
    """Fit the rows of a warp into float16, and add the tile's sums. No product is in flight."""
    fits = cutlass.Boolean(True)
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        # A comparison with NaN is false.
        fits = fits & (state.tile_sum[row] < HALF_SUM_LIMIT) & ~_is_unset(state, row)
    if not cute.arch.vote_all_sync(fits):
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            _move(products, state, row, scale_log2)
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        state.row_sum[row] = state.row_sum[row] + state.tile_sum[row]


def _is_unset(state: RowState, row: int) -> cutlass.Boolean:
    """Return whether a row has no reference of its own."""
    return state.row_max[row] == -cutlass.Float32.inf


def _move(products: Products, state: RowState, row: int, scale_log2: cutlass.Float32) -> None:
    """Give a row the reference that its sums ask for, if they do.

    Its maximum becomes what that is a reference of, for a tile that may take it up.
    """
    peak = largest_of_lanes(state.tile_sum[row])
    is_unset = _is_unset(state, row)
    has_keys = peak != 0.0
    is_far = ~(peak < HALF_SUM_LIMIT) | (is_unset & has_keys)
    rise = (bits_of(peak) >> _MANTISSA_BITS) - _EXPONENT_BIAS
    old = state.reference[row]
    new = old + select(is_far, rise, cutlass.Int32(0)).to(cutlass.Float32)
    # What the sum of both was rounded by is in their difference.
    factor = cute.math.exp2(old - new, fastmath=True)
    scale_row(products.acc_s, row, factor)
    scale_row(products.acc_o, row, factor)
    # Beside so small a sum others have vanished, and so large a one would: its factor is no normal
    # number. Infinity is what `redo.py` knows a row by.
    is_lost = is_unset & has_keys & (peak < OPTIMISTIC_SUM_LEAST)
    is_lost = is_lost | ~(peak < OPTIMISTIC_SUM_LIMIT)
    tile_sum = state.tile_sum[row] * factor
    state.tile_sum[row] = select(is_lost, cutlass.Float32.inf, tile_sum)
    state.row_sum[row] = state.row_sum[row] * factor
    state.reference[row] = new
    state.row_max[row] = select(is_far, new * cute.arch.rcp_approx(scale_log2), state.row_max[row])
