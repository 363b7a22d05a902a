"""Trace a user's score_mod or mask_mod into a graph, its captured tensors and its scalars.

Lives here: the public entry, the checks of arity and of what a mod returns. Not here: the tracer
(`tracer.py`), how captures are found and traces reused (`closures.py`). Invariant: a TracedMod
holds the tensors and numbers of this call; the graph alone may be shared between calls.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fovea.errors import FoveaError, TraceError, invalid
from fovea.mods.assembly import assemble, assemble_text
from fovea.mods.builder import Term, attrs_key
from fovea.mods.calls import problem_in_torch
from fovea.mods.closures import Plan, Survey, remember, reuse, survey, tagged
from fovea.mods.graph import DTYPE_NAME, Graph, captures_text
from fovea.mods.tracer import Tracer, capture_spec
from fovea.mods.values import Recipe, Traced, TracingMode, cook, recipe_text

_SIGNATURE = {
    "score": "(score, b, h, q_idx, kv_idx) -> score",
    "mask": "(b, h, q_idx, kv_idx) -> bool",
}


@dataclass(frozen=True, eq=False)
class TracedMod:
    """A traced mod: the graph, and what it reads in this call.

    `specialised` lists the captured numbers that Python code branched on, for `explain`; `source`
    is `file:line name` of the function; `heads` the numbers of query heads that it is made for.
    """

    graph: Graph
    captures: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]
    specialised: tuple[str, ...]
    source: str
    heads: tuple[int, ...] = ()


def trace_score_mod(
    fn: Callable[..., Any],
    score_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> TracedMod:
    """Return the traced score_mod(score, b, h, q_idx, kv_idx) -> score.

    Args:
        fn: a function, method, partial or callable object, as torch's flex_attention takes it.
        score_dtype: torch.float32, or torch.float64 for float64 inputs.
        device: what `score.device` is inside the mod.

    Raises:
        TraceError: wrong arity, wrong return type, or something that cannot be traced; the text
            names the user's line.
    """
    return _trace("score", fn, DTYPE_NAME[score_dtype], device)


def trace_mask_mod(fn: Callable[..., Any], device: torch.device | None = None) -> TracedMod:
    """Return the traced mask_mod(b, h, q_idx, kv_idx) -> bool; see `trace_score_mod`."""
    return _trace("mask", fn, "b1", device)


def _trace(kind: str, fn: Callable[..., Any], dtype: str, device: torch.device | None) -> TracedMod:
    if torch.compiler.is_dynamo_compiling():
        return _trace_in_dynamo(kind, fn, dtype, device)
    found = survey(fn, (kind, dtype, torch.get_default_dtype(), device))
    plan = reuse(found)
    if plan is None:
        return _trace_anew(kind, fn, dtype, device, found)
    return TracedMod(
        plan.graph,
        tuple([found.tensors[number] for number in plan.captures]),
        _cooked(plan.scalars, found, plan.source) if plan.scalars else (),
        plan.specialised,
        plan.source,
        _heads(plan.heads, found) if plan.heads else (),
    )


def _trace_anew(
    kind: str, fn: Callable[..., Any], dtype: str, device: torch.device | None, found: Survey
) -> TracedMod:
    check_arity(kind, fn, f"{kind}_mod")
    tracer = Tracer(False, device)
    tracer.has_gradient = kind == "score"
    tracer.leaves, tracer.numbers, tracer.names = found.tensors, found.numbers, found.names
    source = source_of(fn)
    try:
        with TracingMode(tracer):
            result = tagged(fn, tracer)(*_inputs(tracer, kind, dtype))
    except FoveaError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and tracer.failure is not None:
            raise tracer.failure from None
        problem = problem_in_torch(error)
        if problem is None:
            raise
        raise TraceError(problem) from error
    if tracer.failure is not None:  # Python went on with another operator: `t += 1` as `t = t + 1`
        raise tracer.failure
    output = _checked_output(tracer, kind, dtype, result, source)
    specs = tuple(capture_spec(tensor) for tensor in tracer.captures)
    done = assemble(kind, tracer.builder.nodes, output, specs, tuple(tracer.scalar_types))
    captures = tuple(tracer.captures[number] for number in done.captures)
    recipes = tuple(tracer.scalars[number] for number in done.scalars)
    notes = tuple(
        f"{recipe_text(recipe, found.names)} is {value}"
        for recipe, value in tracer.guards
        if recipe[0] not in ("size", "truth")
    )
    scalars = _cooked(recipes, found, source)
    places = [_place_of(tensor, found.tensors) for tensor in captures]
    if tracer.repeatable and None not in places:
        plan = Plan(
            graph=done.graph,
            captures=tuple(place for place in places if place is not None),
            scalars=recipes,
            guards=tuple(tracer.guards),
            specialised=notes,
            source=source,
            heads=tuple(tracer.heads),
        )
        remember(found, plan)
    heads = _heads(tuple(tracer.heads), found)
    return TracedMod(done.graph, captures, scalars, notes, source, heads)


def _heads(heads: tuple[Recipe | int, ...], found: Survey) -> tuple[int, ...]:
    """Return the numbers of heads that a mod is made for in this call."""
    return tuple(
        [int(cook(n, found.numbers, found.tensors)) if isinstance(n, tuple) else n for n in heads]
    )


def _cooked(recipes: tuple[Recipe, ...], found: Survey, source: str) -> tuple[Any, ...]:
    """Return the run-time scalars of a call; raise ValueError where one is beyond 64 bits."""
    scalars = tuple([cook(recipe, found.numbers, found.tensors) for recipe in recipes])
    for number in scalars:
        if type(number) is int and not -(2**63) <= number < 2**63:
            raise ValueError(
                invalid(
                    f"an integer captured by a mod ({source})",
                    number,
                    "-2**63 to 2**63 - 1",
                    "capture a float, or a bound that no length reaches, such as 2**62",
                )
            )
    return scalars


def _trace_in_dynamo(
    kind: str, fn: Callable[..., Any], dtype: str, device: torch.device | None
) -> TracedMod:
    """Trace in code that Dynamo inlines: no closures are read, no cache, no frames."""
    tracer = Tracer(True, device)
    inputs = _inputs(tracer, kind, dtype)
    before = _allow_modes(True)
    with TracingMode(tracer):
        _allow_modes(before)
        result = fn(*inputs)
        _allow_modes(True)
    _allow_modes(before)
    output = _checked_output(tracer, kind, dtype, result, "")
    specs = tuple(capture_spec(tensor) for tensor in tracer.captures)
    nodes = " ".join(
        f"{op}:{name}{{{attrs_key(attrs)}}}({','.join([f'{a}' for a in args])})"
        for op, args, name, attrs in tracer.builder.nodes
    )
    text, captures, scalars = assemble_text(
        kind, nodes, output, captures_text(specs), ",".join(tracer.scalar_types)
    ).split(";")
    kept = [int(word) for word in captures.split(",")] if captures != "" else []
    slots = [int(word) for word in scalars.split(",")] if scalars != "" else []
    graph = Graph(
        kind,
        (),
        0,
        tuple([specs[number] for number in kept]),
        tuple([tracer.scalar_types[slot] for slot in slots]),
        text,
    )
    return TracedMod(
        graph,
        tuple([tracer.captures[number] for number in kept]),
        tuple([tracer.scalars[slot] for slot in slots]),
        (),
        "",
        tuple(tracer.heads),
    )


def _allow_modes(allowed: bool) -> bool:
    """Let Dynamo's present code enter a mode, or not; return what it did before.

    Inside a higher order operator (a checkpoint) Dynamo refuses every effect on what is outside,
    and the stack of modes is; a mode that is left again has none.

    Raises:
        TraceError: Dynamo broke its graph inside the mod, and Python runs this function.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:
        raise TraceError(
            "torch.compile cannot follow a mod: it asks for a value that is known at run time "
            "only (most often a Python if on an index or a score); use torch.where, &, | and ~, "
            "or call the function uncompiled for an error with the line"
        ) from None
    before = bool(getattr(tracer, "allow_side_effects_in_hop", False))
    tracer.allow_side_effects_in_hop = allowed
    return before


