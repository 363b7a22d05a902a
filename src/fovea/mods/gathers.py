"""Gathers of a mod whose reach is known without its tensors: indices by b, h, q_idx or kv_idx.

Lives here: which indices of a graph are a monotone function of one position and numbers, the values
they take at its ends, and whether the result depends on an element that is not there. Not here: how
far a call's positions reach (`problem/gathers.py`), indices that depend on contents
(`out_of_range.py`). Invariant: what raises here is wrong whatever the tensors hold.
"""

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fovea.errors import GatherError, invalid
from fovea.mods.graph import Graph, Node
from fovea.mods.trace import TracedMod

Reach = tuple[int, int]  # first and last value of a position
Place = dict[str, int]  # b, h, q_idx and kv_idx
_MEANING = {
    "b": "the batch is {}",
    "h": "there are {} query heads",
    "q_idx": "queries run to {}",
    "kv_idx": "keys run to {}",
}
_POSITIONS = frozenset({"b", "h", "q_idx", "kv_idx"})
_MONOTONE = frozenset({"add", "sub", "mul", "floordiv", "minimum", "maximum"})


class Gather(NamedTuple):
    """One index of one load.

    Attributes:
        capture, dimension: what it indexes.
        position: the one of b, h, q_idx and kv_idx that it is a monotone function of.
        node: number of the index node; `is_plain` where that is the position itself.
    """

    capture: int
    dimension: int
    position: str
    node: int
    is_plain: bool


@lru_cache(maxsize=1024)
def direct_gathers(graph: Graph) -> tuple[Gather, ...]:
    """Return the indices that depend on one position and on no tensor."""
    reads: list[str | None] = []
    for node in graph.nodes:
        reads.append(_position_of(node, [reads[argument] for argument in node.args]))
    found: list[Gather] = []
    for node in graph.nodes:
        if node.op != "load":
            continue
        for dimension, index in enumerate(node.args):
            position = reads[index]
            if position:
                is_plain = graph.nodes[index].op == position
                found.append(Gather(int(node.attrs[0]), dimension, position, index, is_plain))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def has_gathers(graph: Graph) -> bool:
    """Return whether the mod indexes any tensor."""
    return any(node.op == "load" and node.args for node in graph.nodes)


def _position_of(node: Node, operands: list[str | None]) -> str | None:
    """Return the position a node is monotone in, "" for a plain number, None for all else."""
    if node.op in _POSITIONS:
        return node.op
    if node.op in ("const", "scalar"):
        return "" if node.dtype == "i64" else None
    if node.dtype != "i64" or None in operands:
        return None
    if node.op in ("neg", "cast"):
        return operands[0]
    if node.op not in _MONOTONE:
        return None
    if node.op == "floordiv" and operands[1] != "":
        return None
    # Of two operands one is a plain number, or the function need not be monotone.
    return next((name for name in operands if name), "") if "" in operands else None


def index_at(
    graph: Graph, number: int, position: int, scalars: Sequence[int | float]
) -> int | None:
    """Return what the index node is worth at one value of its position; None where undefined."""
    node = graph.nodes[number]
    if node.op in _POSITIONS:
        return position
    if node.op == "const":
        return int(node.attrs[0])
    if node.op == "scalar":
        return int(scalars[int(node.attrs[0])])
    operands = [index_at(graph, argument, position, scalars) for argument in node.args]
    a, b = operands[0], operands[-1]
    if a is None or b is None:
        return None
    match node.op:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "floordiv":
            return a // b if b != 0 else None
        case "minimum":
            return min(a, b)
        case "maximum":
            return max(a, b)
        case "neg":
            return -a
        case _:
            return a


def check_reach(
    name: str, mod: TracedMod, gather: Gather, reach: Reach, probes: Callable[[int], list[Place]]
) -> None:
    """Raise GatherError where an index leaves its tensor at an end of its position.

    Args:
        name: the argument that the mod is.
        mod, gather: what to look at.
        reach: the ends of `gather.position`.
        probes: places with that value of the position at which the mod is asked. Where its result
            depends on the missing element at one of them, the error is certain.
    """
    tensor = mod.captures[gather.capture]
    extent = tensor.shape[gather.dimension]
    for position in reach:
        index = index_at(mod.graph, gather.node, position, mod.scalars)
        if index is None or -extent <= index < extent:
            continue
        if not any(_outcome(mod, place) is _MISSING for place in probes(position)):
            continue
        last = reach[1]
        where = f" ({mod.source})" if mod.source else ""
        what = _MEANING[gather.position].format(last + (gather.position in ("b", "h")))
        raise GatherError(
            invalid(
                f"index into dimension {gather.dimension} of a tensor of shape "
                f"{tuple(tensor.shape)} captured by {name}{where}",
                f"{index} at {gather.position}={position}",
                f"{-extent} to {extent - 1}; {what}",
                "capture a tensor that covers every position, or clamp the index in the mod",
            )
        )


def places(last: Place, position: str, value: int) -> list[Place]:
    """Return a few places where a position has that value: ends of the others, and the diagonal."""
    found: list[Place] = []
    for end in (last, dict.fromkeys(last, 0)):
        for kv_idx in (0, last["kv_idx"], min(end["q_idx"], last["kv_idx"])):
            found.append({**end, "kv_idx": kv_idx, position: value})
    if position in ("q_idx", "kv_idx"):
        other = "kv_idx" if position == "q_idx" else "q_idx"
        found.append({**last, position: value, other: min(value, last[other])})
    return found


# What an element that does not exist makes of a result that depends on it; None is "not known".
_MISSING = object()
_EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "minimum": min,
    "maximum": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "not": operator.not_,
}


def _outcome(mod: TracedMod, place: Place) -> Any:
    """Return a mod's result at one place: a number, None, or _MISSING.

    Only what integers and bools decide is known; tensors are not read.
    """
    values: list[Any] = []
    for node in mod.graph.nodes:
        values.append(_outcome_of(mod, node, [values[i] for i in node.args], place))
    return values[mod.graph.output]


def _outcome_of(mod: TracedMod, node: Node, operands: list[Any], place: Place) -> Any:
    match node.op:
        case "b" | "h" | "q_idx" | "kv_idx":
            return place[node.op]
        case "const":
            return node.attrs[0] if node.dtype in ("i64", "b1") else None
        case "scalar":
            return mod.scalars[int(node.attrs[0])] if node.dtype == "i64" else None
        case "load":
            shape = mod.captures[int(node.attrs[0])].shape
            pairs = zip(operands, shape, strict=True)
            is_outside = any(type(i) is int and not -n <= i < n for i, n in pairs)
            return _MISSING if is_outside or _MISSING in operands else None
        case "where":
            condition, chosen, other = operands
            if condition is None:
                return _MISSING if chosen is other is _MISSING else None
            return condition if condition is _MISSING else chosen if condition else other
        case "and" | "or" if node.dtype == "b1":
            decides = node.op == "or"  # the value of one operand that settles the result
            if decides in [x for x in operands if x is not _MISSING]:
                return decides
            return None if None in operands else _MISSING if _MISSING in operands else not decides
        case _:
            if _MISSING in operands:
                return _MISSING
            if None in operands or node.dtype not in ("i64", "b1"):
                return None
            if node.op == "floordiv" and operands[1] != 0:
                return operands[0] // operands[1]
            if node.op == "mod" and operands[1] != 0:
                return operands[0] % operands[1]
            if node.op == "cast" and node.dtype == "i64":
                return int(operands[0])
            exact = _EXACT.get(node.op)
            is_bitwise = node.op == "not" and node.dtype != "b1"
            return None if exact is None or is_bitwise else exact(*operands)
