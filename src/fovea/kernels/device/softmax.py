"""Online softmax on register fragments: maximum, exponential, row sums and rescaling.

Lives here: the arithmetic of one KV tile on the rows that one thread holds. Not here: what makes a
score (`masking.py`, `mods.py`), when the accumulator is rescaled (a role's decision). The same
formulas in plain torch are in `reference/numerics.py`. Invariant: P, the row sum and O of a row
always refer to the same reference value.

A wgmma accumulator of m64nN gives each thread two rows, `row` and `row + 8`, and of each row the
columns `8 j + 2 (lane % 4) + {0, 1}`; register `4 j + 2 r + c` holds row half r, column parity c.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.ptx import bits_of, float_of
from fovea.kernels.device.values import select
from fovea.plan.numerics import HALF_HUGE_REFERENCE, HUGE_REFERENCE, LN_2, LOG2_E
from fovea.plan.roles import WARP_SIZE

ROWS_PER_THREAD = 2
_SIGN_AND_EXPONENT = -(2**23)  # bits of a float32


def register_idx(row: int, column: int) -> int:
    """Return the accumulator register of the column-th value of a row of this thread."""
    return 4 * (column // 2) + 2 * row + column % 2


def column_of_register(column: int) -> int:
    """Return the tile column of a thread's column-th value, less 2 * (lane % 4)."""
    return 8 * (column // 2) + column % 2


def columns_per_thread(acc: cute.Tensor) -> int:
    """Return how many values of each row a thread holds."""
    return cute.size(acc) // ROWS_PER_THREAD


def row_maximum(acc: cute.Tensor, row: int, start: cutlass.Float32) -> cutlass.Float32:
    """Return the maximum of `start` and a row, over the four lanes that share the row; NaN if any.

    Four chains, since one chain of dependent maxima would wait for each result.
    """
    chains = [start]
    for column in range(columns_per_thread(acc)):
        value = acc[register_idx(row, column)]
        if len(chains) < 4:
            chains.append(value)
        else:
            chains[column % 4] = larger(chains[column % 4], value)
    result = chains[0]
    for chain in chains[1:]:
        result = larger(result, chain)
    return largest_of_lanes(result)


def largest_of_lanes(value: cutlass.Float32) -> cutlass.Float32:
    """Return the maximum over the four lanes that share a row, NaN if one is."""
    value = larger(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return larger(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def larger(a: cutlass.Float32, b: cutlass.Float32) -> cutlass.Float32:
    """Return the larger number, NaN if one is."""
    return cute.arch.fmax(a, b, nan=True)


def finite_reference(maximum: cutlass.Float32) -> cutlass.Float32:
    """Return the exponent's reference of a row: its maximum, or 0 while it has seen no key.

    -inf - -inf would be NaN; with 0 every masked score still becomes exp2(-inf) = 0.
    """
    return select(maximum == -cutlass.Float32.inf, cutlass.Float32(0.0), maximum)


def huge_reference(plan) -> float:
    """Return from where on, in log2 units, a reference's rounding is more than exponents bear."""
    return HUGE_REFERENCE if plan.dtype == "bfloat16" else HALF_HUGE_REFERENCE


def exact_exponents(
    plan, maximum: cutlass.Float32, scale_log2: cutlass.Float32, reference_log2: cutlass.Float32
) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Return the scale and the reference that a row's exponents are made with, of 0 at its maximum.

    Of a huge reference the scale is cut to a power of two, with which products are exact: scores
    that differ are still so far apart that the smaller one vanishes.
    """
    is_huge = cute.math.absf(reference_log2) >= huge_reference(plan)
    kept = select(is_huge, cutlass.Int32(_SIGN_AND_EXPONENT), cutlass.Int32(-1))
    scale = float_of(bits_of(scale_log2) & kept)
    return scale, maximum * scale


def exponentiate_row(
    acc: cute.Tensor,
    row: int,
    scale_log2: cutlass.Float32,
    reference_log2: cutlass.Float32,
    slope_log2: cutlass.Float32 | None = None,
) -> cutlass.Float32:
    """Replace a row's scores by exp2(score * scale_log2 - reference_log2); return their sum.

    With a slope, slope_log2 * column_of_register is added to the exponent.
    """
    start = -reference_log2
    for column in range(columns_per_thread(acc)):
        idx = register_idx(row, column)
        offset = start
        if slope_log2 is not None:
            offset = slope_log2 * cutlass.Float32(float(column_of_register(column))) + start
        acc[idx] = cute.math.fma(acc[idx], scale_log2, offset)
    return powers_of_row(acc, row)


def powers_of_row(acc: cute.Tensor, row: int) -> cutlass.Float32:
    """Replace a row's exponents by powers of two; return their sum.

    The sum covers this thread's columns only; lanes are added up once, at the end.
    """
    sums = []
    for column in range(columns_per_thread(acc)):
        idx = register_idx(row, column)
        p = cute.math.exp2(acc[idx], fastmath=True)
        acc[idx] = p
        if len(sums) < 2:
            sums.append(p)
        else:
            sums[column % 2] = sums[column % 2] + p
    return sums[0] + sums[1]


def scale_row(acc: cute.Tensor, row: int, factor: cutlass.Float32) -> None:
    """Multiply a row of an accumulator."""
    for column in range(columns_per_thread(acc)):
        idx = register_idx(row, column)
        acc[idx] = acc[idx] * factor


def row_in_warpgroup(thread: cutlass.Int32, row: int) -> cutlass.Int32:
    """Return which of a warpgroup's 64 rows a thread's row is."""
    return 16 * (thread // WARP_SIZE) + thread % WARP_SIZE // 4 + 8 * row


def add_lanes(value: cutlass.Float32) -> cutlass.Float32:
    """Return the sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


class Closed(NamedTuple):
    """What a row's sums come to."""

    inverse: cutlass.Float32  # what its output is multiplied by; 0 for a row without keys
    lse: cutlass.Float32
    is_dead: cutlass.Boolean


def close_row(
    reference: cutlass.Float32, row_sum: cutlass.Float32, sink: cutlass.Float32 | None
) -> Closed:
    """Return what a row's reference (log2 units) and sum over all keys come to.

    The largest term of a row with keys is 1, so that only rows without keys sum to 0.
    """
    is_dead = row_sum == 0.0
    factor = cutlass.Float32(1.0)
    if sink is not None:
        # The sink joins the reference, or 2^(sink - reference) could overflow.
        sink_log2 = sink * LOG2_E
        joined = select(is_dead, sink_log2, cute.arch.fmax(reference, sink_log2))
        joined = finite_reference(joined)  # a sink of -inf in a row without keys
        factor = cute.math.exp2(reference - joined, fastmath=True)
        row_sum = row_sum * factor + cute.math.exp2(sink_log2 - joined, fastmath=True)
        reference = joined
    # A true division would call a subroutine and spill the accumulator around it.
    inverse = select(is_dead, cutlass.Float32(0.0), factor * cute.arch.rcp_approx(row_sum))
    lse = (reference + cute.math.log2(row_sum, fastmath=True)) * LN_2
    if sink is None:
        lse = select(is_dead, cutlass.Float32(-cutlass.Float32.inf), lse)
    return Closed(inverse, lse, is_dead)
