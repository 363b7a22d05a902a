"""How a kernel reads captured tensors: which ones two elements at a time, which indices may wrap.

Lives here: the rules that the device code, its arguments' alignment and the runtime share. Not
here: the loads (`kernels/device/mods.py`) and the copies that make a tensor fit
(`runtime/arguments.py`). Invariant: a vector read in pairs starts at a multiple of
`PAIR_ALIGNMENT` and has an even extent, in the kernel's eyes; nothing that wraps a negative index
looks at that extent.
"""

from functools import cache

from fovea.mods.graph import Graph, Node

PAIR_ALIGNMENT = 16  # bytes: two of the widest elements


def may_be_negative(graph: Graph, node_idx: int) -> bool:
    """Return whether an index needs Python's wrap-around; positions and constants do not."""
    index = _uncast(graph, node_idx)
    if index.op == "const":
        return index.attrs[0] < 0
    return index.op not in ("b", "h", "q_idx", "kv_idx", "axis")


@cache
def read_in_pairs(graph: Graph) -> tuple[bool, ...]:
    """Return, per captured tensor, whether it is read in pairs of neighbouring keys.

    Vectors that the key itself indexes are, unless another index into them may wrap.
    """
    loads = [node for node in graph.nodes if node.op == "load" and len(node.args) == 1]
    by_key = {n.attrs[0] for n in loads if _uncast(graph, n.args[0]).op == "kv_idx"}
    wrapping = {n.attrs[0] for n in loads if may_be_negative(graph, n.args[0])}
    return tuple(idx in by_key - wrapping for idx in range(len(graph.captures)))


def is_pair(graph: Graph, node_idx: int) -> bool:
    """Return whether a node is a load at the key itself of a vector that is read in pairs."""
    node = graph.nodes[node_idx]
    return (
        node.op == "load"
        and read_in_pairs(graph)[int(node.attrs[0])]
        and _uncast(graph, node.args[0]).op == "kv_idx"
    )


def _uncast(graph: Graph, node_idx: int) -> Node:
    """Return a node without casts that keep every position; others make other numbers of it."""
    node = graph.nodes[node_idx]
    while node.op == "cast" and node.dtype in ("i32", "i64"):
        node = graph.nodes[node.args[0]]
    return node
