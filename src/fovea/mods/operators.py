"""What pointwise torch functions mean on traced values: handlers that make graph nodes.

Lives here: arithmetic, comparisons, logic and choices. Not here: the table they enter
(`handlers.py`), indexing and shapes (`indexing.py`), the classes that users' code meets
(`values.py`). Invariant: promotion and rounding are torch's, so that a graph evaluates to what the
function would have given under `torch.vmap`.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import operator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.builder import FLOATS, Term, default_float, result_dtype, wrapped
from fovea.mods.handlers import OPERATORS, PYTHON_METHODS, Handler, Tracing, register

_INDICES = ("b", "h", "q_idx", "kv_idx")  # never negative


def is_float(term: Term) -> bool:
    """Return whether a term is of a floating-point dtype."""
    return term.dtype in FLOATS


# ---------------------------------------------------------------------------------- arithmetic


def binary(t: Tracing, op: str, x: Any, y: Any) -> Term:
    """Return x op y for an arithmetic node, promoted as torch does."""
    terms = (t.term(x), t.term(y))
    dtype = result_dtype(terms)
    if dtype == "b1":
        logical = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}.get(op)
        if logical is None:
            raise TraceError(f"{op} of two bool values is not defined; cast one with .int()")
        return t.builder.pointwise(logical, terms, "b1")
    if op in ("floordiv", "mod") and dtype not in FLOATS:
        refuse_zero(t, y, dtype)
    if op in ("div", "atan2") and dtype not in FLOATS:
        dtype = default_float()
    return t.builder.pointwise(op, terms, dtype)


def refuse_zero(t: Tracing, divisor: Any, dtype: str) -> None:
    """Raise where integers are divided by a number that is 0 at every position, as torch does.

    0 in the dtype of the division: 256 divides uint8 by 0.
    """
    term = t.term(divisor)
    value = (
        t.divisor(divisor) if term.node < 0 or term.weak else t.builder.constant_value(term.node)
    )
    if value is not None and wrapped(value, dtype) == 0:
        raise TraceError(
            "integer division or remainder by 0 is not defined; divide by another number"
        )


def _scaled(t: Tracing, op: str, x: Any, y: Any, alpha: Any) -> Term:
    if alpha is None:
        return binary(t, op, x, y)
    dtype = result_dtype((t.term(x), t.term(y)))
    if dtype not in FLOATS:
        if is_float(t.term(alpha)):
            raise TraceError("alpha of integers is not defined for floats; cast them with .float()")
        # Here torch refuses a number beyond the dtype.
        y, alpha = t.builder.operand(t.term(y), dtype), t.builder.cast(t.term(alpha), dtype)
    return binary(t, op, x, binary(t, "mul", y, alpha))


def _add(t: Tracing, x: Any, y: Any, *, alpha: Any = None, out: Any = None) -> Term:
    return _scaled(t, "add", x, y, alpha)


def _sub(t: Tracing, x: Any, y: Any, *, alpha: Any = None, out: Any = None) -> Term:
    return _scaled(t, "sub", x, y, alpha)


def _rsub(t: Tracing, x: Any, y: Any, *, alpha: Any = None) -> Term:
    return _scaled(t, "sub", y, x, alpha)


def _plain(op: str) -> Handler:
    def handler(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
        return binary(t, op, x, y)

    return handler


def _reverse(forward: Handler) -> Handler:
    def handler(t: Tracing, x: Any, y: Any) -> Term:
        return forward(t, y, x)

    return handler


def _div(t: Tracing, x: Any, y: Any, *, rounding_mode: str | None = None, out: Any = None) -> Term:
    if rounding_mode is None:
        return binary(t, "div", x, y)
    if rounding_mode == "floor":
        return binary(t, "floordiv", x, y)
    terms = (t.term(x), t.term(y))
    dtype = result_dtype(terms)
    if dtype in FLOATS:
        return t.builder.pointwise("trunc", (binary(t, "div", x, y),), dtype)
    quotient = binary(t, "floordiv", x, y)
    is_below = _is_below_trunc(t, x, y, dtype)
    return binary(t, "add", quotient, t.builder.cast(is_below, dtype)) if is_below else quotient


def _is_below_trunc(t: Tracing, x: Any, y: Any, dtype: str) -> Term | None:
    """Return where integer division, which rounds down, falls below the quotient cut to 0.

    None where it never does. No absolute values: that of the least integer is itself.
    """
    a, b = t.builder.operand(t.term(x), dtype), t.builder.operand(t.term(y), dtype)
    value = t.builder.constant_value(b.node)
    is_positive = value is not None and value > 0
    if dtype == "u8" or (is_positive and t.builder.nodes[a.node][0] in _INDICES):
        return None
    is_negative = compare(t, "lt", a, 0)
    if not is_positive:
        is_negative = t.builder.pointwise("xor", (is_negative, compare(t, "lt", b, 0)), "b1")
    return t.builder.pointwise(
        "and", (is_negative, compare(t, "ne", binary(t, "mod", a, b), 0)), "b1"
    )


def _fmod(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
    dtype = result_dtype((t.term(x), t.term(y)))
    if dtype not in FLOATS:
        rest = binary(t, "mod", x, y)
        is_below = _is_below_trunc(t, x, y, dtype)
        return where(t, is_below, binary(t, "sub", rest, y), rest) if is_below else rest
    a, b = t.builder.cast(t.term(x), dtype), t.builder.cast(t.term(y), dtype)
    is_negative = compare(t, "lt", a, 0)
    # not abs(a), whose derivative at 0 is 0: that of the remainder is 1 there
    size = where(t, is_negative, unary(t, "neg", a), a)
    rest = binary(t, "mod", size, unary(t, "abs", b))
    return where(t, is_negative, unary(t, "neg", rest), rest)


def _pow(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
    base, exponent = t.term(x), t.term(y)
    dtype = result_dtype((base, exponent))
    value = exponent.value
    if value is None or dtype == "b1":
        return t.builder.pointwise("pow", (base, exponent), dtype)
    # An exponent beyond the dtype is refused by torch too; a base wraps.
    base, exponent = t.builder.operand(base, dtype), t.builder.cast(exponent, dtype)
    # torch computes these exponents by other means than pow, and so does every device.
    if value == 0:
        return t.builder.strong(1, dtype)
    if value == 1:
        return base
    if value == 2:
        return binary(t, "mul", base, base)
    if value == 3:
        return binary(t, "mul", binary(t, "mul", base, base), base)
    if dtype in FLOATS:
        if value == 0.5:
            return unary(t, "sqrt", base)
        if value == -0.5:
            return binary(t, "div", 1.0, unary(t, "sqrt", base))
        if value == -1:
            return binary(t, "div", 1.0, base)
        if value == -2:
            return binary(t, "div", 1.0, binary(t, "mul", base, base))
    elif value < 0:
        raise TraceError(f"integer ** {value} is not defined in torch; cast the base with .float()")
    return t.builder.pointwise("pow", (base, exponent), dtype)


def _float_power(t: Tracing, x: Any, y: Any) -> Term:
    return _pow(t, t.builder.cast(t.term(x), "f64"), y)


def unary(t: Tracing, op: str, x: Any) -> Term:
    """Return op(x) in x's dtype, for neg, abs, sign, floor, ceil, round, trunc and detach.

    Other operations are floating-point: integers turn into the default float dtype first.
    """
    term = t.term(x)
    if term.node < 0:
        term = t.builder.cast(term, default_float() if is_float(term) else term.dtype)
    if op in ("floor", "ceil", "round", "trunc", "detach") and not is_float(term):
        return term
    if op in ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "detach"):
        if term.dtype == "b1":
            if op == "neg":
                raise TraceError("-x of a bool is not defined; use ~x, or cast with .int()")
            return term
        dtype = term.dtype
    else:
        dtype = term.dtype if is_float(term) else default_float()
    return t.builder.pointwise(op, (term,), dtype)


def _unary(op: str) -> Handler:
    def handler(t: Tracing, x: Any, *, out: Any = None) -> Term:
        return unary(t, op, x)

    return handler


def _round(t: Tracing, x: Any, *, decimals: int = 0) -> Term:
    if decimals != 0:
        raise TraceError(f"round(decimals={decimals}) cannot be traced; scale, round and divide")
    return unary(t, "round", x)


# ------------------------------------------------------------------------ comparison and logic


def compare(t: Tracing, op: str, x: Any, y: Any) -> Term:
    """Return the bool x op y, compared in the promoted dtype."""
    terms = (t.term(x), t.term(y))
    return t.builder.pointwise(op, terms, result_dtype(terms), "b1")


def _compare(op: str) -> Handler:
    def handler(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
        return compare(t, op, x, y)

    return handler


def _bitwise(op: str) -> Handler:
    def handler(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
        terms = (t.term(x), t.term(y))
        dtype = result_dtype(terms)
        if dtype in FLOATS:
            raise TraceError(
                f"bitwise {op} of {terms[0].dtype} and {terms[1].dtype} is not defined; "
                "compare floats first, or put parentheses around the comparisons"
            )
        return t.builder.pointwise(op, terms, dtype)

    return handler


def _shift(op: str) -> Handler:
    def handler(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
        terms = (t.term(x), t.term(y))
        dtype = result_dtype(terms)
        if dtype in FLOATS or dtype == "b1":
            raise TraceError(f"{op} needs integers, not {terms[0].dtype} and {terms[1].dtype}")
        return t.builder.pointwise(op, terms, dtype)

    return handler


def invert(t: Tracing, x: Any, *, out: Any = None) -> Term:
    """Return ~x: logical on bool, bitwise on integers."""
    term = t.term(x)
    if is_float(term):
        raise TraceError(f"~x of {term.dtype} is not defined; compare first")
    return t.builder.pointwise("not", (term,), term.dtype)


def truth(t: Tracing, x: Any) -> Term:
    """Return x != 0 as bool."""
    term = t.term(x)
    return t.builder.cast(term, "b1") if term.dtype == "b1" else compare(t, "ne", term, 0)


def _logical(op: str) -> Handler:
    def handler(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
        return t.builder.pointwise(op, (truth(t, x), truth(t, y)), "b1")

    return handler


def _logical_not(t: Tracing, x: Any, *, out: Any = None) -> Term:
    return invert(t, truth(t, x))


# ------------------------------------------------------------------------------------ choices


def where(t: Tracing, condition: Any, x: Any, y: Any) -> Term:
    """Return x where the condition holds, else y."""
    term = t.term(condition)
    if term.dtype != "b1":
        raise TraceError(f"where needs a bool condition, not {term.dtype}; compare it with != 0")
    return t.builder.where(t.builder.cast(term, "b1"), t.term(x), t.term(y))


def _where(t: Tracing, condition: Any, x: Any = None, y: Any = None, **names: Any) -> Term:
    x = names.get("input", names.get("self", x))
    y = names.get("other", y)
    if x is None or y is None:
        raise TraceError("where(condition) alone gives a list of positions; pass both values")
    return where(t, condition, x, y)


def _method_where(t: Tracing, x: Any, condition: Any, y: Any) -> Term:
    return where(t, condition, x, y)


def _masked_fill(t: Tracing, x: Any, mask: Any, value: Any) -> Term:
    term = t.term(x)
    return where(t, mask, t.builder.cast(t.term(value), term.dtype), term)


def clamp(t: Tracing, x: Any, min: Any = None, max: Any = None, *, out: Any = None) -> Term:  # noqa: A002
    """Return x between two bounds; the derivative is 1 on the bounds, as torch's is."""
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = result_dtype([t.term(x), *(t.term(bound) for bound in bounds)])
    term = t.builder.cast(t.term(x), dtype)
    for bound, op, choose in ((min, "lt", "maximum"), (max, "gt", "minimum")):
        if bound is None:
            continue
        limit = t.builder.cast(t.term(bound), dtype)
        if dtype in FLOATS:
            is_outside = compare(t, op, term, limit)
            if t.builder.constant_value(limit.node) is None:  # a bound of NaN gives NaN
                is_nan = compare(t, "ne", limit, limit)
                is_outside = t.builder.pointwise("or", (is_outside, is_nan), "b1")
            term = where(t, is_outside, limit, term)
        else:
            term = binary(t, choose, term, limit)
    return term


