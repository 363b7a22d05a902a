"""How a call of a torch function looks: its name, its arguments, its place in the user's code.

Lives here: argument names made positional, names as errors show them, the user's line. Not here:
what the function means (`operators.py`), what it changes (`changes.py`). Invariant: nothing here
looks at a traced value.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import os
import re
import sys
import traceback
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from fovea.mods.handlers import OPERATORS
from fovea.mods.values import CapturedNumber

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def positional(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with torch's usual names for operands made positional."""
    if "axis" in kwargs or "keepdims" in kwargs:  # torch takes NumPy's names too
        names = {"axis": "dim", "keepdims": "keepdim"}
        kwargs = {names.get(name, name): value for name, value in kwargs.items()}
    if "input" in kwargs:
        args = (kwargs["input"], *args)
    for name in ("other", "exponent", "mask", "value", "mat2", "tensor"):
        if name in kwargs:
            args = (*args, kwargs[name])
    rest = {
        name: value
        for name, value in kwargs.items()
        if name not in ("input", "other", "exponent", "mask", "value", "mat2", "tensor")
    }
    return args, rest


def plain(values: Any) -> Any:
    """Return values with captured numbers replaced by what they are now."""
    if type(values) is CapturedNumber:
        return values.fixed()
    if type(values) in (tuple, list):
        return type(values)(plain(value) for value in values)
    if type(values) is dict:
        return {name: plain(value) for name, value in values.items()}  # pyright: ignore[reportUnknownVariableType]
    if type(values) is slice:
        return slice(plain(values.start), plain(values.stop), plain(values.step))
    return values


# Methods that Python calls for a piece of syntax or a builtin: what the user wrote.
_WRITTEN = {
    "__bool__": "bool(...)",
    "__int__": "int(...)",
    "__float__": "float(...)",
    "__complex__": "complex(...)",
    "__index__": "operator.index(...)",
    "__contains__": "... in tensor",
    "__setitem__": "tensor[...] = ...",
    "__array__": "numpy.asarray(...)",
}


def function_name(function: Any) -> str:
    """Return a torch function's name as an error shows it: torch.rand, Tensor.item, bool(...)."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__") and owner is not None:
        return f"the attribute {owner.__name__}"
    if name in _WRITTEN:
        return _WRITTEN[name]
    text = str(getattr(function, "__qualname__", name or function))
    if text.startswith("pybind11_"):  # torch.ops.aten.NAME
        return str(function)
    return text.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


def form_problem(error: TypeError) -> str:
    """Return why Python refused the arguments of a handler, without the handler's own name."""
    text = re.sub(r"^\S*\(\) ", "", str(error))
    return re.sub(r"^takes .* positional arguments? but .*$", "too many arguments", text)


def operator_by_name(function: Any) -> Any:
    """Return the handler of torch.ops.aten.NAME, or of a registered operator."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return None
    name = str(function).split(".")
    space, base = name[0], name[1]
    if space == "aten":
        for owner in (torch, Tensor, torch.nn.functional, torch.special):
            handler = OPERATORS.get(getattr(owner, base, None))
            if handler is not None:
                return handler
    return OPERATORS.get(f"{space}::{base}")


def problem_in_torch(error: Exception) -> str | None:
    """Return what to say where torch itself failed inside a mod, None of the mod's own errors.

    Torch's higher-order functions (cond, while_loop, vmap) know nothing of traced values.
    """
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [number for _, number in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_code.co_filename for frame in frames]
    if "EagerTraced" not in text and not names[-1].startswith(_TORCH):
        return None
    last = max([place for place, name in enumerate(names) if _is_of_user(name)], default=0)
    called = [
        frame.f_code.co_qualname.partition(".<locals>")[0]
        for frame in frames[last + 1 :]
        if frame.f_code.co_filename.startswith(_TORCH)
    ]
    what = f"{called[0]} cannot be traced in a mod" if called else "a mod failed"
    return (
        f"{what} ({text.replace('EagerTraced', 'traced value')}); write it with elementwise torch "
        f"functions, torch.where in place of a branch [{names[last]}:{lines[last]}]"
    )


def _is_of_user(name: str) -> bool:
    """Return whether a file is neither ours nor torch's."""
    return not name.startswith((_HERE, _TORCH)) or name.startswith(os.path.join(_HERE, "library"))


def user_line() -> str:
    """Return file:line of the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_of_user(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
