"""Reductions over equal elements, and the options of embedding: torch's values and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.derivative import derivative
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.pull_back import evaluate_derivative
from fovea.mods.trace import trace_score_mod

ONE = torch.linspace(-1.0, 2.0, 9)
WEIGHT = torch.linspace(-3.0, 3.0, 27).reshape(9, 3)
LINEAR = torch.nn.Linear(3, 2)
SCORE = torch.linspace(-2.0, 2.0, 7)

AXIS: dict[str, Any] = {"axis": 0}  # NumPy's name, which torch takes and its stubs do not
KEEP: dict[str, Any] = {"keepdims": True}
REDUCTIONS: dict[str, Any] = {
    "sum": lambda s, i: torch.stack([s, s]).sum(),
    "max": lambda s, i: torch.stack([s, s]).max(),
    "amin": lambda s, i: torch.stack([s, s]).amin(0),
    "mean": lambda s, i: torch.stack([s, s]).mean(),
    "prod": lambda s, i: torch.stack([s, s, s]).prod(),
    "prod_7": lambda s, i: s.expand(7).prod(),
    "any": lambda s, i: s + torch.stack([s, s]).any(),
    "all": lambda s, i: s + torch.stack([s > 0, s > 0]).all(),
    "softmax": lambda s, i: s + torch.stack([s, s]).softmax(0).sum() * s,
    "norm": lambda s, i: torch.stack([s, s]).norm(),
    "expand": lambda s, i: s.expand(3).sum(),
    "expand_2d": lambda s, i: s.expand(3, 2).sum(0, keepdim=True).sum(),
    "empty": lambda s, i: s + s.expand(0).sum() + s.expand(0).prod(),
    "new_ones": lambda s, i: s * s.new_ones(3).sum(),
    "captured": lambda s, i: s + torch.stack([ONE[i], ONE[i]]).sum(),
    "integers": lambda s, i: s + i.expand(3).sum() + (i > 1).expand(4).sum() + i.expand(2).prod(),
    "matmul": lambda s, i: s.expand(3) @ WEIGHT[i],
    "linear": lambda s, i: s * F.linear(s.expand(3), WEIGHT, ONE)[4],
    "linear_module": lambda s, i: s * LINEAR(WEIGHT[i])[1],
    "axis": lambda s, i: s * WEIGHT[i].sum(**AXIS) + WEIGHT[i].amax(**AXIS, **KEEP)[0],
    "embedding": lambda s, i: s * F.embedding(i, WEIGHT).sum(),
    "torch_embedding": lambda s, i: s * torch.embedding(WEIGHT, i).sum(),
}


def positions() -> Positions:
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return Positions(b=zero, h=zero, q_idx=torch.arange(7).reshape(1, 1, 7, 1), kv_idx=zero)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_over_equal_elements_equals_torch(name: str) -> None:
    function = REDUCTIONS[name]
    traced = trace_score_mod(lambda s, b, h, i, j: function(s, i))
    score = SCORE.reshape(1, 1, 7, 1)
    captures = traced.captures
    value = evaluate(
        traced.graph, positions(), score=score, captures=captures, scalars=traced.scalars
    )
    d_score, _ = evaluate_derivative(
        derivative(traced.graph),
        positions(),
        score=score,
        grad=torch.ones_like(score),
        captures=captures,
        scalars=traced.scalars,
    )
    leaf = SCORE.clone().requires_grad_()
    expected = torch.stack([function(leaf[i], torch.tensor(i)) for i in range(7)])
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    assert torch.allclose(value.flatten(), expected, rtol=1e-6, atol=1e-6)
    # the norm at 0 has torch's subgradient, 0, nowhere else than in torch itself
    kept = SCORE != 0 if name == "norm" else torch.ones(7, dtype=torch.bool)
    assert torch.allclose(d_score.broadcast_to(score.shape).flatten()[kept], slope[kept], rtol=1e-5)


@pytest.mark.parametrize("padding", [2, -7])
def test_embedding_with_padding_gives_that_row_no_gradient(padding: int) -> None:
    weight = WEIGHT.clone().requires_grad_()
    traced = trace_score_mod(
        lambda s, b, h, i, j: s * F.embedding(i, weight, padding_idx=padding).sum()
    )
    score = SCORE.reshape(1, 1, 7, 1)
    _, (d_weight,) = evaluate_derivative(
        derivative(traced.graph),
        positions(),
        score=score,
        grad=torch.ones_like(score),
        captures=traced.captures,
        scalars=traced.scalars,
    )
    rows: Tensor = F.embedding(torch.arange(7), weight, padding_idx=padding)
    (expected,) = torch.autograd.grad((SCORE * rows.sum(-1)).sum(), weight)
    assert d_weight is not None
    assert torch.allclose(d_weight, expected)


@pytest.mark.parametrize(
    "options",
    [{"max_norm": 0.5}, {"max_norm": 0.0}, {"scale_grad_by_freq": True}, {"sparse": True}],
)
def test_embedding_with_an_option_that_cannot_be_traced_raises(options: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=f"embedding.{next(iter(options))}="):
        trace_score_mod(lambda s, b, h, i, j: s + F.embedding(i, WEIGHT, **options).sum())


def test_extreme_of_no_elements_raises() -> None:
    with pytest.raises(TraceError, match="no elements"):
        trace_score_mod(lambda s, b, h, i, j: s.expand(0).amax())
