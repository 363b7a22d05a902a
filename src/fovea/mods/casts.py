"""Casts of traced values between dtypes.

Lives here: `.to`, `.float()` and their like, the graph's names of torch's dtypes, functions of
16-bit floats that torch computes in fp32. Not here: promotion (`builder.py`). Invariant: a cast to
the value's own dtype adds no node.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.builder import Term, result_dtype
from fovea.mods.graph import DTYPE_NAME
from fovea.mods.handlers import OPERATORS, Handler, Tracing, register


def cast_to(dtype: str) -> Handler:
    """Return the handler of .float(), .long() and their like."""

    def handler(t: Tracing, x: Any, memory_format: Any = None) -> Term:
        return t.builder.cast(t.term(x), dtype)

    return handler


def _to(t: Tracing, x: Any, *args: Any, **names: Any) -> Term:
    term = t.term(x)
    for value in (*args, names.get("dtype"), names.get("other")):
        if isinstance(value, torch.dtype):
            return t.builder.cast(term, name_of(value))
        if isinstance(value, Tensor):
            return t.builder.cast(term, t.term(value).dtype)
    return t.builder.cast(term, term.dtype)


def name_of(dtype: torch.dtype) -> str:
    """Return the graph's name of a torch dtype."""
    if dtype not in DTYPE_NAME:
        raise TraceError(
            f"dtype {dtype} cannot be traced (allowed: {', '.join(map(str, DTYPE_NAME))}); cast it"
        )
    return DTYPE_NAME[dtype]


def in_float32(handler: Handler) -> Handler:
    """Return a function of several nodes that computes 16-bit floats in fp32 and rounds once.

    torch's own kernels do: rounded after every node, 300 ** 2 would be infinite in float16.
    """

    def wide(t: Tracing, *args: Any, **names: Any) -> Term:
        values = [*args, *names.values()]
        terms = [t.term(value) for value in values if isinstance(value, (Tensor, Term))]
        dtype = result_dtype(terms) if terms else ""
        if dtype not in ("f16", "bf16"):
            return handler(t, *args, **names)
        args = tuple([_widened(t, value) for value in args])
        names = {name: _widened(t, value) for name, value in names.items()}
        return t.builder.cast(handler(t, *args, **names), dtype)

    return wide


def _widened(t: Tracing, value: Any) -> Any:
    if not isinstance(value, (Tensor, Term)):
        return value
    term = t.term(value)
    return t.builder.cast(term, "f32") if term.dtype in ("f16", "bf16") else value


def _same(t: Tracing, x: Any, *args: Any, **names: Any) -> Term:
    term = t.term(x)
    return t.builder.cast(term, term.dtype)


def _enter_casts() -> None:
    for name, dtype in (
        *(("bool", "b1"), ("byte", "u8"), ("char", "i8"), ("short", "i16"), ("int", "i32")),
        *(("long", "i64"), ("half", "f16"), ("bfloat16", "bf16"), ("float", "f32")),
        ("double", "f64"),
    ):
        OPERATORS[getattr(Tensor, name)] = cast_to(dtype)
    for name in ("to", "type", "type_as"):
        OPERATORS[getattr(Tensor, name)] = _to
    register("clone contiguous cpu cuda positive __pos__", _same)


_enter_casts()
