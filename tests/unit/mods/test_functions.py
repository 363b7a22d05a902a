"""Composite functions have torch's value and torch's derivative, at their kinks too."""

import math
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
# The kinks of every function below, values beside them, and a spread of others.
KINKS = torch.tensor([-3.0, -1.0, -0.5, -0.3, 0.0, 0.3, 0.5, 1.0, 3.0, 6.0], dtype=torch.float64)
POINTS = torch.cat([KINKS, KINKS - 1e-3, KINKS + 1e-3, torch.linspace(-7, 7, 31).double()])

COMPOSITES: dict[str, Any] = {
    "erfc": torch.erfc,
    "special_erfc": torch.special.erfc,
    "frac": torch.frac,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, alpha=1.7),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.5, -2.0),
    "logaddexp2": lambda x: torch.logaddexp2(x, x * x - 1),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "method": lambda x: x.frac() + x.erfc(),
}


def at_points(function: Any) -> tuple[Tensor, Tensor]:
    """Return the value and the derivative of a mod made of a function, at POINTS."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(s)

    traced = trace_score_mod(mod, torch.float64)
    score = POINTS.reshape(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    positions = Positions(b=zero, h=zero, q_idx=zero, kv_idx=torch.arange(len(POINTS)))
    value = evaluate(traced.graph, positions, score=score, captures=(), scalars=traced.scalars)
    d_score, _ = evaluate_derivative(
        derivative(traced.graph),
        positions,
        score=score,
        grad=torch.ones_like(score),
        captures=(),
        scalars=traced.scalars,
    )
    return value.flatten(), d_score.flatten()


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_at_and_beside_kinks_equals_torch(name: str) -> None:
    function = COMPOSITES[name]
    points = POINTS.clone().requires_grad_()
    expected = function(points)
    (slope,) = torch.autograd.grad(expected.sum(), points)
    value, d_score = at_points(function)
    assert (value - expected).abs().max() <= 32 * EPS * (1 + expected.abs().max())
    # torch's own derivatives of these two are rounded to fp32, even in float64
    rounding = torch.finfo(torch.float32).eps if name in ("celu", "hardsigmoid") else 32 * EPS
    assert (d_score - slope).abs().max() <= rounding * (1 + slope.abs().max())


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_of_nan_is_nan(name: str) -> None:
    function = COMPOSITES[name]
    traced = trace_score_mod(lambda s, b, h, q, k: function(s))
    score = torch.full((1, 1, 1, 1), math.nan)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    positions = Positions(b=zero, h=zero, q_idx=zero, kv_idx=zero)
    value = evaluate(traced.graph, positions, score=score, captures=(), scalars=traced.scalars)
    assert value.isnan().all() == function(score).isnan().all()
