"""Bounds of one operation's result from bounds of its operands.

Lives here: a rule for each operation of the mod language that masks use; one without a rule, and
everything that could wrap around, is unbounded. Not here: inputs and captured tensors
(`mask_intervals.py`). Invariant: the result encloses every value the operation gives for operands
inside their bounds.

Integers have int64 bounds whatever their dtype, floats bounds in their own dtype (rounding is
monotone, so the bounds round as the values do), bools "must be" and "may be" true.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.mods.graph import TORCH_DTYPE, Node

# A 64-bit bound at or beyond this means "unbounded"; twice it still fits 64 bits.
UNBOUNDED = 1 << 61
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
_LIMITS = {
    "u8": (0, 255),
    "i8": (-(1 << 7), (1 << 7) - 1),
    "i16": (-(1 << 15), (1 << 15) - 1),
    "i32": (-(1 << 31), (1 << 31) - 1),
    "i64": (-UNBOUNDED, UNBOUNDED),
}
_BITS = {"u8": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64}


class Interval(NamedTuple):
    """Bounds, both included, of a value that is not NaN; `may_be_nan` says where it can be."""

    low: Tensor
    high: Tensor
    may_be_nan: Tensor | None = None


def is_integer(dtype: str) -> bool:
    """Return whether values of `dtype` have int64 bounds."""
    return dtype in _LIMITS


# ------------------------------------------------------------------------------------ no knowledge


def unknown(dtype: str, operands: list[Interval]) -> Interval:
    """Return the bounds of a value of which only the dtype is known, shaped as the operands."""
    shapes = [operand.low.shape for operand in operands]
    shape: tuple[int, ...] = tuple(torch.broadcast_shapes(*shapes))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    device = operands[0].low.device
    if dtype == "b1":
        no = torch.zeros(shape, dtype=torch.bool, device=device)
        return Interval(no, ~no)
    if dtype in _LIMITS:
        low, high = _LIMITS[dtype]
        return Interval(
            torch.full(shape, low, dtype=torch.int64, device=device),
            torch.full(shape, high, dtype=torch.int64, device=device),
        )
    infinity = torch.full(shape, float("inf"), dtype=TORCH_DTYPE[dtype], device=device)
    return Interval(-infinity, infinity, torch.ones(shape, dtype=torch.bool, device=device))


def _arithmetic(node: Node, low: Tensor, high: Tensor, *operands: Interval) -> Interval:
    """Return bounds of an arithmetic result: unknown where it may wrap around or be NaN."""
    if node.dtype in FLOATS:
        may_be_nan = low.isnan() | high.isnan()
        for operand in operands:
            # inf - inf and 0 * inf may hide between the corners.
            may_be_nan = may_be_nan | operand.low.isinf() | operand.high.isinf()
            if operand.may_be_nan is not None:
                may_be_nan = may_be_nan | operand.may_be_nan
        infinity = float("inf")
        return Interval(
            torch.where(may_be_nan, -infinity, low),
            torch.where(may_be_nan, infinity, high),
            may_be_nan,
        )
    least, most = _LIMITS[node.dtype]
    may_wrap = (low < least) | (high > most)
    if node.dtype == "i64":
        for operand in operands:
            may_wrap = may_wrap | _is_unbounded(operand)
    return Interval(torch.where(may_wrap, least, low), torch.where(may_wrap, most, high))


def _is_unbounded(interval: Interval) -> Tensor:
    return (interval.low <= -UNBOUNDED) | (interval.high >= UNBOUNDED)


def _is_point(interval: Interval) -> Tensor:
    return (interval.low == interval.high) & ~_is_unbounded(interval)


# --------------------------------------------------------------------------------------- arithmetic


def _add(node: Node, a: Interval, b: Interval) -> Interval:
    return _arithmetic(node, a.low + b.low, a.high + b.high, a, b)


def _sub(node: Node, a: Interval, b: Interval) -> Interval:
    return _arithmetic(node, a.low - b.high, a.high - b.low, a, b)


def _neg(node: Node, a: Interval) -> Interval:
    return _arithmetic(node, -a.high, -a.low, a)


def _mul(node: Node, a: Interval, b: Interval) -> Interval:
    if node.dtype in FLOATS:
        return _arithmetic(node, *_corners(torch.mul, a, b), a, b)
    # The product of two bounds may itself pass 64 bits; its size in float64 tells.
    size = _magnitude(a).double() * _magnitude(b).double()
    low, high = _corners(torch.mul, a, b)
    is_wide = size >= float(UNBOUNDED)
    low = torch.where(is_wide, -UNBOUNDED - 1, low)
    return _arithmetic(node, low, torch.where(is_wide, UNBOUNDED + 1, high), a, b)


def _div(node: Node, a: Interval, b: Interval) -> Interval:
    has_zero = (b.low <= 0) & (b.high >= 0)
    low, high = _corners(torch.div, a, b)
    nan = float("nan")
    return _arithmetic(
        node, torch.where(has_zero, nan, low), torch.where(has_zero, nan, high), a, b
    )


def _floordiv(node: Node, a: Interval, b: Interval) -> Interval | None:
    if node.dtype in FLOATS:
        return None
    has_zero = (b.low <= 0) & (b.high >= 0)
    safe = Interval(torch.where(has_zero, 1, b.low), torch.where(has_zero, 1, b.high))
    low, high = _corners(torch.floor_divide, a, safe)
    least, most = _LIMITS[node.dtype]
    low, high = torch.where(has_zero, least, low), torch.where(has_zero, most, high)
    return _arithmetic(node, low, high, a, b)


def _mod(node: Node, a: Interval, b: Interval) -> Interval | None:
    """Return bounds of Python's modulo, whose sign is the divisor's."""
    if node.dtype in FLOATS:
        return None
    is_positive, is_negative = b.low > 0, b.high < 0
    low = torch.where(is_positive, 0, b.low + 1)
    high = torch.where(is_negative, 0, b.high - 1)
    divisor = torch.where(is_positive, b.low, 1)
    # A range between two multiples of one divisor keeps its order.
    is_one_period = (is_positive & (b.low == b.high) & (a.low // divisor == a.high // divisor)) | (
        is_positive & (a.low >= 0) & (a.high < b.low)
    )
    is_small = (a.low >= 0) & (a.high < b.low)
    is_one_period = is_one_period & ~_is_unbounded(a)
    low = torch.where(is_one_period, torch.where(is_small, a.low, a.low % divisor), low)
    high = torch.where(is_one_period, torch.where(is_small, a.high, a.high % divisor), high)
    is_unknown = ~(is_positive | is_negative) | _is_unbounded(b)
    least, most = _LIMITS[node.dtype]
    return Interval(torch.where(is_unknown, least, low), torch.where(is_unknown, most, high))


def _pow(node: Node, a: Interval, b: Interval) -> Interval | None:
    """Return bounds of a square; other powers are unknown."""
    if b.low.dim() != 0 or float(b.low) != 2 or float(b.high) != 2:
        return None
    size = _abs(node, a)
    return _mul(node, size, size)


def _abs(node: Node, a: Interval) -> Interval:
    has_zero = (a.low <= 0) & (a.high >= 0)
    nearest = torch.where(
        has_zero, torch.zeros_like(a.low), torch.minimum(a.low.abs(), a.high.abs())
    )
    return _arithmetic(node, nearest, _magnitude(a), a)


def _minimum(node: Node, a: Interval, b: Interval) -> Interval:
    found = torch.minimum(a.low, b.low), torch.minimum(a.high, b.high)
    return _arithmetic(node, *found, a, b) if node.dtype in FLOATS else Interval(*found)


def _maximum(node: Node, a: Interval, b: Interval) -> Interval:
    found = torch.maximum(a.low, b.low), torch.maximum(a.high, b.high)
    return _arithmetic(node, *found, a, b) if node.dtype in FLOATS else Interval(*found)


def _monotone(function: Callable[[Tensor], Tensor]) -> "Rule":
    """Return the rule of a function that keeps order and is exact or rounds correctly."""

    def rule(node: Node, a: Interval) -> Interval:
        return _arithmetic(node, function(a.low), function(a.high), a)

    return rule


def _detach(node: Node, a: Interval) -> Interval:
    return a


def _magnitude(a: Interval) -> Tensor:
    return torch.maximum(a.low.abs(), a.high.abs())


def _corners(
    function: Callable[[Tensor, Tensor], Tensor], a: Interval, b: Interval
) -> tuple[Tensor, Tensor]:
    """Return extrema of a function that is monotone in each argument: they lie at the corners."""
    some = function(a.low, b.low), function(a.low, b.high)
    more = function(a.high, b.low), function(a.high, b.high)
    low = torch.minimum(torch.minimum(*some), torch.minimum(*more))
    high = torch.maximum(torch.maximum(*some), torch.maximum(*more))
    return low, high


# -------------------------------------------------------------------------------------- comparisons


def _truth(must: Tensor, may: Tensor, *operands: Interval) -> Interval:
    """Return a bool that a NaN among the operands would make false."""
    for operand in operands:
        if operand.may_be_nan is not None:
            must = must & ~operand.may_be_nan
    return Interval(must, may)


def _lt(node: Node, a: Interval, b: Interval) -> Interval:
    return _truth(a.high < b.low, a.low < b.high, a, b)


def _le(node: Node, a: Interval, b: Interval) -> Interval:
    return _truth(a.high <= b.low, a.low <= b.high, a, b)


def _gt(node: Node, a: Interval, b: Interval) -> Interval:
    return _lt(node, b, a)


def _ge(node: Node, a: Interval, b: Interval) -> Interval:
    return _le(node, b, a)


def _eq(node: Node, a: Interval, b: Interval) -> Interval:
    if a.low.dtype == torch.bool:
        differs = _xor(node, a, b)
        return Interval(~differs.high, ~differs.low)
    must = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    if not a.low.is_floating_point():
        must = must & ~_is_unbounded(a)
    return _truth(must, (a.low <= b.high) & (b.low <= a.high), a, b)


def _ne(node: Node, a: Interval, b: Interval) -> Interval:
    same = _eq(node, a, b)
    return Interval(~same.high, ~same.low)


# ------------------------------------------------------------------------------ logic, bits, rest


def _and(node: Node, a: Interval, b: Interval) -> Interval:
    if node.dtype == "b1":
        return Interval(a.low & b.low, a.high & b.high)
    return _bitwise(torch.bitwise_and, node, a, b)


def _or(node: Node, a: Interval, b: Interval) -> Interval:
    if node.dtype == "b1":
        return Interval(a.low | b.low, a.high | b.high)
    return _bitwise(torch.bitwise_or, node, a, b)


def _xor(node: Node, a: Interval, b: Interval) -> Interval:
    if a.low.dtype == torch.bool:
        is_known = (a.low == a.high) & (b.low == b.high)
        return Interval((a.low ^ b.low) & is_known, (a.low ^ b.low) | ~is_known)
    return _bitwise(torch.bitwise_xor, node, a, b)


def _not(node: Node, a: Interval) -> Interval:
    if node.dtype == "b1":
        return Interval(~a.high, ~a.low)
    # ~x is -1 - x, unsigned 255 - x: the order turns round.
    total = 255 if node.dtype == "u8" else -1
    return _arithmetic(node, total - a.high, total - a.low, a)


def _bitwise(
    function: Callable[[Tensor, Tensor], Tensor], node: Node, a: Interval, b: Interval
) -> Interval:
    """Return bounds of a bitwise result from the leading bits that each range has in common."""
    # Bits do not influence each other, so both values of all open bits at once try every case.
    a_zero, a_one = a.low & ~_open_bits(a), a.low | _open_bits(a)
    b_zero, b_one = b.low & ~_open_bits(b), b.low | _open_bits(b)
    results = [function(x, y) for x in (a_zero, a_one) for y in (b_zero, b_one)]
    ones = results[0] & results[1] & results[2] & results[3]
    some = results[0] | results[1] | results[2] | results[3]
    is_unknown = (a.low < 0) | (b.low < 0) | _is_unbounded(a) | _is_unbounded(b)
    is_exact = _is_point(a) & _is_point(b)
    least, most = _LIMITS[node.dtype]
    exact = function(a.low, b.low)
    low = torch.where(is_exact, exact, torch.where(is_unknown, least, ones))
    high = torch.where(is_exact, exact, torch.where(is_unknown, most, some))
    return Interval(low, high)


def _open_bits(a: Interval) -> Tensor:
    """Return a mask of the bits below and at the first bit where the two bounds differ."""
    bits = a.low ^ a.high
    for shift in (1, 2, 4, 8, 16, 32):
        bits = bits | (bits >> shift)
    return bits


def _shl(node: Node, a: Interval, b: Interval) -> Interval:
    is_legal = (b.low >= 0) & (b.high < 61)
    factor = Interval(
        torch.ones_like(b.low) << torch.where(is_legal, b.low, 0),
        torch.ones_like(b.high) << torch.where(is_legal, b.high, 0),
    )
    found = _mul(node, a, factor)
    least, most = _LIMITS[node.dtype]
    is_legal = is_legal & (b.high < _BITS[node.dtype])
    return Interval(
        torch.where(is_legal, found.low, least), torch.where(is_legal, found.high, most)
    )


def _shr(node: Node, a: Interval, b: Interval) -> Interval:
    is_legal = (b.low >= 0) & (b.high < _BITS[node.dtype]) & ~_is_unbounded(a)
    count = Interval(torch.where(is_legal, b.low, 0), torch.where(is_legal, b.high, 0))
    low, high = _corners(torch.bitwise_right_shift, a, count)
    least, most = _LIMITS[node.dtype]
    return Interval(torch.where(is_legal, low, least), torch.where(is_legal, high, most))


def _where(node: Node, condition: Interval, a: Interval, b: Interval) -> Interval:
    if node.dtype == "b1":
        low, high = a.low & b.low, a.high | b.high
    else:
        low, high = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    is_a, is_b = condition.low, ~condition.high
    may_be_nan = None
    if node.dtype in FLOATS:
        none = torch.zeros_like(a.low, dtype=torch.bool)
        nan_a = none if a.may_be_nan is None else a.may_be_nan
        nan_b = none if b.may_be_nan is None else b.may_be_nan
        may_be_nan = torch.where(is_a, nan_a, torch.where(is_b, nan_b, nan_a | nan_b))
    return Interval(
        torch.where(is_a, a.low, torch.where(is_b, b.low, low)),
        torch.where(is_a, a.high, torch.where(is_b, b.high, high)),
        may_be_nan,
    )


def _cast(node: Node, a: Interval) -> Interval:
    is_from_float = a.low.is_floating_point()
    if node.dtype == "b1":
        if a.low.dtype == torch.bool:
            return a
        must, may = (a.low > 0) | (a.high < 0), (a.low != 0) | (a.high != 0)
        # NaN is true as a bool.
        return Interval(must, may if a.may_be_nan is None else may | a.may_be_nan)
    if node.dtype in FLOATS:
        dtype = TORCH_DTYPE[node.dtype]
        if not is_from_float and a.low.dtype != torch.bool:
            infinity = float("inf")
            low = torch.where(a.low <= -UNBOUNDED, -infinity, a.low.to(dtype))
            return Interval(low, torch.where(a.high >= UNBOUNDED, infinity, a.high.to(dtype)))
        return Interval(a.low.to(dtype), a.high.to(dtype), a.may_be_nan)
    if not is_from_float:
        return _arithmetic(node, a.low.long(), a.high.long(), *([a] if _is_wide(a) else []))
    edge = float(UNBOUNDED)
    is_known = (a.low > -edge) & (a.high < edge)
    if a.may_be_nan is not None:
        is_known = is_known & ~a.may_be_nan
    low = torch.where(is_known, a.low, 0).double().trunc().long()
    high = torch.where(is_known, a.high, 0).double().trunc().long()
    least, most = _LIMITS[node.dtype]
    return _arithmetic(
        node, torch.where(is_known, low, least - 1), torch.where(is_known, high, most + 1)
    )


def _is_wide(a: Interval) -> bool:
    return a.low.dtype == torch.int64


def _reduced(node: Node, a: Interval) -> Interval | None:
    """Return bounds of a reduction over an axis, whose positions are all there one by one."""
    dimension = -(int(node.attrs[0]) + 2)
    if a.low.dim() < -dimension or a.high.dim() < -dimension:
        # The operand does not vary along the axis; a sum would need its extent.
        return a if node.op in ("any", "all", "amax", "amin") else None
    match node.op:
        case "any":
            return Interval(a.low.any(dimension, True), a.high.any(dimension, True))
        case "all":
            return Interval(a.low.all(dimension, True), a.high.all(dimension, True))
        case "amax" if node.dtype not in FLOATS:
            return Interval(a.low.amax(dimension, True), a.high.amax(dimension, True))
        case "amin" if node.dtype not in FLOATS:
            return Interval(a.low.amin(dimension, True), a.high.amin(dimension, True))
        case "sum" if node.dtype not in FLOATS:
            low, high = a.low.long().sum(dimension, True), a.high.long().sum(dimension, True)
            size = a.low.double().abs() + a.high.double().abs()
            is_wide = size.sum(dimension, True) >= float(UNBOUNDED)
            low = torch.where(is_wide, -UNBOUNDED - 1, low)
            return _arithmetic(node, low, torch.where(is_wide, UNBOUNDED + 1, high))
        case _:
            first = a.low.narrow(dimension, 0, 1)
            return unknown(node.dtype, [Interval(first, first)])


Rule = Callable[..., Interval | None]

RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": _pow,
    "neg": _neg,
    "abs": _abs,
    "minimum": _minimum,
    "maximum": _maximum,
    "sign": _monotone(torch.sign),
    "floor": _monotone(torch.floor),
    "ceil": _monotone(torch.ceil),
    "round": _monotone(torch.round),
    "trunc": _monotone(torch.trunc),
    "detach": _detach,
    "lt": _lt,
    "le": _le,
    "gt": _gt,
    "ge": _ge,
    "eq": _eq,
    "ne": _ne,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "shl": _shl,
    "shr": _shr,
    "where": _where,
    "cast": _cast,
} | dict.fromkeys(("any", "all", "amax", "amin", "sum"), _reduced)
