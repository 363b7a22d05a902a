"""User mods on the device: evaluation of a mod graph on one register's position and score.

Lives here: the translation of `fovea.mods.graph` nodes into DSL operations. Not here: tracing and
the tensor evaluation, which defines what a node means (`fovea/mods/evaluate.py`). Invariant: a node
that depends on the row or the column alone is evaluated once per row or column of a fragment.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.mod_operations import OPERATIONS, cast, wrap
from fovea.kernels.device.values import select
from fovea.mods.graph import Graph, Node
from fovea.plan.features import ForwardFeatures
from fovea.plan.integers import narrow_nodes

Value = Any  # a DSL scalar


class ModArguments(NamedTuple):
    """Captured tensors and run-time scalars of one mod."""

    captures: tuple
    scalars: tuple


class ModTable(NamedTuple):
    """The arguments of every mod of a variant; None where it has no such mod."""

    score_mod: ModArguments | None
    mask_mod: ModArguments | None
    block_mask_mod: ModArguments | None


def make_mod_table(
    features: ForwardFeatures, captures: tuple | None, scalars: tuple | None
) -> ModTable:
    """Return the table from the flat arguments, which come in the order of `features.graphs`."""
    captures = () if captures is None else captures
    scalars = () if scalars is None else scalars
    table: dict[str, ModArguments | None] = {}
    for name in ModTable._fields:
        graph = getattr(features, name)
        table[name] = None
        if graph is not None:
            num_captures, num_scalars = len(graph.captures), len(graph.scalars)
            table[name] = ModArguments(captures[:num_captures], scalars[:num_scalars])
            captures, scalars = captures[num_captures:], scalars[num_scalars:]
    return ModTable(**table)


class Position(NamedTuple):
    """Where a register lies: indices for the mod, fragment coordinates for the cache of values."""

    b: cutlass.Int32
    h: cutlass.Int32
    q_idx: cutlass.Int32
    kv_idx: cutlass.Int32
    row: int
    column: int


class ModEvaluator:
    """Evaluates one mod on the registers of one fragment."""

    def __init__(self, graph: Graph, arguments: ModArguments, *, wide_integers: bool) -> None:
        narrow = narrow_nodes(graph, wide_integers=wide_integers)
        # A node is computed in the type that `dtype` names; narrow ones in 32 bits.
        self._nodes = [
            replace(node, dtype="i32") if is_narrow and node.dtype == "i64" else node
            for node, is_narrow in zip(graph.nodes, narrow, strict=True)
        ]
        self._graph = graph
        self._arguments = arguments
        self._depends = _dependences(graph)
        self._values: dict[tuple[Any, ...], Value] = {}

    def score(self, score: cutlass.Float32, position: Position) -> cutlass.Float32:
        """Return the modified score."""
        return cast(self._result(position, score), "f32")

    def mask(self, position: Position) -> cutlass.Boolean:
        """Return whether the position is visible."""
        return cast(self._result(position, None), "b1")

    def _result(self, position: Position, score: cutlass.Float32 | None) -> Value:
        local: dict[tuple[Any, ...], Value] = {}
        return self._value(self._graph.output, position, score, (), local)

    def _value(
        self,
        node_idx: int,
        position: Position,
        score: cutlass.Float32 | None,
        axes: tuple[tuple[Any, int], ...],
        local: dict[tuple[Any, ...], Value],
    ) -> Value:
        """Return a node's value; `axes` fixes the positions on axes being reduced."""
        node = self._nodes[node_idx]
        depends = self._depends[node_idx]
        used_axes = tuple(item for item in axes if ("axis", item[0]) in depends)
        key = (
            node_idx,
            position.row if "q_idx" in depends else None,
            position.column if "kv_idx" in depends else None,
            used_axes,
        )
        cache = local if "score" in depends else self._values
        if key not in cache:
            cache[key] = self._compute(node, position, score, axes, local)
        return cache[key]

    def _compute(
        self,
        node: Node,
        position: Position,
        score: cutlass.Float32 | None,
        axes: tuple[tuple[Any, int], ...],
        local: dict[tuple[Any, ...], Value],
    ) -> Value:
        if node.op == "score":
            assert score is not None
            return score
        if node.op in ("b", "h", "q_idx", "kv_idx"):
            return cast(getattr(position, node.op), node.dtype)
        if node.op == "const":
            return cast(node.attrs[0], node.dtype)
        if node.op == "scalar":
            return cast(self._arguments.scalars[node.attrs[0]], node.dtype)
        if node.op == "axis":
            return cast(dict(axes)[node.attrs[0]], node.dtype)
        if node.op in _REDUCTIONS:
            return self._reduce(node, position, score, axes, local)
        operands = [self._value(arg, position, score, axes, local) for arg in node.args]
        if node.op == "load":
            return _load(self._arguments.captures[node.attrs[0]], operands, node.dtype)
        return wrap(OPERATIONS[node.op](node, *operands), node.dtype)

    def _reduce(
        self,
        node: Node,
        position: Position,
        score: cutlass.Float32 | None,
        axes: tuple[tuple[Any, int], ...],
        local: dict[tuple[Any, ...], Value],
    ) -> Value:
        """Reduce over a static axis, unrolled."""
        axis = node.attrs[0]
        extent = next(
            n.attrs[1] for n in self._graph.nodes if n.op == "axis" and n.attrs[0] == axis
        )
        combine = OPERATIONS[_REDUCTIONS[node.op]]
        result = None
        for step in range(extent):
            value = self._value(node.args[0], position, score, (*axes, (axis, step)), local)
            value = cast(value, node.dtype)
            result = value if result is None else combine(node, result, value)
        return result


_REDUCTIONS = {
    "sum": "add",
    "prod": "mul",
    "any": "or",
    "all": "and",
    "amax": "maximum",
    "amin": "minimum",
}


def _dependences(graph: Graph) -> list[frozenset[Any]]:
    """Return, per node, the inputs and axes that its value depends on."""
    result: list[frozenset[Any]] = []
    for node in graph.nodes:
        depends: frozenset[Any] = frozenset().union(*(result[arg] for arg in node.args))
        if node.op in ("score", "q_idx", "kv_idx"):
            depends |= {node.op}
        elif node.op == "axis":
            depends |= {("axis", node.attrs[0])}
        elif node.op in _REDUCTIONS:
            depends -= {("axis", node.attrs[0])}
        result.append(depends)
    return result


def _load(capture: cute.Tensor, indices: list[Value], dtype: str) -> Value:
    """Return an element of a captured tensor.

    A negative index wraps as in torch. An index out of range is clamped: it is an error at a
    visible position (found under FOVEA_CHECK=1) and reads something harmless at a hidden one.
    """
    coordinate = []
    for dimension, index in enumerate(indices):
        extent = capture.shape[dimension]
        position = cast(index, "i32")
        position = select(position < 0, position + extent, position)
        coordinate.append(cutlass.max(cutlass.min(position, extent - 1), 0))
    value = capture[tuple(coordinate)] if coordinate else capture[0]
    return cast(value != 0, dtype) if dtype == "b1" else cast(value, dtype)
