"""Score mods that are nothing but a soft cap, found in their graphs.

Lives here: the reading of `cap * torch.tanh(score / cap)` as the number `cap`. Not here: what is
done with it (`plan/kernel_calls.py`). Invariant: a mod that is read does what the keyword softcap=
does with that number, up to rounding.
"""

from functools import lru_cache
from typing import NamedTuple

from fovea.mods.graph import Graph, Node


class SoftCap(NamedTuple):
    """A number of the mod: its own, or a run-time one."""

    constant: float | None
    slot: int = 0

    def value(self, scalars: tuple[int | float, ...]) -> float:
        """Return the cap; the formula is even in it."""
        return abs(float(scalars[self.slot] if self.constant is None else self.constant))


@lru_cache(maxsize=256)
def softcap_of_mod(graph: Graph) -> SoftCap | None:
    """Return the cap of a score_mod that is a soft cap, None for any other."""
    nodes = graph.nodes
    output = nodes[graph.output]
    if output.op != "mul":
        return None
    for tanh_at, cap_at in (output.args, output.args[::-1]):
        tanh, cap = nodes[tanh_at], _number(nodes[cap_at], graph)
        if tanh.op == "tanh" and cap is not None and _divides(nodes[tanh.args[0]], cap, graph):
            return cap
    return None


def _divides(node: Node, cap: SoftCap, graph: Graph) -> bool:
    """Return whether a node is score / cap, or the score times a constant that is 1 / cap."""
    if node.op not in ("div", "mul") or len(node.args) != 2:
        return False
    pairs = [node.args] if node.op == "div" else [node.args, node.args[::-1]]
    for score_at, number_at in pairs:
        number = _number(graph.nodes[number_at], graph)
        if graph.nodes[score_at].op != "score" or number is None:
            continue
        if node.op == "div":
            return number == cap
        return None not in (number.constant, cap.constant) and number.constant * cap.constant == 1.0  # pyright: ignore
    return False


def _number(node: Node, graph: Graph) -> SoftCap | None:
    """Return a constant or a run-time number, None for anything else.

    A cast to fewer digits than float32 has makes another number of it.
    """
    while node.op == "cast" and node.dtype in ("f32", "f64"):
        node = graph.nodes[node.args[0]]
    if node.dtype not in ("f32", "f64", "i64"):
        return None
    if node.op == "const" and not isinstance(node.attrs[0], (bool, str)):
        return SoftCap(float(node.attrs[0]))
    if node.op == "scalar":
        return SoftCap(None, int(node.attrs[0]))
    return None
