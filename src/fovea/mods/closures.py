"""What a mod captures, and when an earlier trace may be used again.

Lives here: the survey of a function's cells, defaults, globals and partial arguments; the copy of a
function with its captured numbers replaced by `CapturedNumber`; the cache of traces. Not here: the
trace itself (`trace.py`). Invariant: a cached trace is used only if everything that it could have
read is checked on this call: code objects, constants, dtypes and ranks of tensors, which tensors
are the same. Values of captured numbers and contents of tensors are free to change; anything whose
effect cannot be checked (attributes of objects, imports, globals of unknown type) prevents reuse.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import builtins
import dis
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fovea.mods.graph import Graph
from fovea.mods.values import CapturedNumber, NumberRecord, Recipe, cook, made_for

_MODULES = frozenset(
    [torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, math, operator]
)
_IMPORTS = frozenset(("torch", "math", "torch.nn.functional", "operator"))
_FORBIDDEN = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "LOAD_NAME", "IMPORT_FROM"))
# Names through which code reads what no survey sees: torch's global state, other scopes, the world.
_STATE_PREFIXES = ("is_", "are_", "get_", "_is_", "_get_")
_STATELESS = frozenset(
    ("is_tensor", "is_floating_point", "is_complex", "is_cuda", "is_nonzero", "get_device")
)
_WORLD = frozenset(
    ("globals", "locals", "vars", "eval", "exec", "open", "input", "__import__", "dir", "id")
)
_PLAIN = (bool, str, bytes, type(None), torch.dtype, torch.device)
_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """What a code object, and those inside it, read from globals; `pinned` keeps its id taken."""

    pinned: types.CodeType
    global_names: tuple[str, ...]
    is_checkable: bool
    # captured name -> attribute chains read from it, for names used in no other way
    chains: dict[str, tuple[tuple[str, ...], ...]]


@dataclass(slots=True)
class Survey:
    """All that a function captures, found on this call.

    `key` is hashable and covers everything but the values of `numbers` and `tensors`.
    """

    key: Any
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    numbers: list[int | float] = field(default_factory=list[int | float])
    names: list[str] = field(default_factory=list[str])
    is_checkable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A finished trace in terms of a survey: which leaves are captures, how scalars are made."""

    graph: Graph
    captures: tuple[int, ...]
    scalars: tuple[Recipe, ...]
    guards: tuple[tuple[Recipe, bool | int | float], ...]
    specialised: tuple[str, ...]
    source: str
    heads: tuple[Recipe | int, ...] = ()


_MAX_DEPTH = 32  # of captures inside captures
_facts: dict[int, CodeFacts] = {}
_plans: dict[Any, list[Plan]] = {}


def code_facts(code: types.CodeType) -> CodeFacts:
    """Return the facts of a code object, found once."""
    known = _facts.get(id(code))
    if known is not None:
        return known
    names: dict[str, None] = {}
    is_checkable = True
    stack = [code]
    while stack:
        current = stack.pop()
        stack += [
            constant for constant in current.co_consts if isinstance(constant, types.CodeType)
        ]
        is_checkable = is_checkable and not any(reads_state(name) for name in current.co_names)
        for instruction in dis.get_instructions(current):
            if instruction.opname == "LOAD_GLOBAL":
                names[instruction.argval] = None
            elif instruction.opname in _FORBIDDEN:
                is_checkable = False
            elif instruction.opname == "IMPORT_NAME":
                is_checkable = is_checkable and instruction.argval in _IMPORTS
    facts = CodeFacts(code, tuple(names), is_checkable, _attribute_chains(code))
    _facts[id(code)] = facts
    return facts


def reads_state(name: str) -> bool:
    """Return whether a name may give access to state that a survey does not see."""
    is_state = name.startswith(_STATE_PREFIXES) and name not in _STATELESS
    return is_state or name in _WORLD