# Dynamo calls it as it is, while it traces; see `derivative.receivers`.
_allow_modes._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _inputs(tracer: Tracer, kind: str, dtype: str) -> list[Traced]:
    names = [("b", "i64"), ("h", "i64"), ("q_idx", "i64"), ("kv_idx", "i64")]
    if kind == "score":
        names = [("score", dtype), *names]
    return [
        tracer.make(Term(tracer.builder.add(name, (), kind_of), kind_of)) for name, kind_of in names
    ]


def _checked_output(tracer: Tracer, kind: str, dtype: str, result: Any, source: str) -> int:
    """Return the node of what the mod returned, cast to the kind's dtype."""
    argument = f"return value of {kind}_mod{f' ({source})' if source else ''}"
    wanted = "one number (0-d)" if kind == "score" else "one bool (0-d)"
    if isinstance(result, (tuple, list, dict, str)) or result is None:
        raise TraceError(
            invalid(argument, type(result).__name__, wanted, "return the value and nothing else")
        )
    term = tracer.term(result)
    shape = tracer.builder.shape(term)
    if len(shape) > 0:
        raise TraceError(
            invalid(
                argument,
                f"a row of shape {list(shape)}",
                wanted,
                "reduce it with .any(), .sum() or an index",
            )
        )
    if kind == "mask" and term.dtype != "b1":
        raise TraceError(invalid(argument, term.dtype, wanted, "compare it, for example with != 0"))
    if kind == "score" and term.dtype == "b1":
        raise TraceError(
            invalid(
                argument, "bool", wanted, "pass it as mask_mod, or use torch.where on the score"
            )
        )
    return tracer.builder.cast(term, dtype).node


