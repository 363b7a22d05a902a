"""Quotients of small integers for mods, rounded down: three instructions for one divisor of many.

Lives here: the multiplier of a divisor, and the quotient by it. The product of 4a + 2 and
2^(30 + E) / b is 2^(32 + E) times (a + 1/2) / b, so its high word holds the quotient. The half
keeps that number 1 / (2 |b|) away from every integer, whatever the signs, which is more than the
rounding of the multiplier amounts to (division by multiplication: Granlund and Montgomery, PLDI
1994). Not here: integers that may be larger (`mod_operations.py`). Invariant: exact for every
|a| <= LARGEST_DIVIDEND and |b| <= LARGEST_DIVISOR of `plan/integers.py`; a divisor of 0 counts
as 1.

The multiplier is less than 2 off. So the product is, and |a + 1/2| 2 |b| must stay below half of
2^(30 + E), where |b| < 2^(1 + E): |a| < 2^27.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.ptx import bits_of, float_of, high_product
from fovea.kernels.device.values import select

_EXPONENT, _EXPONENT_BITS, _BIAS = 0x7F800000, 23, 127
_SCALE = 30


class Divisor(NamedTuple):
    """A divisor b, ready to divide by; numbers that the compiler knows or a launch alone."""

    value: cutlass.Int32
    multiplier: cutlass.Int32  # 2^(30 + shift) / b
    shift: cutlass.Int32  # E, the exponent of |b|
    half: cutlass.Int32  # 2, with the sign of b


def make_divisor(b: cutlass.Int32) -> Divisor:
    """Return a divisor for `divide_floor`."""
    known = getattr(b, "value", None)
    if isinstance(known, int):
        return _known_divisor(known or 1)
    b = select(b == 0, cutlass.Int32(1), b)
    sign = select(b < 0, cutlass.Int32(-1), cutlass.Int32(1))
    size = (b * sign).to(cutlass.Float32)
    exponent = bits_of(size) & _EXPONENT
    scale = float_of(exponent + (_SCALE << _EXPONENT_BITS))
    reciprocal = cute.arch.rcp_approx(size)
    high = reciprocal * scale  # a whole number: its last bit counts 2^6 or more
    low = high * cute.math.fma(-size, reciprocal, cutlass.Float32(1.0))
    multiplier = high.to(cutlass.Int32) + low.to(cutlass.Int32)
    return Divisor(b, multiplier * sign, (exponent >> _EXPONENT_BITS) - _BIAS, 2 * sign)


def _known_divisor(b: int) -> Divisor:
    sign = 1 if b > 0 else -1
    shift = abs(b).bit_length() - 1
    multiplier = (1 << (_SCALE + shift)) // abs(b)
    numbers = (b, multiplier * sign, shift, 2 * sign)
    return Divisor(*(cutlass.Int32(number) for number in numbers))


def divide_floor(a: cutlass.Int32, divisor: Divisor) -> cutlass.Int32:
    """Return the quotient of integers, rounded down."""
    return high_product(a * 4 + divisor.half, divisor.multiplier) >> divisor.shift
