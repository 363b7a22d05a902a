"""What a thread keeps of its rows, and the softmax of one KV tile on it.

Lives here: `RowState`, the step that moves a row's reference and the one that does not. Not here:
the arithmetic of a fragment (`device/softmax.py`), what a score is (`device/score.py`), the
judgement at the end (`redo.py`). Invariant: P, row_sum and O of a row refer to its `reference`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.mod_affine import Affine
from fovea.kernels.device.score import Scalars, exponent_scale
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    exact_exponents,
    exponentiate_row,
    finite_reference,
    powers_of_row,
    row_maximum,
)
from fovea.kernels.device.values import select
from fovea.plan.numerics import LOG2_E


class RowState(NamedTuple):
    """What the online softmax keeps per row of a thread, in registers (mutable fragments)."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    reference: cute.Tensor  # log2 units
    peak: cute.Tensor | None  # bits of the largest square of q.k below a small soft cap
    tile_sum: cute.Tensor | None  # of the tile alone, where `settle.py` adds it


def make_state(plan) -> RowState:
    """Return registers for the rows of a thread."""

    def numbers(dtype: type[cutlass.Numeric] = cutlass.Float32) -> cute.Tensor:
        return cute.make_rmem_tensor(ROWS_PER_THREAD, dtype)

    peak = numbers(cutlass.Int32) if plan.caps_by_polynomial else None
    tile_sum = numbers() if plan.settles_sums else None
    return RowState(numbers(), numbers(), numbers(), peak, tile_sum)


@cute.jit
def begin(state: RowState):
    """Forget every row."""
    state.row_max.fill(-cutlass.Float32.inf)
    state.row_sum.fill(0.0)
    state.reference.fill(0.0)
    if cutlass.const_expr(state.peak is not None):
        state.peak.fill(0)


@cute.jit
def default_reference(state: RowState, is_redo: cutlass.Int32):
    """Let rows that saw nothing in the first tile refer to 0; `redo.py` judges what comes of it."""
    zero = cutlass.Float32(0.0)
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        lacks_maximum = (state.row_max[row] == -cutlass.Float32.inf) & (is_redo == 0)
        state.row_max[row] = select(lacks_maximum, zero, state.row_max[row])


def online_softmax(
    plan, acc_s: cute.Tensor, state: RowState, scalars: Scalars
) -> list[cutlass.Float32]:
    """Turn S into P in place with the running maximum; return the factors O must be scaled by."""
    scale_log2 = exponent_scale(plan, scalars)
    one = cutlass.Float32(1.0)
    factors = []
    for row in range(ROWS_PER_THREAD):
        is_new = state.row_max[row] == -cutlass.Float32.inf
        row_max = row_maximum(acc_s, row, state.row_max[row])
        maximum = finite_reference(row_max)
        reference = maximum * scale_log2
        power = cute.math.exp2(state.reference[row] - reference, fastmath=True)
        factor = select(is_new, one, power)
        exponents = exact_exponents(plan, maximum, scale_log2, reference)
        row_sum = exponentiate_row(acc_s, row, *exponents)
        row_sum = state.row_sum[row] * factor + row_sum
        state.row_max[row] = row_max
        state.reference[row] = reference
        state.row_sum[row] = row_sum
        factors.append(factor)
    return factors


def plain_softmax(
    plan, acc_s: cute.Tensor, state: RowState, scalars: Scalars, addends: list[Affine] | None
) -> None:
    """Turn S into P in place with the reference that each row already has.

    With `addends`, S holds q.k alone and a row's scores are scale * S plus its addend; below a
    small soft cap it holds exponents.
    """
    if plan.caps_by_polynomial:
        for row in range(ROWS_PER_THREAD):
            _keep_sum(state, row, powers_of_row(acc_s, row))
        return
    scale_log2 = exponent_scale(plan, scalars) if addends is None else scalars.scale_log2
    for row in range(ROWS_PER_THREAD):
        reference, slope = state.reference[row], None
        if addends is not None:
            reference = reference - addends[row].base * LOG2_E
            slope = addends[row].step * LOG2_E
        _keep_sum(state, row, exponentiate_row(acc_s, row, scale_log2, reference, slope))


def _keep_sum(state: RowState, row: int, tile_sum: cutlass.Float32) -> None:
    """Add a tile's sum to the row's, or leave it for `settle.py` to look at."""
    if state.tile_sum is None:
        state.row_sum[row] = state.row_sum[row] + tile_sum
    else:
        state.tile_sum[row] = tile_sum