def check_arity(kind: str, fn: Any, argument: str) -> None:
    """Raise unless a mod can be called with its 5 or 4 positional arguments."""
    count = 5 if kind == "score" else 4
    if not callable(fn) or inspect.isclass(fn):
        got = f"the class {fn.__name__}" if inspect.isclass(fn) else type(fn).__name__
        remedy = "pass a function, or an instance that can be called"
        raise TraceError(invalid(argument, got, f"a function {_SIGNATURE[kind]}", remedy))
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (ValueError, TypeError):  # a builtin without one: the call itself will tell
        return
    if _takes(signature, count):
        return
    remedy = f"take {count} positional arguments (further ones need defaults)"
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds != {inspect.Parameter.VAR_KEYWORD}:
        name = getattr(fn, "__name__", type(fn).__name__)
        own = f"({', '.join(signature.parameters)})"
        remedy += f"; if it makes a {kind}_mod, call it with its own arguments: {name}{own}"
    if _takes(signature, 4 if kind == "score" else 5):
        remedy += f"; or pass it as {'mask_mod' if kind == 'score' else 'score_mod'}"
    got = f"{source_of(fn)}{signature}"
    raise TraceError(invalid(argument, got, f"a function {_SIGNATURE[kind]}", remedy))


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def source_of(fn: Any) -> str:
    """Return `file:line name` of a function, looking through partials and methods."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        fn = type(fn).__call__ if callable(fn) else fn
        code = getattr(fn, "__code__", None)
    if code is None:
        return f"{getattr(fn, '__qualname__', repr(fn))}"
    return f"{code.co_filename}:{code.co_firstlineno} {fn.__qualname__}"


def _place_of(tensor: Tensor, leaves: list[Tensor]) -> int | None:
    for number, leaf in enumerate(leaves):
        if leaf is tensor:
            return number
    return None
