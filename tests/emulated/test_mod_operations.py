"""Every operation of the mod language on the device against its definition on tensors."""

from collections.abc import Iterable

import pytest
import torch
from mod_variant import ModVariant
from torch import Tensor

from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.graph import (
    BINARY,
    BITWISE,
    COMPARISONS,
    FLOAT_UNARY,
    INPUTS,
    OPS,
    REDUCTIONS,
    TORCH_DTYPE,
    UNARY,
    CaptureSpec,
    Graph,
    Node,
)
from fovea.runtime.emulated_module import load

INTEGERS = ("u8", "i8", "i16", "i32", "i64")
FLOATS = ("f16", "bf16", "f32")
LENGTH = 96
_EXTENT = 3
_CAPTURES = {
    "b1": torch.tensor([True, False, True, True, False]),
    "u8": torch.tensor([0, 1, 128, 200, 255], dtype=torch.uint8),
    "i8": torch.tensor([-128, -1, 0, 1, 127], dtype=torch.int8),
    "i16": torch.tensor([-(2**15), -3, 0, 300, 2**15 - 1], dtype=torch.int16),
    "i32": torch.tensor([-(2**31), -70000, 0, 5, 2**31 - 1], dtype=torch.int32),
    "i64": torch.tensor([-(2**62), -(2**33), 0, 2**40 + 3, 2**62]),
    "f16": torch.tensor([-2.5, -0.0, 0.5, 1.0, 60000.0], dtype=torch.float16),
    "bf16": torch.tensor([-2.5, -0.0, 0.5, 1.0, 1e30], dtype=torch.bfloat16),
    "f32": torch.tensor([-2.5, -0.0, 0.1, 1.0, 1e-30]),
    "f64": torch.tensor([-2.5, -0.0, 0.1, 1.0, 1e30], dtype=torch.float64),
}
_SPECS = tuple(CaptureSpec(dtype, 1, False) for dtype in _CAPTURES)
_SCALARS = {"i64": 13, "f64": -1.75}


class Builder:
    """Nodes in order, with what every graph here starts from."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, op: str, dtype: str, *args: int, attrs: tuple[object, ...] = ()) -> int:
        """Append a node and return its number."""
        node = Node(op=op, args=args, dtype=dtype, attrs=attrs)
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)

    def operand(self, which: int, dtype: str) -> int:
        """Return an operand: for integers from the indices, for floats from the score too."""
        index = self.add(("kv_idx", "q_idx")[which], "i64")
        if dtype == "i64":
            return index
        if dtype == "b1":
            return self.add("gt", "b1", index, self.add("const", "i64", attrs=(which,)))
        if dtype in INTEGERS:
            return self.add("cast", dtype, index)
        value = self.add("score", "f32")
        if which == 1:
            eighth = self.add("const", "f32", attrs=(0.125,))
            value = self.add("mul", "f32", self.add("cast", "f32", index), eighth)
        return value if dtype == "f32" else self.add("cast", dtype, value)

    def graphs(self, result: int) -> Iterable[Graph]:
        """Return graphs whose fp32 outputs show a node's value, exactly for integers."""
        dtype = self.nodes[result].dtype
        if dtype == "i64":
            low_bits = self.add("const", "i64", attrs=(0xFFFFF,))
            for shift in (0, 20, 40):
                by = self.add("const", "i64", attrs=(shift,))
                part = self.add("and", "i64", self.add("shr", "i64", result, by), low_bits)
                yield self.graph(self.add("cast", "f32", part))
            return
        if dtype == "i32":
            wide = self.add("cast", "i64", result)
            yield from self.graphs(wide)
            return
        yield self.graph(result if dtype == "f32" else self.add("cast", "f32", result))

    def graph(self, output: int) -> Graph:
        """Return the graph of an output."""
        return Graph("score", tuple(self.nodes), output, _SPECS, tuple(_SCALARS))


def _operation_graphs(op: str, dtype: str) -> list[Graph]:
    build = Builder()
    operands = 1 if op in (*UNARY, *FLOAT_UNARY, "not") else 2
    args = [build.operand(which, dtype) for which in range(operands)]
    result_type = "b1" if op in COMPARISONS else dtype
    if op in ("shl", "shr"):
        # Counts from -2 to past the width: the modulo of the language has the divisor's sign.
        count = build.add("mod", dtype, args[1], build.add("const", dtype, attrs=(67,)))
        args[1] = build.add("sub", dtype, count, build.add("const", dtype, attrs=(2,)))
    return list(build.graphs(build.add(op, result_type, *args)))


