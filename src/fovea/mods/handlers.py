"""The tables from torch functions to their handlers, and what a handler needs of the tracer.

Lives here: the empty tables. Not here: the handlers, which enter themselves (`operators.py`,
`indexing.py`, `functions.py`, `casts.py`). Invariant: the first handler of a function stays.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fovea.mods.builder import GraphBuilder, Term

Handler = Callable[..., Any]


class Tracing(Protocol):
    """What handlers need of the tracer."""

    builder: GraphBuilder
    compiling: bool
    device: torch.device

    def term(self, value: Any) -> Term:
        """Return the term of anything that a mod may combine with traced values."""
        ...

    def source(self, base: Any) -> Any:
        """Return what is being indexed."""
        ...

    def fixed_extent(self, source: Any, dimension: int) -> int:
        """Return an extent that the graph will contain."""
        ...

    def divisor(self, value: Any) -> int | float | None:
        """Return 0 where a Python number is 0, and remember that the trace depends on that."""
        ...

    def fixed(self, value: Any) -> Any:
        """Return a Python number, specialising a captured one to its present value."""
        ...


OPERATORS: dict[Any, Handler] = {}
# Methods that torch writes in Python: Dynamo's function objects for them are not ours, names are.
PYTHON_METHODS: dict[str, Handler] = {}


def register(names: str, handler: Handler) -> None:
    """Enter a handler for every torch function of these names, methods and F included."""
    for name in names.split():
        for space in (torch, Tensor, torch.nn.functional, torch.special):
            function = getattr(space, name, None)
            if function is not None and callable(function):
                OPERATORS.setdefault(function, handler)
