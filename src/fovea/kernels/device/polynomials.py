"""Functions as polynomials, on the multiply-add pipe.

Lives here: their evaluation. Not here: the coefficients and their errors (`plan/numerics.py`).
Invariant: the same operations in the same order wherever one is used.
"""

import cutlass
import cutlass.cute as cute

from fovea.plan.numerics import TANH_COEFFICIENTS


def tanh_factor(square: cutlass.Float32) -> cutlass.Float32:
    """Return tanh(x) / x of x^2 <= TANH_LIMIT^2."""
    factor = cutlass.Float32(TANH_COEFFICIENTS[-1])
    for coefficient in (*TANH_COEFFICIENTS[-2::-1], 1.0):
        factor = cute.math.fma(factor, square, cutlass.Float32(coefficient))
    return factor
