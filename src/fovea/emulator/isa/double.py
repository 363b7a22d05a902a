"""Float arithmetic in double precision.

Lives here: f64 of add, sub, mul, fma, div, sqrt, rcp, rsqrt, abs, neg, min, max. Not here: single
precision (`floating.py`), conversions. Invariant: every rounded operation is rounded once, in any
mode, from the exact value.
Source: PTX ISA 9.7.3.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.floating import MODES, apply, mode_of
from fovea.emulator.isa.instruction import Array, Inline, Instruction


def _exact_f64(name: str, a: Array, b: Array, c: Array | None, mode: str) -> Array:
    """Return a float64 operation rounded once in any mode, lane by lane with exact fractions."""
    nearest = {"add": a + b, "mul": a * b, "fma": a * b + (c if c is not None else 0)}[name]
    result = nearest.copy()
    third = c if c is not None else np.zeros_like(a)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(third)
    for lane in np.flatnonzero(finite).tolist():
        x, y, z = Fraction(float(a[lane])), Fraction(float(b[lane])), Fraction(float(third[lane]))
        exact = x + y if name == "add" else x * y + z if name == "fma" else x * y
        if exact != 0:
            result[lane] = round_fraction(exact, mode)
        elif mode == "rm" and name != "mul" and not _is_plus_zero_sum(name, a, b, third, lane):
            result[lane] = -0.0
    if c is None:
        return fp.nan_f64(result, a, b)
    # an overflowing product must not meet an infinite addend as an infinity
    lost = np.isfinite(a) & np.isfinite(b) & np.isinf(c)
    return fp.nan_f64(np.where(lost, c, result), a, b, c)


def _is_plus_zero_sum(name: str, a: Array, b: Array, c: Array, lane: int) -> bool:
    """Return whether an exact zero sum is of two +0 terms, the only sum that stays +0 in rm."""
    first, second = (a[lane], b[lane]) if name == "add" else (a[lane] * b[lane], c[lane])
    is_exact_zero = name == "add" or a[lane] == 0 or b[lane] == 0
    terms = (first, second)
    return is_exact_zero and all(t == 0 and not np.signbit(t) for t in terms)


def round_fraction(exact: Fraction, mode: str) -> float:
    """Return an exact fraction rounded to float64."""
    try:
        nearest = exact.numerator / exact.denominator
    except OverflowError:
        nearest = float("inf") if exact > 0 else float("-inf")
    if mode == "rn":
        return nearest
    if nearest in (float("inf"), float("-inf")):
        difference = -1 if nearest > 0 else 1
    else:
        gap = exact - Fraction(nearest)
        difference = (gap > 0) - (gap < 0)
    moved = fp.towards(np.array([nearest]), np.array([difference]), mode)
    return float(moved[0])


@instruction("add{.rnd}.f64 d, a, b", "sub{.rnd}.f64 d, a, b", "mul{.rnd}.f64 d, a, b",
             source="PTX ISA 9.7.3.3-5", evidence="manual-only", rnd=MODES)  # fmt: skip
def add_sub_mul_f64(ins: Instruction) -> Inline:
    """d = a op b in double precision."""
    name, mode = ins.opcode.split(".")[0], mode_of(ins)
    ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]

    def nearest(a: Array, b: Array) -> Array:
        return fp.nan_f64(ufunc(a, b), a, b)

    def directed(a: Array, b: Array) -> Array:
        if name == "sub":
            return _exact_f64("add", a, -b, None, mode)
        return _exact_f64(name, a, b, None, mode)

    return apply(ins, nearest if mode == "rn" else directed, "a b", "f64")


@instruction("fma.rnd.f64 d, a, b, c", "mad.rnd.f64 d, a, b, c", source="PTX ISA 9.7.3.6-7",
             evidence="manual-only", rnd=MODES)  # fmt: skip
def fma_f64(ins: Instruction) -> Inline:
    """d = a * b + c in double precision, rounded once."""
    mode = mode_of(ins)
    return apply(ins, lambda a, b, c: _exact_f64("fma", a, b, c, mode), "a b c", "f64")


def _unary_f64(ufunc: Any) -> Callable[..., Array]:
    def function(*operands: Array) -> Array:
        return fp.nan_f64(ufunc(*operands), *operands)

    return function


def _division(a: Array, b: Array, mode: str) -> Array:
    """Return a / b rounded once."""
    result = np.divide(a, b)
    if mode != "rn":
        finite = np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0)
        for lane in np.flatnonzero(finite).tolist():
            exact = Fraction(float(a[lane])) / Fraction(float(b[lane]))
            result[lane] = round_fraction(exact, mode)
    return fp.nan_f64(result, a, b)


def _square_root(a: Array, mode: str) -> Array:
    """Return the square root rounded once: the nearest one, moved by the sign of what is left."""
    nearest = np.sqrt(a)
    if mode != "rn":
        rest = np.zeros_like(a)
        for lane in np.flatnonzero(np.isfinite(nearest)).tolist():
            left = Fraction(float(a[lane])) - Fraction(float(nearest[lane])) ** 2
            rest[lane] = (left > 0) - (left < 0)
        nearest = fp.towards(nearest, rest, mode)
    return fp.nan_f64(nearest, a)


@instruction("div.rnd.f64 d, a, b", source="PTX ISA 9.7.3.8", evidence="manual-only", rnd=MODES)
def div_f64(ins: Instruction) -> Inline:
    """d = a / b in double precision."""
    mode = mode_of(ins)
    return apply(ins, lambda a, b: _division(a, b, mode), "a b", "f64")


@instruction("sqrt.rnd.f64 d, a", source="PTX ISA 9.7.3.15", evidence="manual-only", rnd=MODES)
def sqrt_f64(ins: Instruction) -> Inline:
    """d = square root of a in double precision."""
    mode = mode_of(ins)
    return apply(ins, lambda a: _square_root(a, mode), "a", "f64")


@instruction("rcp.rnd.f64 d, a", source="PTX ISA 9.7.3.13", evidence="manual-only", rnd=MODES)
def rcp_f64(ins: Instruction) -> Inline:
    """d = 1 / a in double precision."""
    mode, one = mode_of(ins), np.ones(32)

    def function(a: Array) -> Array:
        return fp.nan_f64(_division(one, a, mode), a)

    return apply(ins, function, "a", "f64")


_HIGH_WORD = np.uint64(0xFFFFFFFF00000000)


def _flushed(value: Array) -> Array:
    """Return values with subnormal ones as zeros of their sign."""
    is_tiny = np.abs(value) < np.finfo(np.float64).smallest_normal
    return np.where(is_tiny, np.copysign(0.0, value), value)


@instruction("rcp.approx.ftz.f64 d, a", "rsqrt.approx.ftz.f64 d, a", source="PTX ISA 9.7.3.14-17",
             evidence="inferred", kind="mufu")  # fmt: skip
def gross_approximation(ins: Instruction) -> Inline:
    """d = 1 / a or 1 / sqrt(a) from the high word of a; the low word of d is 0 (20 bits count)."""
    is_root = ins.opcode.startswith("rsqrt")

    def function(a: Array) -> Array:
        high = _flushed((a.view(np.uint64) & _HIGH_WORD).view(np.float64))
        result = _flushed(1.0 / (np.sqrt(high) if is_root else high))
        cut = (result.view(np.uint64) & _HIGH_WORD).view(np.float64)
        return fp.nan_f64(np.where(np.isnan(result), result, cut), a)

    return apply(ins, function, "a", "f64")


@instruction("rsqrt.approx.f64 d, a", source="PTX ISA 9.7.3.16", evidence="inferred", kind="mufu")
def rsqrt_f64(ins: Instruction) -> Inline:
    """d = 1 / sqrt(a), within the manual's bound."""

    def function(a: Array) -> Array:
        return fp.nan_f64(1.0 / np.sqrt(a), a)

    return apply(ins, function, "a", "f64")


@instruction("abs.f64 d, a", "neg.f64 d, a", source="PTX ISA 9.7.3.9-10", evidence="manual-only")
def abs_neg_f64(ins: Instruction) -> Inline:
    """d = |a| or -a in double precision; a NaN is passed on."""
    change: Callable[[Array], Array] = np.abs if ins.opcode.startswith("abs") else np.negative

    def function(a: Array) -> Array:
        return np.where(np.isnan(a), a, change(a))

    return apply(ins, function, "a", "f64")


@instruction("min.f64 d, a, b", "max.f64 d, a, b", source="PTX ISA 9.7.3.11-12",
             evidence="manual-only")  # fmt: skip
def minimum_maximum_f64(ins: Instruction) -> Inline:
    """d = min or max in double precision."""
    is_max = ins.opcode.startswith("max")
    choose = np.fmax if is_max else np.fmin

    def function(a: Array, b: Array) -> Array:
        result = choose(a, b)
        x, y = a.view(np.uint64), b.view(np.uint64)
        zero = (x & y if is_max else x | y).view(np.float64)
        return np.where((a == 0) & (b == 0), zero, result)

    return apply(ins, _unary_f64(function), "a b", "f64")
