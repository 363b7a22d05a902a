"""Reductions over traced rows: sums, extremes, norms and matrix products.

Lives here: what consumes the axis of a row. Not here: where rows come from (`indexing.py`).
Invariant: a reduction of 16-bit floats is computed in fp32 and rounded once, as torch does.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from typing import Any

import torch

from fovea.errors import TraceError
from fovea.mods.builder import FLOATS, Term, default_float
from fovea.mods.casts import in_float32, name_of
from fovea.mods.handlers import OPERATORS, Tracing, register
from fovea.mods.indexing import permute, place_of, turned, unsqueeze
from fovea.mods.operators import binary, compare, truth, unary, where


def _reduced(t: Tracing, op: str, term: Term, dim: Any, keepdim: bool, dtype: str) -> Term:
    rank = len(term.dims)
    if dim is None or dim in ((), []):
        places = list(range(rank))
    else:
        chosen = dim if isinstance(dim, (tuple, list)) else (dim,)
        places = sorted({place_of(d, rank) for d in chosen}) if rank else []
    term = t.builder.cast(term, dtype)
    for place in reversed(places):
        term = t.builder.reduce(op, term, place, dtype, keepdim)
    return term


def _counting(op: str) -> Any:
    def handler(
        t: Tracing, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Term:
        term = t.term(x)
        kept = term.dtype if term.dtype in FLOATS else "i64"
        return _reduced(t, op, term, dim, keepdim, kept if dtype is None else name_of(dtype))

    return handler


_sum = _counting("sum")


def _extreme(op: str) -> Any:
    def handler(t: Tracing, x: Any, dim: Any = None, keepdim: bool = False) -> Term:
        term = t.term(x)
        return _reduced(t, op, term, dim, keepdim, term.dtype)

    return handler


def _truths(op: str) -> Any:
    def handler(t: Tracing, x: Any, dim: Any = None, keepdim: bool = False) -> Term:
        return _reduced(t, op, truth(t, x), dim, keepdim, "b1")

    return handler


def _max_or_min(op: str, pair: str) -> Any:
    def handler(t: Tracing, x: Any, other: Any = None, keepdim: bool = False, **names: Any) -> Any:
        if other is None and not names:
            term = t.term(x)
            return _reduced(t, op, term, None, False, term.dtype)
        if names or isinstance(other, int):
            raise TraceError(f"{op[1:]}(dim=...) also gives positions; use torch.{op}(x, dim)")
        return binary(t, pair, x, other)

    return handler


def _mean(t: Tracing, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Term:
    term = t.term(x)
    if dtype is not None:
        term = t.builder.cast(term, name_of(dtype))
    if term.dtype not in FLOATS:
        raise TraceError(f"mean of {term.dtype} is not defined in torch; cast with .float()")
    total = _sum(t, _wide(t, term), dim, keepdim)
    places = range(len(term.dims)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    count = 1
    for place in places:
        count *= t.builder.extent(term, place_of(place, len(term.dims)))
    return t.builder.cast(binary(t, "div", total, count), term.dtype)


def _wide(t: Tracing, term: Term) -> Term:
    """Return a row of 16-bit floats in fp32, in which torch reduces them, others as they are."""
    return t.builder.cast(term, "f32") if term.dtype in ("f16", "bf16") else term


def _count_nonzero(t: Tracing, x: Any, dim: Any = None) -> Term:
    return _sum(t, truth(t, x), dim)


def _norm(
    t: Tracing,
    x: Any,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    out: Any = None,
) -> Term:
    if p not in (2, "fro", None):
        raise TraceError(f"norm of order {p} cannot be traced (allowed: 2); write it as a sum")
    term = t.term(x) if dtype is None else t.builder.cast(t.term(x), name_of(dtype))
    wide = _wide(t, term)
    squares = _sum(t, binary(t, "mul", wide, wide), dim, keepdim)
    # torch's derivative is 0 where the norm is, that of a root is infinite there
    root = where(t, compare(t, "eq", squares, 0), squares, unary(t, "sqrt", squares))
    return t.builder.cast(root, term.dtype)


def _vector_norm(t: Tracing, x: Any, ord: Any = 2, *args: Any, **names: Any) -> Term:  # noqa: A002
    return _norm(t, x, ord, *args, **names)


def _matmul(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
    left, right = t.term(x), t.term(y)
    if not left.dims or not right.dims:
        raise TraceError("matmul needs rows; use * for 0-d values")
    if len(right.dims) == 1:
        return _sum(t, binary(t, "mul", left, right), -1)
    rows = Term(left.node, left.dtype, (*left.dims, None))
    columns = right
    if len(left.dims) > 1:
        columns = Term(
            right.node, right.dtype, (*right.dims[:-2], None, right.dims[-2], right.dims[-1])
        )
    return _sum(t, binary(t, "mul", rows, columns), -2)


def _rmatmul(t: Tracing, x: Any, y: Any) -> Term:
    return _matmul(t, y, x)


def _linear(t: Tracing, x: Any, weight: Any, bias: Any = None) -> Term:
    product = _matmul(t, x, turned(t, weight))
    return product if bias is None else binary(t, "add", product, bias)


def _vecdot(t: Tracing, x: Any, y: Any, dim: int = -1) -> Term:
    return _sum(t, binary(t, "mul", x, y), dim)


def _einsum(t: Tracing, equation: str, *operands: Any) -> Term:
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], list) else operands
    return in_float32(_contracted)(t, equation, *values)


def _contracted(t: Tracing, equation: str, *values: Any) -> Term:
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    letters = sorted(set(left) - {","})
    if "." in left or not arrow or any(len(set(part)) != len(part) for part in parts):
        raise TraceError(
            f"einsum {equation!r} cannot be traced (allowed: no dots or repeats, and ->)"
        )
    product: Any = None
    for part, value in zip(parts, values):
        term = t.term(value)
        dims = tuple(term.dims[part.index(c)] if c in part else None for c in letters)
        spread = Term(term.node, term.dtype, dims)
        product = spread if product is None else binary(t, "mul", product, spread)
    order = [letters.index(c) for c in right]
    summed = tuple(place for place, c in enumerate(letters) if c not in right)
    total = _sum(t, product, summed, True) if summed else product
    kept = permute(t, total, [*order, *summed])
    return Term(kept.node, kept.dtype, kept.dims[: len(order)])


def _isin(t: Tracing, x: Any, values: Any, *, invert: bool = False, **_: Any) -> Term:
    test = t.term(values)
    if len(test.dims) > 1:
        raise TraceError("isin needs a captured tensor of one dimension; use .flatten() outside")
    found = _truths("any")(t, compare(t, "eq", unsqueeze(t, x, -1), test), -1)
    return compare(t, "eq", found, False) if invert else found


def _softmax(t: Tracing, x: Any, dim: int, *_: Any, dtype: Any = None, **__: Any) -> Term:
    term = t.term(x)
    term = t.builder.cast(term, name_of(dtype)) if dtype is not None else term
    if term.dtype not in FLOATS:
        term = t.builder.cast(term, default_float())
    wide = _wide(t, term)
    top = _extreme("amax")(t, wide, dim, True)
    powers = unary(t, "exp", binary(t, "sub", wide, top))
    return t.builder.cast(binary(t, "div", powers, _sum(t, powers, dim, True)), term.dtype)


def enter_reductions() -> None:
    """Enter the handlers of this module."""
    register("sum", _sum)
    register("prod", _counting("prod"))
    register("amax", _extreme("amax"))
    register("amin", _extreme("amin"))
    register("any", _truths("any"))
    register("all", _truths("all"))
    register("max", _max_or_min("amax", "maximum"))
    register("min", _max_or_min("amin", "minimum"))
    register("mean", _mean)
    register("count_nonzero", _count_nonzero)
    register("norm", _norm)
    OPERATORS[torch.linalg.vector_norm] = _vector_norm
    register("matmul mm mv __matmul__ dot inner vdot", in_float32(_matmul))
    register("__rmatmul__", in_float32(_rmatmul))
    OPERATORS[torch.nn.functional.linear] = in_float32(_linear)
    OPERATORS[torch.linalg.vecdot] = in_float32(_vecdot)
    register("einsum", _einsum)
    register("isin", _isin)
    register("softmax", _softmax)
