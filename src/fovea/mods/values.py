"""What a mod's code meets while it is traced: traced tensors and captured numbers.

Lives here: `Traced`, `CapturedNumber` and the mode that sends every torch function to the tracer.
Not here: what the functions mean (`operators.py`, `indexing.py`). Invariant: nothing here decides
by a traced value; a captured number gives its value away only through `NumberRecord.fix`, which
remembers it.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fovea.errors import TraceError
from fovea.mods.builder import Term
from fovea.mods.graph import TORCH_DTYPE

Recipe = tuple[Any, ...]
_META = torch.device("meta")


class Dispatcher(Protocol):
    """The part of the tracer that values call."""

    heads: list[Any]

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the traced result of a torch function."""
        ...


class Share:
    """What a traced value and its views have in common: the number of changes in place so far."""

    __slots__ = ("line", "version")

    def __init__(self) -> None:
        self.version = 0
        self.line = ""  # of the last change


class Traced(Tensor):
    """A 0-d tensor (or a row of a captured one) whose value is known at run time only.

    It is a tensor subclass, so that Dynamo treats it as a tensor in comparisons with symbolic
    numbers. Its device is meta: whatever escapes the tracer cannot pass for data.
    """

    fovea_tracer: Dispatcher
    fovea_term: Term
    fovea_share: Share
    fovea_version: int  # the share's, when the term was last right

    @classmethod
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tracer_among(args, kwargs or {}).dispatch(func, args, kwargs or {})

    # Dynamo's abs() would run on the storage
    def __abs__(self) -> Tensor:
        return torch.abs(self)

    # math.floor and its like look these up; Tensor has none of them
    def __floor__(self) -> Tensor:
        return torch.floor(self)

    def __ceil__(self) -> Tensor:
        return torch.ceil(self)

    def __trunc__(self) -> Tensor:
        return torch.trunc(self)

    def __round__(self, digits: int = 0) -> Tensor:
        return torch.round(self, decimals=digits)

    # torch has neither: its error would name this class
    def __divmod__(self, other: Any) -> Any:
        return self.fovea_tracer.dispatch(divmod, (self, other), {})

    def __rdivmod__(self, other: Any) -> Any:
        return self.fovea_tracer.dispatch(divmod, (other, self), {})


class EagerTraced(Traced):
    """A traced value outside Dynamo: it has no storage at all, so no dispatch mode sees it made."""

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise TraceError(
            f"{func} reached a traced value while torch functions are disabled; do not disable "
            "__torch_function__ inside a mod"
        )


def make_traced(tracer: Dispatcher, term: Term, shape: tuple[int, ...] = ()) -> Traced:
    """Return a value of user code for a term."""
    if not torch.compiler.is_dynamo_compiling():
        traced = Tensor._make_wrapper_subclass(  # pyright: ignore
            EagerTraced, (), dtype=TORCH_DTYPE[term.dtype], device=_META
        )
    else:
        # Dynamo runs abs() and the unpacking of a row on the storage, without asking Traced. So the
        # storage names its node by its last two extents: see `escaped`.
        tagged = (*shape, term.node + 1, len(shape) + 2)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            storage = torch.empty(tagged, dtype=torch.complex64, device="meta")
            traced = storage.as_subclass(Traced)
    traced.fovea_tracer = tracer
    traced.fovea_term = term
    traced.fovea_share = Share()
    traced.fovea_version = 0
    return traced


def made_for(h: Tensor, heads: int) -> Tensor:
    """Return h, the head, of a mod that is made for so many heads; a call with more then raises.

    For a formula in place of a table: a table is checked by its extent.
    """
    if isinstance(h, Traced):
        number: Any = heads  # a captured one while a mod is traced
        is_recorded = type(number) is CapturedNumber
        h.fovea_tracer.heads.append(number.fovea_recipe if is_recorded else number)
    return h


def escaped(value: Tensor) -> tuple[str, int] | None:
    """Return what Dynamo computed on a traced value's storage: ("abs" or "item", node).

    The storage is complex, and abs is the one function of it that gives a float of its shape.
    """
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        if value.device.type != "meta" or value.dim() < 2:
            return None
        rank = value.shape[-1] - 2
        node = value.shape[-2] - 1
        if value.dtype == torch.float32 and rank == value.dim() - 2:
            return ("abs", node)
        if value.dtype == torch.complex64 and rank == value.dim() - 1:
            return ("item", node)
        return None


