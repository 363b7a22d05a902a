"""User mods on the device: evaluation of a mod graph on one register's position and score.

Lives here: the translation of `fovea.mods.graph` nodes into DSL operations. Not here: tracing and
the tensor evaluation, which defines what a node means (`fovea/mods/evaluate.py`). Invariant: a node
that depends on the row or the column alone is evaluated once per row or column of a fragment.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.integer_division import divide_floor, make_divisor
from fovea.kernels.device.mod_affine import Affine, add, scale, subtract, times, to_float
from fovea.kernels.device.mod_operations import OPERATIONS, cast, wrap
from fovea.kernels.device.values import select
from fovea.mods.graph import COMPARISONS, Graph, Node
from fovea.plan.captures import is_pair, may_be_negative
from fovea.plan.features import ForwardFeatures
from fovea.plan.integers import (
    EXACT_FLOAT_MAX,
    INT32_MAX,
    LARGEST_DIVIDEND,
    LARGEST_DIVISOR,
    integer_bounds,
    narrow_nodes,
)

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
    """Where a register lies: indices for the mod, fragment coordinates for the cache of values.

    kv_idx = first_kv_idx + column_offset, the second a constant of the register. Past the end of a
    sequence indices are not clamped: masks hide what a mod makes of them, and `_load` clamps to the
    captured tensor.
    """

    b: cutlass.Int32
    h: cutlass.Int32
    q_idx: cutlass.Int32
    first_kv_idx: cutlass.Int32
    column_offset: int
    row: int
    column: int

    @property
    def kv_idx(self) -> cutlass.Int32:
        """The key."""
        return self.first_kv_idx + self.column_offset


class ModEvaluator:
    """Evaluates one mod on the registers of one fragment."""

    def __init__(
        self,
        graph: Graph,
        arguments: ModArguments,
        *,
        wide_integers: bool,
        packs_heads: bool = False,
    ) -> None:
        self._bounds = integer_bounds(graph, wide_integers=wide_integers)
        # A node is computed in the type that `dtype` names; narrow ones in 32 bits.
        self._nodes = [
            replace(node, dtype="i32") if node.dtype == "i64" and is_narrow else node
            for node, is_narrow in zip(graph.nodes, narrow_nodes(graph, self._bounds), strict=True)
        ]
        self._graph = graph
        self._arguments = arguments
        self._depends = _dependences(graph, packs_heads=packs_heads)
        self._values: dict[tuple[Any, ...], Value] = {}
        self._affines: dict[tuple[Any, ...], Affine | None] = {}

    @property
    def loads_by_key(self) -> int:
        """How many captured values depend on the key alone."""
        return len(self._loads(lambda depends: depends == {"kv_idx"}))

    @property
    def loads_by_row(self) -> int:
        """How many captured values do not depend on the key."""
        return len(self._loads(lambda depends: depends <= {"q_idx"}))

    def prefetch(self, pair: tuple[Position, Position]) -> None:
        """Load what depends on the key alone, for two neighbouring columns and both rows."""
        for node_idx in self._loads(lambda depends: depends == {"kv_idx"}):
            if is_pair(self._graph, node_idx):
                node = self._nodes[node_idx]
                capture = self._arguments.captures[node.attrs[0]]
                values = _load_pair(capture, pair[0].kv_idx, node.dtype)
                for position, value in zip(pair, values, strict=True):
                    self._values[self._key(node_idx, position, ())] = value
            else:
                for position in pair:
                    self._value(node_idx, position, None, (), {})

    def hoist(self, positions: list[Position]) -> tuple[Value, ...]:
        """Load what does not depend on the key, once for a query tile: row by row of a thread."""
        return tuple(
            self._value(node_idx, position, None, (), {})
            for node_idx in self._loads(lambda depends: depends <= {"q_idx"})
            for position in positions
        )

    def use_hoisted(self, positions: list[Position], values: tuple[Value, ...]) -> None:
        """Take the values that `hoist` returned for the same rows."""
        remaining = list(values)
        for node_idx in self._loads(lambda depends: depends <= {"q_idx"}):
            for position in positions:
                self._values[self._key(node_idx, position, ())] = remaining.pop(0)

    def _loads(self, wanted: Callable[[frozenset[Any]], bool]) -> list[int]:
        """Return the loads of captured tensors whose inputs are as wanted."""
        return [
            i
            for i, node in enumerate(self._nodes)
            if node.op == "load" and wanted(self._depends[i])
        ]

    def score(self, score: cutlass.Float32, position: Position) -> cutlass.Float32:
        """Return the modified score."""
        return cast(self._result(position, score), "f32")

    def addend(self, position: Position) -> Affine | None:
        """Return what the mod adds to the score in a row, as base + step * column_offset.

        None where the mod is not a sum of the score and a number linear in the key. The products
        round in another order than the mod's own: good for a score, not for a comparison.
        """
        node = self._nodes[self._graph.output]
        if node.op not in ("add", "sub"):
            return None
        ops = [self._nodes[arg].op for arg in node.args]
        if ops[0] == "score":
            line = self._line(node.args[1], position)
            return line if line is None or node.op == "add" else times(line, cutlass.Float32(-1.0))
        if ops[1] == "score" and node.op == "add":
            return self._line(node.args[0], position)
        return None

    def _line(self, node_idx: int, position: Position) -> Affine | None:
        """Return a float node as base + step * column_offset, rounded in fp32, else None."""
        node, depends = self._nodes[node_idx], self._depends[node_idx]
        if not depends <= {"q_idx", "kv_idx"} or node.dtype not in _FLOATS:
            return None
        if "kv_idx" not in depends:
            value = self._value(node_idx, position, None, (), {})
            return Affine(cast(value, "f32"), cutlass.Float32(0.0))
        if node.dtype != "f32":
            return None  # rounded key by key
        if node.op == "cast":
            if self._nodes[node.args[0]].dtype in _FLOATS:
                return self._line(node.args[0], position)
            exact = self._affine(node_idx, position)
            return None if exact is None else Affine(exact.base, cutlass.Float32(exact.step))
        if node.op not in ("add", "sub", "mul"):
            return None
        lines = [self._line(arg, position) for arg in node.args]
        if lines[0] is None or lines[1] is None:
            return None
        if node.op == "mul":
            constant, other = (0, 1) if "kv_idx" not in self._depends[node.args[0]] else (1, 0)
            if "kv_idx" in self._depends[node.args[constant]]:
                return None
            return times(lines[other], lines[constant].base)
        return add(*lines) if node.op == "add" else subtract(*lines)

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
        depends = self._depends[node_idx]
        key = self._key(node_idx, position, axes)
        cache = local if "score" in depends else self._values
        if key not in cache:
            affine = self._affine(node_idx, position) if "kv_idx" in depends else None
            if affine is not None:
                cache[key] = affine.at(position.column_offset)
            else:
                cache[key] = self._compute(node_idx, position, score, axes, local)
        return cache[key]

    def _key(
        self, node_idx: int, position: Position, axes: tuple[tuple[Any, int], ...]
    ) -> tuple[Any, ...]:
        """Return what a node's value varies with."""
        depends = self._depends[node_idx]
        return (
            node_idx,
            position.row if "q_idx" in depends else None,
            position.column if "kv_idx" in depends else None,
            tuple(item for item in axes if ("axis", item[0]) in depends),
        )

    def _affine(self, node_idx: int, position: Position) -> Affine | None:
        """Return a node as base + step * column where it is exactly that, else None."""
        depends = self._depends[node_idx]
        key = (node_idx, position.row if "q_idx" in depends else None)
        if key not in self._affines:
            self._affines[key] = self._make_affine(node_idx, position)
        return self._affines[key]

    def _make_affine(self, node_idx: int, position: Position) -> Affine | None:
        node, depends = self._nodes[node_idx], self._depends[node_idx]
        if node.op == "cast" and node.dtype == "f32":
            inner = self._affine(node.args[0], position)
            is_exact = self._bounds[node.args[0]] <= EXACT_FLOAT_MAX
            return to_float(inner) if inner is not None and is_exact else None
        if node.dtype != "i32" or not depends <= {"q_idx", "kv_idx"}:
            return None
        if "kv_idx" not in depends:
            return Affine(self._value(node_idx, position, None, (), {}), 0)
        if node.op == "kv_idx":
            return Affine(position.first_kv_idx, 1)
        operands = [self._affine(arg, position) for arg in node.args]
        if any(operand is None for operand in operands):
            return None
        if node.op == "add":
            return add(*operands)
        if node.op == "sub":
            return subtract(*operands)
        if node.op == "mul":
            return self._scaled(node, operands)
        return None

    def _scaled(self, node: Node, operands: list[Affine]) -> Affine | None:
        """Return a product with a constant."""
        for constant, other in ((1, 0), (0, 1)):
            factor = self._nodes[node.args[constant]]
            if factor.op == "const":
                return scale(operands[other], int(factor.attrs[0]))
        return None

    def _compare(self, node_idx: int, position: Position) -> Value | None:
        """Return a comparison of index arithmetic: one instruction with a constant, else None."""
        node = self._nodes[node_idx]
        a, b = (self._affine(arg, position) for arg in node.args)
        if a is None or b is None:
            return None
        if any(isinstance(side.base, cutlass.Float32) for side in (a, b)):
            return None
        if sum(self._bounds[arg] for arg in node.args) > INT32_MAX:
            return None
        key = (node_idx, position.row if "q_idx" in self._depends[node_idx] else None, "apart")
        if key not in self._values:
            self._values[key] = b.base - a.base
        column = cutlass.Int32((a.step - b.step) * position.column_offset)
        return OPERATIONS[node.op](node, column, self._values[key])

    def _compute(
        self,
        node_idx: int,
        position: Position,
        score: cutlass.Float32 | None,
        axes: tuple[tuple[Any, int], ...],
        local: dict[tuple[Any, ...], Value],
    ) -> Value:
        node = self._nodes[node_idx]
        if node.op == "score":
            assert score is not None
            return score
        if node.op in ("b", "h", "q_idx", "kv_idx"):
            return cast(getattr(position, node.op), node.dtype)
        if node.op == "const":
            return _constant(node)
        if node.op == "scalar":
            return wrap(cast(self._arguments.scalars[node.attrs[0]], node.dtype), node)
        if node.op == "axis":
            return cast(dict(axes)[node.attrs[0]], node.dtype)
        if node.op in _REDUCTIONS:
            return self._reduce(node, position, score, axes, local)
        if node.op in COMPARISONS and "kv_idx" in self._depends[node_idx]:
            compared = self._compare(node_idx, position)
            if compared is not None:
                return compared
        if self._divides_small(node):
            return wrap(self._divide(node, position, score, axes, local), node)
        operands = [self._value(arg, position, score, axes, local) for arg in node.args]
        if node.op == "load":
            may_wrap = [may_be_negative(self._graph, arg) for arg in node.args]
            return _load(self._arguments.captures[node.attrs[0]], operands, may_wrap, node.dtype)
        dtypes = [self._nodes[arg].dtype for arg in node.args]
        return wrap(OPERATIONS[node.op](node, *operands), node, dtypes)

    def _divides_small(self, node: Node) -> bool:
        """Return whether a node is a quotient or remainder of small integers."""
        if node.op not in ("floordiv", "mod") or node.dtype in ("i64", *_FLOATS):
            return False
        dividend, divisor = (self._bounds[arg] for arg in node.args)
        return dividend <= LARGEST_DIVIDEND and divisor <= LARGEST_DIVISOR

    def _divide(
        self,
        node: Node,
        position: Position,
        score: cutlass.Float32 | None,
        axes: tuple[tuple[Any, int], ...],
        local: dict[tuple[Any, ...], Value],
    ) -> Value:
        """Return a quotient or remainder; those of one pair of numbers share their quotient."""
        a, b = node.args
        depends = self._depends[a] | self._depends[b]
        cache = local if "score" in depends else self._values
        by_divisor = ("divisor", *self._key(b, position, axes))
        if by_divisor not in cache:
            value = cast(self._value(b, position, score, axes, local), node.dtype)
            cache[by_divisor] = make_divisor(value)
        divisor = cache[by_divisor]
        dividend = cast(self._value(a, position, score, axes, local), node.dtype)
        by_both = ("quotient", self._key(a, position, axes), self._key(b, position, axes))
        if by_both not in cache:
            cache[by_both] = divide_floor(dividend, divisor)
        quotient = cache[by_both]
        return quotient if node.op == "floordiv" else dividend - quotient * divisor.value

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
        return wrap(result, node)


