"""Checks of what the library's factories are given, before a mod is made of it.

Lives here: the kinds of argument that factories have. Not here: what a call asks of a mod, such as
a table long enough for its heads (`gathers.py`). Invariant: contents of tensors are not read, but
for offsets, of which tables are made at once, where contents are checked.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch

from fovea.errors import invalid
from fovea.mods.evaluate import is_checked
from fovea.mods.trace import check_arity


def check_number(name: str, value: Any, least: float) -> None:
    """Raise unless a value is a number above `least`, or a tensor of one.

    Raises:
        TypeError: it is neither.
        ValueError: it is too small, or a tensor of several.
    """
    allowed = f"a finite number above {least:g}"
    if isinstance(value, torch.Tensor):
        _check_one(name, value)
        return
    if isinstance(value, bool) or not isinstance(value, Real | torch.SymInt | torch.SymFloat):
        raise TypeError(_of_wrong_type(name, value, allowed))
    if value <= least or value != value or value == math.inf:
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


def check_flags(name: str, value: Any, *ranks: int) -> None:
    """Raise unless a value is a bool tensor of one of these ranks.

    Raises:
        TypeError: it is no tensor, or not of bools.
        ValueError: it has another rank.
    """
    check_tensor(name, value, *ranks)
    if value.dtype != torch.bool:
        raise TypeError(invalid(f"{name}.dtype", value.dtype, "torch.bool", f"pass {name}.bool()"))


def check_mod(name: str, value: Any, kind: str = "mask") -> None:
    """Raise TraceError unless a value is a function with the arguments of a mod.

    Inside `torch.compile`, which cannot look at signatures, the call of the mod tells.
    """
    if not torch.compiler.is_compiling():
        check_arity(kind, value, name)


def check_odd(name: str, value: Any) -> None:
    """Raise ValueError unless an integer is odd; it is at least 1 and no bool already."""
    if not isinstance(value, torch.Tensor) and value % 2 == 0:
        remedy = f"pass {value - 1} or {value + 1}"
        raise ValueError(invalid(name, value, "an odd integer", remedy))


def check_extents(name: str, value: Any, count: int) -> None:
    """Raise unless a value is a tuple of so many positive integers.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != count:
        allowed = f"a tuple of {count} positive integers"
        raise TypeError(invalid(name, repr(value), allowed, "pass one number for each dimension"))
    for place, extent in enumerate(value):
        check_integer(f"{name}[{place}]", extent, 1)


def check_multiple(name: str, value: Sequence[int], tile: Sequence[int]) -> None:
    """Raise ValueError unless every extent is a multiple of the tile's."""
    if any(extent % size for extent, size in zip(value, tile, strict=True)):
        whole = tuple(-(-extent // size) * size for extent, size in zip(value, tile, strict=True))
        allowed = f"multiples of tile={tuple(tile)}"
        raise ValueError(invalid(name, tuple(value), allowed, f"pass {whole}, or another tile"))


def check_offsets(name: str, value: Any) -> None:
    """Raise unless a value holds cumulative lengths that start at 0, as `offsets_of` returns them.

    Raises:
        TypeError: it is no tensor, or not of integers.
        ValueError: it has another rank, does not start at 0, or decreases somewhere.
    """
    check_tensor(name, value, 1, is_index=True)
    if torch.compiler.is_compiling() or not is_checked(value):
        return
    numbers: list[int] = value.tolist()
    if numbers[:1] != [0] or any(b < a for a, b in pairwise(numbers)):
        got = str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"
        allowed = "0, then the ends of the documents, none less than the one before"
        raise ValueError(invalid(name, got, allowed, "pass offsets_of(lengths)"))