def tracer_among(args: Any, kwargs: dict[str, Any]) -> Dispatcher:
    """Return the tracer of the first traced value among arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Traced):
            return value.fovea_tracer
        if isinstance(value, (tuple, list)):
            for inner in value:  # pyright: ignore[reportUnknownVariableType]
                if isinstance(inner, Traced):
                    return inner.fovea_tracer
    raise AssertionError("a torch function reached Traced without a traced argument")


class TracingMode(TorchFunctionMode):
    """Sends every torch function called inside a mod to the tracer."""

    def __init__(self, tracer: Dispatcher):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.tracer.dispatch(func, args, kwargs or {})


# ---------------------------------------------------------------------------- captured numbers


class NumberRecord(Protocol):
    """Where captured numbers report that Python code looked at their value."""

    def fix(self, recipe: Recipe, value: bool | int | float) -> None:
        """Remember that the trace holds only while the recipe gives this value."""
        ...


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "truth": bool,
}
_SYMBOL = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}


def cook(recipe: Recipe, numbers: list[int | float], tensors: list[Tensor]) -> bool | int | float:
    """Return the value of a recipe, given the captured numbers and tensors of this call."""
    kind = recipe[0]
    if kind == "number":
        return numbers[recipe[1]]
    if kind == "literal":
        return recipe[2]
    if kind == "size":
        return tensors[recipe[1]].shape[recipe[2]]
    return _ARITHMETIC[kind](*(cook(part, numbers, tensors) for part in recipe[1:]))


def recipe_text(recipe: Recipe, names: list[str]) -> str:
    """Return a recipe as a reader would write it."""
    kind = recipe[0]
    if kind == "number":
        return names[recipe[1]]
    if kind == "literal":
        return repr(recipe[2])
    if kind == "size":
        return f"size({recipe[2]}) of captured tensor {recipe[1]}"
    parts = [recipe_text(part, names) for part in recipe[1:]]
    if kind in _SYMBOL:
        return f"({parts[0]} {_SYMBOL[kind]} {parts[1]})"
    return f"{kind}({', '.join(parts)})"


def _binary(name: str) -> Any:
    def method(self: "CapturedNumber", other: Any) -> Any:
        return self.combine(name, other, False)

    return method


def _reflected(name: str) -> Any:
    def method(self: "CapturedNumber", other: Any) -> Any:
        return self.combine(name, other, True)

    return method


def _unary(name: str) -> Any:
    def method(self: "CapturedNumber") -> "CapturedNumber":
        value = _ARITHMETIC[name](self.fovea_value)
        return CapturedNumber(value, (name, self.fovea_recipe), self.fovea_record)

    return method


class CapturedNumber:
    """A Python int or float from a closure cell or a default: a run-time scalar of the graph.

    Arithmetic with other numbers is recorded as a recipe and done on the host; Python code that
    needs the value itself (an `if`, a `range`, `math.sqrt`) gets it, and the record keeps a note.
    """

    __slots__ = ("fovea_recipe", "fovea_record", "fovea_value")

    def __init__(self, value: bool | int | float, recipe: Recipe, record: NumberRecord):
        self.fovea_value = value
        self.fovea_recipe = recipe
        self.fovea_record = record

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # isinstance(x, int) holds as it does for the number itself
        return type(self.fovea_value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tracer_among(args, kwargs or {}).dispatch(func, args, kwargs or {})

    def combine(self, name: str, other: Any, reflected: bool) -> Any:
        """Return a derived number, or NotImplemented so that a tensor may take over."""
        if type(other) is CapturedNumber:
            value, recipe = other.fovea_value, other.fovea_recipe
        elif type(other) in (bool, int, float):
            value, recipe = other, ("literal", type(other).__name__, other)
        else:
            return NotImplemented
        values, recipes = [self.fovea_value, value], [self.fovea_recipe, recipe]
        if reflected:
            values.reverse()
            recipes.reverse()
        result = _ARITHMETIC[name](*values)
        return CapturedNumber(result, (name, *recipes), self.fovea_record)

    def fixed(self) -> Any:
        """Return the value and record that the trace depends on it."""
        self.fovea_record.fix(self.fovea_recipe, self.fovea_value)
        return self.fovea_value

    def __bool__(self) -> bool:
        # Only the truth is needed: `if w > 0` holds for every positive w, `if w` for every other
        self.fovea_record.fix(
            ("ne", self.fovea_recipe, ("literal", "int", 0)), bool(self.fovea_value)
        )
        return bool(self.fovea_value)

    def __index__(self) -> int:
        return operator.index(self.fixed())

    def __int__(self) -> int:
        return int(self.fixed())

    def __float__(self) -> float:
        return float(self.fixed())

    def __complex__(self) -> complex:
        return complex(self.fixed())

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __str__(self) -> str:
        return str(self.fixed())

    def __repr__(self) -> str:
        return repr(self.fixed())

    def __format__(self, form: str) -> str:
        return format(self.fixed(), form)

    def __getattr__(self, name: str) -> Any:
        # int and float methods such as is_integer or bit_length
        return getattr(self.fixed(), name)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        if digits is not None:
            return round(self.fixed(), digits)
        return CapturedNumber(
            round(self.fovea_value), ("round", self.fovea_recipe), self.fovea_record
        )

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("truediv"), _reflected("truediv")
    __floordiv__, __rfloordiv__ = _binary("floordiv"), _reflected("floordiv")
    __mod__, __rmod__ = _binary("mod"), _reflected("mod")
    __pow__, __rpow__ = _binary("pow"), _reflected("pow")
    __and__, __rand__ = _binary("and"), _reflected("and")
    __or__, __ror__ = _binary("or"), _reflected("or")
    __xor__, __rxor__ = _binary("xor"), _reflected("xor")
    __lshift__, __rlshift__ = _binary("lshift"), _reflected("lshift")
    __rshift__, __rrshift__ = _binary("rshift"), _reflected("rshift")
    __lt__, __le__ = _binary("lt"), _binary("le")
    __gt__, __ge__ = _binary("gt"), _binary("ge")
    __eq__, __ne__ = _binary("eq"), _binary("ne")
    __neg__, __pos__, __invert__ = _unary("neg"), _unary("pos"), _unary("invert")
    __abs__, __floor__ = _unary("abs"), _unary("floor")
    __ceil__, __trunc__ = _unary("ceil"), _unary("trunc")


def flat_values(args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield arguments, those inside tuples, lists and slices too."""
    for value in (*args, *kwargs.values()):
        if type(value) in (tuple, list):
            yield from flat_values(value, {})
        elif type(value) is slice:
            yield value.start
            yield value.stop
            yield value.step
        else:
            yield value