def _clamp_min(t: Tracing, x: Any, min: Any) -> Term:  # noqa: A002
    return clamp(t, x, min)


def _clamp_max(t: Tracing, x: Any, max: Any) -> Term:  # noqa: A002
    return clamp(t, x, None, max)


def _but_nan(op: str, wins: str) -> Handler:
    """Return fmax or fmin: a NaN loses, and a tie is the first operand's, derivative and all."""

    def handler(t: Tracing, x: Any, y: Any, *, out: Any = None) -> Term:
        if result_dtype((t.term(x), t.term(y))) not in FLOATS:
            return binary(t, op, x, y)
        is_first = t.builder.pointwise("or", (compare(t, wins, x, y), compare(t, "ne", y, y)), "b1")
        return where(t, is_first, x, y)

    return handler


def _isnan(t: Tracing, x: Any) -> Term:
    return compare(t, "ne", x, x)


def _isinf(t: Tracing, x: Any) -> Term:
    return compare(t, "eq", unary(t, "abs", x), float("inf"))


def _isfinite(t: Tracing, x: Any) -> Term:
    return compare(t, "lt", unary(t, "abs", x), float("inf"))


def _nan_to_num(
    t: Tracing, x: Any, nan: float | None = None, posinf: Any = None, neginf: Any = None
) -> Term:
    term = t.term(x)
    if not is_float(term):
        return term
    limits = torch.finfo(
        {"f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}.get(
            term.dtype, torch.float32
        )
    )
    term_out = where(t, compare(t, "ne", term, term), 0.0 if nan is None else nan, term)
    top = limits.max if posinf is None else posinf
    bottom = limits.min if neginf is None else neginf
    term_out = where(t, compare(t, "eq", term, float("inf")), top, term_out)
    return where(t, compare(t, "eq", term, -float("inf")), bottom, term_out)


