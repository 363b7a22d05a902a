"""Index arithmetic that is linear along a row of registers.

Lives here: `Affine`, a value of the form base + step * column, where the column is a constant of
each register. Not here: everything else of a mod (`mods.py`). Invariant: the arithmetic is exact
(32-bit integers that cannot overflow, floats below 2^24), so it may be reordered.

In `q_idx - kv_idx` only the column differs between the registers of a row. Written as base + step *
column the subtraction happens once a row, a comparison with it is one instruction with a constant,
and a conversion to float (a quarter-rate instruction) happens once a row instead of per register.
"""

from typing import Any, NamedTuple

import cutlass

from fovea.kernels.device.mod_operations import cast

Value = Any  # a DSL scalar


class Affine(NamedTuple):
    """base + step * column; the step is a Python int, or a run-time float of `times`."""

    base: Value
    step: Any

    def at(self, column: int) -> Value:
        """Return the value at a column."""
        offset = self.step * column
        if offset == 0:
            return self.base
        if isinstance(self.base, cutlass.Float32):
            return self.base + cutlass.Float32(float(offset))
        return self.base + offset


def add(a: Affine, b: Affine) -> Affine:
    """Return a + b."""
    return Affine(a.base + b.base, a.step + b.step)


def subtract(a: Affine, b: Affine) -> Affine:
    """Return a - b."""
    return Affine(a.base - b.base, a.step - b.step)


def scale(a: Affine, factor: int) -> Affine:
    """Return a * factor."""
    return Affine(a.base * factor, a.step * factor)


def times(a: Affine, factor: cutlass.Float32) -> Affine:
    """Return a * factor with a run-time step, for a float `a`. Rounds: not for comparisons."""
    return Affine(a.base * factor, cutlass.Float32(a.step) * factor)


def to_float(a: Affine) -> Affine:
    """Return a as fp32, exact for values below 2^24."""
    return Affine(cast(a.base, "f32"), a.step)
