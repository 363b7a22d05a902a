"""Derivatives at kinks, ties and singular points are torch's; 16-bit floats round where torch's do.

Every function is evaluated on all pairs of POINTS, whatever it does there, and compared with torch.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.mods.derivative import derivative
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.pull_back import evaluate_derivative
from fovea.mods.trace import trace_score_mod

EPS = torch.finfo(torch.float64).eps
POINTS = torch.tensor(
    [-6.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.3, 0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0],
    dtype=torch.float64,
)
# What torch answers with NaN, or an infinity of a sign of its own, where fovea is finite or NaN.
EXEMPT: dict[str, Any] = {
    "logit": lambda x, y: (x <= 0) | (x >= 1),  # the value is NaN or infinite
    "xlogy": lambda x, y: (x == 0) & (y == 0),  # torch: 0 / 0 for y
    "fmod": lambda x, y: y == 0,  # the value is NaN
}

UNARY: dict[str, Any] = {
    name: getattr(torch, name, None) or getattr(F, name)
    for name in (
        *("abs", "sign", "sqrt", "rsqrt", "log", "log2", "log1p", "relu", "reciprocal", "square"),
        *("asin", "acos", "acosh", "atanh", "expm1", "tanh", "sigmoid", "erf", "floor", "round"),
        *("frac", "logit", "relu6", "elu", "silu", "gelu", "softplus", "mish", "logsigmoid"),
        *("hardtanh", "leaky_relu", "hardswish", "softshrink", "hardshrink", "softsign"),
    )
} | {
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp_min(0),
    "power_half": lambda x: x**0.5,
    "power_three_halves": lambda x: x**1.5,
    "power_of_zero": lambda x: 0.0**x,
    "fmod_number": lambda x: torch.fmod(x, 1.5),
    "remainder_number": lambda x: x % 1.5,
    "xlogy_number": lambda x: torch.xlogy(x, 2.0),
}
BINARY: dict[str, Any] = {
    name: getattr(torch, name)
    for name in (
        *("div", "fmod", "remainder", "pow", "maximum", "minimum", "fmax", "fmin", "atan2"),
        *("hypot", "copysign", "logaddexp", "logaddexp2", "xlogy"),
    )
} | {
    "clamp_by_tensor": lambda x, y: x.clamp(y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
}
ROWS: dict[str, Any] = {
    "norm": lambda row: row.norm(),
    "norm_of_dimension": lambda row: row.norm(dim=-1),
    "torch_norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "amax": lambda row: row.amax(-1),
    "amin": lambda row: row.amin(-1),
    "prod": lambda row: row.prod(-1),
    "mean": lambda row: row.mean(-1),
    "softmax": lambda row: row.softmax(-1)[0],
}
ALL = {**UNARY, **BINARY, **ROWS}


def called(name: str, row: Any) -> Any:
    """Return a function of a pair."""
    if name in UNARY:
        return UNARY[name](row[0])
    return BINARY[name](row[0], row[1]) if name in BINARY else ROWS[name](row)


def by_graph(name: str, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values and the derivative for every pair, of a mod that captures the pairs."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0 + called(name, rows[k])

    traced = trace_score_mod(mod, dtype)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    positions = Positions(b=zero, h=zero, q_idx=zero, kv_idx=torch.arange(len(rows)))
    score = torch.zeros(1, 1, 1, len(rows), dtype=dtype)
    captures = [capture.detach() for capture in traced.captures]
    value = evaluate(traced.graph, positions, score=score, captures=captures, scalars=())
    _, grads = evaluate_derivative(
        derivative(traced.graph),
        positions,
        score=score,
        grad=torch.ones_like(score),
        captures=captures,
        scalars=(),
    )
    total = next((grad for grad in grads if grad is not None), torch.zeros_like(rows))
    return value.flatten(), total


@pytest.mark.parametrize("name", ALL)
def test_derivative_on_a_grid_with_kinks_equals_autograd(name: str) -> None:
    rows = torch.cartesian_prod(POINTS, POINTS).requires_grad_()
    expected = torch.vmap(lambda row: called(name, row))(rows)
    (slope,) = torch.autograd.grad(expected.sum(), rows)
    value, actual = by_graph(name, rows, torch.float64)
    x, y = rows.detach().unbind(-1)
    kept = ~EXEMPT[name](x, y) if name in EXEMPT else torch.ones_like(x, dtype=torch.bool)
    assert torch.allclose(value, expected, rtol=64 * EPS, atol=64 * EPS, equal_nan=True)
    actual, slope = actual[kept], slope[kept]
    assert torch.allclose(actual, slope, rtol=64 * EPS, atol=64 * EPS, equal_nan=True)


@pytest.mark.parametrize("y", [0.0, -1.0, torch.inf, torch.nan])
def test_xlogy_of_zero_is_zero_unless_of_nan(y: float) -> None:
    rows = torch.tensor([[0.0, y]], dtype=torch.float64)
    value, _ = by_graph("xlogy", rows, torch.float64)
    assert torch.equal(value.isnan(), torch.tensor([y != y]))
    assert value.nan_to_num().item() == 0.0


def test_clamp_by_a_bound_of_nan_is_nan() -> None:
    rows = torch.tensor([[1.0, torch.nan], [torch.nan, 1.0], [1.0, 2.0]], dtype=torch.float64)
    value, _ = by_graph("clamp_by_tensor", rows, torch.float64)
    assert value.isnan().tolist() == [True, True, False]


HALVES = torch.tensor([-60000.0, -300.0, -15.0, -3.0, -1e-4, 0.0, 0.1, 3.0, 15.0, 19.0, 300.0, 6e4])
HALF_ROWS: dict[str, Any] = {
    "mean_of_all": lambda row: row.mean(),
    "difference": lambda row: row @ (row * SIGNS.to(row.dtype)),
    "difference_by_einsum": lambda row: torch.einsum("i,i->", row, row * SIGNS.to(row.dtype)),
    "mean_in_float32": lambda row: row.mean(dtype=torch.float32),
    "norm_in_float32": lambda row: row.norm(dtype=torch.float32),
}
SIGNS = torch.tensor([1.0, -1.0])
HALF_NAMES = ("norm", "norm_of_dimension", "vector_norm", "mean", "softmax", "softplus", "mish")
HALF_NAMES += ("hypot", "lerp", "gelu", "silu", "logaddexp", *HALF_ROWS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALF_NAMES)
def test_function_of_16_bit_floats_is_rounded_once(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, name, HALF_ROWS.get(name, ROWS.get(name)))
    rows = torch.cartesian_prod(HALVES, HALVES).to(dtype)
    expected = torch.vmap(lambda row: called(name, row))(rows).float()
    value, _ = by_graph(name, rows, torch.float32)
    # One rounding here and one in torch, of values that differ by the rounding of fp32.
    room = 1.01 * torch.finfo(dtype).eps * expected.abs() + 1e-7
    near = (value - expected).abs() <= room
    if name == "gelu":
        near = near | (rows[:, 0] == -3.0)  # 1 + erf, whose digits cancel
    assert (near | (value == expected)).all()
