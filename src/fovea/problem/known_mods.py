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
from torch.nn import Parameter

from fovea.mods.closures import (
    Plan,
    code_facts,
    has_attributes,
    reuse,
    same,
    survey,
)
from fovea.mods.gathers import direct_gathers
from fovea.mods.trace import TracedMod
from fovea.mods.values import Recipe, cook, made_for
from fovea.problem.value import AttentionProblem

Scalars = tuple[int | float, ...]
# What is expected of a captured value: its type, and None for a run-time number, else one of the
# classes below. A tuple, since reading one has to cost little.
Part = tuple[type, Any]

_TENSOR_TYPES = (Tensor, Parameter)
_PLAIN_TYPES = (bool, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 8


class _Unknown(Exception):
    """A mod captures something that readers leave to the survey."""


class _Tensor(NamedTuple):
    """A captured tensor; its shape decides whether gathers stay inside."""

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    layout: torch.layout
    device: torch.device


class _Constant(NamedTuple):
    """A number of the trace itself: the same by its bits."""

    value: int | float

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return same(value, self.value)


class _Plain(NamedTuple):
    value: Any

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return value == self.value


class _Same(NamedTuple):
    """A module, builtin, class, or function of torch or fovea's own."""

    value: Any

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return value is self.value


class _Sequence(NamedTuple):
    parts: tuple[Part, ...]

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        return _read(self.parts, value, tensors, numbers)


class _Function(NamedTuple):
    """A plain function: parts of its cells, defaults, keyword defaults and globals.

    A global whose part is None did not exist: its name is a builtin's.
    """

    code: CodeType
    cells: tuple[Part, ...]
    defaults: tuple[Part, ...]
    words: tuple[tuple[str, Part], ...]
    names: tuple[tuple[str, Part | None], ...]

    def read(self, value: Any, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        code, cells, defaults, words, names = self
        if value.__code__ is not code:
            return False
        # The code decides the number of cells. An empty one raises ValueError.
        if cells and not _read(cells, value.__closure__, tensors, numbers, True):
            return False
        found = value.__defaults__
        if (found or defaults) and not _read(defaults, found or (), tensors, numbers):
            return False
        found = value.__kwdefaults__
        if (found or words) and not _read_words(words, found or {}, tensors, numbers):
            return False
        return not names or _read_globals(names, value.__globals__, tensors, numbers)


def _read(
    parts: tuple[Part, ...],
    values: Any,
    tensors: list[Tensor],
    numbers: list[int | float],
    are_cells: bool = False,
) -> bool:
    """Add the tensors and numbers among values to the lists; False where one is not expected."""
    if len(parts) != len(values):
        return False
    for (kind, expected), value in zip(parts, values):
        if are_cells:
            value = value.cell_contents
        if type(value) is not kind:
            return False
        if expected is None:
            numbers.append(value)
        elif kind is Tensor or kind is Parameter:
            dtype, shape, requires_grad, layout, device = expected
            if (
                value.dtype is not dtype
                or value.shape != shape
                or value.requires_grad is not requires_grad
                or value.layout is not layout
                or value.device != device
            ):
                return False
            tensors.append(value)
        elif not expected.read(value, tensors, numbers):
            return False
    return True


def _read_words(
    words: tuple[tuple[str, Part], ...],
    found: dict[str, Any],
    tensors: list[Tensor],
    numbers: list[int | float],
) -> bool:
    if tuple(found) != tuple([word for word, _ in words]):
        return False
    return _read(tuple([part for _, part in words]), tuple(found.values()), tensors, numbers)


def _read_globals(
    names: tuple[tuple[str, Part | None], ...],
    space: dict[str, Any],
    tensors: list[Tensor],
    numbers: list[int | float],
) -> bool:
    for name, part in names:
        if part is None:
            if name in space:
                return False
        elif name not in space or not _read((part,), (space[name],), tensors, numbers):
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
        self,
        function: _Function,
        plan: Plan,
        tensors: list[Tensor],
        traced: TracedMod,
        has_fixed_scalars: bool,
    ) -> None:
        self.code = function.code
        self._function = function
        self._aliases = _aliases(tensors)
        # None where every tensor is a capture, in order.
        self._captures = None if plan.captures == tuple(range(len(tensors))) else plan.captures
        self._default_dtype = torch.get_default_dtype()
        self._guards = plan.guards
        # Of other numbers of heads, or other numbers around an index, the checks may say no.
        self._heads = tuple(zip(plan.heads, traced.heads, strict=True))
        self._pinned = traced.scalars if has_fixed_scalars else None
        self._recipes: tuple[Recipe, ...] = plan.scalars
        # Places of the scalars among the numbers, where each is one of them unchanged.
        is_direct = all(recipe[0] == "number" for recipe in plan.scalars)
        self._direct = tuple([recipe[1] for recipe in plan.scalars]) if is_direct else None

    def read(self, mod: Any, captures: list[Tensor]) -> Scalars | None:
        """Return the run-time scalars of a call and add its captures; None: survey again.

        Raises:
            ValueError: a cell of the function is empty.
        """
        if type(mod) is not FunctionType:
            return None
        tensors: list[Tensor] = []
        numbers: list[int | float] = []
        if not self._function.read(mod, tensors, numbers):
            return None
        if torch.get_default_dtype() is not self._default_dtype:
            return None
        if len(tensors) > 1 and _aliases(tensors) != self._aliases:
            return None
        if (self._guards or self._heads) and not self._holds(tensors, numbers):
            return None
        if self._captures is None:
            captures += tensors
        else:
            captures += [tensors[place] for place in self._captures]
        if not self._recipes:
            return ()
        if self._direct is not None:
            scalars = tuple([numbers[place] for place in self._direct])
        else:
            scalars = tuple([cook(recipe, numbers, tensors) for recipe in self._recipes])
        return scalars if self._pinned is None or scalars == self._pinned else None

    def _holds(self, tensors: list[Tensor], numbers: list[int | float]) -> bool:
        """Return whether what Python code branched on, and the heads, are those of the trace."""
        for recipe, value in self._guards:
            if not same(cook(recipe, numbers, tensors), value):
                return False
        for recipe, heads in self._heads:
            if isinstance(recipe, tuple) and cook(recipe, numbers, tensors) != heads:
                return False
        return True


def reader_of(mod: object, traced: TracedMod, problem: AttentionProblem) -> ModReader | None:
    """Return a reader of a mod that was just traced, None where it has to be surveyed every time.

    Args:
        mod: the user's function.
        traced: what the trace gave.
        problem: the call that it was traced for.
    """
    if type(mod) is not FunctionType:
        return None
    kind = traced.graph.kind
    score_dtype = "f64" if problem.dtype == torch.float64 else "f32"
    dtype = score_dtype if kind == "score" else "b1"
    found = survey(mod, (kind, dtype, torch.get_default_dtype(), problem.device))
    plan = reuse(found)
    if plan is None or plan.graph is not traced.graph:
        return None
    try:
        function = _function_of(mod, True, 0)
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
    return ModReader(function, plan, tensors, traced, _may_leave_a_tensor(traced, problem))


def _may_leave_a_tensor(traced: TracedMod, problem: AttentionProblem) -> bool:
    """Return whether the numbers of a mod decide that its gathers are no error.

    Those by a position itself that their tensor covers never are.
    """
    sizes = {"b": problem.batch, "h": problem.heads_q}
    sizes |= {"q_idx": problem.seqlen_q, "kv_idx": problem.seqlen_kv}
    return any(
        not gather.is_plain
        or traced.captures[gather.capture].shape[gather.dimension] < sizes[gather.position]
        for gather in direct_gathers(traced.graph)
    )


def _aliases(tensors: list[Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the place of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor), n) for n, tensor in enumerate(tensors)])


