"""The one definition of fovea's softmax arithmetic: exponentials, the reference rule, roundings.

Lives here: the formulas whose constants are in `plan/numerics.py` and whose device twins are in
`kernels/device/`. Not here: loops over tiles (`tiled_forward.py`, `tiled_backward.py`). Invariant:
P, the row sum and O of a row are always relative to the same reference, so O / row sum and lse do
not depend on which reference that was.
"""

from enum import Enum

import torch
from torch import Tensor

from fovea.plan.numerics import (
    EXP2_COEFFICIENTS,
    EXP2_HIGHEST,
    EXP2_SPAN,
    LN_2,
    LOG2_E,
    OPTIMISTIC_SUM_LEAST,
    OPTIMISTIC_SUM_LIMIT,
    RESCALE_THRESHOLD_LOG2,
)

FLOAT32_EXPONENT_BIAS = 127
FLOAT32_MANTISSA_BITS = 23


class ReferenceRule(Enum):
    """How a row's reference moves from tile to tile.

    RUNNING: to the running maximum, with `RESCALE_THRESHOLD_LOG2` of delay.
    OPTIMISTIC: to the maximum of the row's first tile, and never again. Rows that came near
        overflow or underflow are redone with RUNNING (bfloat16 kernels; those of float16 raise
        the reference before P overflows).
    """

    RUNNING = "running"
    OPTIMISTIC = "optimistic"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, row sums, accumulators and lse for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to the inputs' dtype, in the dtype it came in.

    The tensor cores take P and dS in the inputs' 16 bits. Nothing changes for fp32 and fp64.
    """
    if dtype == x.dtype or dtype.itemsize >= x.element_size():
        return x
    return x.to(dtype).to(x.dtype)


def finite_reference(maximum: Tensor) -> Tensor:
    """Return the maximum, or 0 for a row that has seen nothing, so that -inf - (-inf) never is."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def updated_reference(
    reference: Tensor, tile_maximum: Tensor, threshold_log2: float = RESCALE_THRESHOLD_LOG2
) -> Tensor:
    """Return the reference that a row's exponentials use from this tile on.

    The new maximum, or the old reference while the maximum has not risen more than the threshold
    above it. NaN scores make the reference NaN, which keeps the row NaN to the end.

    Units:
        reference and maximum: natural; -inf where nothing was seen yet.
    """
    maximum = torch.maximum(reference, tile_maximum)
    if threshold_log2 == 0.0:
        return maximum
    # inf - inf and -inf - (-inf) give NaN here and so take the maximum.
    keeps = (maximum - reference) * LOG2_E <= threshold_log2
    return torch.where(keeps, reference, maximum)


def optimistic_reference(reference: Tensor) -> Tensor:
    """Return the reference of all tiles after the first: that one's, or 0 where it showed nothing.

    Units:
        natural; -inf where nothing was seen.
    """
    return finite_reference(reference)


def fits_optimistically(row_sum: Tensor, acc: Tensor, maximum: Tensor) -> Tensor:
    """Return which rows stayed inside the range of their numbers under the optimistic reference.

    A row whose reference is one of its own scores has a term of 1; one that saw nothing in its
    first tile may sum to next to nothing. NaN does not fit: it is redone and is NaN again.

    Shapes:
        row_sum, maximum (..., 1), acc (..., head_dim_v); result (..., 1) bool.
    """
    is_finite = acc.isfinite().all(dim=-1, keepdim=True)
    vanishes = (row_sum < OPTIMISTIC_SUM_LEAST) & (maximum > -torch.inf)
    return (row_sum < OPTIMISTIC_SUM_LIMIT) & is_finite & ~vanishes


def exp_relative_(scores: Tensor, reference: Tensor) -> Tensor:
    """Return exp(scores - reference), overwriting scores; reference must not be -inf.

    The difference is taken before it is scaled to log2 units: near the reference it is exact, as
    in the kernels' fused multiply-add, so huge scores cost P no precision.

    Units:
        natural in, the exponential is taken as exp2.
    """
    return scores.sub_(reference).mul_(LOG2_E).exp2_()


def exp_relative(scores: Tensor, reference: Tensor) -> Tensor:
    """Return exp(scores - reference) as a new tensor; reference must not be -inf."""
    return torch.exp2((scores - reference) * LOG2_E)


def log_sum(reference: Tensor, row_sum: Tensor) -> Tensor:
    """Return the natural log of `row_sum` exponentials relative to `reference`."""
    return reference + torch.log2(row_sum) * LN_2


def exp2_polynomial(x: Tensor) -> Tensor:
    """Return 2**x by the kernels' polynomial, for fp32 x; below -62 the result is 0.

    x is rounded as its distance from the highest value that there is, 65, and held there and 128
    below. Floor and fraction split it, a polynomial gives 2**fraction, and the floor goes into the
    exponent field. What is above, and NaN, gives 2**65, by which the kernels know it.

    Raises:
        TypeError: x is not float32, whose bit layout this is.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"exp2_polynomial takes float32 (got {x.dtype}); use torch.exp2 instead.")
    distance = ((EXP2_HIGHEST - x.double()) / EXP2_SPAN).float().clamp(0.0, 1.0).nan_to_num(0.0)
    above_lowest = EXP2_SPAN * (1.0 - distance.double())
    whole = torch.floor(above_lowest)
    fraction = (above_lowest - whole).float()
    mantissa = torch.zeros_like(fraction)
    for coefficient in reversed(EXP2_COEFFICIENTS):
        mantissa = (mantissa + coefficient) * fraction
    mantissa = mantissa + 1.0
    power = torch.bitwise_left_shift(whole.to(torch.int32), FLOAT32_MANTISSA_BITS)
    rest = 2.0 ** (EXP2_HIGHEST - EXP2_SPAN + FLOAT32_EXPONENT_BIAS)
    return mantissa * rest * power.view(torch.float32)
