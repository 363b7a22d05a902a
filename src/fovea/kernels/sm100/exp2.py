"""2^x on the FMA pipe, two values at a time.

Lives here: the device twin of `reference.numerics.exp2_polynomial`, in packed fp32 arithmetic.
Not here: which columns get it (`plan/sm100.py`), what x is (`forward/rows.py`). Invariant: for x in
[-62, 65] it gives the reference's value, products and sums fused; below, 0; above, and for NaN, a
number that no sum of exponentials that is judged good can hold (SOFTWARE_SUM_LIMIT).

Source: Cody and Waite's splitting; adding 1.5 * 2^23 rounded down leaves a floor in the low bits.
What differs from the usual form: x is clamped on both sides by the saturation of the multiply-add
that makes it, which costs nothing, where a maximum and a minimum a value took a third of the whole.
For that x comes from its highest value down, in units of the span.
"""

import cutlass
import cutlass.cute as cute

from fovea.plan.numerics import EXP2_COEFFICIENTS, EXP2_HIGHEST, EXP2_SPAN

Pair = tuple[cutlass.Float32, cutlass.Float32]

_MAGIC = 1.5 * 2.0**23
_EXPONENT_BIAS = 127
_LOWEST = EXP2_HIGHEST - EXP2_SPAN
# Exponent fields count from 0 for x at its lowest, so that the power is 0 there.
_REST = 2.0 ** (_LOWEST + _EXPONENT_BIAS)


def both(value: float | cutlass.Float32) -> Pair:
    """Return a number twice."""
    return cutlass.Float32(value), cutlass.Float32(value)


def distance(
    value: cutlass.Float32, scale: cutlass.Float32, offset: cutlass.Float32
) -> cutlass.Float32:
    """Return value * scale + offset, held between 0 and 1; 0 for NaN.

    With an x = HIGHEST - SPAN * distance, NaN is the highest x, and -inf the lowest.
    """
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[cutlass.Float32],
        read_only_args=[value, scale, offset],
    )


def exp2_pair(distances: Pair) -> Pair:
    """Return 2^x of both numbers x, given their distances from the highest."""
    down = both(-EXP2_SPAN)
    # Low bits: floor(x) above the lowest, between 0 and the span.
    floors = cute.arch.fma_packed_f32x2(
        distances, down, both(_MAGIC + EXP2_SPAN), rnd="rm", ftz=False
    )
    rest = cute.arch.fma_packed_f32x2(
        floors, both(-1.0), both(_MAGIC + EXP2_SPAN), rnd="rn", ftz=False
    )
    fraction = cute.arch.fma_packed_f32x2(distances, down, rest, rnd="rn", ftz=False)
    mantissa = both(EXP2_COEFFICIENTS[-1] * _REST)
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1.0):
        mantissa = cute.arch.fma_packed_f32x2(
            mantissa, fraction, both(coefficient * _REST), rnd="rn", ftz=False
        )
    powers = (_power(floors[0]), _power(floors[1]))
    return cute.arch.mul_packed_f32x2(mantissa, powers, rnd="rn", ftz=False)


def _power(floor: cutlass.Float32) -> cutlass.Float32:
    """Return 2^(n - 127) of the number n in the low bits; 0 for 0."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 bits; mov.b32 bits, {$r0}; shl.b32 bits, bits, 23; mov.b32 {$w0}, bits; }",
        write_only_types=[cutlass.Float32],
        read_only_args=[floor],
    )
