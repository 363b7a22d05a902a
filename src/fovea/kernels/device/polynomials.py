"""Functions as polynomials, on the multiply-add pipe.

Lives here: their evaluation. Not here: the coefficients and their errors (`plan/numerics.py`).
Invariant: the same operations in the same order wherever one is used.
"""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute

from fovea.plan.numerics import (
    COSINE_COEFFICIENTS,
    SINE_COEFFICIENTS,
    TANH_COEFFICIENTS,
    TANH_LARGEST_SQUARE,
)

_TANH_TERMS = (
    1.0,
    *(c / TANH_LARGEST_SQUARE**power for power, c in enumerate(TANH_COEFFICIENTS, start=1)),
)


def tanh_factor(square: cutlass.Float32) -> cutlass.Float32:
    """Return tanh(x) / x of x^2 <= TANH_LARGEST_SQUARE."""
    return polynomial(_TANH_TERMS, square)


def sine_factor(square: cutlass.Float32) -> cutlass.Float32:
    """Return sin(x) / x of x^2 <= 1."""
    return polynomial((1.0, *SINE_COEFFICIENTS), square)


def cosine_of(square: cutlass.Float32) -> cutlass.Float32:
    """Return cos(x) of x^2 <= 1."""
    return polynomial((1.0, *COSINE_COEFFICIENTS), square)


def polynomial(terms: Sequence[float | cutlass.Float32], x: cutlass.Float32) -> cutlass.Float32:
    """Return t0 + t1 x + t2 x^2 + ..., from the last one up."""
    value = cutlass.Float32(terms[-1])
    for term in terms[-2::-1]:
        value = cute.math.fma(value, x, cutlass.Float32(term))
    return value