_FLOATS = ("f16", "bf16", "f32", "f64")

_REDUCTIONS = {
    "sum": "add",
    "prod": "mul",
    "any": "or",
    "all": "and",
    "amax": "maximum",
    "amin": "minimum",
}


def _dependences(graph: Graph, *, packs_heads: bool) -> list[frozenset[Any]]:
    """Return, per node, the inputs and axes that its value depends on.

    "q_idx" stands for the row. Where heads are packed that is what the head varies with, too.
    """
    result: list[frozenset[Any]] = []
    for node in graph.nodes:
        depends: frozenset[Any] = frozenset().union(*(result[arg] for arg in node.args))
        if node.op in ("score", "q_idx", "kv_idx"):
            depends |= {node.op}
        elif node.op == "h" and packs_heads:
            depends |= {"q_idx"}
        elif node.op == "axis":
            depends |= {("axis", node.attrs[0])}
        elif node.op in _REDUCTIONS:
            depends -= {("axis", node.attrs[0])}
        result.append(depends)
    return result


def _constant(node: Node) -> Value:
    """Return a constant as its dtype holds it; an integer so that powers know its value."""
    number = node.attrs[0]
    if node.dtype == "u8":
        number = int(number) & 255
    value = cast(number, node.dtype)
    return wrap(value, node) if node.dtype in _FLOATS else value


