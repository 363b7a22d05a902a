"""Gathers of a mod whose reach is known without its tensors: indices by b, h, q_idx or kv_idx.

Lives here: which indices of a graph are a monotone function of one position and numbers, and the
test of the values they take at its ends. Not here: how far a call's positions reach
(`problem/gathers.py`), indices that depend on contents (`evaluate.py` checks those where it runs).
Invariant: the mod itself takes the values judged here, so one outside its tensor is a fact.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fovea.errors import GatherError, invalid
from fovea.mods.graph import Graph, Node
from fovea.mods.trace import TracedMod

Reach = tuple[int, int]  # first and last value of a position
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


def check_reach(name: str, mod: TracedMod, gather: Gather, reach: Reach) -> None:
    """Raise GatherError unless an index stays inside its tensor at both ends of its position."""
    tensor = mod.captures[gather.capture]
    extent = tensor.shape[gather.dimension]
    for position in reach:
        index = index_at(mod.graph, gather.node, position, mod.scalars)
        if index is None or -extent <= index < extent:
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
