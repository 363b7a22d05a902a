"""Tracing inside torch.compile(fullgraph=True): same graph as in eager, no extra graphs."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

import fovea.mods as library
from fovea.mods.graph import Graph
from fovea.mods.picture import EXAMPLES
from fovea.mods.trace import TracedMod, trace_mask_mod, trace_score_mod

SEEN: list[str] = []


def note(text: str) -> int:
    """Keep the text that Dynamo computed; called while it traces."""
    SEEN.append(text)
    return len(text)


note._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class Counter:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return module.forward


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    SEEN.clear()
    yield
    torch._dynamo.reset()


def tracing(kind: str) -> Callable[..., Any]:
    """Return a function that traces a mod and hands its captures and scalars to the graph."""

    def function(x: Tensor, mod: Any) -> Tensor:
        traced = trace_score_mod(mod) if kind == "score" else trace_mask_mod(mod)
        total = x.sum(dtype=torch.float64)
        for capture in traced.captures:
            total = total + capture.sum()
        for scalar in traced.scalars:
            total = total + (torch.zeros((), dtype=torch.float64) + scalar)
        note(traced.graph.text())
        return total

    return function


def eager(kind: str, mod: Any) -> TracedMod:
    return trace_score_mod(mod) if kind == "score" else trace_mask_mod(mod)


def check(kind: str, mod: Any, backend: Any = "eager") -> Graph:
    """Compile one trace and compare its parts with those of the eager trace."""
    torch.compile(tracing(kind), backend=backend, fullgraph=True)(torch.ones(2), mod)
    return Graph.parse(SEEN[0])


FEW = ("selected_tiles",)


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in EXAMPLES]
)
def test_trace_in_compile_of_library_mod_equals_eager(name: str) -> None:
    example = EXAMPLES[name]
    mod = example.make()
    inside = check(example.kind, mod)
    outside = eager(example.kind, mod)
    # Dynamo's first graph holds captured numbers as constants: put them into the eager graph.
    assert with_constants(inside, ()) == with_constants(outside.graph, outside.scalars)


def with_constants(graph: Graph, scalars: tuple[Any, ...]) -> list[str]:
    """Return the graph's operations in order, scalars and casts of them written as constants."""
    texts: list[str] = []
    for node in graph.nodes:
        args = [texts[argument] for argument in node.args]
        if node.op == "scalar":
            texts.append(f"{float(scalars[int(node.attrs[0])])}")
        elif node.op == "const":
            texts.append(f"{float(node.attrs[0])}")
        elif node.op == "cast" and is_number(args[0]):
            texts.append(args[0])
        else:
            texts.append(f"{node.op}:{node.dtype}{node.attrs}({','.join(args)})")
    return [texts[graph.output]]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_trace_in_compile_with_aot_eager_has_no_dead_weight() -> None:
    table = torch.randn(4, 8)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(abs(q - kv) <= 3, s + table[h, kv], -float("inf"))

    assert check("score", mod, "aot_eager") == eager("score", mod).graph


def test_trace_in_compile_changed_numbers_cost_one_graph_each() -> None:
    bias = torch.randn(3, 7)

    def make(w: int, c: float) -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return torch.where((q - kv <= w) & (q >= 3), s * 2.5 * c + bias[h, q - kv], 2 * w)

        return mod

    counter = Counter()
    compiled = torch.compile(tracing("score"), backend=counter, fullgraph=True)
    graphs = []
    for w, c in ((5, 0.5), (6, 0.5), (7, 0.5), (8, 0.6), (9, 0.7), (9, 0.8)):
        result = compiled(torch.ones(2), make(w, c))
        graphs.append(counter.graphs)
        if counter.graphs == 3:  # both numbers are scalars of the graph now, as in eager
            assert torch.equal(result, tracing("score")(torch.ones(2), make(w, c)))
    assert graphs == [1, 2, 2, 3, 3, 3]
    last = Graph.parse(SEEN[-1])
    assert sorted(last.scalars) == ["f64", "i64", "i64"]


@pytest.mark.parametrize("lengths", [(8, 9, 10, 11)])
def test_trace_in_compile_changed_lengths_cost_one_graph(lengths: tuple[int, ...]) -> None:
    def make(ids: Tensor) -> Any:
        return lambda b, h, q, kv: (ids[q % ids.shape[0]] == ids[kv]) & (q >= kv)

    counter = Counter()
    compiled = torch.compile(tracing("mask"), backend=counter, fullgraph=True)
    for length in lengths:
        compiled(torch.ones(2), make(torch.zeros(length, dtype=torch.int32)))
    assert counter.graphs == 2


