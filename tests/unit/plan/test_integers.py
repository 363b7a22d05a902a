"""Bounds of integers: no node's value may pass its own."""

import pytest
import torch

from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.graph import BITWISE, Graph, Node
from fovea.plan.integers import INT32_MAX, NARROW_LIMIT, integer_bounds, narrow_nodes

INTEGERS = ("u8", "i8", "i16", "i32", "i64")
OPS = ("add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", *BITWISE)
UNARY = ("neg", "abs", "sign", "not")


def _inputs(dtype: str) -> list[Node]:
    """Return nodes whose last two are positions in a dtype."""
    positions = [Node(op=op, args=(), dtype="i64", attrs=()) for op in ("q_idx", "kv_idx")]
    if dtype == "i64":
        return positions
    return [*positions, *(Node(op="cast", args=(i,), dtype=dtype, attrs=()) for i in (0, 1))]


def _values(graph: Graph) -> torch.Tensor:
    edges = torch.tensor([-NARROW_LIMIT, -300, -128, -1, 0, 1, 127, 255, 70000, NARROW_LIMIT])
    q_idx, kv_idx = edges[:, None], edges[None, :]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    positions = Positions(b=zero, h=zero, q_idx=q_idx, kv_idx=kv_idx)
    return evaluate(graph, positions, score=zero, captures=(), scalars=())


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", [*OPS, *UNARY])
def test_integer_bounds_of_any_operation_hold_at_the_edges(op: str, dtype: str) -> None:
    nodes = _inputs(dtype)
    last = len(nodes) - 1
    args = (last,) if op in UNARY else (last - 1, last)
    nodes.append(Node(op=op, args=args, dtype=dtype, attrs=()))
    for output in range(len(nodes)):
        kept = tuple(nodes[: output + 1])
        graph = Graph("score", kept, output, (), ())
        bounds = integer_bounds(graph, wide_integers=False)
        values = _values(graph).double().abs()
        assert float(values.max()) <= bounds[-1], kept[-1]
        if narrow_nodes(graph, bounds)[-1]:
            assert bounds[-1] <= INT32_MAX


def test_narrow_nodes_are_none_where_integers_are_wide() -> None:
    graph = Graph("score", tuple(_inputs("i64")), 1, (), ())
    bounds = integer_bounds(graph, wide_integers=True)
    assert narrow_nodes(graph, bounds) == (False, False)
