"""Differentiate a score graph: dL/dscore and what each captured tensor receives, as a graph.

Lives here: reverse-mode differentiation of the mod language. Not here: running the result
(`pull_back.py`). Invariant: a branch that `where` did not take adds exactly 0, even
where its own derivative is infinite or NaN, and so does a position whose `grad` is 0. For this an
adjoint carries a gate, the condition under which it counts, and the gate is applied once, at the
end of its path.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fovea.errors import TraceError
from fovea.mods.assembly import Renumbering
from fovea.mods.builder import FLOATS, GraphBuilder
from fovea.mods.graph import Graph, Node, Scatter, ScoreDerivative

_PASSIVE = frozenset(("sign", "floor", "ceil", "round", "trunc", "detach", "floordiv"))
# Products with these cannot turn a 0 into NaN, so positions with grad 0 need no gate of their own.
_HARMLESS = frozenset(("add", "sub", "neg", "cast", "where", "sum", "minimum", "maximum"))


@dataclass(frozen=True, slots=True)
class Adjoint:
    """dL/dnode: `value`, valid where `gate` (a bool node) holds and 0 elsewhere."""

    value: int
    gate: int | None


@lru_cache(maxsize=512)
def derivative(graph: Graph) -> ScoreDerivative:
    """Return the derivative of a score graph.

    Raises:
        TraceError: the graph is a mask, which has no derivative.
    """
    if graph.kind != "score":
        raise TraceError(
            "kind='mask' has no derivative (allowed: 'score'); pass a score_mod's graph"
        )
    return Differentiation(graph).run()


def receivers(text: str) -> str:
    """Return the captures that a score graph's derivative adds to, from text to text.

    A capture that requires grad is none where the mod reads it through `detach` alone. Dynamo calls
    this as it is: from a constant text to a constant text, numbers between commas.
    """
    numbers = sorted({scatter.capture for scatter in derivative(Graph.parse(text)).scatters})
    return ",".join(map(str, numbers))


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo now.
receivers._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class Differentiation:
    """The state of one differentiation."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.b = GraphBuilder()
        axes = [node for node in graph.nodes if node.op == "axis"]
        extents = {int(node.attrs[0]): int(node.attrs[1]) for node in axes}
        for axis in range(len(extents)):
            self.b.new_axis(extents[axis])
        self.place: list[int] = []
        for node in graph.nodes:
            args = tuple(self.place[argument] for argument in node.args)
            self.place.append(self.b.add(node.op, args, node.dtype, node.attrs))
        self.active = self._active()
        self.adjoints: dict[int, list[Adjoint]] = {}
        self.is_risky = False

    def run(self) -> ScoreDerivative:
        """Return the finished program."""
        graph, b = self.graph, self.b
        grad = b.add("grad", (), graph.dtype)
        self.adjoints[graph.output] = [Adjoint(grad, None)]
        d_score = b.constant(0.0, graph.dtype)
        scatters: list[Scatter] = []
        for number in range(graph.output, -1, -1):
            if not self.active[number] or number not in self.adjoints:
                continue
            node = graph.nodes[number]
            adjoint = self._merged(number)
            if node.op == "score":
                d_score = self._final(adjoint, grad)
            elif node.op == "load":
                index = tuple(self.place[argument] for argument in node.args)
                value = self._final(adjoint, grad)
                axes = b.free[self.place[number]]
                scatters.append(
                    Scatter(capture=int(node.attrs[0]), index=index, value=value, axes=axes)
                )
            else:
                self.is_risky = self.is_risky or node.op not in _HARMLESS
                self._spread(number, node, adjoint)
        scatters.reverse()
        return self._assembled(d_score, scatters)

    def _assembled(self, d_score: int, scatters: list[Scatter]) -> ScoreDerivative:
        renumbering = Renumbering(self.b.nodes)
        # The program shares its captures and scalars with the graph: their numbers stay.
        renumbering.captures = list(range(len(self.graph.captures)))
        renumbering.scalars = list(range(len(self.graph.scalars)))
        new_d_score = renumbering.visit(d_score)
        moved: list[Scatter] = []
        for scatter in scatters:
            index = tuple(renumbering.visit(number) for number in scatter.index)
            value = renumbering.visit(scatter.value)
            axes = tuple(renumbering.axes.index(axis) for axis in scatter.axes)
            moved.append(Scatter(capture=scatter.capture, index=index, value=value, axes=axes))
        return ScoreDerivative(
            tuple(renumbering.done),
            new_d_score,
            tuple(moved),
            self.graph.captures,
            self.graph.scalars,
        )

    # ------------------------------------------------------------------------------- adjoints

    def _active(self) -> list[bool]:
        """Return which nodes carry a derivative to the score or to a capture that wants one."""
        active: list[bool] = []
        for node in self.graph.nodes:
            if node.op == "score":
                active.append(True)
            elif node.op == "load":
                active.append(self.graph.captures[int(node.attrs[0])].requires_grad)
            elif node.op in _PASSIVE or node.dtype not in FLOATS:
                active.append(False)
            else:
                values = node.args[1:] if node.op == "where" else node.args
                active.append(any(active[argument] for argument in values))
        return active

    def _merged(self, number: int) -> Adjoint:
        """Return the sum of what reached a node."""
        parts = self.adjoints.pop(number)
        if len(parts) == 1:
            return parts[0]
        total = self._closed(parts[0])
        for part in parts[1:]:
            total = self.op("add", total, self._closed(part))
        gate: int | None = parts[0].gate
        for part in parts[1:]:
            gate = None if gate is None or part.gate is None else self._or(gate, part.gate)
        return Adjoint(total, gate)

    def _or(self, a: int, b: int) -> int:
        return self.b.fold("or", (a, b), "b1")

    def _closed(self, adjoint: Adjoint) -> int:
        """Return the value with 0 where the gate is shut."""
        if adjoint.gate is None:
            return adjoint.value
        zero = self.b.constant(0.0, self.dtype_of(adjoint.value))
        return self.b.fold("where", (adjoint.gate, adjoint.value, zero), self.dtype_of(zero))

    def _final(self, adjoint: Adjoint, grad: int) -> int:
        """Return the value at the end of a path: 0 where the gate is shut or grad is 0."""
        gate = adjoint.gate
        if self.is_risky:
            zero = self.b.constant(0.0, self.graph.dtype)
            lives = self.b.add("ne", (grad, zero), "b1")
            gate = lives if gate is None else self.b.fold("and", (lives, gate), "b1")
        return self._closed(Adjoint(adjoint.value, gate))

    def send(self, argument: int, value: int, gate: int | None) -> None:
        """Add an adjoint to a node, summed over the axes that the node does not have."""
        if not self.active[argument]:
            return
        dtype = "f64" if self.graph.nodes[argument].dtype == "f64" else "f32"
        target = self.b.free[self.place[argument]]
        reached = set(self.b.free[value]) | set(self.b.free[gate] if gate is not None else ())
        extra = [axis for axis in sorted(reached) if axis not in target]
        if extra:
            value = self._closed(Adjoint(value, gate))
            for axis in extra:
                value = self.b.add("sum", (value,), self.dtype_of(value), (axis,))
                if gate is not None and axis in self.b.free[gate]:
                    gate = self.b.add("any", (gate,), "b1", (axis,))
        value = self.cast(value, dtype)
        self.adjoints.setdefault(argument, []).append(Adjoint(value, gate))

    # --------------------------------------------------------------------------------- pieces

    def dtype_of(self, number: int) -> str:
        """Return a node's dtype."""
        return self.b.nodes[number][2]

    def cast(self, number: int, dtype: str) -> int:
        """Return a node in another dtype."""
        if self.dtype_of(number) == dtype:
            return number
        return self.b.add("cast", (number,), dtype)

    def op(self, op: str, *args: int) -> int:
        """Return a node in the widest dtype of its operands, at least fp32."""
        dtype = "f64" if any(self.dtype_of(number) == "f64" for number in args) else "f32"
        return self.b.add(op, tuple(self.cast(number, dtype) for number in args), dtype)

    def number(self, value: float, like: int) -> int:
        """Return a constant beside another node."""
        return self.b.constant(value, "f64" if self.dtype_of(like) == "f64" else "f32")

    def scaled(self, value: int, factor: float) -> int:
        """Return a node times a constant."""
        return self.op("mul", value, self.number(factor, value))

    def one_minus(self, value: int) -> int:
        """Return 1 - value."""
        return self.op("sub", self.number(1.0, value), value)

    def one_plus(self, value: int) -> int:
        """Return 1 + value."""
        return self.op("add", self.number(1.0, value), value)

    def square(self, value: int) -> int:
        """Return value * value."""
        return self.op("mul", value, value)

    def compare(self, op: str, a: int, b: int) -> int:
        """Return a comparison of two forward nodes of one dtype."""
        return self.b.add(op, (a, b), "b1")

    # ------------------------------------------------------------------------------ operations

    def _spread(self, number: int, node: Node, adjoint: Adjoint) -> None:
        """Send a node's adjoint to its operands."""
        args = tuple(self.place[argument] for argument in node.args)
        g, gate, out = adjoint.value, adjoint.gate, self.place[number]
        if node.op in _UNARY:
            self.send(node.args[0], _UNARY[node.op](self, g, args[0], out), gate)
        elif node.op in _BINARY:
            for argument, value in zip(node.args, _BINARY[node.op](self, g, args[0], args[1], out)):
                self.send(argument, value, gate)
        elif node.op == "where":
            shut = self.b.fold("not", (args[0],), "b1")
            for argument, condition in ((node.args[1], args[0]), (node.args[2], shut)):
                both = condition if gate is None else self.b.fold("and", (gate, condition), "b1")
                self.send(argument, g, both)
        elif node.op in ("minimum", "maximum"):
            self._extreme(node, args, adjoint)
        elif node.op in ("cast", "sum"):
            self.send(node.args[0], g, gate)
        elif node.op in ("amax", "amin"):
            axis = int(node.attrs[0])
            hit = self.compare("eq", args[0], out)
            count = self.b.add("sum", (self.cast(hit, "i64"),), "i64", (axis,))
            both = hit if gate is None else self.b.fold("and", (gate, hit), "b1")
            self.send(node.args[0], self.op("div", g, self.cast(count, "f32")), both)
        elif node.op == "prod":
            self.send(node.args[0], self.op("mul", g, self._others(node, args[0])), gate)
        else:
            raise AssertionError(f"no derivative of {node.op}")

    def _extreme(self, node: Node, args: tuple[int, ...], adjoint: Adjoint) -> None:
        """Send to the winner of minimum or maximum; a tie is shared, as torch does."""
        half = self.scaled(adjoint.value, 0.5)
        tie = self.compare("eq", args[0], args[1])
        value = self.b.add("where", (tie, half, adjoint.value), self.dtype_of(half))
        first = "le" if node.op == "minimum" else "ge"
        for argument, a, b in ((node.args[0], *args), (node.args[1], args[1], args[0])):
            wins = self.compare(first, a, b)
            gate = adjoint.gate
            self.send(
                argument, value, wins if gate is None else self.b.fold("and", (gate, wins), "b1")
            )

    def _others(self, node: Node, operand: int) -> int:
        """Return, for every element of a product, the product of the other elements.

        Quadratic in the extent, but right when elements are 0, where out / x is not.
        """
        axis = int(node.attrs[0])
        other = self.b.new_axis(self.b.extents[axis])
        there = self.b.substitute(operand, axis, self.b.axis_node(other))
        same = self.compare("eq", self.b.axis_node(axis), self.b.axis_node(other))
        one = self.b.constant(1.0, node.dtype)
        rest = self.b.add("where", (same, one, there), node.dtype)
        return self.b.add("prod", (rest,), node.dtype, (other,))


