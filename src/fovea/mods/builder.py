"""Build graphs: hash-consing, type promotion, broadcasting over axes, gathers and reductions.

Lives here: `GraphBuilder` and `Term`, which the tracer, the derivative and the rewrites share. Not
here: what torch's functions mean (`operators.py`). Invariant: every node is unique, and the code is
plain enough for Dynamo to inline it, because tracing happens inside `torch.compile` too.
"""

from collections.abc import Sequence

import torch

from fovea.errors import TraceError
from fovea.mods.graph import DTYPE_NAME

FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("u8", "i8", "i16", "i32", "i64")
_F32_MAX = 3.4028234663852886e38
_INTEGER_RANGE = {
    "u8": (0, 255),
    "i8": (-(2**7), 2**7 - 1),
    "i16": (-(2**15), 2**15 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}
_INTEGER_BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}

NodeKey = tuple[str, tuple[int, ...], str, tuple[bool | int | float, ...]]


class Term:
    """A value under construction.

    `node` is -1 for a Python number, which stays untyped until it meets something: `value` then
    holds it. `weak` values (Python numbers, captured or not) take the other operand's dtype as in
    torch. `dims` has one entry per dimension: an axis number, or None for extent 1.
    """

    __slots__ = ("dims", "dtype", "node", "value", "weak")

    def __init__(
        self,
        node: int,
        dtype: str,
        dims: tuple[int | None, ...] = (),
        weak: bool = False,
        value: bool | int | float | None = None,
    ):
        self.node = node
        self.dtype = dtype
        self.dims = dims
        self.weak = weak
        self.value = value


def number_term(value: bool | int | float) -> Term:
    """Return the term of a Python number."""
    if isinstance(value, bool):
        return Term(-1, "b1", (), True, value)
    if isinstance(value, int):
        return Term(-1, "i64", (), True, value)
    return Term(-1, "f64", (), True, value)


def default_float() -> str:
    """Return the dtype that integers divide into: torch's default dtype."""
    return DTYPE_NAME[torch.get_default_dtype()]


def promote(a: str, b: str) -> str:
    """Return torch.promote_types of two dtypes."""
    if a == b:
        return a
    if a in FLOATS or b in FLOATS:
        if a not in FLOATS:
            return b
        if b not in FLOATS:
            return a
        if a == "f64" or b == "f64":
            return "f64"
        return "f32"
    if a == "b1":
        return b
    if b == "b1":
        return a
    if a == "u8" or b == "u8":
        other = b if a == "u8" else a
        return "i16" if other == "i8" else other
    return a if _INTEGER_BITS[a] > _INTEGER_BITS[b] else b


def _combine(higher: str, lower: str) -> str:
    """Return the type of two priority classes: a lower one counts only by its category."""
    if higher == "":
        return lower
    if lower == "" or higher in FLOATS:
        return higher
    if higher == "b1" or lower in FLOATS:
        return promote(higher, lower)
    return higher


def result_dtype(terms: Sequence[Term]) -> str:
    """Return torch.result_type: tensors with dimensions, then 0-d tensors, then Python numbers."""
    dimensioned = ""
    zero = ""
    number = ""
    for term in terms:
        if term.weak:
            dtype = default_float() if term.dtype in FLOATS else term.dtype
            number = dtype if number == "" else promote(number, dtype)
        elif len(term.dims) > 0:
            dimensioned = term.dtype if dimensioned == "" else promote(dimensioned, term.dtype)
        else:
            zero = term.dtype if zero == "" else promote(zero, term.dtype)
    return _combine(dimensioned, _combine(zero, number))