def test_trace_in_compile_of_torch_and_masks_with_captured_window() -> None:
    def make(w: int) -> Any:
        return and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < w)

    counter = Counter()
    compiled = torch.compile(tracing("mask"), backend=counter, fullgraph=True)
    for w in (3, 4, 5, 6):
        compiled(torch.ones(2), make(w))
    assert counter.graphs == 2
    assert Graph.parse(SEEN[-1]) == eager("mask", make(6)).graph


class Learned(torch.nn.Module):
    """A module whose parameter is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.arange(4.0))

    def forward(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + self.slopes[h] * (kv - q)


def test_trace_in_compile_of_module_captures_its_parameter() -> None:
    graph = check("score", Learned())
    assert graph.captures[0].requires_grad
    assert graph == eager("score", Learned()).graph


CASES: dict[str, Any] = {
    "builtin_abs": lambda s, b, h, q, kv: s - abs(q - kv) * abs(s),
    "reflected": lambda s, b, h, q, kv: 2 / (3 - s) + 2**h + 7 % (q + 1) + 7 // (q + 1) + (1 << h),
    "in_place": lambda s, b, h, q, kv: s.clone().add_(1).mul_(q),
    "inplace_argument": lambda s, b, h, q, kv: s + torch.nn.functional.relu(s, inplace=True) + s,
    "made_inside": lambda s, b, h, q, kv: s + torch.zeros(()).add_(s).float(),
    "row": lambda s, b, h, q, kv: s + (ROWS[b, kv] * ROWS[b, q]).sum(-1) + ROWS[h, :].T @ ROWS[q],
    "unbind": lambda s, b, h, q, kv: s + ROWS[b].unbind()[1] + ROWS[b][0],
    "constants": lambda s, b, h, q, kv: s * s.new_ones(()) + torch.zeros((), dtype=s.dtype),
    "powers": lambda s, b, h, q, kv: s**2 + s**0.5 + torch.pow(s, h) + q**3,
    "activations": lambda s, b, h, q, kv: torch.nn.functional.silu(s) + torch.nn.functional.gelu(s),
    "attributes": lambda s, b, h, q, kv: s.to(s.dtype) + q.to(s.dtype) + len(ROWS[b]) + s.ndim,
}
ROWS = torch.randn(4, 3)


FAST = ("builtin_abs", "reflected", "row")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_trace_in_compile_of_python_operators_equals_eager(name: str) -> None:
    assert check("score", CASES[name]) == eager("score", CASES[name]).graph


@pytest.mark.parametrize(
    "rest",
    [lambda i, n: i / n, lambda i, n: n + i, lambda i, n: n / 3],
    ids=["div", "int", "float"],
)
def test_trace_in_compile_of_a_length_that_a_guard_fixed_is_a_constant(rest: Any) -> None:
    # math.log fixes the length by a guard, but Dynamo keeps it as a symbol with one value
    def function(x: Tensor) -> Tensor:
        length = x.shape[0]
        traced = trace_score_mod(lambda s, b, h, q, kv: s * math.log(length) + rest(q, length))
        note(traced.graph.text())
        return x + 1

    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for length in (5, 6):
        compiled(torch.ones(length))
        mod = lambda s, b, h, q, kv, n=length: s * math.log(n) + rest(q, n)  # noqa: E731
        outside = eager("score", mod)
        inside = Graph.parse(SEEN[-1])
        assert with_constants(inside, ()) == with_constants(outside.graph, outside.scalars)


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda s, b, h, q, kv: s if q > kv else -s, "torch.where"),
        (lambda s, b, h, q, kv: s + torch.fft.fft(s), "cannot be traced"),
        (lambda s, b, h, q, kv: s + sum(x for x in ROWS[b]), "unbind"),
        (lambda s, b, h, q, kv: q > kv, "mask_mod"),
        (lambda s, b, h, q, kv: s + s.view(1).add_(1)[0] + s, "changed in place"),
        (lambda s, b, h, q, kv: s + ROWS.add_(1)[b, 0], "captured tensor"),
    ],
)
def test_trace_in_compile_error_keeps_its_text(mod: Any, words: str) -> None:
    compiled = torch.compile(tracing("score"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=words):
        compiled(torch.ones(2), mod)


def test_library_is_reachable_from_compiled_code() -> None:
    def function(x: Tensor, w: int) -> Tensor:
        note(trace_mask_mod(library.sliding_window(w)).graph.text())
        return x + 1

    torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2), 4)
    assert "le:b1" in SEEN[0]
