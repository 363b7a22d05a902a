"""Float formats bit by bit: widening, rounding, flushing, exact fused operations.

Lives here: pure functions on arrays that several families share. Not here: instructions.
Invariant: every function is exact for all inputs, NaN, infinities, subnormals and zeros included;
a NaN result has the canonical pattern NVIDIA units give.
Source: PTX ISA 5.2.3 and 9.7.9.21 (cvt); OCP 8-bit floating point specification 1.0 for fp8.
"""

from collections.abc import Callable

import numpy as np

from fovea.emulator.isa.instruction import Array

CANONICAL_F32 = np.uint32(0x7FFFFFFF)
DEFAULT_NAN_F64 = np.uint64(0xFFF8000000000000)
QUIET_F64 = np.uint64(0x0008000000000000)
CANONICAL_HALF = np.uint16(0x7FFF)

_SIGN_F32 = np.uint32(0x80000000)
_EXPONENT_F32 = np.uint32(0x7F800000)


def canonical_f32(value: Array) -> Array:
    """Return a copy with every NaN replaced by the canonical one."""
    bits = value.view(np.uint32).copy()
    bits[np.isnan(value)] = CANONICAL_F32
    return bits.view(np.float32)


def nan_f64(result: Array, *operands: Array) -> Array:
    """Return a float64 result with NaNs as the unit makes them.

    The first NaN among the operands is passed on, made quiet; an invalid operation gives the
    negative default NaN (both measured on sm_90).
    """
    is_nan = np.isnan(result)
    if not is_nan.any():
        return result
    bits = result.view(np.uint64).copy()
    bits[is_nan] = DEFAULT_NAN_F64
    for operand in reversed(operands):
        chosen = is_nan & np.isnan(operand)
        bits[chosen] = operand.view(np.uint64)[chosen] | QUIET_F64
    return bits.view(np.float64)


def flush_f32(value: Array) -> Array:
    """Return subnormals replaced by zeros of their sign (`.ftz`)."""
    bits = value.view(np.uint32)
    exponent = bits & _EXPONENT_F32
    if exponent.all():
        return value
    return np.where(exponent != 0, bits, bits & _SIGN_F32).view(np.float32)


def saturate(value: Array) -> Array:
    """Return values clamped to [0, 1]; NaN becomes +0 (`.sat`)."""
    clamped = np.clip(np.where(np.isnan(value), value.dtype.type(0), value), 0, 1)
    return clamped + value.dtype.type(0)  # -0 becomes +0


# --- 16-bit halves ------------------------------------------------------------------------------


def f16_to_f32(bits: Array) -> Array:
    """Return f16 bits as float32, exactly."""
    return bits.view(np.float16).astype(np.float32)