def _part_of(value: Any, free: bool, depth: int) -> Part:
    """Return what has to be read of a captured value; numbers are run-time ones where `free`."""
    kind: Any = type(value)
    expected: Any = None
    if depth > _MAX_DEPTH:
        raise _Unknown
    if kind is int or kind is float:
        expected = None if free else _Constant(value)
    elif kind in _TENSOR_TYPES:
        expected = _Tensor(
            value.dtype, value.shape, value.requires_grad, value.layout, value.device
        )
    elif value is made_for or _is_of_torch(value, free):
        expected = _Same(value)
    elif kind is FunctionType and not (value.__module__ or "").startswith("torch."):
        expected = _function_of(value, free, depth)
    elif kind in _PLAIN_TYPES:
        expected = _Plain(value)
    elif kind is tuple or kind is list:
        parts = [_part_of(inner, free and callable(inner), depth + 1) for inner in value]
        expected = _Sequence(tuple(parts))
    else:
        raise _Unknown
    return kind, expected


def _is_of_torch(value: Any, free: bool) -> bool:
    """Return whether a value is a module, a builtin, a class or, as a global, torch's function."""
    kind: Any = type(value)
    if kind is FunctionType:
        return not free and (value.__module__ or "").startswith("torch.")
    is_class = kind is type and value.__module__ in ("builtins", "torch")
    return is_class or kind is ModuleType or kind is BuiltinFunctionType


def _function_of(fn: FunctionType, free: bool, depth: int) -> _Function:
    code = fn.__code__
    facts = code_facts(code)
    cells: list[Part] = []
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            raise _Unknown from None
        if content is fn or (name in facts.chains and has_attributes(content)):
            raise _Unknown
        cells.append(_part_of(content, free, depth + 1))
    names: list[tuple[str, Part | None]] = []
    for name in facts.global_names:
        if name not in fn.__globals__:
            names.append((name, None))
            continue
        content = fn.__globals__[name]
        if content is fn:
            raise _Unknown
        names.append((name, _part_of(content, free and isinstance(content, Tensor), depth + 1)))
    words = fn.__kwdefaults__ or {}
    return _Function(
        code,
        tuple(cells),
        tuple([_part_of(default, free, depth + 1) for default in fn.__defaults__ or ()]),
        tuple([(word, _part_of(default, free, depth + 1)) for word, default in words.items()]),
        tuple(names),
    )
