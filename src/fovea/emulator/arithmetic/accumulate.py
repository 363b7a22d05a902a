"""How matrix units accumulate: D = A B + C for one instruction.

What lives here: a plain float32 product, and the fused dot product of NVIDIA's tensor cores, bit
for bit as published. Not here: formats (formats.py), operands and who uses which (isa/).

Exact mode. All products of one output element and C are aligned to the largest exponent among them,
each is truncated toward zero to a fixed number of fraction bits, the integers are summed exactly,
and the sum is rounded once: toward zero to f32, or to nearest-even to f16. An exponent of a product
is the sum of its factors' exponents, not normalised; a subnormal has its format's smallest
exponent, zero has -126. Hopper's fp8 units keep 13 fraction bits in alignment and in the f32
result; every other unit here keeps 25.

The same sum has two implementations: `multiply_aligned` in float32 and 32-bit integers, for terms
from 2^-100 to 2^127, and `multiply_exact`, which takes the former where it can and 64-bit integers
elsewhere, at five times the cost.

Invariant: all agree within float32 rounding of the dot product; the two of the fused sum agree in
every bit; integers are exact.

Source: Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
arXiv 2511.10909. Evidence: published measurement; comparison with silicon is in tests/gpu when
recorded.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.arithmetic.formats import FORMATS

_ZERO_EXPONENT = -126
_LOWEST = -100  # of the largest exponent of an element: below it float32 would lose kept bits
_BLOCK = 1 << 16  # terms summed at a time: they stay in the second cache
_ADDENDS = 16  # of less than 2^27 each: their sum fits 32 bits
_CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)
_CANONICAL_NAN_F16 = np.uint16(0x7FFF)
_FP8 = ("e4m3", "e5m2")
_rooms = threading.local()  # of each thread that emulates: blocks of every shape it has met

Array = NDArray[Any]


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
    result = multiply_aligned(a, b, c, a_format=a_format, b_format=b_format, how=how)
    if result is not None:
        return result
    if c is None:
        c = np.zeros((a.shape[0], b.shape[1]), np.float16 if how.result == "f16" else np.float32)
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
    if how.result == "f16":
        return _with_specials(value.astype(np.float16), a, b, c)
    rounded = _toward_zero(value)
    if how.result == "f32_13":
        rounded = _with_13_bits(rounded)
    return _with_specials(rounded, a, b, c)


def multiply_aligned(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[Any] | None,
    *,
    a_format: str,
    b_format: str,
    how: Accumulation,
) -> NDArray[Any] | None:
    """Return what `multiply_exact` does, or None if float32 cannot hold the terms.

    A product of two operands is exact in float32. Multiplied with 2^bits over the power of two of
    the element's largest exponent it is truncated by the conversion to an integer. What of it is
    lost to underflow lies below the last kept bit, if that exponent is at least `_LOWEST`.

    Shapes:
        a: [M, K]. b: [K, N]. c: [M, N] in the result's type; None is zero.
    """
    b = np.ascontiguousarray(b)  # often the transpose of what was read: rows are faster below
    exponent_a, exponent_b = _exponents(a, a_format), _exponents(b, b_format)
    if exponent_a.max() > 127 or exponent_b.max() > 127:  # an infinity or a NaN
        return None
    if int(exponent_a.max()) + int(exponent_b.max()) >= 126:
        return None
    rows, columns = a.shape[0], b.shape[1]
    if c is None:
        top = np.full((rows, columns), _ZERO_EXPONENT, np.int16)
    else:
        top = _exponents(c.astype(np.float32), "f16" if c.dtype == np.float16 else "f32")
        if top.max() > 127:
            return None
    step = min(rows, max(1, _BLOCK // (a.shape[1] * columns)))
    exponents, terms, integers = _scratch(a.shape[1], step, columns)
    blocks = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    for block in blocks:
        part = exponents[:, : block.stop - block.start]
        np.add(exponent_a[block].T[:, :, None], exponent_b[:, None], out=part)
        np.maximum(top[block], np.maximum.reduce(part), out=top[block])
    if not _is_held(a, b, c, top):
        return None
    scale = ((np.int32(how.alignment_bits + 127) - top) << 23).view(np.float32)
    total = np.zeros((rows, columns)) if c is None else np.trunc(c * scale).astype(np.float64)
    for block in blocks:
        part = terms[:, : block.stop - block.start]
        np.einsum("mk,kn->kmn", a[block], b, out=part)
        np.multiply(part, scale[block], out=part)
        truncated = integers[:, : block.stop - block.start]
        truncated[...] = part
        for first in range(0, a.shape[1], _ADDENDS):
            total[block] += np.add.reduce(truncated[first : first + _ADDENDS])
    total /= scale
    if how.result == "f16":
        return total.astype(np.float16)
    # toward zero: what float32 has no bits for goes
    total.view(np.uint64)[...] &= np.uint64(0xFFFFFFFFE0000000)
    with np.errstate(over="ignore"):
        result = total.astype(np.float32)
    return _with_13_bits(result) if how.result == "f32_13" else result


def _scratch(k_extent: int, rows: int, columns: int) -> tuple[Array, Array, Array]:
    """Return room for the exponents, terms and integers of a block.

    It is kept: to allocate it anew took half the time of a product.
    """
    kept: dict[tuple[int, int, int], tuple[Array, Array, Array]] | None
    kept = getattr(_rooms, "kept", None)
    if kept is None:
        kept = _rooms.kept = {}
    key = k_extent, rows, columns
    if key not in kept:
        kept[key] = np.empty(key, np.int16), np.empty(key, np.float32), np.empty(key, np.int32)
    return kept[key]


def _exponents(x: NDArray[np.float32], name: str) -> NDArray[np.int16]:
    """Return the exponents of elements as the unit takes them; above 127 if not finite."""
    exponents = (x.view(np.int32) >> 23 & 255).astype(np.int16)
    exponents -= 127
    np.maximum(exponents, FORMATS[name].min_exponent, out=exponents)
    exponents[x == 0] = _ZERO_EXPONENT
    return exponents


def _is_held(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[Any] | None,
    top: NDArray[np.int16],
) -> bool:
    """Return whether every element's largest exponent is high enough; lift those of zeros."""
    low = top < _LOWEST
    if not low.any():
        return True
    count = np.matmul((a != 0).astype(np.float32), (b != 0).astype(np.float32))
    if c is not None:
        count += c != 0
    if count[low].any():
        return False
    top[low] = _LOWEST
    return True


def _with_13_bits(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return x with the fraction bits that Hopper's fp8 units keep."""
    return (x.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32)


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