def bf16_to_f32(bits: Array) -> Array:
    """Return bf16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(value: Array, mode: str = "rn") -> Array:
    """Return float32 rounded to bf16 bits; mode rn, rz, or rna (ties away)."""
    bits = value.view(np.uint32)
    if mode == "rn":
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif mode == "rna":
        rounded = bits + np.uint32(0x8000)
    elif mode == "rz":
        rounded = bits
    else:
        rounded = _directed(value, 16, mode)
    result = (rounded >> np.uint32(16)).astype(np.uint16)
    is_nan = np.isnan(value)
    if is_nan.any():
        result = np.where(is_nan, CANONICAL_HALF, result)
    return result


def _directed(value: Array, dropped: int, mode: str) -> Array:
    """Return bits rounded up in magnitude where direction `rm`/`rp` asks for it."""
    bits = value.view(np.uint32)
    is_negative = (bits & _SIGN_F32) != 0
    away = is_negative if mode == "rm" else ~is_negative
    inexact = (bits & np.uint32((1 << dropped) - 1)) != 0
    step = np.uint32(1 << dropped)
    return np.where(away & inexact & np.isfinite(value), bits + step, bits)


def f32_to_f16(value: Array, mode: str = "rn") -> Array:
    """Return float32 rounded to f16 bits; mode rn, rz, rm, rp."""
    nearest = value.astype(np.float16)
    if mode != "rn":
        back = nearest.astype(np.float32)
        nearest = towards(nearest, np.sign(value - back), mode)
        # an infinite input stays infinite
        nearest = np.where(np.isinf(value), value.astype(np.float16), nearest)
    result = nearest.view(np.uint16)
    is_nan = np.isnan(value)
    if is_nan.any():
        result = np.where(is_nan, CANONICAL_HALF, result)
    return result


def towards(nearest: Array, remainder: Array, mode: str) -> Array:
    """Move the nearest value one step where `mode` lies the other way.

    `remainder` is the sign of (exact - nearest).
    """
    kind = nearest.dtype.type
    infinity = kind(np.inf)
    down = np.nextafter(nearest, -infinity)
    up = np.nextafter(nearest, infinity)
    if mode == "rm":
        return np.where(remainder < 0, down, nearest)
    if mode == "rp":
        return np.where(remainder > 0, up, nearest)
    shrink_positive = (remainder < 0) & (nearest > 0)
    shrink_negative = (remainder > 0) & (nearest < 0)
    return np.where(shrink_positive, down, np.where(shrink_negative, up, nearest))


half_to_f32: dict[str, Callable[[Array], Array]] = {"f16": f16_to_f32, "bf16": bf16_to_f32}
f32_to_half: dict[str, Callable[..., Array]] = {"f16": f32_to_f16, "bf16": f32_to_bf16}


# --- exact float32 operations in directed modes and fused ---------------------------------------


def round_pair(total: Array, error: Array, mode: str) -> Array:
    """Return float64 `total + error` (error below half an ulp) rounded once to float32."""
    nearest = total.astype(np.float32)
    if mode == "rn":
        low = total.view(np.uint64) & np.uint64(0x1FFFFFFF)
        tiny = np.abs(total) < 1.1754943508222875e-38
        doubtful = (error != 0) & ((low == np.uint64(0x10000000)) | tiny)
        if doubtful.any():
            return _round_doubtful(total, error, nearest, doubtful)
        return nearest
    remainder = np.sign(total - nearest.astype(np.float64))
    remainder = np.where(remainder == 0, np.sign(error), remainder)
    moved = towards(nearest, remainder, mode)
    return np.where(np.isfinite(total), moved, nearest)


def _round_doubtful(total: Array, error: Array, nearest: Array, doubtful: Array) -> Array:
    """Resolve ties that `error` breaks, also among subnormals."""
    gap = total - nearest.astype(np.float64)
    side = np.where(gap > 0, np.float32(np.inf), np.float32(-np.inf))
    other = np.nextafter(nearest, side)
    middle = (nearest.astype(np.float64) + other.astype(np.float64)) / 2
    is_tie = doubtful & (gap != 0) & (middle == total) & np.isfinite(total)
    return np.where(is_tie & (np.sign(error) == np.sign(gap)), other, nearest)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return (a + b rounded, exact error), Knuth's branch-free form."""
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    return total, np.where(np.isfinite(total), error, 0)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float32 with one rounding to nearest even."""
    product = a.astype(np.float64) * b  # exact: 48 bits
    total = product + c
    low = total.view(np.uint64) & np.uint64(0x1FFFFFFF)
    if (low == np.uint64(0x10000000)).any() or not (np.abs(total) >= 1.2e-38).all():
        return fma_f32_mode(a, b, c, "rn")
    result = total.astype(np.float32)
    check = result.dot(result)
    return canonical_f32(result) if check != check else result


def fma_f32_mode(a: Array, b: Array, c: Array, mode: str) -> Array:
    """Return a * b + c of float32 with one rounding in any mode."""
    product = a.astype(np.float64) * b
    wide = c.astype(np.float64)
    total, error = two_sum(product, wide)
    result = round_pair(total, error, mode)
    cancelled = (product == -wide) & np.isfinite(product)
    opposite = (product != 0) | (np.signbit(product) != np.signbit(wide))
    result = exact_zero_sign(result, cancelled & opposite, mode)
    return canonical_f32(result) if np.isnan(result).any() else result


def exact_zero_sign(result: Array, is_cancelled: Array, mode: str) -> Array:
    """Return -0 for exact cancellation when rounding down (IEEE 754, 6.3)."""
    if mode == "rm" and is_cancelled.any():
        return np.where(is_cancelled, np.float32(-0.0), result)
    return result


def add_f32_mode(a: Array, b: Array, mode: str) -> Array:
    """Return a + b of float32 rounded once in any mode."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total, error = two_sum(wide_a, wide_b)
    result = round_pair(total, error, mode)
    cancelled = (wide_a == -wide_b) & np.isfinite(wide_a)
    opposite = (wide_a != 0) | (np.signbit(a) != np.signbit(b))
    result = exact_zero_sign(result, cancelled & opposite, mode)
    return canonical_f32(result) if np.isnan(result).any() else result


def mul_f32_mode(a: Array, b: Array, mode: str) -> Array:
    """Return a * b of float32 rounded once in any mode."""
    product = a.astype(np.float64) * b
    result = round_pair(product, np.zeros_like(product), mode)
    return canonical_f32(result) if np.isnan(result).any() else result


# --- tf32 and fp8 -------------------------------------------------------------------------------


def f32_to_tf32(value: Array, mode: str) -> Array:
    """Return float32 bits rounded to 10 fraction bits; mode rn, rna, rz."""
    bits = value.view(np.uint32)
    if mode == "rna":
        rounded = bits + np.uint32(0x1000)
    elif mode == "rn":
        rounded = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    else:
        rounded = bits
    kept = np.uint32(0xFFFFE000)
    # measured on sm_90: .rna passes a NaN on, cut to 10 fraction bits; the others make one
    nan = bits & kept if mode == "rna" else CANONICAL_F32 & kept
    return np.where(np.isfinite(value), rounded & kept, np.where(np.isnan(value), nan, bits))