# ------------------------------------------------------------------------------------- entry


def _enter_arithmetic() -> None:
    register("add __add__ __radd__", _add)
    register("sub subtract __sub__", _sub)
    register("rsub __rsub__", _rsub)
    register("mul multiply __mul__ __rmul__", _plain("mul"))
    register("div divide true_divide __div__ __truediv__", _div)
    register("__rdiv__ __rtruediv__", _reverse(_div))
    register("floor_divide __floordiv__", _plain("floordiv"))
    register("__rfloordiv__", _reverse(_plain("floordiv")))
    register("remainder __mod__", _plain("mod"))
    register("__rmod__", _reverse(_plain("mod")))
    register("fmod", _fmod)
    register("pow __pow__", _pow)
    register("float_power", _float_power)
    register("__rpow__", _reverse(_pow))
    register("maximum", _plain("maximum"))
    register("minimum", _plain("minimum"))
    register("fmax", _but_nan("maximum", "ge"))
    register("fmin", _but_nan("minimum", "le"))
    register("atan2 arctan2", _plain("atan2"))
    for op in ("neg", "abs", "sign", "floor", "ceil", "trunc", "detach"):
        register(op, _unary(op))
    register("negative __neg__", _unary("neg"))
    register("absolute __abs__", _unary("abs"))
    register("sgn", _unary("sign"))
    register("fix", _unary("trunc"))
    register("round __round__", _round)