class GraphBuilder:
    """Nodes under construction, with the rules that keep them few."""

    def __init__(self):
        self.nodes: list[NodeKey] = []
        self.index: dict[tuple[str, tuple[int, ...], str, str], int] = {}
        self.free: list[tuple[int, ...]] = []  # axes that each node's value varies along
        self.extents: list[int] = []  # extent of each axis
        self.rows: dict[tuple[int, int], int] = {}  # (dimension from the right, extent) -> axis

    # ---------------------------------------------------------------------------------- nodes

    def add(
        self,
        op: str,
        args: tuple[int, ...] = (),
        dtype: str = "f32",
        attrs: tuple[bool | int | float, ...] = (),
    ) -> int:
        """Return the number of this node, adding it if it is new."""
        key = (op, args, dtype, attrs_key(attrs))
        if key in self.index:
            return self.index[key]
        free: list[int] = []
        for argument in args:
            for axis in self.free[argument]:
                if axis not in free:
                    free.append(axis)
        if op == "axis":
            free = [int(attrs[0])]
        elif op in ("sum", "prod", "any", "all", "amax", "amin"):
            free = [axis for axis in free if axis != attrs[0]]
        number = len(self.nodes)
        self.nodes.append((op, args, dtype, attrs))
        self.free.append(tuple(sorted(free)))
        self.index[key] = number
        return number

    def constant(self, value: bool | int | float, dtype: str) -> int:
        """Return the node of a constant of this dtype."""
        if dtype == "b1":
            return self.add("const", (), dtype, (bool(value),))
        if dtype in FLOATS:
            number = float(value)
            if dtype == "f32" and abs(number) > _F32_MAX and abs(number) < float("inf"):
                # torch.tensor rounds it too; torch.full, which makes constants, refuses it
                number = rounded_to_f32(number)
            return self.add("const", (), dtype, (number,))
        number = int(value)
        low, high = _INTEGER_RANGE[dtype]
        if dtype == "u8" and -255 <= number < 0:
            number += 256  # torch.full takes -1 for 255
        if number < low or number > high:
            raise TraceError(
                f"the number {number} does not fit {dtype} (allowed: {low} to {high}); use a "
                "smaller one, or cast the tensor it meets to a wider dtype"
            )
        return self.add("const", (), dtype, (number,))

    def strong(self, value: bool | int | float, dtype: str) -> Term:
        """Return a constant that counts as a 0-d tensor in promotion."""
        return Term(self.constant(value, dtype), dtype)

    def constant_value(self, node: int) -> bool | int | float | None:
        """Return a constant node's value, None for other nodes."""
        op, _, _, attrs = self.nodes[node]
        return attrs[0] if op == "const" else None

    def cast(self, term: Term, dtype: str) -> Term:
        """Return the term in another dtype, strong."""
        if term.node < 0:
            assert term.value is not None
            return Term(self.constant(term.value, dtype), dtype)
        if term.dtype == dtype:
            return Term(term.node, dtype, term.dims)
        value = self.constant_value(term.node)
        if value is not None and _folds(value, term.dtype, dtype):
            return Term(self.constant(wrapped(value, dtype), dtype), dtype)
        return Term(self.add("cast", (term.node,), dtype), dtype, term.dims)

    def operand(self, term: Term, dtype: str) -> Term:
        """Return a cast operand of arithmetic or a comparison: there torch wraps Python numbers.

        Everywhere else (where, clamp, full, the exponent of pow) it refuses one beyond the dtype.
        """
        if term.node < 0 and term.value is not None:
            return self.cast(number_term(wrapped(term.value, dtype)), dtype)
        return self.cast(term, dtype)

    # ------------------------------------------------------------------------------- pointwise

    def pointwise(self, op: str, terms: Sequence[Term], dtype: str, result: str = "") -> Term:
        """Return op(terms) with every operand cast to `dtype`; `result` is the node's dtype."""
        cast = [self.operand(term, dtype) for term in terms]
        aligned, dims = self.align(cast)
        node = self.fold(op, tuple(term.node for term in aligned), result or dtype)
        return Term(node, result or dtype, dims)

    def where(self, condition: Term, x: Term, y: Term) -> Term:
        """Return x where the condition (bool) holds, else y, promoted as torch does."""
        dtype = result_dtype((x, y))
        aligned, dims = self.align([condition, self.cast(x, dtype), self.cast(y, dtype)])
        node = self.fold("where", tuple(term.node for term in aligned), dtype)
        return Term(node, dtype, dims)

    def fold(self, op: str, args: tuple[int, ...], dtype: str) -> int:
        """Return the node of op(args), simplified where a bool operand is known."""
        if op in ("and", "or") and dtype == "b1":
            absorbing = op == "or"
            for mine, other in ((args[0], args[1]), (args[1], args[0])):
                value = self.constant_value(mine)
                if value is not None:
                    return mine if value == absorbing else other
            if args[0] == args[1]:
                return args[0]
        elif op == "where":
            value = self.constant_value(args[0])
            if value is not None:
                return args[1] if value else args[2]
            if args[1] == args[2]:
                return args[1]
        elif op == "not" and dtype == "b1":
            value = self.constant_value(args[0])
            if value is not None:
                return self.constant(not value, "b1")
            inner, inner_args, _, _ = self.nodes[args[0]]
            if inner == "not":
                return inner_args[0]
        return self.add(op, args, dtype)

    # ------------------------------------------------------------------------------------ axes

    def new_axis(self, extent: int) -> int:
        """Return a fresh axis."""
        self.extents.append(extent)
        return len(self.extents) - 1

    def row_axis(self, position: int, extent: int) -> int:
        """Return the axis that rows of this extent share at a dimension counted from the right."""
        key = (position, extent)
        if key not in self.rows:
            self.rows[key] = self.new_axis(extent)
        return self.rows[key]

    def axis_node(self, axis: int) -> int:
        """Return the node that runs over an axis."""
        return self.add("axis", (), "i64", (axis, self.extents[axis]))

    def extent(self, term: Term, dimension: int) -> int:
        """Return the extent of one dimension of a term."""
        axis = term.dims[dimension]
        return 1 if axis is None else self.extents[axis]

    def shape(self, term: Term) -> tuple[int, ...]:
        """Return the extents of a term."""
        return tuple(1 if axis is None else self.extents[axis] for axis in term.dims)

    def align(self, terms: list[Term]) -> tuple[list[Term], tuple[int | None, ...]]:
        """Return terms whose equal dimensions, counted from the right, use the same axis."""
        rank = 0
        for term in terms:
            rank = max(rank, len(term.dims))
        if rank == 0:
            return terms, ()
        dims: list[int | None] = []
        aligned = list(terms)
        for position in range(rank):
            axes: list[int] = []
            for term in aligned:
                if position < len(term.dims):
                    axis = term.dims[len(term.dims) - 1 - position]
                    if axis is not None and axis not in axes:
                        axes.append(axis)
            if not axes:
                dims.append(None)
                continue
            extents = [self.extents[axis] for axis in axes]
            if any(extent != extents[0] for extent in extents):
                raise TraceError(
                    f"rows of extents {extents} do not broadcast; make the captured rows equally "
                    "long, or index them down to one element"
                )
            axis = axes[0]
            # One axis may serve one dimension only: an outer product needs two.
            if len(axes) > 1 or axis in dims:
                axis = self.new_axis(extents[0])
                aligned = [self.rename_dimension(term, position, axis) for term in aligned]
            dims.append(axis)
        dims.reverse()
        return aligned, tuple(dims)

    def rename_dimension(self, term: Term, position: int, axis: int) -> Term:
        """Return a term whose dimension, counted from the right, runs over another axis."""
        if position >= len(term.dims):
            return term
        place = len(term.dims) - 1 - position
        old = term.dims[place]
        if old is None or old == axis:
            return term
        node = self.substitute(term.node, old, self.axis_node(axis))
        dims = (*term.dims[:place], axis, *term.dims[place + 1 :])
        return Term(node, term.dtype, dims)

    def substitute(self, node: int, axis: int, replacement: int) -> int:
        """Return a node with `replacement` in the place of an axis, free occurrences only."""
        return self._substitute(node, axis, replacement, {})

    def _substitute(self, node: int, axis: int, replacement: int, done: dict[int, int]) -> int:
        if axis not in self.free[node]:
            return node
        if node in done:
            return done[node]
        op, args, dtype, attrs = self.nodes[node]
        if op == "axis":
            done[node] = replacement
            return replacement
        if op in ("sum", "prod", "any", "all", "amax", "amin"):
            bound = int(attrs[0])
            if bound in self.free[replacement]:
                # The reduced axis would capture the replacement: reduce over a fresh one.
                fresh = self.new_axis(self.extents[bound])
                args = (self.substitute(args[0], bound, self.axis_node(fresh)),)
                attrs = (fresh,)
        new_args = tuple(self._substitute(argument, axis, replacement, done) for argument in args)
        done[node] = self.add(op, new_args, dtype, attrs)
        return done[node]

    def reduce(self, op: str, term: Term, dimension: int, dtype: str, keepdim: bool) -> Term:
        """Return a reduction over one dimension."""
        axis = term.dims[dimension]
        if axis is None:
            node = self.cast(term, dtype).node
        elif axis not in self.free[term.node]:
            node = self.repeated(op, self.cast(term, dtype).node, dtype, self.extents[axis])
        else:
            node = self.add(op, (term.node,), dtype, (axis,))
        kept: tuple[int | None, ...] = (None,) if keepdim else ()
        return Term(node, dtype, (*term.dims[:dimension], *kept, *term.dims[dimension + 1 :]))

    def repeated(self, op: str, node: int, dtype: str, count: int) -> int:
        """Return a reduction over `count` equal elements: no node of the graph has that axis."""
        if count == 0:
            if op in ("amax", "amin"):
                raise TraceError(f"{op} of no elements is not defined; make the row longer")
            return self.constant(op in ("prod", "all"), dtype)
        if op == "sum":
            return (
                node if count == 1 else self.add("mul", (node, self.constant(count, dtype)), dtype)
            )
        if op != "prod":
            return node
        result = -1
        while count > 0:  # by squaring
            if count % 2 == 1:
                result = node if result < 0 else self.add("mul", (result, node), dtype)
            node, count = self.add("mul", (node, node), dtype), count // 2
        return result


