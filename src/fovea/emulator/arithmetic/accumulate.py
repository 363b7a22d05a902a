"""How matrix units accumulate: D = A B + C for one instruction.

What lives here: the fast mode (a float32 product) and the exact mode (the fused dot product of
NVIDIA's tensor cores, bit for bit as published). Not here: formats (formats.py), operands (isa/).

Exact mode. All products of one output element and C are aligned to the largest exponent among them,
each is truncated toward zero to a fixed number of fraction bits, the integers are summed exactly,
and the sum is rounded once: toward zero to f32, or to nearest-even to f16. An exponent of a product
is the sum of its factors' exponents, not normalised; a subnormal has its format's smallest
exponent, zero has -126. Hopper's fp8 units keep 13 fraction bits in alignment and in the f32
result; every other unit here keeps 25.

Invariant: fast and exact agree within float32 rounding of the dot product; integers are exact in
both.

Source: Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
arXiv 2511.10909. Evidence: published measurement; comparison with silicon is in tests/gpu when
recorded.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.arithmetic.formats import FORMATS

_ZERO_EXPONENT = -126
_CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)
_CANONICAL_NAN_F16 = np.uint16(0x7FFF)
_FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The accumulation of one kind of unit.

    Attributes:
        alignment_bits: fraction bits kept when products are aligned.
        result: "f32", "f16" or "f32_13" (f32 with 13 fraction bits).
    """

    alignment_bits: int
    result: str


def accumulation(generation: str, a_format: str, result: str) -> Accumulation:
    """Return how the unit of `generation` ("hopper" or "blackwell") accumulates.

    Args:
        generation: "hopper" for wgmma and sm_90 mma, "blackwell" for tcgen05.
        a_format: format of A.
        result: type of C and D, "f32" or "f16".
    """
    if generation not in ("hopper", "blackwell"):
        raise ValueError(f"generation={generation!r} is not 'hopper' or 'blackwell'")
    if generation == "hopper" and a_format in _FP8:
        return Accumulation(13, "f32_13" if result == "f32" else "f16")
    return Accumulation(25, result)


def multiply_fast(
    a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[Any] | None
) -> NDArray[Any]:
    """Return A B + C, the product and the sum in float32, in C's type (float32 without C).

    Shapes:
        a: [M, K]. b: [K, N]. c: [M, N], float32 or float16.
    """
    with np.errstate(all="ignore"):
        product = np.matmul(a, b)
        if c is None:
            return product
        if c.dtype == np.float16:
            return (product + c.astype(np.float32)).astype(np.float16)
        product += c
        return product


def multiply_integer(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[np.int32] | None, *, saturates: bool
) -> NDArray[np.int32]:
    """Return A B + C in 32-bit integers, wrapping or saturating at the end."""
    # Products of 8-bit integers over K <= 32 stay below 2^21, so float32 matmul is exact and fast.
    total = np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(np.int64)
    if c is not None:
        total += c
    if saturates:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)


def multiply_exact(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[Any] | None,
    *,
    a_format: str,
    b_format: str,
    how: Accumulation,
) -> NDArray[Any]:
    """Return A B + C bit for bit as the tensor core computes it.

    Shapes:
        a: [M, K]. b: [K, N]. c: [M, N] in the result's type; None is zero.
    """
    result_type = np.float16 if how.result == "f16" else np.float32
    if c is None:
        c = np.zeros((a.shape[0], b.shape[1]), result_type)
    c_format = "f16" if c.dtype == np.float16 else "f32"
    mantissa_a, exponent_a = _split(a, a_format)
    mantissa_b, exponent_b = _split(b, b_format)
    mantissa_c, exponent_c = _split(c, c_format)
    product_bits = FORMATS[a_format].fraction_bits + FORMATS[b_format].fraction_bits
    top = exponent_c.copy()
    for k in range(a.shape[1]):
        np.maximum(top, exponent_a[:, k, None] + exponent_b[None, k, :], out=top)
    total = _truncated(
        mantissa_c, how.alignment_bits - FORMATS[c_format].fraction_bits + exponent_c - top
    )
    for k in range(a.shape[1]):
        shift = exponent_a[:, k, None] + exponent_b[None, k, :] - top
        shift += how.alignment_bits - product_bits
        total += _truncated(mantissa_a[:, k, None] * mantissa_b[None, k, :], shift)
    value = np.ldexp(total.astype(np.float64), top - how.alignment_bits)
    result = value.astype(np.float16) if how.result == "f16" else _toward_zero(value)
    if how.result == "f32_13":
        result = (result.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32)
    return _with_specials(result, a, b, c)


def _split(x: NDArray[Any], name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return integer mantissas (in units of 2^-fraction_bits) and exponents."""
    form = FORMATS[name]
    finite = np.where(np.isfinite(x), x, 0).astype(np.float64)
    _fraction, exponent = np.frexp(finite)
    exponent = np.maximum(exponent.astype(np.int64) - 1, form.min_exponent)
    mantissa = np.ldexp(finite, form.fraction_bits - exponent).astype(np.int64)
    return mantissa, np.where(mantissa == 0, _ZERO_EXPONENT, exponent)


def _truncated(mantissa: NDArray[np.int64], shift: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return mantissa * 2^shift, truncated toward zero."""
    magnitude = np.abs(mantissa)
    left = np.clip(shift, 0, 62)
    right = np.clip(-shift, 0, 62)
    return np.sign(mantissa) * (magnitude << left >> right)


def _toward_zero(value: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        nearest = value.astype(np.float32)
    is_above = np.abs(nearest.astype(np.float64)) > np.abs(value)
    is_above &= np.abs(value) < 2.0**128
    return np.where(is_above, np.nextafter(nearest, np.float32(0)), nearest)


def _with_specials(
    result: NDArray[Any], a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[Any]
) -> NDArray[Any]:
    """Return the result with infinities and NaNs where an operand makes them."""
    if np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all():
        return result
    with np.errstate(all="ignore"):
        # In float64 nothing overflows, so a non-finite sum means a non-finite operand.
        total = np.matmul(a.astype(np.float64), b.astype(np.float64)) + c.astype(np.float64)
    result = np.where(np.isinf(total), total.astype(result.dtype), result)
    if result.dtype == np.float16:
        nan = np.array(_CANONICAL_NAN_F16).view(np.float16)
    else:
        nan = np.array(_CANONICAL_NAN_F32).view(np.float32)
    return np.where(np.isnan(total), nan, result)
