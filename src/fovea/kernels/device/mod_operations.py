"""Device operations of mod graphs, by node name.

Lives here: `OPERATIONS`, one DSL function per node of `fovea.mods.graph`. Not here: the walk over a
graph (`mods.py`), quotients of floats (`division.py`). Invariant: each agrees with
`fovea/mods/evaluate.py` on every input, integer division with Python's sign included.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute

from fovea.kernels.device import trigonometry
from fovea.kernels.device.division import as_float32, divide
from fovea.kernels.device.polynomials import tanh_factor
from fovea.kernels.device.ptx import float_of
from fovea.kernels.device.values import select
from fovea.mods.graph import Node
from fovea.plan.numerics import LOG2_E, TANH_LARGEST_SQUARE

Value = Any  # a DSL scalar or a Python number

_SIGN = -(2**31)  # bits of -0.0

_TYPES: dict[str, Any] = {
    "b1": cutlass.Boolean,
    "u8": cutlass.Int32,
    "i8": cutlass.Int32,
    "i16": cutlass.Int32,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "f16": cutlass.Float32,
    "bf16": cutlass.Float32,
    "f32": cutlass.Float32,
    "f64": cutlass.Float32,  # nothing but loads that are converted at once
}
_HALVES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}
# Operations whose result is one of their operands, or has no more digits.
_EXACT = frozenset(
    (
        *("load", "where", "detach", "neg", "abs", "sign", "minimum", "maximum"),
        *("floor", "ceil", "trunc", "round", "amax", "amin"),
    )
)
_EXACT_SOURCES = ("b1", "u8", "i8")  # types that fit the eight digits of bf16


def cast(value: Value, dtype: str) -> Value:
    """Return a value in the register type of a node's dtype.

    Small integers compute as 32-bit, all floats as fp32: mods in a kernel never use more.
    """
    kind = _TYPES[dtype]
    if isinstance(value, float) and value == 0.0 and math.copysign(1.0, value) < 0.0:
        return float_of(cutlass.Int32(_SIGN))  # the DSL takes -0.0 for an earlier constant 0.0
    if isinstance(value, (bool, int, float)):
        return kind(value)
    if isinstance(value, kind):
        return value
    if kind is cutlass.Boolean:
        return value != 0
    if isinstance(value, cutlass.Boolean):
        return select(value, kind(1), kind(0))
    return value.to(kind)


def wrap(value: Value, node: Node, operand_dtypes: Sequence[str] = ()) -> Value:
    """Return a result cut to what its dtype holds, as the dtype's own arithmetic would cut it.

    Small integers keep their low bits; 16-bit floats, which are computed in fp32, are rounded.
    """
    if node.dtype in _HALVES:
        return value if _is_exact(node, operand_dtypes) else _rounded(value, node.dtype)
    if node.dtype == "u8":
        return value & 255
    bits = {"i8": 24, "i16": 16}.get(node.dtype)
    return value if bits is None else (value << bits) >> bits


def _is_exact(node: Node, operand_dtypes: Sequence[str]) -> bool:
    """Return whether a 16-bit float needs no rounding: a pair of slow instructions."""
    if node.op == "cast":
        return all(dtype in (node.dtype, *_EXACT_SOURCES) for dtype in operand_dtypes)
    return node.op in _EXACT


def _rounded(value: Value, dtype: str) -> Value:
    """Return a float32 as the nearest number of a 16-bit type, which may be infinite."""
    if isinstance(getattr(value, "value", None), float):
        # The DSL takes the conversions of a number that it knows for nothing.
        value = float_of(cutlass.Int32(_bits_of_number(value.value)))
    return value.to(_HALVES[dtype]).to(cutlass.Float32)


def _bits_of_number(number: float) -> int:
    """Return the bits of the nearest float32."""
    return struct.unpack("i", struct.pack("f", as_float32(number)))[0]


def _is_integer(node: Node) -> bool:
    return node.dtype in ("u8", "i8", "i16", "i32", "i64")


def _typed(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return an operation whose operands are cast to the node's dtype first."""

    def operation(node: Node, *operands: Value) -> Value:
        return function(*(cast(operand, node.dtype) for operand in operands))

    return operation