def _other_graphs() -> dict[str, list[Graph]]:
    """Return graphs of the nodes that are no plain operation."""
    found: dict[str, list[Graph]] = {}
    for number, dtype in enumerate(_CAPTURES):
        build = Builder()
        # From -5 to 4, so that some wrap.
        ten, five = (build.add("const", "i64", attrs=(x,)) for x in (10, 5))
        index = build.add("sub", "i64", build.add("mod", "i64", build.operand(0, "i64"), ten), five)
        value = build.add("load", dtype, index, attrs=(number,))
        if dtype == "f64":
            value = build.add("cast", "f32", value)
        found[f"load {dtype}"] = list(build.graphs(value))
    for source in (*INTEGERS, "b1", *FLOATS):
        for target in (*INTEGERS, "b1", *FLOATS):
            build = Builder()
            value = build.operand(0, source)
            found[f"cast {source} {target}"] = list(build.graphs(build.add("cast", target, value)))
    for op in REDUCTIONS:
        for dtype in ("b1",) if op in ("any", "all") else ("i64", *FLOATS):
            build = Builder()
            axis = build.add("axis", "i64", attrs=(0, _EXTENT))
            total = build.add("add", "i64", axis, build.operand(0, "i64"))
            if dtype == "b1":
                total = build.add("gt", "b1", total, build.add("const", "i64", attrs=(0,)))
            elif dtype in FLOATS:
                total = build.add(
                    "mul", dtype, build.add("cast", dtype, total), build.operand(0, dtype)
                )
            found[f"{op} {dtype}"] = list(build.graphs(build.add(op, dtype, total, attrs=(0,))))
    for name in ("b", "h", "q_idx", "kv_idx"):
        build = Builder()
        found[name] = list(build.graphs(build.add(name, "i64")))
    for slot, kind in enumerate(_SCALARS):
        build = Builder()
        dtype = "f32" if kind == "f64" else kind
        found[f"scalar {kind}"] = list(build.graphs(build.add("scalar", dtype, attrs=(slot,))))
    for dtype in (*INTEGERS, "b1", *FLOATS):
        build = Builder()
        values = [build.operand(which, dtype) for which in range(2)]
        chosen = build.add("where", dtype, build.operand(0, "b1"), *values)
        found[f"where {dtype}"] = list(build.graphs(chosen))
    return found


def _quotient_graphs() -> dict[str, list[Graph]]:
    """Return divisions by the score of multiples of it, and of numbers it does not divide."""
    found: dict[str, list[Graph]] = {}
    for op in ("floordiv", "mod"):
        for what in ("multiple", "index"):
            build = Builder()
            score = build.add("score", "f32")
            dividend = build.add("cast", "f32", build.operand(0, "i64"))
            if what == "multiple":
                dividend = build.add("mul", "f32", dividend, score)
            found[f"{op} f32 {what}"] = list(build.graphs(build.add(op, "f32", dividend, score)))
    return found


def _graphs_of(ops: Iterable[str], dtypes: Iterable[str]) -> dict[str, list[Graph]]:
    dtypes = tuple(dtypes)
    return {f"{op} {dtype}": _operation_graphs(op, dtype) for op in ops for dtype in dtypes}


_INTEGER_OPS = tuple(op for op in BINARY if op not in ("div", "atan2"))
# The reduction of large arguments is long code: a kernel of its own.
_CIRCULAR = ("sin", "cos", "tan")
_SIMPLE_FLOAT = tuple(op for op in FLOAT_UNARY if op not in _CIRCULAR)
GROUPS: dict[str, dict[str, list[Graph]]] = {
    "integers": {
        **_graphs_of((*_INTEGER_OPS, *COMPARISONS, *BITWISE), INTEGERS),
        **_graphs_of(("neg", "abs", "sign"), ("i8", "i16", "i32", "i64")),
        **_graphs_of(("floor", "ceil", "round", "trunc"), ("i32",)),
        **_graphs_of(("and", "or", "xor", "not", *COMPARISONS), ("b1",)),
    },
    "floats": {
        **_graphs_of((*BINARY, *COMPARISONS, *UNARY, *_SIMPLE_FLOAT), ("f32",)),
        **_graphs_of((*BINARY, *COMPARISONS, *UNARY, *_SIMPLE_FLOAT), ("f16", "bf16")),
        **_quotient_graphs(),
    },
    "circular": _graphs_of(_CIRCULAR, ("f32",)),
    "others": _other_graphs(),
}


