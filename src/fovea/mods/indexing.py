"""Gathers from captured tensors and the shapes of traced rows.

Lives here: `tensor[...]` with traced indices, rows and their dimensions. Not here:
pointwise functions (`operators.py`), reductions over rows (`reductions.py`). Invariant: an index
expression has one integer node per dimension of the captured tensor; a slice becomes an axis, which
some reduction must consume.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import operator
from typing import Any

from torch import Tensor

from fovea.errors import GatherError, TraceError
from fovea.mods.builder import FLOATS, Term
from fovea.mods.casts import name_of
from fovea.mods.handlers import OPERATORS, Tracing, register
from fovea.mods.operators import compare, where


def _items(index: Any, rank: int) -> list[Any]:
    """Return the items of an index, the ellipsis written out and missing dimensions added."""
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    used = len([item for item in items if item is not None and item is not Ellipsis])
    if used > rank:
        raise TraceError(f"{used} indices for a tensor of {rank} dimensions; remove {used - rank}")
    missing = [slice(None)] * (rank - used)
    for place, item in enumerate(items):
        if item is Ellipsis:
            return items[:place] + missing + items[place + 1 :]
    return items + missing


def getitem(t: Tracing, base: Any, index: Any) -> Term:
    """Return base[index], where the base or an index is traced."""
    source = t.source(base)
    dimension = 0
    dims: list[int | str | None] = []  # an extent, None for a new dimension, "adv" once
    slices: list[tuple[int, int, int, int]] = []  # tensor dimension, start, step, place in dims
    advanced: list[tuple[int, Term]] = []
    for item in _items(index, len(source.extents)):
        if item is None:
            dims.append(None)
            continue
        extent = source.extents[dimension]
        if isinstance(item, slice):
            start, stop, step = item.indices(t.fixed_extent(source, dimension))
            slices.append((dimension, start, step, len(dims)))
            dims.append(len(range(start, stop, step)))
        else:
            if not advanced:
                dims.append("adv")
            elif advanced[-1][0] != dimension - 1 and any(len(term.dims) for _, term in advanced):
                raise TraceError(
                    "index rows on both sides of a slice; move them next to each other"
                )
            advanced.append((dimension, _index_term(t, item, extent)))
        dimension += 1
    return _gathered(t, source, dims, slices, advanced)


def _index_term(t: Tracing, item: Any, extent: Any) -> Term:
    """Return one integer index as an i64 term."""
    if isinstance(item, (bool, list)):
        raise TraceError(f"index {item!r} cannot be traced; index with integers or a tensor")
    term = t.term(item)
    if term.dtype == "u8":
        raise TraceError(
            "a tensor was indexed by a value of dtype u8, which torch takes for a mask like a bool "
            "(allowed: wider integers); use .long(), or torch.where for a choice by a bool"
        )
    if term.dtype == "b1" or term.dtype in FLOATS:
        raise TraceError(
            f"a tensor was indexed by a value of dtype {term.dtype} (allowed: integers); "
            "use .long(), or torch.where for a choice by a bool"
        )
    value = term.value
    if value is not None and isinstance(extent, int) and not -extent <= value < extent:
        raise GatherError(
            f"index {value} is out of range for a dimension of {extent} (allowed: {-extent} to "
            f"{extent - 1}); correct it, or capture a larger tensor"
        )
    return t.builder.cast(term, "i64")


def _gathered(
    t: Tracing,
    source: Any,
    dims: list[Any],
    slices: list[tuple[int, int, int, int]],
    advanced: list[tuple[int, Term]],
) -> Term:
    b = t.builder
    aligned, broadcast = b.align([term for _, term in advanced])
    # Result dimensions, and how far each is from the right: rows of one length share an axis.
    result: list[int | None] = []
    total = len(dims) - ("adv" in dims) + len(broadcast)
    indices: dict[int, int] = {}
    for place, extent in enumerate(dims):
        if extent == "adv":
            result += broadcast
        elif extent is None:
            result.append(None)
        else:
            tensor_dimension, start, step, _ = next(s for s in slices if s[3] == place)
            axis = None
            steps = b.constant(start, "i64")
            if extent != 1:
                axis = b.row_axis(total - 1 - len(result), extent)
                if axis in broadcast:
                    axis = b.new_axis(extent)
                steps = b.axis_node(axis)
                if step != 1:
                    steps = b.add("mul", (steps, b.constant(step, "i64")), "i64")
                if start != 0:
                    steps = b.add("add", (steps, b.constant(start, "i64")), "i64")
            indices[tensor_dimension] = steps
            result.append(axis)
    for (tensor_dimension, _), term in zip(advanced, aligned):
        indices[tensor_dimension] = term.node
    nodes = tuple(indices[dimension] for dimension in range(len(indices)))
    return Term(source.gather(nodes), source.dtype, tuple(result))


class TensorSource:
    """A captured tensor that is being indexed."""

    def __init__(self, t: Tracing, capture: int, tensor: Tensor):
        self.builder = t.builder
        self.capture = capture
        self.dtype = name_of(tensor.dtype)
        self.extents = tuple(tensor.shape)

    def gather(self, indices: tuple[int, ...]) -> int:
        """Return the node of the element at these index nodes."""
        return self.builder.add("load", indices, self.dtype, (self.capture,))


class RowSource:
    """A traced row that is being indexed: its axes are replaced by the index expressions."""

    def __init__(self, t: Tracing, term: Term):
        self.builder = t.builder
        self.term = term
        self.dtype = term.dtype
        self.extents = t.builder.shape(term)

    def gather(self, indices: tuple[int, ...]) -> int:
        """Return the node with every axis replaced."""
        b = self.builder
        node = self.term.node
        fresh: list[tuple[int, int]] = []
        # Two steps: an index may itself run over an axis that is yet to be replaced.
        for axis, index in zip(self.term.dims, indices):
            if axis is not None:
                new = b.new_axis(b.extents[axis])
                node = b.substitute(node, axis, b.axis_node(new))
                fresh.append((new, index))
        for new, index in fresh:
            value = b.constant_value(index)
            if value is not None and value < 0:
                index = b.constant(value + b.extents[new], "i64")
            elif value is None and b.nodes[index][0] != "axis":
                zero, size = b.constant(0, "i64"), b.constant(b.extents[new], "i64")
                negative = b.add("lt", (index, zero), "b1")
                wrapped = b.add("add", (index, size), "i64")
                index = b.add("where", (negative, wrapped, index), "i64")
            node = b.substitute(node, new, index)
        return node


# -------------------------------------------------------------------------------- dimensions


def place_of(dimension: Any, rank: int) -> int:
    """Return the place of a dimension that may be counted from the end."""
    place = operator.index(dimension)
    if not -max(rank, 1) <= place < max(rank, 1):
        raise IndexError(f"dimension {place} is out of range for {rank} dimensions")
    return place % max(rank, 1)


def unsqueeze(t: Tracing, x: Any, dim: int) -> Term:
    """Return x with a new dimension of extent 1."""
    term = t.term(x)
    place = place_of(dim, len(term.dims) + 1)
    return Term(term.node, term.dtype, (*term.dims[:place], None, *term.dims[place:]))


def _squeeze(t: Tracing, x: Any, dim: Any = None) -> Term:
    term = t.term(x)
    rank = len(term.dims)
    if dim is None:
        chosen = list(range(rank))
    else:
        chosen = [place_of(d, rank) for d in (dim if isinstance(dim, tuple) else (dim,))]
    dims = tuple(a for place, a in enumerate(term.dims) if a is not None or place not in chosen)
    return Term(term.node, term.dtype, dims)


def permute(t: Tracing, x: Any, *order: Any) -> Term:
    """Return x with its dimensions in another order."""
    term = t.term(x)
    places = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
    rank = len(term.dims)
    return Term(term.node, term.dtype, tuple(term.dims[place_of(place, rank)] for place in places))


def _transpose(t: Tracing, x: Any, a: int, b: int) -> Term:
    rank = len(t.term(x).dims)
    order = list(range(rank))
    first, second = place_of(a, rank), place_of(b, rank)
    order[first], order[second] = second, first
    return permute(t, x, order)


def turned(t: Tracing, x: Any) -> Term:
    """Return x with its last two dimensions exchanged."""
    rank = len(t.term(x).dims)
    return _transpose(t, x, -2, -1) if rank >= 2 else t.term(x)


def _expand(t: Tracing, x: Any, *sizes: Any) -> Term:
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return broadcast_to(t, t.term(x), tuple(shape))


def _expand_as(t: Tracing, x: Any, other: Any) -> Term:
    return broadcast_to(t, t.term(x), t.builder.shape(t.term(other)))


def broadcast_to(t: Tracing, term: Term, shape: tuple[Any, ...]) -> Term:
    """Return a term with its dimensions of extent 1 made as long as the shape says."""
    dims: list[int | None] = [None] * (len(shape) - len(term.dims)) + list(term.dims)
    for place, size in enumerate(shape):
        if dims[place] is None and size not in (1, -1):
            axis = t.builder.row_axis(len(shape) - 1 - place, size)
            dims[place] = t.builder.new_axis(size) if axis in dims else axis
    return Term(term.node, term.dtype, tuple(dims))


def _reshape(t: Tracing, x: Any, *sizes: Any) -> Term:
    """Return a reshape that only adds or drops dimensions of extent 1."""
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    term = t.term(x)
    axes = [axis for axis in term.dims if axis is not None]
    wanted = [size for size in shape if size != 1]
    extents = [t.builder.extents[axis] for axis in axes]
    if wanted == [-1] and len(axes) <= 1:
        wanted = extents
    if wanted != extents:
        raise TraceError(
            f"reshape of a traced row from {list(t.builder.shape(term))} to {list(shape)} cannot "
            "be traced; reshape the captured tensor before indexing it"
        )
    rest = list(axes)
    return Term(
        term.node,
        term.dtype,
        tuple(None if size == 1 or not rest else rest.pop(0) for size in shape),
    )


def _unbind(t: Tracing, x: Any, dim: int = 0) -> tuple[Term, ...]:
    term = t.term(x)
    place = place_of(dim, len(term.dims))
    before = (slice(None),) * place
    return tuple(getitem(t, term, (*before, i)) for i in range(t.builder.extent(term, place)))


def _iterate(t: Tracing, x: Any) -> tuple[Term, ...]:
    if not t.term(x).dims:
        raise TraceError("iteration over a 0-d value cannot be traced; index the captured tensor")
    return _unbind(t, x)


def _stack(t: Tracing, values: Any, dim: int = 0) -> Term:
    terms = [t.term(value) for value in values]
    axis = t.builder.new_axis(len(terms))
    step = Term(t.builder.axis_node(axis), "i64")
    result = terms[-1]
    for number in range(len(terms) - 2, -1, -1):
        result = where(t, compare(t, "eq", step, number), terms[number], result)
    place = place_of(dim, len(result.dims) + 1)
    new = axis if len(terms) > 1 else None
    return Term(result.node, result.dtype, (*result.dims[:place], new, *result.dims[place:]))


def _index_select(t: Tracing, base: Any, dim: int, index: Any) -> Term:
    rank = len(t.source(base).extents)
    place = place_of(dim, rank)
    items: list[Any] = [slice(None)] * rank
    term = t.term(index)
    items[place] = term if term.dims else unsqueeze(t, term, 0)
    return getitem(t, base, tuple(items))


def _select(t: Tracing, base: Any, dim: int, index: Any) -> Term:
    rank = len(t.source(base).extents)
    items: list[Any] = [slice(None)] * rank
    items[place_of(dim, rank)] = index
    return getitem(t, base, tuple(items))


def _enter() -> None:
    register("__getitem__", getitem)
    register("unsqueeze", unsqueeze)
    register("squeeze", _squeeze)
    register("permute", permute)
    register("transpose swapaxes swapdims", _transpose)
    register("t", turned)
    register("expand broadcast_to", _expand)
    register("expand_as", _expand_as)
    register("reshape view", _reshape)
    register("unbind", _unbind)
    register("__iter__", _iterate)
    register("stack", _stack)
    register("index_select", _index_select)
    register("select", _select)
    for name in ("T", "mT"):
        OPERATORS[getattr(Tensor, name).__get__] = turned


_enter()
