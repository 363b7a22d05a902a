"""Quotients of floats for mods.

Lives here: division in float32 that is good for every pair of finite numbers, subnormal and huge
ones included. Not here: division that rounds down, and of integers (`mod_operations.py`).
Invariant: straight code in registers. The DSL's own division calls a subroutine for rare inputs,
and every call makes the compiler spill the accumulators around it.
"""

import math
import struct
from typing import Any

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.ptx import bits_of, float_of
from fovea.kernels.device.values import select

Value = Any  # a DSL float32

_SIGN, _EXPONENT = -(2**31), 0x7F800000  # bits of a float32
# Bits of 2^126 and 2^-126: a divisor of exponent e is multiplied by 2^(-1 - e).
_HALF_OVER_ONE, _LEAST = 0x7E800000, 0x00800000
# Divisors that need no scaling: their reciprocals, and remainders of normal quotients, are normal.
_NEAR_ONE = 2.0**100


def divide(a: Value, b: Value) -> Value:
    """Return a / b, good to the last place, and exact where the quotient is representable.

    Quotients below 2^-125 are good to two of the least subnormal numbers.
    """
    known = getattr(b, "value", None)
    if isinstance(known, float):
        number = as_float32(known)
        if math.isfinite(number) and number != 0.0:
            return _divide_by_number(a, number)
    # Between 1/2 and 1, or 2^-23 where it is subnormal and 4 where it is huge; and positive, so
    # that below a remainder of 0 leaves the sign of a quotient of 0.
    scale = _scale_of(b)
    a, b = a * scale, b * scale
    return _refined(a, b, cute.arch.rcp_approx(b))


def _scale_of(b: Value) -> Value:
    """Return the power of two that a divisor and its dividend are multiplied by, with b's sign.

    The dividend then is about the quotient, and overflows or vanishes where that does.
    """
    bits = bits_of(b)
    power = cutlass.max(_HALF_OVER_ONE - (bits & _EXPONENT), _LEAST)
    return float_of(power | (bits & _SIGN))


def _refined(a: Value, b: Value, reciprocal: Value) -> Value:
    """Return a / b for b > 0 by one Newton step on the reciprocal."""
    quotient = a * reciprocal
    excess = cute.math.fma(quotient, b, -a)
    refined = cute.math.fma(-excess, reciprocal, quotient)
    # An infinite quotient or divisor makes the excess NaN; the first quotient is right then.
    return select(refined == refined, refined, quotient)


def _divide_by_number(a: Value, b: float) -> Value:
    """Return a / b of a number that the compiler knows, finite and not 0."""
    mantissa, exponent = math.frexp(b)
    if abs(mantissa) == 0.5 and 2.0**-127 <= abs(b) <= 2.0**126:
        return a * (1.0 / b)
    if b < 0:
        a, b = -a, -b
    if not 1 / _NEAR_ONE < b < _NEAR_ONE:
        # As for a divisor that is not known.
        power = max(-126, min(-exponent, 126))
        a, b = a * 2.0**power, b * 2.0**power
    return _refined(a, cutlass.Float32(b), cutlass.Float32(as_float32(1.0 / b)))


def as_float32(number: float) -> float:
    """Return the nearest float32 of a number, infinite past the largest."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
