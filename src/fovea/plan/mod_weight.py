"""Whether the mods of a variant leave registers for a wide tile of scores.

Lives here: the rule, from the variants of `tests/compile/test_spills.py` that kept numbers in local
memory beside 128 keys and do not beside 64. Not here: tile shapes (`sm90.py`). Invariant: a
function of the features alone.
"""

from fovea.mods.graph import Graph
from fovea.plan.features import ForwardFeatures

_MOST_NODES = 25
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


def _num_loads(graph: Graph) -> int:
    return sum(node.op == "load" for node in graph.nodes)


def _has_heavy_node(graph: Graph) -> bool:
    return any(
        node.op == "axis"  # of a reduction
        or node.op in _LARGE_FUNCTIONS
        or (node.op == "load" and len(node.args) > _MOST_AXES)
        for node in graph.nodes
    )