def _float(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return an operation on fp32 operands."""

    def operation(node: Node, *operands: Value) -> Value:
        return function(*(cast(operand, "f32") for operand in operands))

    return operation


def _compared(function: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """Return a comparison of two operands in their common type."""

    def operation(node: Node, a: Value, b: Value) -> Value:
        common = _common(a, b)
        return function(cast(a, common), cast(b, common))

    return operation


def _common(a: Value, b: Value) -> str:
    kinds = (cutlass.Float32, cutlass.Int64, cutlass.Int32)
    for kind, name in zip(kinds, ("f32", "i64", "i32"), strict=True):
        if isinstance(a, kind) or isinstance(b, kind):
            return name
    return "i32"  # two booleans compare as integers


def _tan(a: Value) -> Value:
    return divide(*trigonometry.sine_and_cosine(a))


def _tanh(a: Value) -> Value:
    """Return tanh(a): 1 - 2 / (1 + e^(2a)), where that is small a polynomial, all good to 2^-22.

    The hardware's tanh is good to 5e-4.
    """
    square = a * a
    power = cute.math.exp2(a * (2.0 * LOG2_E), fastmath=True)
    large = 1.0 - 2.0 * cute.arch.rcp_approx(power + 1.0)
    return select(square <= TANH_LARGEST_SQUARE, a * tanh_factor(square), large)


def _floordiv(node: Node, a: Value, b: Value) -> Value:
    a, b = cast(a, node.dtype), cast(b, node.dtype)
    if _is_integer(node):
        return _divide_floor(a, b)[0]
    # An infinite a has no quotient (a - a is NaN), unless b is 0.
    quotient = _divide_floor_float(a, b)[0]
    return select(b == 0.0, quotient, quotient + (a - a))


def _mod(node: Node, a: Value, b: Value) -> Value:
    a, b = cast(a, node.dtype), cast(b, node.dtype)
    return _divide_floor(a, b)[1] if _is_integer(node) else _divide_floor_float(a, b)[1]


def _divide_floor_float(a: Value, b: Value) -> tuple[Value, Value]:
    """Return the quotient rounded down and the remainder with b's sign, exact below 2^24.

    Past that the quotient keeps its leading 24 bits, and the remainder means nothing.
    """
    quotient = cute.math.floor(divide(a, b))
    # The product of 0 and an infinite b would be NaN.
    product_rest = cute.math.fma(-quotient, b, a)
    remainder = select(quotient == 0.0, a, product_rest)
    # The quotient may have been rounded up to an integer: then the remainder is past b's side of 0.
    zero, one = cutlass.Float32(0.0), cutlass.Float32(1.0)
    is_above = ((remainder < zero) & (b > zero)) | ((remainder > zero) & (b < zero))
    return (
        select(is_above, quotient - one, quotient),
        select(is_above, remainder + b, remainder),
    )


def _divide_floor(a: Value, b: Value) -> tuple[Value, Value]:
    """Return quotient rounded down and the remainder with b's sign; a divisor of 0 counts as 1."""
    kind = type(a)
    b = select(b == kind(0), kind(1), b)
    quotient = a // b
    remainder = a - quotient * b
    # Correct whichever rounding the DSL's `//` has: the remainder must have b's sign or be 0.
    wrong = (remainder != kind(0)) & ((remainder < kind(0)) != (b < kind(0)))
    return (
        select(wrong, quotient - kind(1), quotient),
        select(wrong, remainder + b, remainder),
    )


def _minimum(node: Node, a: Value, b: Value) -> Value:
    a, b = cast(a, node.dtype), cast(b, node.dtype)
    if _is_integer(node):
        return cutlass.min(a, b)
    return cute.arch.fmin(a, b, nan=True)


def _maximum(node: Node, a: Value, b: Value) -> Value:
    a, b = cast(a, node.dtype), cast(b, node.dtype)
    if _is_integer(node):
        return cutlass.max(a, b)
    return cute.arch.fmax(a, b, nan=True)


def _abs(node: Node, a: Value) -> Value:
    a = cast(a, node.dtype)
    if _is_integer(node):
        return cutlass.max(a, type(a)(0) - a)
    return cute.math.absf(a)


def _where(node: Node, condition: Value, a: Value, b: Value) -> Value:
    return select(cast(condition, "b1"), cast(a, node.dtype), cast(b, node.dtype))


def _not(node: Node, a: Value) -> Value:
    if node.dtype == "b1":
        return cast(a, "b1") ^ cutlass.Boolean(True)
    a = cast(a, node.dtype)
    return type(a)(-1) ^ a


def _shl(node: Node, a: Value, count: Value) -> Value:
    a, count = cast(a, node.dtype), cast(count, node.dtype)
    kind = type(a)
    inside = (count >= kind(0)) & (count < kind(kind.width))
    return select(inside, a << count, kind(0))


def _shr(node: Node, a: Value, count: Value) -> Value:
    """Shift right with the sign; a count out of range leaves the sign alone, as in torch."""
    a, count = cast(a, node.dtype), cast(count, node.dtype)
    kind = type(a)
    inside = (count >= kind(0)) & (count < kind(kind.width))
    return a >> select(inside, count, kind(kind.width - 1))


def _neg(node: Node, a: Value) -> Value:
    a = cast(a, node.dtype)
    return type(a)(0) - a if _is_integer(node) else -a


def _pow(node: Node, a: Value, b: Value) -> Value:
    """Return a^b: of integers by squaring, in the arithmetic of their type, as torch does."""
    if not _is_integer(node):
        return cute.math.pow(cast(a, "f32"), cast(b, "f32"))
    a, b = cast(a, node.dtype), cast(b, node.dtype)
    kind = type(a)
    exponent = _constant(b)
    result, square = kind(1), a
    for place in range(kind.width - 1 if exponent is None else max(exponent, 0).bit_length()):
        if exponent is None:
            result = select(((b >> place) & 1) != 0, result * square, result)
        elif exponent >> place & 1:
            result = square if _constant(result) == 1 else _times(result, square)
        square = _times(square, square)
    if exponent is not None and exponent >= 0:
        return result
    # Of a negative exponent: 1 / a^-b, which only 1 and -1 have.
    unit = select((b & 1) != 0, a, kind(1))
    fraction = select((a == kind(1)) | (a == kind(-1)), unit, kind(0))
    return select(b < kind(0), fraction, result)


def _constant(value: Value) -> int | None:
    """Return the value of a constant, None of what only a launch knows."""
    known = getattr(value, "value", None)
    return known if isinstance(known, int) else None


def _times(a: Value, b: Value) -> Value:
    """Return a product of integers, cut to their width where Python computes it."""
    known_a, known_b = _constant(a), _constant(b)
    if known_a is None or known_b is None:
        return a * b
    half = 1 << (type(a).width - 1)
    return type(a)((known_a * known_b + half) % (2 * half) - half)


def _sign(node: Node, a: Value) -> Value:
    a = cast(a, node.dtype)
    kind = type(a)
    positive = select(a > kind(0), kind(1), kind(0))
    return select(a < kind(0), kind(-1), positive)


def _sigmoid(a: Value) -> Value:
    # Of a rounded a * log2(e) the power would be good to 4e-6 where it is large.
    return cute.arch.rcp_approx(cute.math.exp(-a) + 1.0)


def _rounding(function: Callable[[Value], Value]) -> Callable[..., Value]:
    def operation(node: Node, a: Value) -> Value:
        return cast(a, node.dtype) if _is_integer(node) else function(cast(a, "f32"))

    return operation


OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _typed(lambda a, b: a + b),
    "sub": _typed(lambda a, b: a - b),
    "mul": _typed(lambda a, b: a * b),
    "div": _float(divide),
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": _neg,
    "abs": _abs,
    "minimum": _minimum,
    "maximum": _maximum,
    "pow": _pow,
    "floor": _rounding(cute.math.floor),
    "ceil": _rounding(cute.math.ceil),
    "trunc": _rounding(cute.math.trunc),
    "round": _rounding(cute.math.roundeven),
    "sign": _sign,
    "exp": _float(cute.math.exp),
    "exp2": _float(cute.math.exp2),
    "expm1": _float(cute.math.expm1),
    "log": _float(cute.math.log),
    "log2": _float(cute.math.log2),
    "log10": _float(cute.math.log10),
    "log1p": _float(cute.math.log1p),
    "sqrt": _float(cute.math.sqrt),
    "rsqrt": _float(cute.math.rsqrt),
    "sin": _float(trigonometry.sine),
    "cos": _float(trigonometry.cosine),
    "tan": _float(_tan),
    "tanh": _float(_tanh),
    "asin": _float(cute.math.asin),
    "acos": _float(cute.math.acos),
    "sinh": _float(cute.math.sinh),
    "cosh": _float(cute.math.cosh),
    "asinh": _float(cute.math.asinh),
    "acosh": _float(cute.math.acosh),
    "atanh": _float(cute.math.atanh),
    "atan": _float(cute.math.atan),
    "atan2": _float(cute.math.atan2),
    "erf": _float(cute.math.erf),
    "sigmoid": _float(_sigmoid),
    "eq": _compared(lambda a, b: a == b),
    "ne": _compared(lambda a, b: a != b),
    "lt": _compared(lambda a, b: a < b),
    "le": _compared(lambda a, b: a <= b),
    "gt": _compared(lambda a, b: a > b),
    "ge": _compared(lambda a, b: a >= b),
    "and": _typed(lambda a, b: a & b),
    "or": _typed(lambda a, b: a | b),
    "xor": _typed(lambda a, b: a ^ b),
    "not": _not,
    "shl": _shl,
    "shr": _shr,
    "where": _where,
    "detach": lambda node, a: a,
    "cast": lambda node, a: cast(a, node.dtype),
}
