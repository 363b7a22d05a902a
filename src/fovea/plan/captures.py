"""How a kernel reads captured tensors: which ones two elements at a time.

Lives here: the rule that the device code, its arguments' alignment and the runtime share. Not here:
the loads (`kernels/device/mods.py`) and the copies that make a tensor fit (`runtime/arguments.py`).
Invariant: a tensor read in pairs starts at a multiple of `PAIR_ALIGNMENT` and has an even extent.
"""

from functools import cache

from fovea.mods.graph import Graph

PAIR_ALIGNMENT = 16  # bytes: two of the widest elements


def is_by_key(graph: Graph, node_idx: int) -> bool:
    """Return whether a node is a load of a vector at the position's key itself."""
    node = graph.nodes[node_idx]
    if node.op != "load" or len(node.args) != 1:
        return False
    index = graph.nodes[node.args[0]]
    while index.op == "cast":
        index = graph.nodes[index.args[0]]
    return index.op == "kv_idx"


@cache
def read_in_pairs(graph: Graph) -> tuple[bool, ...]:
    """Return, per captured tensor, whether it is read in pairs of neighbouring keys."""
    by_key = {
        node.attrs[0] for idx, node in enumerate(graph.nodes) if is_by_key(graph, idx)
    }
    return tuple(idx in by_key for idx in range(len(graph.captures)))