class SmallFloat:
    """A float format of at most 8 bits, by table."""

    __slots__ = ("_bits", "_positive", "has_infinity", "nan", "values")

    def __init__(self, exponent_bits: int, fraction_bits: int, bias: int, special: str):
        self._bits = 1 + exponent_bits + fraction_bits
        codes = np.arange(1 << self._bits)
        fraction = codes & ((1 << fraction_bits) - 1)
        exponent = (codes >> fraction_bits) & ((1 << exponent_bits) - 1)
        magnitude = np.where(
            exponent == 0,
            np.ldexp(fraction.astype(np.float64), 1 - bias - fraction_bits),
            np.ldexp((fraction + (1 << fraction_bits)).astype(np.float64),
                     exponent - bias - fraction_bits),
        )  # fmt: skip
        top = (1 << exponent_bits) - 1
        self.nan: int | None = None
        self.has_infinity = special == "ieee"
        if special == "ieee":
            magnitude[(exponent == top) & (fraction == 0)] = np.inf
            magnitude[(exponent == top) & (fraction != 0)] = np.nan
            self.nan = (1 << self._bits - 1) - 1
        elif special == "nan":
            magnitude[(exponent == top) & (fraction == (1 << fraction_bits) - 1)] = np.nan
            self.nan = (1 << self._bits - 1) - 1
        sign = np.where(codes >> (self._bits - 1), -1.0, 1.0)
        self.values = np.copysign(magnitude, sign).astype(np.float32)
        positive = magnitude[: 1 << (self._bits - 1)]
        self._positive = positive[np.isfinite(positive)]

    def widen(self, codes: Array) -> Array:
        """Return codes as float32, exactly."""
        return self.values[codes]

    def narrow_saturating(self, value: Array, is_relu: bool = False) -> Array:
        """Return float32 rounded to nearest even, out of range clamped to the largest finite."""
        wide = value.astype(np.float64)
        if is_relu:
            wide = np.where(wide < 0, 0.0, wide)
            wide = np.where(wide == 0, 0.0, wide)
        magnitude = np.abs(wide)
        grid = self._positive
        above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
        low, high = grid[above - 1], grid[above]
        middle = (low + high) / 2
        is_even = (above - 1) % 2 == 0
        take_low = (magnitude < middle) | ((magnitude == middle) & is_even)
        code = np.where(take_low, above - 1, above)
        code = np.where(magnitude >= grid[-1], len(grid) - 1, code)
        code = code | np.where(np.signbit(wide), 1 << (self._bits - 1), 0)
        if self.nan is not None:
            code = np.where(np.isnan(wide), self.nan, code)
        else:
            code = np.where(np.isnan(wide), len(grid) - 1, code)
        return code.astype(np.uint8)


E4M3 = SmallFloat(4, 3, 7, "nan")
E5M2 = SmallFloat(5, 2, 15, "ieee")
E2M1 = SmallFloat(2, 1, 1, "none")
E2M3 = SmallFloat(2, 3, 1, "none")
E3M2 = SmallFloat(3, 2, 3, "none")
SMALL_FLOATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2}


def nan_f64_to_f32(value: Array, result: Array) -> Array:
    """Return a narrowed float64 with the top of each NaN's payload kept."""
    is_nan = np.isnan(value)
    if not is_nan.any():
        return result
    wide = value.view(np.uint64)
    sign = (wide >> np.uint64(32)).astype(np.uint32) & _SIGN_F32
    payload = (wide >> np.uint64(29)).astype(np.uint32) & np.uint32(0x3FFFFF)
    bits = sign | np.uint32(0x7FC00000) | payload
    return np.where(is_nan, bits, result.view(np.uint32)).view(np.float32)


def nan_f32_to_f64(value: Array, result: Array) -> Array:
    """Return a widened float32 with each NaN's sign and payload kept, made quiet."""
    is_nan = np.isnan(value)
    if not is_nan.any():
        return result
    bits = value.view(np.uint32).astype(np.uint64)
    wide = (bits & np.uint64(0x80000000)) << np.uint64(32)
    wide |= np.uint64(0x7FF8000000000000) | (bits & np.uint64(0x7FFFFF)) << np.uint64(29)
    return np.where(is_nan, wide, result.view(np.uint64)).view(np.float64)


def nan_f64_to_f16(value: Array, result: Array) -> Array:
    """Return float64 narrowed to f16 bits with the top of each NaN's payload kept."""
    wide = value.view(np.uint64)
    sign = (wide >> np.uint64(48)).astype(np.uint16) & np.uint16(0x8000)
    payload = (wide >> np.uint64(42)).astype(np.uint16) & np.uint16(0x1FF)
    return np.where(np.isnan(value), sign | np.uint16(0x7E00) | payload, result)


def pack_bf16x2(high: Array, low: Array) -> Array:
    """Return two float32 rounded to nearest even and packed as bf16x2."""
    half, one, sixteen = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    a, b = high.view(np.uint32), low.view(np.uint32)
    check = high.dot(high) + low.dot(low)
    if check != check:
        return f32_to_bf16(high).astype(np.uint32) << sixteen | f32_to_bf16(low)
    a = a + half + ((a >> sixteen) & one)
    b = b + half + ((b >> sixteen) & one)
    return a & np.uint32(0xFFFF0000) | b >> sixteen