_Unary = Callable[[Differentiation, int, int, int], int]
_Binary = Callable[[Differentiation, int, int, int, int], tuple[int, int]]

# (differentiation, grad, operand, result) -> adjoint of the operand
_UNARY: dict[str, _Unary] = {
    "neg": lambda d, g, x, y: d.op("neg", g),
    "abs": lambda d, g, x, y: d.op("mul", g, d.op("sign", x)),
    "exp": lambda d, g, x, y: d.op("mul", g, y),
    "exp2": lambda d, g, x, y: d.scaled(d.op("mul", g, y), math.log(2)),
    "expm1": lambda d, g, x, y: d.op("mul", g, d.one_plus(y)),
    "log": lambda d, g, x, y: d.op("div", g, x),
    "log2": lambda d, g, x, y: d.op("div", g, d.scaled(x, math.log(2))),
    "log10": lambda d, g, x, y: d.op("div", g, d.scaled(x, math.log(10))),
    "log1p": lambda d, g, x, y: d.op("div", g, d.one_plus(x)),
    "sqrt": lambda d, g, x, y: d.op("div", g, d.scaled(y, 2.0)),
    "rsqrt": lambda d, g, x, y: d.op("mul", g, d.scaled(d.op("mul", d.square(y), y), -0.5)),
    "sigmoid": lambda d, g, x, y: d.op("mul", g, d.op("mul", y, d.one_minus(y))),
    "erf": lambda d, g, x, y: d.op(
        "mul", g, d.scaled(d.op("exp", d.op("neg", d.square(x))), 2 / math.sqrt(math.pi))
    ),
    "sin": lambda d, g, x, y: d.op("mul", g, d.op("cos", x)),
    "cos": lambda d, g, x, y: d.op("mul", g, d.op("neg", d.op("sin", x))),
    "tan": lambda d, g, x, y: d.op("mul", g, d.one_plus(d.square(y))),
    "asin": lambda d, g, x, y: d.op("mul", g, d.op("rsqrt", d.one_minus(d.square(x)))),
    "acos": lambda d, g, x, y: d.op("mul", g, d.op("neg", d.op("rsqrt", d.one_minus(d.square(x))))),
    "atan": lambda d, g, x, y: d.op("div", g, d.one_plus(d.square(x))),
    "sinh": lambda d, g, x, y: d.op("mul", g, d.op("cosh", x)),
    "cosh": lambda d, g, x, y: d.op("mul", g, d.op("sinh", x)),
    "asinh": lambda d, g, x, y: d.op("mul", g, d.op("rsqrt", d.one_plus(d.square(x)))),
    "acosh": lambda d, g, x, y: d.op(
        "mul", g, d.op("rsqrt", d.op("sub", d.square(x), d.number(1.0, x)))
    ),
    "atanh": lambda d, g, x, y: d.op("div", g, d.one_minus(d.square(x))),
    "tanh": lambda d, g, x, y: d.op("mul", g, d.one_minus(d.square(y))),
}


