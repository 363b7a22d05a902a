"""Sine, cosine and tangent of any fp32 angle, in registers alone.

Lives here: the reduction of an angle to a quarter turn, and what follows from it. Not here: the
polynomials' coefficients (`plan/numerics.py`). Invariant: no array, since one that is indexed at
run time lies in local memory, as that of the compiler's own functions does.

Source: Cody and Waite's three-part pi / 2; for large angles Payne and Hanek's, which multiplies by
those bits of 2 / pi alone that matter.
"""

from itertools import pairwise

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.polynomials import cosine_of, sine_factor
from fovea.kernels.device.ptx import bits_of, funnel_left
from fovea.kernels.device.values import select
from fovea.plan.numerics import (
    HALF_PI_PARTS,
    SMALL_ANGLE,
    TWO_OVER_PI,
    TWO_OVER_PI_BITS,
)

_HALF_PI = 1.5707963267948966
_WORD = 32
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
# Added to a number, it leaves the nearest integer in the low bits.
_ROUNDER = 1.5 * 2.0**_MANTISSA_BITS

# 2 / pi behind a word of zeros, which angles just beyond the small ones read from.
_SHIFTS = range(TWO_OVER_PI_BITS - _WORD, -1, -_WORD)
_WORDS = (0, *((TWO_OVER_PI >> shift) & (2**_WORD - 1) for shift in _SHIFTS))
_WINDOW_WORDS = 3  # 2 bits before the point, 94 behind it, where the nearest angle needs some 60


def sine(angle: cutlass.Float32) -> cutlass.Float32:
    """Return sin(angle), NaN of infinite ones."""
    quarter, rest = _reduced(angle)
    return _sine(quarter, rest)


def cosine(angle: cutlass.Float32) -> cutlass.Float32:
    """Return cos(angle), NaN of infinite ones."""
    quarter, rest = _reduced(angle)
    return _sine(quarter + 1, rest)


def sine_and_cosine(angle: cutlass.Float32) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Return both of one angle."""
    quarter, rest = _reduced(angle)
    return _sine(quarter, rest), _sine(quarter + 1, rest)


def _sine(quarter: cutlass.Int32, rest: cutlass.Float32) -> cutlass.Float32:
    """Return the sine of so many quarter turns and a rest of at most half of one."""
    square = rest * rest
    is_odd = (quarter & 1) != 0
    value = select(is_odd, cosine_of(square), rest * sine_factor(square))
    return select((quarter & 2) != 0, -value, value)


@cute.jit
def _reduced(angle: cutlass.Float32) -> tuple[cutlass.Int32, cutlass.Float32]:
    """Return quarter turns, of which the lowest two bits count, and the rest in radians."""
    rounded = cute.math.fma(angle, cutlass.Float32(1.0 / _HALF_PI), cutlass.Float32(_ROUNDER))
    quarter = bits_of(rounded)
    turns = rounded - _ROUNDER
    rest = angle
    for part in HALF_PI_PARTS:
        rest = cute.math.fma(-turns, cutlass.Float32(part), rest)
    if cute.math.absf(angle) > SMALL_ANGLE:
        quarter, rest = _reduced_by_bits(angle)
    return quarter, rest


def _reduced_by_bits(angle: cutlass.Float32) -> tuple[cutlass.Int32, cutlass.Float32]:
    """Return the same of an angle beyond the small ones: M 2^E, M of 24 bits.

    Bits of 2 / pi that are worth 4 or more in 2^E 2 / pi make whole turns, whatever M is. What
    begins behind them, times M, has the quarter turns in its highest two bits.
    """
    bits = bits_of(angle)
    exponent = ((bits >> _MANTISSA_BITS) & 255) - (_EXPONENT_BIAS + _MANTISSA_BITS)
    mantissa = _wide((bits & (2**_MANTISSA_BITS - 1)) | 2**_MANTISSA_BITS)
    # The first bit of 2 / pi, worth 1 / 2, is the one behind the word of zeros.
    high, middle, low = _window(exponent + (_WORD - 2))
    lowest = mantissa * _wide(low)
    upper = mantissa * _wide(middle) + (lowest >> _WORD)
    highest = mantissa * _wide(high) + (upper >> _WORD)
    top = highest.to(cutlass.Int32)
    fraction = (highest << (_WORD + 2)) | ((upper & (2**_WORD - 1)) << 2)
    fraction = fraction | ((lowest >> (_WORD - 2)) & 3)
    # As a signed number it is the distance from the nearest quarter turn.
    quarter = ((top >> 29) + 1) >> 1
    rest = fraction.to(cutlass.Int64).to(cutlass.Float32) * (_HALF_PI * 2.0**-64)
    rest = rest + (angle - angle)  # NaN of what is not finite
    is_negative = bits < 0
    return select(is_negative, -quarter, quarter), select(is_negative, -rest, rest)


def _window(first: cutlass.Int32) -> list[cutlass.Int32]:
    """Return the words of 2 / pi that begin at a bit, by selects."""
    skipped = first >> 5
    words = []
    for place in range(_WINDOW_WORDS + 1):
        word = cutlass.Int32(_signed(_WORDS[place]))
        for skip in range(1, len(_WORDS) - _WINDOW_WORDS):
            other = cutlass.Int32(_signed(_WORDS[place + skip]))
            word = select(skipped == skip, other, word)
        words.append(word)
    return [funnel_left(a, b, first) for a, b in pairwise(words)]


def _signed(word: int) -> int:
    return word - 2**_WORD if word >= 2 ** (_WORD - 1) else word


def _wide(word: cutlass.Int32) -> cutlass.Uint64:
    return word.to(cutlass.Uint32).to(cutlass.Uint64)
