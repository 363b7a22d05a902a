"""Errors of the tracer: what cannot be traced says so, and where."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fovea.errors import TraceError
from fovea.mods import closures, sliding_window
from fovea.mods.trace import trace_mask_mod, trace_score_mod

GLOBAL_TABLE = torch.arange(4.0)
BYTES = torch.arange(4, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def no_remembered_traces() -> None:
    closures.clear()


def failure(mod: Any, kind: str = "score") -> str:
    with pytest.raises(TraceError) as caught:
        (trace_score_mod if kind == "score" else trace_mask_mod)(mod)
    return str(caught.value)


def line_of(mod: Any, offset: int) -> str:
    return f"test_trace_errors.py:{mod.__code__.co_firstlineno + offset}]"


def test_trace_python_branch_on_traced_value_names_the_line() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        s = s * 2
        if q > kv:
            return s
        return -s

    message = failure(mod)
    assert "torch.where" in message
    assert line_of(mod, 2) in message


def test_trace_python_min_names_the_line_and_the_way_out() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + min(q, kv)

    message = failure(mod)
    assert "torch.minimum" in message
    assert line_of(mod, 1) in message


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda s, b, h, q, kv: s if s > 0 and q > 0 else -s, "bool(...)"),
        (lambda s, b, h, q, kv: s + float(q), "float(...)"),
        (lambda s, b, h, q, kv: s + int(q), "int(...)"),
        (lambda s, b, h, q, kv: s + q.item(), "item"),
        (lambda s, b, h, q, kv: s + GLOBAL_TABLE[: q + 1].sum(), "index(...)"),
        (lambda s, b, h, q, kv: s + [1.0, 2.0][h], r"torch.tensor(the_list)"),
        (lambda s, b, h, q, kv: s + (q + 2**70), "does not fit i64"),
        (lambda s, b, h, q, kv: s + torch.where(q > 0, BYTES[q], 300), "does not fit u8"),
        (lambda s, b, h, q, kv: s + GLOBAL_TABLE[BYTES[q]], "mask like a bool"),
        (lambda s, b, h, q, kv: s + divmod(q, 3)[0], "x // y and x % y"),
        (lambda s, b, h, q, kv: s + divmod(3, q)[0], "x // y and x % y"),
        (lambda s, b, h, q, kv: torch.cond(q > kv, torch.sin, torch.cos, (s,)), "torch.where"),
        (lambda s, b, h, q, kv: torch.vmap(torch.sin)(s.unsqueeze(0))[0], "vmap cannot be traced"),
        (lambda s, b, h, q, kv: (*q, s), "Tensor.__iter__ cannot be traced"),
        (lambda s, b, h, q, kv: "s" + q, 'not "traced value"'),
        (lambda s, b, h, q, kv: s + torch.linalg.inv(s), "linalg_inv"),
        (lambda s, b, h, q, kv: s + torch.fft.fft(s), "fft"),
        (lambda s, b, h, q, kv: s + torch.rand(()), "draw them outside"),
        (lambda s, b, h, q, kv: F.dropout(s), "dropout"),
        (lambda s, b, h, q, kv: s & 1, "bitwise"),
        (lambda s, b, h, q, kv: s + GLOBAL_TABLE[s], "f32"),
        (lambda s, b, h, q, kv: s + GLOBAL_TABLE[q > 0], "torch.where"),
        (lambda s, b, h, q, kv: torch.where(q, s, 0.0), "bool condition"),
        (lambda s, b, h, q, kv: s + (q > 0) - (kv > 0) - (-(q > 0)), "bool"),
        (lambda s, b, h, q, kv: GLOBAL_TABLE.add_(s)[0], "trailing underscore"),
        (lambda s, b, h, q, kv: s + torch.max(GLOBAL_TABLE + s, dim=0)[0], "amax"),
        (lambda s, b, h, q, kv: s.to(torch.complex64), "complex64"),
        (lambda s, b, h, q, kv: torch.amax(s, (), out=s), "out="),
        (lambda s, b, h, q, kv: s + GLOBAL_TABLE[b, h], "2 indices"),
        (lambda s, b, h, q, kv: s + (GLOBAL_TABLE + s)[:3] @ (GLOBAL_TABLE + s), "broadcast"),
    ],
)
def test_trace_unsupported_use_raises_with_the_line(mod: Any, words: str) -> None:
    message = failure(mod)
    assert words in message
    assert re.search(r"\[.*test_trace_errors\.py:\d+\]$", message)


@pytest.mark.parametrize(
    ("kind", "mod", "words"),
    [
        ("score", lambda b, h, q, kv: q >= kv, "pass it as mask_mod"),
        ("mask", lambda s, b, h, q, kv: s, "pass it as score_mod"),
        ("score", lambda: 1, "5 positional"),
        ("score", torch.nn.Linear(1, 1), "5 positional"),
        ("mask", torch.nn.Sequential(torch.nn.Linear(1, 1)), "4 positional"),
        ("score", dict, "the class dict.*an instance"),
        ("mask", lambda b, h, q, kv, extra: q >= kv, "4 positional"),
        ("mask", lambda **kw: kw["q_idx"] >= kw["kv_idx"], r"need defaults\)\.$"),
        ("score", lambda s, b, h, q, kv: None, "NoneType"),
        ("score", lambda s, b, h, q, kv: (s, s), "tuple"),
        ("score", lambda s, b, h, q, kv: q >= kv, "mask_mod"),
        ("score", lambda s, b, h, q, kv: GLOBAL_TABLE * s, "row of shape \\[4\\]"),
        ("mask", lambda b, h, q, kv: q - kv, "!= 0"),
        ("mask", lambda b, h, q, kv: 1, "i64"),
        ("mask", lambda b, h, q, kv: "yes", "str"),
    ],
)
def test_trace_wrong_arity_or_return_raises(kind: str, mod: Any, words: str) -> None:
    message = failure(mod, kind)
    assert re.search(words, message)
    assert "allowed" in message


def test_trace_not_callable_raises() -> None:
    with pytest.raises(TraceError, match="a function"):
        trace_score_mod(3)  # pyright: ignore[reportArgumentType]


def test_trace_mod_with_optional_extra_arguments_is_accepted() -> None:
    assert trace_mask_mod(lambda b, h, q, kv, *rest: q >= kv).graph.kind == "mask"
    assert trace_score_mod(lambda *args: args[0]).graph.kind == "score"


def test_trace_out_of_range_constant_index_raises() -> None:
    with pytest.raises(IndexError, match="out of range"):
        trace_score_mod(lambda s, b, h, q, kv: s + torch.zeros(3, 2)[q, 2])


def test_trace_error_of_user_code_passes_through() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        trace_score_mod(mod)


@pytest.mark.parametrize("use", [lambda s, old: s + old, lambda s, old: old], ids=["used", "given"])
def test_trace_value_left_behind_by_an_earlier_trace_raises(use: Any) -> None:
    kept: list[Any] = []

    def keeps(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept.append(s * 2)
        return s

    trace_score_mod(keeps)
    assert "earlier trace" in failure(lambda s, b, h, q, kv: use(s, kept[0]))


@pytest.mark.parametrize("zero", [0, False, 0 * 3])
@pytest.mark.parametrize(
    "divide",
    [
        lambda i, n: i // n,
        lambda i, n: i % n,
        lambda i, n: torch.div(i, n, rounding_mode="trunc"),
        lambda i, n: torch.fmod(i, n),
        lambda i, n: i // torch.tensor(0),
    ],
)
def test_trace_integer_division_by_zero_raises(divide: Any, zero: int) -> None:
    assert "by 0" in failure(lambda s, b, h, i, j: s + divide(i, zero))


def test_trace_captured_divisor_of_zero_raises_after_another_one_was_traced() -> None:
    def make(n: int) -> Any:
        return lambda s, b, h, i, j: s + i // n

    first = trace_score_mod(make(3))
    assert trace_score_mod(make(4)).graph is first.graph
    assert first.specialised == ()
    assert "by 0" in failure(make(0))
    assert trace_score_mod(lambda s, b, h, i, j: s % 0).graph.kind == "score"  # NaN, as in torch


def test_trace_error_names_what_the_user_wrote() -> None:
    assert "torch.sin" in failure(lambda s, b, h, i, j: s + math.sin(i))
    for mod, start in (
        (lambda s, b, h, i, j: s if s > 0 else -s, "bool(...) needs"),
        (lambda s, b, h, i, j: s + torch.rand(()), "torch.rand gives"),
        (lambda s, b, h, i, j: s + s.item(), "Tensor.item needs"),
        (lambda s, b, h, i, j: s + GLOBAL_TABLE[i].cumsum(0), "Tensor.cumsum cannot"),
        (lambda s, b, h, i, j: s + GLOBAL_TABLE[i : i + 1], "operator.index(...) needs"),
        (lambda s, b, h, i, j: (GLOBAL_TABLE + s).permute(dims=(0,))[0], "Tensor.permute was"),
    ):
        message = failure(mod)
        assert message.startswith(start)
        assert "<locals>" not in message


def test_trace_uncalled_factory_names_its_arguments_and_no_argument_that_refuses_it() -> None:
    message = failure(sliding_window, "mask")
    assert "sliding_window(left, right)" in message
    assert "pass it as" not in message


def test_trace_captured_meta_tensor_is_named_by_its_shape() -> None:
    table = torch.empty(3, 5, device="meta")
    message = failure(lambda s, b, h, q, kv: s + table[h, q])
    assert "captured tensor of shape (3, 5) is on the meta device" in message