def attrs_key(attrs: tuple[bool | int | float, ...]) -> str:
    """Return a text that tells constants apart: 1, 1.0 and True, 0.0 and -0.0, equal NaNs."""
    words: list[str] = []
    for value in attrs:
        if isinstance(value, bool):
            words.append("True" if value else "False")
        elif isinstance(value, int):
            words.append(f"{value}")
        else:
            words.append(float_key(value))
    return ",".join(words)


def wrapped(value: bool | int | float, dtype: str) -> bool | int | float:
    """Return an integer cut to the width of an integer dtype, as torch's casts do.

    One beyond 64 bits stays as it is: torch takes none.
    """
    low, high = _INTEGER_RANGE.get(dtype, (0, 0))
    if isinstance(value, (bool, float)) or high == 0 or not -(2**63) <= value < 2**63:
        return value
    return (value - low) % (high - low + 1) + low


def _folds(value: bool | int | float, dtype: str, wanted: str) -> bool:
    """Return whether a constant is exact in its own dtype, and its cast is defined."""
    if dtype in ("f16", "bf16"):
        return False
    low, high = _INTEGER_RANGE.get(wanted, (0, 0))
    return high == 0 or not isinstance(value, float) or low <= value <= high


def float_key(value: float) -> str:
    """Return the hexadecimal text of a float."""
    return value.hex()


def rounded_to_f32(value: float) -> float:
    """Return a finite number beyond the largest fp32 number as fp32 has it: that number, or inf."""
    # Half way to the number that would follow it.
    if abs(value) < 3.4028235677973366e38:
        return _F32_MAX if value > 0 else -_F32_MAX
    return float("inf") if value > 0 else -float("inf")


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo now.
# Dynamo cannot format floats, so it has to call this function as it is.
float_key._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
