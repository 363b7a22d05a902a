"""Torch functions made of several nodes, attributes of traced values, and refusals.

Lives here: activations and other composites, in-place variants. Not here: single nodes
(`operators.py`), rows (`indexing.py`, `reductions.py`), constants (`factories.py`). Invariant:
a composite has torch's value and torch's derivative, kinks included; one with arithmetic rounds
16-bit floats once.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import math
import operator
from typing import Any

import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.builder import FLOATS, Term, default_float, result_dtype
from fovea.mods.casts import in_float32
from fovea.mods.graph import TORCH_DTYPE
from fovea.mods.handlers import OPERATORS, Handler, Tracing, register
from fovea.mods.indexing import getitem
from fovea.mods.operators import (
    binary,
    clamp,
    compare,
    enter_python_operators,
    is_float,
    unary,
    where,
)
from fovea.mods.reductions import enter_reductions

# ------------------------------------------------------------------------------- activations


def _relu(t: Tracing, x: Any, inplace: bool = False) -> Term:
    return where(t, compare(t, "le", x, 0), t.builder.cast(t.term(0), t.term(x).dtype), x)


def _leaky_relu(t: Tracing, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Term:
    return where(t, compare(t, "gt", x, 0), x, binary(t, "mul", x, negative_slope))


@in_float32
def _elu(t: Tracing, x: Any, alpha: Any = 1.0, inplace: bool = False) -> Term:
    negative = binary(t, "mul", unary(t, "expm1", x), alpha)
    return where(t, compare(t, "gt", x, 0), x, negative)


@in_float32
def _selu(t: Tracing, x: Any, inplace: bool = False) -> Term:
    # Source: Klambauer et al., Self-Normalizing Neural Networks, section 2, equation (2).
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    negative = binary(t, "mul", unary(t, "expm1", x), alpha * scale)
    return where(t, compare(t, "gt", x, 0), binary(t, "mul", x, scale), negative)


@in_float32
def _celu(t: Tracing, x: Any, alpha: Any = 1.0, inplace: bool = False) -> Term:
    curve = unary(t, "expm1", binary(t, "div", x, alpha))
    return where(t, compare(t, "gt", x, 0), x, binary(t, "mul", curve, alpha))


@in_float32
def _silu(t: Tracing, x: Any, inplace: bool = False) -> Term:
    return binary(t, "mul", x, unary(t, "sigmoid", x))


@in_float32
def _gelu(t: Tracing, x: Any, *, approximate: str = "none") -> Term:
    half = binary(t, "mul", x, 0.5)
    if approximate == "tanh":
        cube = binary(t, "mul", binary(t, "mul", x, x), x)
        inner = binary(t, "add", x, binary(t, "mul", cube, 0.044715))
        curve = unary(t, "tanh", binary(t, "mul", inner, math.sqrt(2.0 / math.pi)))
    else:
        curve = unary(t, "erf", binary(t, "mul", x, math.sqrt(0.5)))
    return binary(t, "mul", half, binary(t, "add", curve, 1.0))


@in_float32
def _softplus(t: Tracing, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Term:
    scaled = binary(t, "mul", x, beta)
    curve = binary(t, "div", unary(t, "log1p", unary(t, "exp", scaled)), beta)
    return where(t, compare(t, "gt", scaled, threshold), x, curve)


@in_float32
def _logsigmoid(t: Tracing, x: Any) -> Term:
    # min(x, 0) - log1p(exp(-|x|)): no overflow on either side
    is_negative = compare(t, "lt", x, 0)
    # not abs(x), whose derivative at 0 is 0: that of logsigmoid is 1/2 there
    size = where(t, is_negative, unary(t, "neg", x), x)
    tail = unary(t, "log1p", unary(t, "exp", unary(t, "neg", size)))
    return binary(t, "sub", where(t, is_negative, x, 0.0), tail)


@in_float32
def _mish(t: Tracing, x: Any, inplace: bool = False) -> Term:
    return binary(t, "mul", x, unary(t, "tanh", _softplus(t, x)))


def _hardtanh(
    t: Tracing, x: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> Term:
    low, high = min_val, max_val
    # torch's derivative is 0 on the bounds here, 1 in clamp
    inside = where(t, compare(t, "le", x, low), t.builder.cast(t.term(low), t.term(x).dtype), x)
    return where(
        t, compare(t, "ge", x, high), t.builder.cast(t.term(high), t.term(x).dtype), inside
    )


def _relu6(t: Tracing, x: Any, inplace: bool = False) -> Term:
    return _hardtanh(t, x, 0.0, 6.0)


@in_float32
def _hardsigmoid(t: Tracing, x: Any, inplace: bool = False) -> Term:
    return binary(t, "div", _relu6(t, binary(t, "add", x, 3.0)), 6.0)


@in_float32
def _hardswish(t: Tracing, x: Any, inplace: bool = False) -> Term:
    ramp = binary(t, "div", binary(t, "mul", x, binary(t, "add", x, 3.0)), 6.0)
    zero = t.builder.cast(t.term(0), t.term(x).dtype)
    inner = where(t, compare(t, "le", x, -3.0), zero, ramp)
    return where(t, compare(t, "ge", x, 3.0), x, inner)


def _softshrink(t: Tracing, x: Any, lambd: Any = 0.5) -> Term:
    middle = binary(t, "mul", x, 0.0)  # NaN stays NaN
    is_low = compare(t, "gt", unary(t, "neg", x), lambd)
    low = where(t, is_low, binary(t, "add", x, lambd), middle)
    return where(t, compare(t, "gt", x, lambd), binary(t, "sub", x, lambd), low)


def _hardshrink(t: Tracing, x: Any, lambd: Any = 0.5) -> Term:
    return where(t, compare(t, "le", unary(t, "abs", x), lambd), 0.0, x)


def _threshold(t: Tracing, x: Any, threshold: Any, value: Any, inplace: bool = False) -> Term:
    filled = t.builder.cast(t.term(value), t.term(x).dtype)
    return where(t, compare(t, "le", x, threshold), filled, x)


@in_float32
def _softsign(t: Tracing, x: Any) -> Term:
    return binary(t, "div", x, binary(t, "add", unary(t, "abs", x), 1))


def _tanhshrink(t: Tracing, x: Any) -> Term:
    return binary(t, "sub", x, unary(t, "tanh", x))


# ---------------------------------------------------------------------------------- composites


def _square(t: Tracing, x: Any) -> Term:
    return binary(t, "mul", x, x)


def _reciprocal(t: Tracing, x: Any) -> Term:
    return binary(t, "div", 1.0, x)


@in_float32
def _addcmul(t: Tracing, x: Any, y: Any, z: Any, value: Any = 1) -> Term:
    dtype = result_dtype([t.term(operand) for operand in (x, y, z)])
    if dtype not in FLOATS:  # a number beyond the dtype is refused, as with alpha
        value = t.builder.cast(t.term(value), dtype)
    return binary(t, "add", x, binary(t, "mul", binary(t, "mul", y, z), value))


@in_float32
def _addcdiv(t: Tracing, x: Any, y: Any, z: Any, value: Any = 1) -> Term:
    return binary(t, "add", x, binary(t, "mul", binary(t, "div", y, z), value))


def _number(t: Tracing, value: Any, dtype: str) -> Any:
    """Return a Python number in a dtype, lest it count as a tensor once something is made of it."""
    term = t.term(value)
    return (
        t.builder.cast(term, dtype if dtype in FLOATS else default_float()) if term.weak else value
    )


@in_float32
def _lerp(t: Tracing, x: Any, y: Any, weight: Any) -> Term:
    weight = _number(t, weight, result_dtype((t.term(x), t.term(y))))
    near = binary(t, "add", x, binary(t, "mul", weight, binary(t, "sub", y, x)))
    rest = binary(t, "mul", binary(t, "sub", y, x), binary(t, "sub", 1, weight))
    far = binary(t, "sub", y, rest)
    return where(t, compare(t, "lt", unary(t, "abs", weight), 0.5), near, far)


def _copysign(t: Tracing, x: Any, y: Any) -> Term:
    size = unary(t, "abs", x)
    if not is_float(size):
        size = t.builder.cast(size, default_float())
    # 1 / -0.0 is -inf: tells the two zeros apart
    negative = compare(t, "lt", where(t, compare(t, "eq", y, 0), _reciprocal(t, y), y), 0)
    return where(t, negative, unary(t, "neg", size), size)


@in_float32
def _hypot(t: Tracing, x: Any, y: Any) -> Term:
    return unary(t, "sqrt", binary(t, "add", _square(t, x), _square(t, y)))


@in_float32
def _logaddexp(t: Tracing, x: Any, y: Any) -> Term:
    top = binary(t, "maximum", x, y)
    gap = unary(t, "neg", unary(t, "abs", binary(t, "sub", x, y)))
    sum_ = binary(t, "add", top, unary(t, "log1p", unary(t, "exp", gap)))
    # equal infinities: their difference is NaN, their sum is themselves
    return where(t, compare(t, "eq", unary(t, "abs", top), math.inf), top, sum_)


@in_float32
def _logaddexp2(t: Tracing, x: Any, y: Any) -> Term:
    top = binary(t, "maximum", x, y)
    gap = unary(t, "neg", unary(t, "abs", binary(t, "sub", x, y)))
    rest = binary(t, "mul", unary(t, "log1p", unary(t, "exp2", gap)), 1.0 / math.log(2.0))
    return where(
        t, compare(t, "eq", unary(t, "abs", top), math.inf), top, binary(t, "add", top, rest)
    )


@in_float32
def _erfc(t: Tracing, x: Any) -> Term:
    # torch's value to the rounding of 1: of a tail below that nothing is left
    return binary(t, "sub", 1.0, unary(t, "erf", x))


def _frac(t: Tracing, x: Any) -> Term:
    return binary(t, "sub", x, unary(t, "trunc", x))


@in_float32
def _xlogy(t: Tracing, x: Any, y: Any) -> Term:
    y = _number(t, y, result_dtype((t.term(x), t.term(y))))
    # where x is 0 and log(y) infinite or NaN, log(1): a where around the product would hide
    # that the derivative for x is log(y)
    is_singular = t.builder.pointwise(
        "or", (compare(t, "le", y, 0), compare(t, "eq", y, math.inf)), "b1"
    )
    is_singular = t.builder.pointwise("and", (compare(t, "eq", x, 0), is_singular), "b1")
    return binary(t, "mul", x, unary(t, "log", where(t, is_singular, 1.0, y)))


@in_float32
def _logit(t: Tracing, x: Any, eps: Any = None) -> Term:
    p = x
    if eps is not None:
        eps = _number(t, eps, t.term(x).dtype)
        p = clamp(t, x, eps, binary(t, "sub", 1.0, eps))
    return unary(t, "log", binary(t, "div", p, binary(t, "sub", 1.0, p)))


def _heaviside(t: Tracing, x: Any, values: Any) -> Term:
    term = t.term(x)
    zero, one = t.builder.strong(0, term.dtype), t.builder.strong(1, term.dtype)
    return where(t, compare(t, "eq", x, 0), values, where(t, compare(t, "lt", x, 0), zero, one))


def _embedding(
    t: Tracing,
    index: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Term:
    options = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    for name, value in options.items():
        if value is not None and value is not False:
            raise TraceError(
                f"embedding({name}={value}) cannot be traced (allowed: padding_idx); leave it "
                "out, and scale the weight or its gradient outside the mod"
            )
    row = getitem(t, weight, (index,))
    if padding_idx is None:
        return row
    padding = t.fixed(padding_idx)
    if padding < 0:
        padding += t.fixed_extent(t.source(weight), 0)
    test = compare(t, "eq", index, padding)
    dims = (*test.dims, *(None,) * (len(row.dims) - len(test.dims)))
    # torch gives this row no gradient
    return where(t, Term(test.node, "b1", dims), unary(t, "detach", row), row)


def _native_embedding(
    t: Tracing,
    weight: Any,
    index: Any,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Term:
    padding = None if t.fixed(padding_idx) < 0 else padding_idx
    return _embedding(
        t, index, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


def _scaled_by(factor: float) -> Handler:
    def handler(t: Tracing, x: Any) -> Term:
        return binary(t, "mul", x, factor)

    return handler


# ---------------------------------------------------------------------------------- attributes


def _shape(t: Tracing, x: Any) -> Any:
    return torch.Size(t.builder.shape(t.term(x)))


def _size_of(t: Tracing, x: Any, dim: Any = None) -> Any:
    shape = t.builder.shape(t.term(x))
    return torch.Size(shape) if dim is None else shape[dim]


def _rank(t: Tracing, x: Any) -> int:
    return len(t.term(x).dims)


def _length(t: Tracing, x: Any) -> int:
    term = t.term(x)
    if not term.dims:
        raise TraceError("len() of a 0-d value is not defined")
    return t.builder.extent(term, 0)


def _numel(t: Tracing, x: Any) -> int:
    return math.prod(t.builder.shape(t.term(x)))


def _dtype(t: Tracing, x: Any) -> torch.dtype:
    return TORCH_DTYPE[t.term(x).dtype]


def _device(t: Tracing, x: Any) -> Any:
    return t.device


def _is_floating(t: Tracing, x: Any) -> bool:
    return t.term(x).dtype in FLOATS


def _is_cuda(t: Tracing, x: Any) -> bool:
    return t.device.type == "cuda"


def _text(t: Tracing, x: Any, *_: Any, **__: Any) -> str:
    return f"<traced {t.term(x).dtype}>"


def _false(t: Tracing, x: Any) -> bool:
    return False


# ------------------------------------------------------------------------------------- tables

NEEDS_VALUE = {
    function
    for name in (
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist"),
        *("numpy", "__array__", "__contains__", "is_nonzero", "equal", "allclose"),
    )
    for function in (getattr(Tensor, name, None), getattr(torch, name, None))
    if function is not None
}
RANDOM = {
    getattr(torch, name)
    for name in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli")
} | {torch.normal, torch.multinomial, torch.nn.functional.dropout}

INPLACE: dict[Any, Handler] = {}


def _enter() -> None:
    for names, handler in (
        *(("relu", _relu), ("relu6", _relu6), ("leaky_relu", _leaky_relu), ("elu", _elu)),
        *(("silu", _silu), ("gelu", _gelu), ("softplus", _softplus), ("mish", _mish)),
        *(("logsigmoid", _logsigmoid), ("hardtanh", _hardtanh), ("softsign", _softsign)),
        *(("tanhshrink", _tanhshrink), ("square", _square), ("reciprocal", _reciprocal)),
        *(("addcmul", _addcmul), ("addcdiv", _addcdiv), ("lerp", _lerp), ("hypot", _hypot)),
        *(("copysign", _copysign), ("logaddexp", _logaddexp), ("xlogy", _xlogy)),
        *(("logit", _logit), ("heaviside", _heaviside), ("logaddexp2", _logaddexp2)),
        *(("erfc", _erfc), ("frac", _frac), ("selu", _selu), ("celu", _celu)),
        *(("hardsigmoid", _hardsigmoid), ("hardswish", _hardswish)),
        *(("softshrink", _softshrink), ("hardshrink", _hardshrink), ("threshold", _threshold)),
        *(("deg2rad", _scaled_by(math.pi / 180)), ("rad2deg", _scaled_by(180 / math.pi))),
        *(("dim ndimension", _rank), ("__len__", _length), ("numel nelement", _numel)),
        ("size", _size_of),
        *(("is_floating_point", _is_floating), ("__repr__ __str__ __format__", _text)),
    ):
        register(names, handler)
    OPERATORS[torch.embedding] = _native_embedding
    OPERATORS[torch.nn.functional.embedding] = _embedding
    properties = {"shape": _shape, "dtype": _dtype, "device": _device, "ndim": _rank}
    properties |= {"is_cuda": _is_cuda, "requires_grad": _false}
    for name, handler in properties.items():
        OPERATORS[getattr(Tensor, name).__get__] = handler
    for name in dir(Tensor):
        base = name[:-1]
        if name.endswith("_") and not name.endswith("__"):
            plain = OPERATORS.get(getattr(Tensor, base, None))
            if plain is not None:
                INPLACE[getattr(Tensor, name)] = plain
        elif name.startswith("__i") and name != "__invert__":
            plain = OPERATORS.get(getattr(Tensor, f"__{name[3:]}", None))
            if plain is not None:
                INPLACE[getattr(Tensor, name)] = plain
                python_name = getattr(operator, f"i{name[3:].strip('_')}", None)
                if python_name is not None:
                    INPLACE[python_name] = plain


enter_reductions()
_enter()
enter_python_operators()
# Operators of torch.library packages, by "namespace::name".
OPERATORS["approx::tanh"] = OPERATORS[torch.tanh]
