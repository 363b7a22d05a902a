"""Functions as polynomials, on the multiply-add pipe.

Lives here: their evaluation. Not here: the coefficients and their errors (`plan/numerics.py`).
Invariant: the same operations in the same order wherever one is used.
"""

import cutlass
import cutlass.cute as cute

from fovea.plan.numerics import COSINE_COEFFICIENTS, SINE_COEFFICIENTS, TANH_COEFFICIENTS


def tanh_factor(square: cutlass.Float32) -> cutlass.Float32:
    """Return tanh(x) / x of x^2 <= TANH_LIMIT^2."""
    return _polynomial(TANH_COEFFICIENTS, square)


def sine_factor(square: cutlass.Float32) -> cutlass.Float32:
    """Return sin(x) / x of x^2 <= 1."""
    return _polynomial(SINE_COEFFICIENTS, square)


def cosine_of(square: cutlass.Float32) -> cutlass.Float32:
    """Return cos(x) of x^2 <= 1."""
    return _polynomial(COSINE_COEFFICIENTS, square)


def _polynomial(coefficients: tuple[float, ...], x: cutlass.Float32) -> cutlass.Float32:
    """Return 1 + c1 x + c2 x^2 + ..., from the last one up."""
    value = cutlass.Float32(coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        value = cute.math.fma(value, x, cutlass.Float32(coefficient))
    return value
