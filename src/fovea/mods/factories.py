"""Tensors that a mod makes: constants, and copies of values.

Lives here: `zeros`, `full`, `new_ones`, `tensor` and their like. Not here: casts of what there is
(`casts.py`). Invariant: what they make counts as a tensor in promotion.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
from torch import Tensor

from fovea.mods.builder import FLOATS, Term, default_float
from fovea.mods.casts import name_of
from fovea.mods.handlers import Handler, Tracing, register
from fovea.mods.indexing import broadcast_to
from fovea.mods.operators import unary


def _size(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _filled(t: Tracing, value: Any, dtype: Any, size: tuple[Any, ...], default: str) -> Term:
    """Return a constant of a shape, strong as a tensor is."""
    name = default if dtype is None else name_of(dtype)
    return broadcast_to(t, t.builder.cast(t.term(value), name), tuple(t.fixed(s) for s in size))


def _like(value: Any) -> Handler:
    def handler(t: Tracing, x: Any, *, dtype: Any = None, **_: Any) -> Term:
        term = t.term(x)
        return _filled(t, value, dtype, t.builder.shape(term), term.dtype)

    return handler


def _full_like(t: Tracing, x: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Term:
    return _like(fill_value)(t, x, dtype=dtype)


def _new(value: Any) -> Handler:
    def handler(t: Tracing, x: Any, *size: Any, dtype: Any = None, **names: Any) -> Term:
        shape = _size(size) if size else tuple(names.get("size", ()))
        return _filled(t, value, dtype, shape, t.term(x).dtype)

    return handler


def _new_full(
    t: Tracing, x: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any
) -> Term:
    return _filled(t, fill_value, dtype, tuple(size), t.term(x).dtype)


def natural_dtype(t: Tracing, value: Any) -> str:
    """Return the dtype that torch.tensor gives a number."""
    dtype = t.term(value).dtype
    return default_float() if dtype in FLOATS and t.term(value).weak else dtype


def _new_tensor(t: Tracing, x: Any, data: Any, *, dtype: Any = None, **_: Any) -> Term:
    return _copied(t, data, t.term(x).dtype if dtype is None else name_of(dtype))


def _tensor(t: Tracing, data: Any, *, dtype: Any = None, **_: Any) -> Term:
    return _copied(t, data, natural_dtype(t, data) if dtype is None else name_of(dtype))


def _copied(t: Tracing, data: Any, dtype: str) -> Term:
    """Return the data's values, which have no part in the derivative, as in torch."""
    copy = t.builder.cast(t.term(data), dtype)
    return unary(t, "detach", copy) if isinstance(data, (Tensor, Term)) else copy


def _as_tensor(t: Tracing, data: Any, dtype: Any = None, device: Any = None) -> Term:
    return _filled(t, data, dtype, (), natural_dtype(t, data))


def _constant(value: Any) -> Handler:
    def handler(t: Tracing, *size: Any, dtype: Any = None, **_: Any) -> Term:
        return _filled(t, value, dtype, (), default_float())

    return handler


def _full(t: Tracing, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Term:
    return _filled(t, fill_value, dtype, (), natural_dtype(t, fill_value))


def _is_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the data is one number: longer data makes a real tensor."""
    data = args[0] if args else kwargs.get("data", ())
    return isinstance(data, (bool, int, float))


def _is_scalar_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a factory makes one element without dimensions."""
    size = args[0] if args else kwargs.get("size", (1,))
    return isinstance(size, (tuple, list)) and len(size) == 0  # pyright: ignore[reportUnknownArgumentType]


# Factories called without any traced argument: (is it ours?, handler). Others run as they are.
FACTORIES: dict[Any, tuple[Any, Handler]] = {
    torch.tensor: (_is_number, _tensor),
    torch.scalar_tensor: (_is_number, _tensor),
    torch.as_tensor: (_is_number, _as_tensor),
    torch.zeros: (_is_scalar_shape, _constant(0.0)),
    torch.ones: (_is_scalar_shape, _constant(1.0)),
    torch.empty: (_is_scalar_shape, _constant(0.0)),
    torch.full: (_is_scalar_shape, _full),
}


def _enter() -> None:
    for names, handler in (
        *(("zeros_like", _like(0)), ("ones_like", _like(1)), ("empty_like", _like(0))),
        *(("full_like", _full_like), ("new_zeros", _new(0)), ("new_ones", _new(1))),
        *(("new_empty", _new(0)), ("new_full", _new_full), ("new_tensor", _new_tensor)),
        *(("tensor scalar_tensor", _tensor), ("as_tensor", _as_tensor), ("full", _full)),
    ):
        register(names, handler)


_enter()