def _attribute_chains(code: types.CodeType) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return, for captured names that only ever have attributes read, which ones.

    `self.bias[h]` depends on `self.bias` and nothing else of self.
    """
    chains: dict[str, dict[tuple[str, ...], None]] = {name: {} for name in code.co_freevars}
    bare: set[str] = set()
    stack = [code]
    while stack:
        current = stack.pop()
        stack += [
            constant for constant in current.co_consts if isinstance(constant, types.CodeType)
        ]
        instructions = list(dis.get_instructions(current))
        for place, instruction in enumerate(instructions):
            name = instruction.argval
            if instruction.opname not in ("LOAD_DEREF", "LOAD_CLOSURE") or name not in chains:
                continue
            chain: list[str] = []
            while instructions[place + 1 + len(chain)].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain.append(instructions[place + 1 + len(chain)].argval)
            if instruction.opname == "LOAD_DEREF":
                if chain:
                    chains[name][tuple(chain)] = None
                else:
                    bare.add(name)
    return {name: tuple(found) for name, found in chains.items() if name not in bare and found}


def survey(fn: Any, context: tuple[Any, ...]) -> Survey:
    """Return what a function captures; `context` is added to the key."""
    found = Survey(None)
    key: list[Any] = [context]
    _visit(fn, "", found, key, True, 0)
    if len(found.tensors) > 1:
        first: dict[int, int] = {}
        for number, tensor in enumerate(found.tensors):
            key.append(first.setdefault(id(tensor), number))
    found.key = tuple(key)
    return found


def _visit(value: Any, name: str, found: Survey, key: list[Any], free: bool, depth: int) -> None:
    """Add one captured value; numbers are run-time scalars where `free`, else constants."""
    kind: Any = type(value)
    if kind is int or kind is float:
        if free:
            found.numbers.append(value)
            found.names.append(name)
            key.append(kind)
        else:
            # by its bits: 0.0 equals -0.0, and NaN nothing
            key.append((kind, value if kind is int else value.hex()))
    elif isinstance(value, Tensor):
        if value.__dict__:  # a mod may read them
            found.is_checkable = False
        found.tensors.append(value)
        key.append((kind, value.dtype, value.dim(), value.requires_grad))
    elif value is made_for:
        key.append(value)  # ours: reads nothing
    elif kind is types.FunctionType:
        _visit_function(value, found, key, free, depth)
    elif kind in _PLAIN:
        key.append((kind, value))
    elif kind is types.ModuleType:
        found.is_checkable = found.is_checkable and value in _MODULES
        key.append(id(value))
    elif kind is types.BuiltinFunctionType:
        key.append(id(value))
    elif kind is type:
        # attributes of a class of the user's are as free to change as those of an object
        found.is_checkable = found.is_checkable and value.__module__ in ("builtins", "torch")
        key.append(id(value))
    elif (kind is tuple or kind is list) and depth > _MAX_DEPTH:  # such as a list that holds itself
        found.is_checkable = False
    elif kind is tuple or kind is list:
        key.append((kind, len(value)))
        for part in value:
            _visit(part, name, found, key, False if not callable(part) else free, depth + 1)
    elif kind is partial:
        key.append((partial, len(value.args), tuple(value.keywords)))
        _visit(value.func, name, found, key, free, depth)
        for place, part in enumerate(value.args):
            _visit(part, f"argument {place}", found, key, free, depth + 1)
        for word, part in value.keywords.items():
            _visit(part, word, found, key, free, depth + 1)
    elif isinstance(value, (torch.SymInt, torch.SymFloat)) and free:
        found.numbers.append(value)  # pyright: ignore[reportArgumentType]
        found.names.append(name)
        found.is_checkable = False
    else:
        _visit_object(value, found, key, free, depth)


def has_attributes(value: Any) -> bool:
    """Return whether a captured value is an object whose attributes a mod may read one by one."""
    kind: Any = type(value)
    known = (int, float, tuple, list, dict, partial, types.FunctionType, types.ModuleType)
    plain = kind in known or kind in _PLAIN or isinstance(value, (Tensor, types.MethodType))
    usual = (object.__getattribute__, type.__getattribute__)
    return not plain and type(value).__getattribute__ in usual


def _visit_attributes(
    value: Any, chains: tuple[tuple[str, ...], ...], found: Survey, key: list[Any], depth: int
) -> None:
    """Add the attributes that the code reads: constants, and tensors as captures."""
    for chain in chains:
        part = value
        for step, name in enumerate(chain):
            if isinstance(part, Tensor):
                break
            if step > 0 and not has_attributes(part):
                found.is_checkable = False
                return
            part = getattr(part, name, found)
            if part is found:  # no such attribute: the mod's own error will say so
                found.is_checkable = False
                return
        _visit(part, chain[0], found, key, False, depth + 1)


def _visit_object(value: Any, found: Survey, key: list[Any], free: bool, depth: int) -> None:
    """Look into a bound method or callable object; its attributes cannot be checked."""
    found.is_checkable = False
    function = function_behind(value, depth == 0)
    if function is not None:
        _visit_function(function, found, key, free, depth + 1)


def function_behind(value: Any, is_mod: bool) -> types.FunctionType | None:
    """Return the function of a bound method, or of a callable object that is the mod itself.

    An object that a mod merely captures must stay what it is: its attributes may be read.
    """
    if isinstance(value, types.MethodType):
        function = value.__func__
    elif is_mod and not isinstance(value, torch.nn.Module):
        function = type(value).__call__ if callable(value) else None
    else:
        return None
    return function if type(function) is types.FunctionType else None


def _visit_function(
    fn: types.FunctionType, found: Survey, key: list[Any], free: bool, depth: int
) -> None:
    code = fn.__code__
    key.append(id(code))
    if fn.__dict__:  # a mod may read them, its own too
        found.is_checkable = False
    if (fn.__module__ or "").startswith("torch."):
        key.append(id(fn))
        code_facts(code)
        if not free:
            return
    facts = code_facts(code)
    if depth > 32 or not facts.is_checkable:
        found.is_checkable = False
        return
    for place, cell in enumerate(fn.__closure__ or ()):
        try:
            content = cell.cell_contents
        except ValueError:  # not yet filled
            found.is_checkable = False
            continue
        if content is fn:  # a function that calls itself
            continue
        name = code.co_freevars[place]
        if name in facts.chains and has_attributes(content):
            _visit_attributes(content, facts.chains[name], found, key, depth)
        else:
            _visit(content, name, found, key, free, depth + 1)
    if fn.__defaults__:
        first = code.co_argcount - len(fn.__defaults__)
        for place, default in enumerate(fn.__defaults__):
            _visit(default, code.co_varnames[first + place], found, key, free, depth + 1)
    if fn.__kwdefaults__:
        for word, default in fn.__kwdefaults__.items():
            key.append(word)
            _visit(default, word, found, key, free, depth + 1)
    if facts.global_names:
        space = fn.__globals__
        for word in facts.global_names:
            content = space.get(word, None)
            if content is None and word not in space:
                if not hasattr(builtins, word):
                    found.is_checkable = False
                key.append(word)
            elif content is fn:
                key.append(word)
            elif isinstance(content, Tensor):
                _visit(content, word, found, key, free, depth + 1)
            else:
                _visit(content, word, found, key, False, depth + 1)


# --------------------------------------------------------------------------------------- copies


class Tagger:
    """Copies functions with every captured int and float replaced by a `CapturedNumber`.

    Walks exactly as `survey` does, so that the numbers have the survey's order.
    """

    def __init__(self, record: NumberRecord):
        self.record = record
        self.count = 0

    def value(self, value: Any, free: bool, depth: int) -> Any:
        """Return a captured value's copy."""
        kind: Any = type(value)
        if kind is int or kind is float or isinstance(value, (torch.SymInt, torch.SymFloat)):
            if not free:
                return value
            self.count += 1
            number: Any = value
            return CapturedNumber(number, ("number", self.count - 1), self.record)
        if isinstance(value, Tensor) or kind in _PLAIN:
            return value
        if kind is types.FunctionType:
            return self.function(value, free, depth)
        if kind is tuple or kind is list:
            if depth > _MAX_DEPTH or not any(callable(part) for part in value):
                return value  # the mod may fill the list it captured
            return kind(
                self.value(part, free if callable(part) else False, depth + 1) for part in value
            )
        if kind is partial:
            function = self.value(value.func, free, depth)
            args = [self.value(part, free, depth + 1) for part in value.args]
            words = {w: self.value(part, free, depth + 1) for w, part in value.keywords.items()}
            return partial(function, *args, **words)
        if kind is types.ModuleType or kind is types.BuiltinFunctionType or kind is type:
            return value
        return self.object(value, free, depth)

    def object(self, value: Any, free: bool, depth: int) -> Any:
        """Return a bound method or callable object whose function is a copy."""
        function = function_behind(value, depth == 0)
        if function is None:
            return value
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        return types.MethodType(self.function(function, free, depth + 1), owner)

    def function(self, fn: types.FunctionType, free: bool, depth: int) -> Any:
        """Return a function of the same code over copied cells and defaults."""
        code = fn.__code__
        if not free or depth > _MAX_DEPTH or not code_facts(code).is_checkable:
            return fn
        cells: list[Any] = []
        own: types.CellType | None = None
        for cell in fn.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                cells.append(cell)
                continue
            if content is fn:
                own = types.CellType(None)
                cells.append(own)
                continue
            cells.append(types.CellType(self.value(content, free, depth + 1)))
        defaults = fn.__defaults__
        if defaults:
            defaults = tuple(self.value(default, free, depth + 1) for default in defaults)
        words = fn.__kwdefaults__
        if words:
            words = {word: self.value(d, free, depth + 1) for word, d in words.items()}
        copy = types.FunctionType(
            code, fn.__globals__, fn.__name__, defaults, tuple(cells) if cells else None
        )
        copy.__kwdefaults__ = words  # pyright: ignore[reportAttributeAccessIssue]
        copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
        copy.__dict__.update(fn.__dict__)
        if own is not None:
            own.cell_contents = copy
        # Globals are read from the module as they are: numbers there are constants.
        return copy


def tagged(fn: Callable[..., Any], record: NumberRecord) -> Callable[..., Any]:
    """Return a copy of a mod whose captured numbers report what becomes of them."""
    return Tagger(record).value(fn, True, 0)


# ---------------------------------------------------------------------------------------- cache


def reuse(found: Survey) -> Plan | None:
    """Return an earlier trace that holds for this call."""
    if not found.is_checkable:
        return None
    for plan in _plans.get(found.key, ()):
        if all(
            same(cook(recipe, found.numbers, found.tensors), value) for recipe, value in plan.guards
        ):
            return plan
    return None


def same(a: bool | int | float, b: bool | int | float) -> bool:
    """Return whether two numbers are one: NaN is itself, 0.0 is not -0.0."""
    if a == b:
        return a != 0 or math.copysign(1, a) == math.copysign(1, b)
    return a != a and b != b


def remember(found: Survey, plan: Plan) -> None:
    """Keep a trace for later calls."""
    if not found.is_checkable:
        return
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans.setdefault(found.key, []).append(plan)
    del _plans[found.key][:-16]


def clear() -> None:
    """Forget all traces."""
    _plans.clear()