def _positions(*, is_wide: bool) -> tuple[Tensor, Tensor]:
    """Return scores (LENGTH,) and indices (4, LENGTH); mods see negative indices only here."""
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.5, torch.inf, -torch.inf])
    special = torch.cat((special, torch.tensor([torch.nan, 1e-30, 1e30, 90.0, -90.0, 1e-6])))
    score = torch.cat((special, torch.randn(LENGTH - len(special), generator=generator) * 3))
    limit = 2**27 if is_wide else 300
    indices = torch.randint(-limit, limit, (4, LENGTH), generator=generator, dtype=torch.int32)
    small = torch.arange(-8, 24, dtype=torch.int32)
    indices[2, :32], indices[3, :32] = small, small.flip(0)
    return score, indices


def _mismatch(
    name: str, graph: Graph, score: Tensor, actual: Tensor, expected: Tensor
) -> str | None:
    """Return what differs, None if nothing does."""
    dtypes = {node.dtype for node in graph.nodes}
    op = name.split()[0]
    if name.startswith("cast") and name.split()[2] in INTEGERS and name.split()[1] in FLOATS:
        # What an integer type cannot hold is undefined.
        kept = score.abs() < 100
        actual, expected, score = actual[kept], expected[kept], score[kept]
    if op == "mod" and name.endswith("index"):
        # The remainder of a quotient past 2^24 means nothing.
        kept = (score.abs() > 1e-3) | (score == 0) | score.isnan()
        actual, expected, score = actual[kept], expected[kept], score[kept]
    tolerance = 4e-6 if op in (*FLOAT_UNARY, "pow", "atan2", "div", "sum", "prod") else 0.0
    if tolerance > 0 and ("f16" in dtypes or "bf16" in dtypes):
        # What is good to the last places of fp32 may round to a neighbour.
        tolerance = torch.finfo(torch.bfloat16 if "bf16" in dtypes else torch.float16).eps
    if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    wrong = ~torch.isclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    i = int(wrong.nonzero()[0])
    return f"{name}: {int(wrong.sum())} wrong, first at {i}: {actual[i]!r}, not {expected[i]!r}"


@pytest.mark.parametrize(
    ("group", "wide_integers"),
    [
        ("integers", False),
        ("integers", True),
        ("floats", False),
        ("others", False),
        pytest.param("others", True, marks=pytest.mark.slow),
        pytest.param("circular", False, marks=pytest.mark.slow),
    ],
)
def test_device_operations_equal_the_evaluation_on_tensors(group: str, wide_integers: bool) -> None:
    named = [(name, graph) for name, graphs in GROUPS[group].items() for graph in graphs]
    variant = ModVariant(graphs=tuple(graph for _, graph in named), wide_integers=wide_integers)
    score, indices = _positions(is_wide=wide_integers)
    out = torch.full((len(named), LENGTH), torch.nan)
    captures = tuple(_CAPTURES.values())
    passed = tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in captures)
    artifact = get_artifact(variant, CompileTarget(arch="sm_90a"))
    # No operation takes local memory, so none makes a kernel's accumulators go there.
    assert not any(used.stack_bytes + used.local_bytes for used in artifact.record.kernels.values())
    run = load(artifact)
    run(score, indices, out, passed, tuple(_SCALARS.values()))
    b, h, q_idx, kv_idx = indices.long()
    problems = []
    for row, (name, graph) in zip(out, named, strict=True):
        expected = evaluate(
            graph,
            Positions(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx),
            score=score,
            captures=captures,
            scalars=tuple(_SCALARS.values()),
        ).expand(LENGTH)
        problems.append(_mismatch(name, graph, score, row, expected))
    found = [text for text in problems if text is not None]
    assert not found, "\n".join(found)


def test_every_operation_of_the_language_is_compared() -> None:
    seen = {
        node.op
        for group in GROUPS.values()
        for graphs in group.values()
        for graph in graphs
        for node in graph.nodes
    }
    assert OPS - seen == {"grad"}
    assert set(INPUTS) - seen == {"grad"}
    assert set(TORCH_DTYPE) == {*INTEGERS, *FLOATS, "b1", "f64"}