def _enter_functions() -> None:
    for op in (
        *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
        *("tanh", "erf"),
    ):
        register(op, _unary(op))
        if op.startswith("a"):
            register(f"arc{op[1:]}", _unary(op))
    register("expit", _unary("sigmoid"))


def _enter_logic() -> None:
    aliases = {"eq": "eq", "ne": "not_equal", "lt": "less", "le": "less_equal"}
    aliases |= {"gt": "greater", "ge": "greater_equal"}
    for op, alias in aliases.items():
        register(f"{op} __{op}__ {alias}", _compare(op))
    for op in ("and", "or", "xor"):
        register(f"__{op}__ __r{op}__ bitwise_{op}", _bitwise(op))
        register(f"logical_{op}", _logical(op))
    register("__invert__ bitwise_not", invert)
    register("logical_not", _logical_not)
    register("__lshift__ bitwise_left_shift", _shift("shl"))
    register("__rshift__ bitwise_right_shift", _shift("shr"))
    register("__rlshift__", _reverse(_shift("shl")))
    register("__rrshift__", _reverse(_shift("shr")))
    OPERATORS[torch.where] = _where
    OPERATORS[Tensor.where] = _method_where
    register("masked_fill", _masked_fill)
    register("clamp clip", clamp)
    register("clamp_min", _clamp_min)
    register("clamp_max", _clamp_max)
    register("isnan", _isnan)
    register("isinf", _isinf)
    register("isfinite", _isfinite)
    register("nan_to_num", _nan_to_num)


def enter_python_operators() -> None:
    """Enter Python's operators: Dynamo hands over these where torch has no method of its own."""
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),
        *("lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"),
        *("matmul", "getitem"),
    ):
        method = getattr(Tensor, f"__{name.rstrip('_')}__", None)
        if method in OPERATORS:
            OPERATORS[getattr(operator, name)] = OPERATORS[method]
    for name in dir(Tensor):
        method = getattr(Tensor, name)
        if isinstance(method, FunctionType) and method in OPERATORS:
            PYTHON_METHODS[method.__name__] = OPERATORS[method]


_enter_arithmetic()
_enter_functions()
_enter_logic()