def _load(capture: cute.Tensor, indices: list[Value], may_wrap: list[bool], dtype: str) -> Value:
    """Return an element of a captured tensor.

    A negative index wraps as in torch. An index out of range is clamped: it is an error at a
    visible position (found under FOVEA_CHECK=1) and reads something harmless at a hidden one.
    """
    coordinate = []
    for dimension, index in enumerate(indices):
        extent = capture.shape[dimension]
        position = cast(index, "i32")
        if may_wrap[dimension]:
            position = select(position < 0, position + extent, position)
        coordinate.append(cutlass.max(cutlass.min(position, extent - 1), 0))
    value = capture[tuple(coordinate)] if coordinate else capture[0]
    return _stored(value, dtype)


def _load_pair(capture: cute.Tensor, index: cutlass.Int32, dtype: str) -> tuple[Value, Value]:
    """Return two elements of a captured vector, the first at an even index, with one instruction.

    Past the end the last pair is read, for positions that nobody sees.
    """
    start = cutlass.max(cutlass.min(index, capture.shape[0] - 2), 0)
    pair_bytes = 2 * (capture.element_type.width // 8)
    pointer = (capture.iterator + start).align(pair_bytes)
    pair = cute.make_tensor(pointer, cute.make_layout(2)).load()
    # The DSL's vectors forget that bytes have no sign.
    first, second = (pair[place].to(capture.element_type) for place in range(2))
    return _stored(first, dtype), _stored(second, dtype)


def _stored(value: Value, dtype: str) -> Value:
    """Return an element as the graph's type; truth values are stored as bytes."""
    return cast(value != 0, dtype) if dtype == "b1" else cast(value, dtype)
