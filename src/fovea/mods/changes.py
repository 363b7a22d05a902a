"""Changes in place: what a torch function would change, and which values see the change.

Lives here: the names that ask for a change (`add_`, `inplace=True`, `out=`), shares between a value
and its views, tensors that a mod made for itself. Not here: the change itself (`tracer.py`).
Invariant: a value that a change through another one would have changed is never read again.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.builder import FLOATS, GraphBuilder, Term
from fovea.mods.values import Traced, flat_values

# Functions whose result may be a view of their first argument, or that argument itself.
ALIASING = frozenset(
    (
        *("__getitem__", "getitem", "select", "unbind", "__iter__", "unsqueeze", "squeeze"),
        *("permute", "transpose", "swapaxes", "swapdims", "t", "__get__", "expand", "expand_as"),
        *("broadcast_to", "reshape", "view", "detach", "contiguous", "cpu", "cuda", "positive"),
        *("__pos__", "pos", "to", "type", "type_as", "bool", "byte", "char", "short", "int"),
        *("as_tensor", "einsum", "long", "half", "bfloat16", "float", "double"),
    )
)
_RESHAPING = ("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_")
_AUGMENTED = frozenset(
    f"{lead}i{name}{end}"
    for name in (
        *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
    for lead, end in (("__", "__"), ("", ""))
)
_ITEM = frozenset(("__setitem__", "setitem", "__set__", "__delitem__"))


_CHANGING = (
    frozenset(
        name
        for space in (Tensor, torch, torch.nn.functional, torch.nn.init)
        for name in dir(space)
        if name.endswith("_") and not name.endswith("__")
    )
    | _AUGMENTED
    | _ITEM
)


def _inplace_places() -> dict[str, int]:
    """Return where torch.nn.functional's functions take `inplace`, by their own names."""
    places: dict[str, int] = {}
    for name in dir(torch.nn.functional):
        function = getattr(torch.nn.functional, name)
        code = getattr(function, "__code__", None)
        if code is not None and "inplace" in code.co_varnames[: code.co_argcount]:
            places[function.__name__] = code.co_varnames.index("inplace")
    return places


_INPLACE_PLACE = _inplace_places()


def _argument(args: Any, kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def wants_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `inplace=True` was passed to an activation, by name or by position."""
    if name not in _INPLACE_PLACE:
        return False
    return bool(_argument(args, kwargs, _INPLACE_PLACE[name], "inplace"))


def changed_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a torch function of this name would change."""
    found: list[Any] = []
    changes = name in _CHANGING or wants_in_place(name, args, kwargs)
    # Dynamo knows the name to compare it alone; custom operators are in no list
    if not changes and not torch.compiler.is_dynamo_compiling():
        changes = name.endswith("_") and not name.endswith("__")
    if changes:
        found += args[:1] if args else [kwargs.get("input", kwargs.get("tensor"))]
    if kwargs.get("out") is not None:
        found.append(kwargs["out"])
    if name in ("embedding", "embedding_bag") and _argument(args, kwargs, 3, "max_norm"):
        found.append(_argument(args, kwargs, 1, "weight"))
    return [value for value in flat_values(found, {}) if isinstance(value, Tensor)]


# ------------------------------------------------------------------------------- traced values


def is_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether .to() was told to copy."""
    if name != "to":
        return False
    place = 3 if len(args) > 1 and isinstance(args[1], (torch.dtype, Tensor)) else 4
    return bool(_argument(args, kwargs, place, "copy"))


def current_term(value: Traced) -> Term:
    """Return a traced value's term, unless a view of it, or what it is a view of, has changed."""
    share = value.fovea_share
    if share.version != value.fovea_version:
        raise TraceError(
            f"a value is read after another one that shares its elements was changed in place"
            f"{share.line} (a view such as y[0], y.view(1) or y.detach(), or what it is a view "
            "of); write y = y + 1 in place of y.add_(1) or y += 1"
        )
    return value.fovea_term


def check_stored(builder: GraphBuilder, name: str, old: Term, new: Term) -> None:
    """Raise where torch would refuse to store a result in the value that it changes."""
    shapes = (list(builder.shape(old)), list(builder.shape(new)))
    if name not in _RESHAPING and shapes[0] != shapes[1]:
        raise TraceError(
            f"{name} cannot store a result of shape {shapes[1]} in a value of shape {shapes[0]}; "
            "use the function without the trailing underscore"
        )
    loses = new.dtype in FLOATS and old.dtype not in FLOATS
    if loses or (old.dtype == "b1" and new.dtype != "b1"):
        raise TraceError(
            f"{name} cannot store a result of dtype {new.dtype} in a value of dtype {old.dtype}; "
            "use the function without the trailing underscore"
        )


# -------------------------------------------------------------------------------- real tensors


# Functions whose result may share memory with something that is no tensor.
_BORROWING = frozenset(("from_numpy", "frombuffer", "from_dlpack", "as_tensor", "asarray", "set_"))


class OwnTensors:
    """The real tensors that a mod made while it was traced: it may change these, and no others."""

    def __init__(self, compiling: bool) -> None:
        self.compiling = compiling
        self.tensors: list[Tensor] = []  # kept alive: storages are told apart by address
        self.storages: set[int] = set()

    def noted(self, name: str, inputs: Any, result: Any) -> Any:
        """Return a function's result after remembering the new tensors in it."""
        if name in _BORROWING:
            return result
        given = [value for value in inputs if isinstance(value, Tensor)]
        if self.compiling:
            # Dynamo has no storages: what was made from no tensor is surely new
            if not given and isinstance(result, Tensor):
                self.tensors.append(result)
            return result
        borrowed = {_storage(tensor) for tensor in given}
        for tensor in flat_values((result,), {}):
            if isinstance(tensor, Tensor) and _storage(tensor) not in (None, *borrowed):
                self.tensors.append(tensor)
                self.storages.add(_storage(tensor) or 0)
        return result

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise unless the mod made this tensor itself."""
        if self.compiling:
            if any(tensor is known for known in self.tensors):
                return
        elif _storage(tensor) in self.storages:
            return
        raise TraceError(
            f"{name} would change a captured tensor, which cannot be changed inside a mod; change "
            "it outside, or use the form that returns a new tensor (without the trailing "
            "underscore, inplace=, out= or max_norm=)"
        )


def _storage(tensor: Tensor) -> int | None:
    """Return what tells a tensor's storage from others, None where it has none."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        try:
            return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        except (NotImplementedError, RuntimeError):
            return None
