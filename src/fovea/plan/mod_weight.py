"""Whether the mods of a variant leave registers for a wide tile of scores.

Lives here: the rules, from the variants of `tests/compile/test_spills*.py` that kept numbers in
local memory beside 128 keys (Hopper), or spelled out for them (Blackwell), and do not otherwise.
Not here: what a plan makes of it (`sm90_tiles.py`, `sm100.py`). Invariant: a function of the
features alone.
"""

from fovea.mods.graph import Graph, Node
from fovea.plan.features import ForwardFeatures

_MOST_NODES = 20
_MOST_SPELLED_OUT_NODES = 20  # for all columns of a chunk
_MOST_LOADS = 2
_MOST_AXES = 2  # of a tensor whose places cost few registers
# Functions that the compiler spells out in many instructions.
_LARGE_FUNCTIONS = frozenset(
    (
        *("tanh", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh"),
        *("acosh", "atanh", "erf", "pow", "log1p", "expm1"),
    )
)


def are_heavy(features: ForwardFeatures) -> bool:
    """Return whether a variant gets a narrow tile of scores."""
    if features.score_mod is not None and (features.softcap or _num_loads(features.score_mod) > 1):
        return True
    graphs = features.graphs
    return (
        sum(len(graph.nodes) for graph in graphs) > _MOST_NODES
        or sum(map(_num_loads, graphs)) > _MOST_LOADS
        or any(_has_heavy_node(graph) for graph in graphs)
    )


def adds_line(features: ForwardFeatures) -> bool:
    """Return whether a variant's one mod adds to the score what is linear in the key, as in ALiBi.

    Such a sum folds into the exponent (`kernels/device/score.py`), and takes two registers a row
    beside the scores. Index arithmetic with products is left to the kernels, whose numbers may
    grow too large for it.
    """
    graph = features.score_mod
    if graph is None or features.softcap or len(features.graphs) > 1 or features.wide_integers:
        return False
    sum_ = graph.nodes[graph.output]
    ops = [graph.nodes[arg].op for arg in sum_.args]
    has_score = "score" in (ops if sum_.op == "add" else ops[:1]) and ops.count("score") == 1
    if sum_.op not in ("add", "sub") or not has_score:
        return False
    lines: list[bool] = []
    by_key: list[bool] = []
    by_score: list[bool] = []
    for node in graph.nodes:
        by_key.append(node.op == "kv_idx" or any(by_key[arg] for arg in node.args))
        by_score.append(node.op == "score" or any(by_score[arg] for arg in node.args))
        is_sum = node.op in ("kv_idx", "cast", "add", "sub") and node.dtype in ("i32", "i64", "f32")
        is_float_product = node.op == "mul" and node.dtype == "f32"
        has_factor = is_float_product and not all(by_key[arg] for arg in node.args)
        keeps_line = (is_sum or has_factor) and all(lines[arg] for arg in node.args)
        lines.append(not by_score[-1] and (keeps_line or not by_key[-1]))
    return all(lines[arg] for arg, op in zip(sum_.args, ops, strict=True) if op != "score")


def fill_registers(features: ForwardFeatures) -> bool:
    """Return whether mods need too many registers to be spelled out for many columns at a time.

    On Blackwell, where a thread has a whole row: those that are heavy, of many nodes, or that for
    each key read a captured tensor or divide integers. Spelled out for all columns quotients take
    the compiler 10 seconds, where they are of large integers, and in a loop 4.
    """
    has_many_nodes = sum(len(graph.nodes) for graph in features.graphs) > _MOST_SPELLED_OUT_NODES
    divides = any(_divides_by_key(graph) for graph in features.graphs)
    return are_heavy(features) or has_many_nodes or divides or load_by_key(features)


def load_by_key(features: ForwardFeatures) -> bool:
    """Return whether mods read a captured tensor for each key."""
    return any(node.op == "load" for graph in features.graphs for node in _nodes_by_key(graph))


def _divides_by_key(graph: Graph) -> bool:
    nodes = _nodes_by_key(graph)
    return any(node.op in ("floordiv", "mod") and node.dtype[0] in "iu" for node in nodes)


def _nodes_by_key(graph: Graph) -> list[Node]:
    by_key: list[bool] = []
    for node in graph.nodes:
        by_key.append(node.op == "kv_idx" or any(by_key[arg] for arg in node.args))
    return [node for node, depends in zip(graph.nodes, by_key, strict=True) if depends]


def _num_loads(graph: Graph) -> int:
    return sum(node.op == "load" for node in graph.nodes)


def _has_heavy_node(graph: Graph) -> bool:
    return any(
        node.op == "axis"  # of a reduction
        or node.op in _LARGE_FUNCTIONS
        or (node.op != "load" and node.dtype in ("f16", "bf16"))  # rounded, two by two
        or (node.op == "load" and len(node.args) > _MOST_AXES)
        for node in graph.nodes
    )
