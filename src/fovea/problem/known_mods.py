"""Mods traced before: what one captures, read straight from its cells.

Lives here: a reader made for one traced function, which finds the captured tensors and numbers of a
later call, or says that the trace may not hold. Not here: what a trace depends on
(`mods/closures.py`, whose survey a reader repeats for the kinds of values that most mods capture).
Invariant: a reader that returns something returns what a survey would find, and the survey's key
would be that of the trace; whatever it does not know sends the call to the survey. It holds no
tensor and no function of the user's, only code, constants and modules.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fovea.mods.closures import (
    Plan,
    code_facts,
    has_attributes,
    reuse,
    same,
    survey,
)
from fovea.mods.gathers import direct_gathers
from fovea.mods.graph import DTYPE_NAME
from fovea.mods.trace import TracedMod
from fovea.mods.values import Recipe, cook, made_for

Read = tuple[list[Tensor], tuple[int | float, ...]]

_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_PLAIN_TYPES = (bool, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 8


class _Unknown(Exception):
    """A mod captures something that readers leave to the survey."""


class _Tensor(NamedTuple):
    """A captured tensor; its shape decides whether gathers stay inside."""

    kind: type
    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        tensors.append(value)
        return (
            type(value) is self.kind
            and value.dtype is self.dtype
            and value.shape == self.shape
            and value.requires_grad is self.requires_grad
        )


class _Number(NamedTuple):
    """A run-time scalar: free to change its value."""

    kind: type

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        numbers.append(value)
        return type(value) is self.kind


class _Constant(NamedTuple):
    """A number of the trace itself: the same by its bits."""

    value: int | float

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return type(value) is type(self.value) and same(value, self.value)


class _Plain(NamedTuple):
    kind: type
    value: Any

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return type(value) is self.kind and value == self.value


class _Same(NamedTuple):
    """A module, builtin, class, or function of torch or fovea's own."""

    value: Any

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return value is self.value


class _Sequence(NamedTuple):
    kind: type
    parts: tuple[Any, ...]

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        if type(value) is not self.kind or len(value) != len(self.parts):
            return False
        for part, inner in zip(self.parts, value, strict=True):
            if not part.read(inner, tensors, numbers):
                return False
        return True


class _Function(NamedTuple):
    """A plain function: parts of its cells, defaults, keyword defaults and globals.

    A global whose part is None did not exist: its name is a builtin's.
    """

    code: CodeType
    cells: tuple[Any, ...]
    defaults: tuple[Any, ...]
    words: tuple[tuple[str, Any], ...]
    names: tuple[tuple[str, Any], ...]

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        if type(value) is not FunctionType or value.__code__ is not self.code:
            return False
        if self.cells:
            # The code decides the number of cells. An empty one raises ValueError.
            for part, cell in zip(self.cells, value.__closure__ or (), strict=True):
                if not part.read(cell.cell_contents, tensors, numbers):
                    return False
        if value.__defaults__ or self.defaults:
            defaults = value.__defaults__ or ()
            if len(defaults) != len(self.defaults):
                return False
            for part, default in zip(self.defaults, defaults, strict=True):
                if not part.read(default, tensors, numbers):
                    return False
        if value.__kwdefaults__ or self.words:
            words = value.__kwdefaults__ or {}
            if tuple(words) != tuple([word for word, _ in self.words]):
                return False
            for word, part in self.words:
                if not part.read(words[word], tensors, numbers):
                    return False
        return not self.names or self._reads_globals(value.__globals__, tensors, numbers)

    def _reads_globals(
        self, space: dict[str, Any], tensors: list[Tensor], numbers: list[int | float]
    ) -> bool:
        for name, part in self.names:
            if part is None:
                if name in space:
                    return False
            elif name not in space or not part.read(space[name], tensors, numbers):
                return False
        return True


