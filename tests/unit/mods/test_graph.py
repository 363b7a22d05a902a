"""The text of graphs: round trips, equality, what it refuses."""

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.errors import TraceError
from fovea.mods.assembly import assemble
from fovea.mods.builder import GraphBuilder
from fovea.mods.graph import (
    BINARY,
    FLOAT_UNARY,
    OPS,
    CaptureSpec,
    Graph,
    Node,
    number_text,
    parse_number,
)
from fovea.mods.picture import EXAMPLES
from fovea.mods.trace import trace_mask_mod, trace_score_mod

NUMBERS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats())


@given(NUMBERS)
def test_number_text_round_trip_keeps_type_and_bits(value: Any) -> None:
    back = parse_number(number_text(value))
    assert type(back) is type(value)
    if isinstance(value, float) and math.isnan(value):
        assert math.isnan(back)
    else:
        assert back == value
        assert math.copysign(1, back) == math.copysign(1, value)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Return score graphs of random operations on random constants, loads and scalars."""
    count = draw(st.integers(0, 4))
    captures = tuple(
        CaptureSpec(draw(st.sampled_from(("f32", "bf16", "f64"))), 2, draw(st.booleans()))
        for _ in range(count)
    )
    nodes = [Node(op="score", args=(), dtype="f32"), Node(op="q_idx", args=(), dtype="i64")]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(("const", "unary", "binary", "load", "scalar")))
        floats = [n for n, node in enumerate(nodes) if node.dtype != "i64"]
        if kind == "const":
            value = draw(st.floats(width=32))
            nodes.append(Node(op="const", args=(), dtype="f32", attrs=(value,)))
        elif kind == "unary":
            op = draw(st.sampled_from(FLOAT_UNARY))
            nodes.append(Node(op=op, args=(draw(st.sampled_from(floats)),), dtype="f32"))
        elif kind == "binary":
            op = draw(st.sampled_from(BINARY))
            pair = (draw(st.sampled_from(floats)), draw(st.sampled_from(floats)))
            nodes.append(Node(op=op, args=pair, dtype="f32"))
        elif kind == "load" and count:
            which = draw(st.integers(0, count - 1))
            dtype = captures[which].dtype
            nodes.append(Node(op="load", args=(1, 1), dtype=dtype, attrs=(which,)))
        else:
            nodes.append(Node(op="scalar", args=(), dtype="f64", attrs=(0,)))
    return Graph("score", tuple(nodes), len(nodes) - 1, captures, ("f64",))


@settings(max_examples=50)
@given(graphs())
def test_graph_text_round_trip(graph: Graph) -> None:
    text = graph.text()
    back = Graph.parse(text)
    assert "\n" not in text
    assert back.text() == text
    assert back == graph
    assert back.digest() == graph.digest()
    assert repr(back.nodes) == repr(graph.nodes)


@settings(max_examples=50)
@given(graphs())
def test_graph_assembled_again_is_unchanged(graph: Graph) -> None:
    """Renumbering is canonical: the second time it finds everything in place."""
    keys = [(node.op, node.args, node.dtype, node.attrs) for node in graph.nodes]
    once = assemble("score", keys, graph.output, graph.captures, graph.scalars).graph
    keys = [(node.op, node.args, node.dtype, node.attrs) for node in once.nodes]
    twice = assemble("score", keys, once.output, once.captures, once.scalars).graph
    assert once.text() == twice.text()
    used = {argument for node in once.nodes for argument in node.args} | {once.output}
    assert used == set(range(len(once.nodes)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_graph_of_library_mod_round_trips_and_is_canonical(name: str) -> None:
    example = EXAMPLES[name]
    trace = trace_mask_mod if example.kind == "mask" else trace_score_mod
    graph = trace(example.make()).graph
    assert Graph.parse(graph.text()) == graph
    assert {node.op for node in graph.nodes} <= OPS
    assert all(a < n for n, node in enumerate(graph.nodes) for a in node.args)
    assert len({repr(node) for node in graph.nodes}) == len(graph.nodes)
    assert pickle.loads(pickle.dumps(graph)) == graph


def test_graph_order_of_tracing_does_not_show() -> None:
    def first(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        kv * 7  # not used
        distance = q - kv
        scaled = s * 2
        return scaled + distance

    def second(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        scaled = s * 2
        return scaled + (q - kv)

    assert trace_score_mod(first).graph == trace_score_mod(second).graph


def test_graph_different_constants_differ() -> None:
    texts = {
        trace_score_mod(lambda s, b, h, q, kv, c=c: s + torch.tensor(float(repr(c)))).graph.text()
        for c in (0.0, -0.0, 1.0, float("nan"), float("inf"))
    }
    assert len(texts) == 5
    builder = GraphBuilder()
    numbers = {builder.constant(value, "f32") for value in (0.0, -0.0, math.nan, math.nan, 1.0)}
    assert len(numbers) == 4
    assert builder.constant(1, "i64") != builder.constant(True, "b1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mod0 score - - | score:f32 | 0",
        "mod1 other - - | score:f32 | 0",
        "mod1 score - - | score:f99 | 0",
        "mod1 score - - | launch:f32 | 0",
        "mod1 score - - | score:f32",
    ],
)
def test_graph_parse_of_foreign_text_raises(text: str) -> None:
    with pytest.raises(TraceError, match=r"trace the mod again|another version"):
        Graph.parse(text)
