"""Checks of what the library's factories are given, before a mod is made of it.

Lives here: the kinds of argument that factories have. Not here: what a call asks of a mod, such as
a table long enough for its heads (`gathers.py`). Invariant: contents of tensors are never read.
"""

import math
from numbers import Integral, Real
from typing import Any

import torch

from fovea.errors import invalid


def check_number(name: str, value: Any, least: float) -> None:
    """Raise unless a value is a number above `least`, or a tensor of one.

    Raises:
        TypeError: it is neither.
        ValueError: it is too small, or a tensor of several.
    """
    allowed = f"a number above {least:g}"
    if isinstance(value, torch.Tensor):
        _check_one(name, value)
        return
    if isinstance(value, bool) or not isinstance(value, Real | torch.SymInt | torch.SymFloat):
        raise TypeError(_of_wrong_type(name, value, allowed))
    if value <= least:
        raise ValueError(invalid(name, value, allowed, "correct it"))


def check_integer(name: str, value: Any, least: float = -math.inf) -> None:
    """Raise unless a value is an integer of at least `least`, or a tensor of one.

    Raises:
        TypeError: it is neither.
        ValueError: it is too small, or a tensor of several.
    """
    allowed = "an integer" if least == -math.inf else f"an integer of at least {least:g}"
    if isinstance(value, torch.Tensor):
        _check_one(name, value)
        _check_integers(name, value)
        return
    if isinstance(value, bool) or not isinstance(value, Integral | torch.SymInt):
        raise TypeError(_of_wrong_type(name, value, allowed))
    if value < least:
        raise ValueError(invalid(name, value, allowed, "correct it"))


def _check_one(name: str, value: torch.Tensor) -> None:
    if value.dim() > 0:
        got = tuple(value.shape)
        raise ValueError(invalid(f"{name}.shape", got, "()", "pass one number"))


def _of_wrong_type(name: str, value: Any, allowed: str) -> str:
    return invalid(name, repr(value), allowed, f"pass one, not {type(value).__name__}")


def check_tensor(name: str, value: Any, *ranks: int, is_index: bool = False) -> None:
    """Raise unless a value is a tensor of one of these ranks, of integers where it is an index.

    Raises:
        TypeError: it is no tensor, or not of integers.
        ValueError: it has another rank.
    """
    if not isinstance(value, torch.Tensor):
        got = type(value).__name__
        raise TypeError(invalid(name, got, "a tensor", f"pass torch.tensor({name})"))
    if value.dim() not in ranks:
        allowed = f"{' or '.join(map(str, ranks))} dimensions"
        raise ValueError(
            invalid(f"{name}.shape", tuple(value.shape), allowed, "reshape the tensor")
        )
    if is_index:
        _check_integers(name, value)


def _check_integers(name: str, value: torch.Tensor) -> None:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        raise TypeError(invalid(f"{name}.dtype", value.dtype, "integers", f"pass {name}.long()"))