def _pow(d: Differentiation, g: int, x: int, y: int, out: int) -> tuple[int, int]:
    zero = d.number(0.0, out)
    lower = d.op("pow", x, d.op("sub", y, d.number(1.0, out)))
    flat = d.compare("eq", d.cast(y, d.dtype_of(zero)), zero)
    d_x = d.op("mul", g, d.op("mul", y, lower))
    d_x = d.b.add("where", (flat, d.number(0.0, d_x), d_x), d.dtype_of(d_x))
    # 0 ** y is constant in y for y >= 0, although log(0) is not finite
    at_zero = d.compare("eq", d.cast(x, d.dtype_of(zero)), zero)
    rising = d.compare("ge", d.cast(y, d.dtype_of(zero)), zero)
    d_y = d.op("mul", g, d.op("mul", out, d.op("log", x)))
    constant = d.b.fold("and", (at_zero, rising), "b1")
    return d_x, d.b.add("where", (constant, d.number(0.0, d_y), d_y), d.dtype_of(d_y))


def _div(d: Differentiation, g: int, x: int, y: int, out: int) -> tuple[int, int]:
    d_x = d.op("div", g, y)
    return d_x, d.op("neg", d.op("mul", d_x, out))


def _atan2(d: Differentiation, g: int, y: int, x: int, out: int) -> tuple[int, int]:
    squares = d.op("add", d.square(x), d.square(y))
    zero = d.number(0.0, squares)
    at_zero = d.compare("eq", squares, zero)
    # 0 at the origin, as torch has it
    share = d.b.add("where", (at_zero, zero, d.op("div", g, squares)), d.dtype_of(squares))
    return d.op("mul", share, x), d.op("neg", d.op("mul", share, y))


# (differentiation, grad, left, right, result) -> adjoints of both operands
_BINARY: dict[str, _Binary] = {
    "add": lambda d, g, x, y, out: (g, g),
    "sub": lambda d, g, x, y, out: (g, d.op("neg", g)),
    "mul": lambda d, g, x, y, out: (d.op("mul", g, y), d.op("mul", g, x)),
    "div": _div,
    "mod": lambda d, g, x, y, out: (
        g,
        d.op("neg", d.op("mul", g, d.op("floordiv", x, y))),
    ),
    "pow": _pow,
    "atan2": _atan2,
}
