"""Choice between two scalars without a branch, keeping the DSL's type.

Lives here: `select`. Not here: anything on fragments. Invariant: both values have one DSL type,
which the result has too (the DSL's own primitive returns an untyped value).
"""

from typing import TypeVar

import cutlass
from cutlass.cutlass_dsl import select_

Scalar = TypeVar("Scalar", bound=cutlass.Numeric)


def select(condition: cutlass.Boolean, if_true: Scalar, if_false: Scalar) -> Scalar:
    """Return one of two values of the same type."""
    return type(if_false)(select_(condition, if_true, if_false))