class ModReader:
    """Finds what a traced mod reads in this call, or that it has to be surveyed again.

    Attributes:
        code: of the function; as long as the reader lives, so does its id.
    """

    __slots__ = (
        "_aliases",
        "_captures",
        "_default_dtype",
        "_direct",
        "_function",
        "_guards",
        "_heads",
        "_pinned",
        "_recipes",
        "code",
    )

    def __init__(
        self, function: _Function, plan: Plan, tensors: list[Tensor], traced: TracedMod
    ) -> None:
        self.code = function.code
        self._function = function
        self._aliases = _aliases(tensors)
        self._captures = plan.captures
        self._default_dtype = torch.get_default_dtype()
        self._guards = plan.guards
        # Of other numbers of heads, or other numbers in an index, the checks may say no.
        self._heads = [(n, known) for n, known in zip(plan.heads, traced.heads, strict=True)]
        is_pinned = any(not gather.is_plain for gather in direct_gathers(plan.graph))
        self._pinned = traced.scalars if is_pinned else None
        self._recipes: tuple[Recipe, ...] = plan.scalars
        # Places of the scalars among the numbers, where each is one of them unchanged.
        is_direct = all(recipe[0] == "number" for recipe in plan.scalars)
        self._direct = tuple([recipe[1] for recipe in plan.scalars]) if is_direct else None

    def read(self, mod: Any, device: torch.device) -> Read | None:
        """Return (captured tensors, run-time scalars) of a call on `device`; None: survey again.

        Raises:
            ValueError: a cell of the function is empty.
        """
        tensors: list[Tensor] = []
        numbers: list[int | float] = []
        if not self._function.read(mod, tensors, numbers):
            return None
        if torch.get_default_dtype() is not self._default_dtype:
            return None
        if len(tensors) > 1 and _aliases(tensors) != self._aliases:
            return None
        for recipe, value in self._guards:
            if not same(cook(recipe, numbers, tensors), value):
                return None
        for recipe, heads in self._heads:
            if isinstance(recipe, tuple) and cook(recipe, numbers, tensors) != heads:
                return None
        captures = [tensors[place] for place in self._captures]
        for capture in captures:
            if capture.layout is not torch.strided or (
                capture.device != device and not _is_host_number(capture)
            ):
                return None
        if self._direct is not None:
            scalars = tuple([numbers[place] for place in self._direct])
        else:
            scalars = tuple([cook(recipe, numbers, tensors) for recipe in self._recipes])
        return None if self._pinned not in (None, scalars) else (captures, scalars)


def reader_of(
    mod: object, traced: TracedMod, score_dtype: torch.dtype, device: torch.device
) -> ModReader | None:
    """Return a reader of a mod that was just traced, None where it has to be surveyed every time.

    Args:
        mod: the user's function.
        traced: what the trace gave.
        score_dtype: as `trace_score_mod` takes it.
        device: of the call.
    """
    if type(mod) is not FunctionType:
        return None
    kind = traced.graph.kind
    dtype = DTYPE_NAME[score_dtype] if kind == "score" else "b1"
    found = survey(mod, (kind, dtype, torch.get_default_dtype(), device))
    plan = reuse(found)
    if plan is None or plan.graph is not traced.graph:
        return None
    try:
        function = _part_of_function(mod, True, 0)
    except _Unknown:
        return None
    tensors: list[Tensor] = []
    numbers: list[int | float] = []
    is_read = function.read(mod, tensors, numbers)
    # The reader has to see exactly what the survey saw.
    if not is_read or len(tensors) != len(found.tensors) or len(numbers) != len(found.numbers):
        return None
    if any(one is not other for one, other in zip(tensors, found.tensors, strict=True)):
        return None
    if any(one is not other for one, other in zip(numbers, found.numbers, strict=True)):
        return None
    return ModReader(function, plan, tensors, traced)


def _is_host_number(capture: Tensor) -> bool:
    return capture.dim() == 0 and capture.is_cpu and not capture.requires_grad


def _aliases(tensors: list[Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the place of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor), n) for n, tensor in enumerate(tensors)])


def _part_of(value: Any, free: bool, depth: int) -> Any:
    """Return what has to be read of a captured value; numbers are run-time ones where `free`."""
    kind: Any = type(value)
    if depth > _MAX_DEPTH:
        raise _Unknown
    if kind is int or kind is float:
        return _Number(kind) if free else _Constant(value)
    if kind in _TENSOR_TYPES:
        return _Tensor(kind, value.dtype, value.shape, value.requires_grad)
    if value is made_for:
        return _Same(value)
    if kind is FunctionType:
        if not (value.__module__ or "").startswith("torch."):
            return _part_of_function(value, free, depth)
        if not free:
            return _Same(value)
    elif kind in _PLAIN_TYPES:
        return _Plain(kind, value)
    elif kind in (ModuleType, BuiltinFunctionType) or (
        kind is type and value.__module__ in ("builtins", "torch")
    ):
        return _Same(value)
    elif kind is tuple or kind is list:
        parts = [_part_of(inner, free and callable(inner), depth + 1) for inner in value]
        return _Sequence(kind, tuple(parts))
    raise _Unknown


def _part_of_function(fn: FunctionType, free: bool, depth: int) -> _Function:
    code = fn.__code__
    facts = code_facts(code)
    cells: list[Any] = []
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            raise _Unknown from None
        if content is fn or (name in facts.chains and has_attributes(content)):
            raise _Unknown
        cells.append(_part_of(content, free, depth + 1))
    names: list[tuple[str, Any]] = []
    for name in facts.global_names:
        if name not in fn.__globals__:
            names.append((name, None))
            continue
        content = fn.__globals__[name]
        if content is fn:
            raise _Unknown
        is_tensor = isinstance(content, Tensor)
        names.append((name, _part_of(content, free and is_tensor, depth + 1)))
    words = fn.__kwdefaults__ or {}
    return _Function(
        code,
        tuple(cells),
        tuple([_part_of(default, free, depth + 1) for default in fn.__defaults__ or ()]),
        tuple([(word, _part_of(default, free, depth + 1)) for word, default in words.items()]),
        tuple(names),
    )
