"""Divisions of integers, which have no value where the divisor is 0.

Lives here: which nodes they are, and what a call's captured numbers alone prove wrong. Not here:
the refusal while a mod is traced (`operators.py`), divisors that come out of tensors or positions
(`out_of_range.py`). Invariant: a captured number that a mod divides by is judged on every device,
before anything runs.
"""

from functools import lru_cache

from fovea.errors import invalid
from fovea.mods.builder import wrapped
from fovea.mods.graph import Graph, Node
from fovea.mods.trace import TracedMod

_FLOATS = ("f16", "bf16", "f32", "f64")


def is_integer_division(node: Node) -> bool:
    """Return whether a node is an integer quotient or remainder."""
    return node.op in ("floordiv", "mod") and node.dtype not in _FLOATS


@lru_cache(maxsize=1024)
def has_divisors(graph: Graph) -> bool:
    """Return whether the mod divides integers by anything but a constant."""
    return any(
        is_integer_division(node) and graph.nodes[node.args[1]].op != "const"
        for node in graph.nodes
    )


@lru_cache(maxsize=1024)
def scalar_divisors(graph: Graph) -> tuple[tuple[int, str], ...]:
    """Return slots of run-time numbers that the mod divides integers by, with these' dtypes."""
    slots: dict[tuple[int, str], None] = {}
    for node in graph.nodes:
        if not is_integer_division(node):
            continue
        divisor = graph.nodes[node.args[1]]
        while divisor.op in ("cast", "abs", "neg"):
            divisor = graph.nodes[divisor.args[0]]
        if divisor.op == "scalar":
            slots[int(divisor.attrs[0]), node.dtype] = None
    return tuple(slots)


def check_divisors(name: str, mod: TracedMod) -> None:
    """Raise ValueError where a mod divides integers by a captured number that is 0.

    Outside `torch.compile` the trace itself refuses it and names the line; there the number may be
    a symbol, which has its value when the operator runs.
    """
    for slot, dtype in scalar_divisors(mod.graph):
        if wrapped(mod.scalars[slot], dtype) == 0:
            raise ValueError(
                invalid(
                    f"a number that {name}{f' ({mod.source})' if mod.source else ''} captures and "
                    "divides integers by",
                    mod.scalars[slot],
                    f"a number that is not 0 as {dtype}",
                    "capture another one, or branch on it in Python before dividing",
                )
            )
