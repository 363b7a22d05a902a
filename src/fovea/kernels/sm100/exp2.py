"""2^x on the FMA pipe, two values at a time.

Lives here: the device twin of `reference.numerics.exp2_polynomial`, in packed fp32 arithmetic.
Not here: which columns get it (`plan/sm100.py`). Invariant: for x in [-127, 126] it gives the
reference's value, products and sums fused; below, 0; above, and for NaN, a number that no sum of
exponentials that is judged good can hold (OPTIMISTIC_SUM_LIMIT).

Source: Cody and Waite's splitting; adding 1.5 * 2^23 rounded down leaves floor(x) in the low bits.
"""

import cutlass
import cutlass.cute as cute

from fovea.plan.numerics import EXP2_COEFFICIENTS, EXP2_LOWEST

Pair = tuple[cutlass.Float32, cutlass.Float32]

EXP2_HIGHEST = 126.0  # a power far above what passes for good, and a finite one
_MAGIC = 1.5 * 2.0**23


def both(value: float | cutlass.Float32) -> Pair:
    """Return a number twice."""
    return cutlass.Float32(value), cutlass.Float32(value)


def exp2_pair(x: Pair) -> Pair:
    """Return 2^x of both numbers."""
    low, high = x
    clamped = (_clamp(low), _clamp(high))
    floors = cute.arch.add_packed_f32x2(clamped, both(_MAGIC), rnd="rm", ftz=False)
    whole = cute.arch.add_packed_f32x2(floors, both(-_MAGIC), rnd="rn", ftz=False)
    fraction = cute.arch.fma_packed_f32x2(whole, both(-1.0), clamped, rnd="rn", ftz=False)
    mantissa = both(EXP2_COEFFICIENTS[-1])
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1.0):
        mantissa = cute.arch.fma_packed_f32x2(
            mantissa, fraction, both(coefficient), rnd="rn", ftz=False
        )
    return _scale(mantissa[0], floors[0]), _scale(mantissa[1], floors[1])


def _clamp(x: cutlass.Float32) -> cutlass.Float32:
    # NaN has to pass: a plain maximum would drop it.
    return cute.arch.fmin(cute.arch.fmax(x, EXP2_LOWEST, nan=True), EXP2_HIGHEST, nan=True)


def _scale(mantissa: cutlass.Float32, floor: cutlass.Float32) -> cutlass.Float32:
    """Return mantissa * 2^floor: the floor's low bits go into the exponent field, one shift-add."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 power, bits; mov.b32 power, {$r1}; mov.b32 bits, {$r0}; "
        "shl.b32 power, power, 23; add.s32 bits, bits, power; mov.b32 {$w0}, bits; }",
        write_only_types=[cutlass.Float32],
        read_only_args=[mantissa, floor],
    )
