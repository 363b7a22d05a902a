"""The DSL type of q, k, v and out.

Lives here: `element_type`. Invariant: whatever has a `dtype` of the plans has one.
"""

from typing import Literal, Protocol

import cutlass

_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class _HasDtype(Protocol):
    @property
    def dtype(self) -> Literal["bfloat16", "float16"]: ...


def element_type(plan: _HasDtype) -> type[cutlass.Numeric]:
    """Return the DSL type of a plan's elements in memory."""
    return _DTYPES[plan.dtype]
