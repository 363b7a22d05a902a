"""Gradients that a mod turns off stay off, and a backward of its own is refused."""

from typing import Any

import pytest
import torch

import fovea

SLOPE = torch.tensor([0.7, -1.3], requires_grad=True)


class Tenth(torch.autograd.Function):
    """The identity, whose gradient is a tenth."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return grad * 0.1


def _within(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    with torch.no_grad():
        slope = SLOPE[h] * 2
    return score * slope


def _by_call(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    slope = SLOPE[h] * 2
    torch.set_grad_enabled(was)
    return score * slope


def _inference(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    with torch.inference_mode():
        slope = SLOPE[h] * 2
    return score * slope


def _reopened(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    with torch.no_grad():
        shift = SLOPE[h] * q_idx
        with torch.enable_grad():
            slope = SLOPE[h] * 2
    return score * slope + shift


@torch.no_grad()
def _decorated(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * SLOPE[h]


def _gradients(mod: Any, *, is_compiled: bool = False) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 8, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )

    def call(q: torch.Tensor) -> torch.Tensor:
        return fovea.attention(q, k, v, score_mod=mod)

    if is_compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    loss = call(q).square().sum()
    return torch.autograd.grad(loss, (q, SLOPE), allow_unused=True, materialize_grads=True)


def _dense(mod: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 8, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    heads, position = torch.arange(2)[:, None, None], torch.arange(8)
    changed = mod(scores, 0, heads, position[:, None], position)
    out = torch.einsum("bhij,bjhd->bihd", changed.softmax(-1), v)
    return torch.autograd.grad(
        out.square().sum(), (q, SLOPE), allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("mod", [_within, _by_call, _reopened])
def test_values_without_gradient_have_none(mod: Any, is_compiled: bool) -> None:
    for found, expected in zip(_gradients(mod, is_compiled=is_compiled), _dense(mod), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("copied", [torch.tensor, lambda x: x.new_tensor(x)])
def test_a_copy_of_the_data_has_no_gradient(copied: Any) -> None:
    """As in torch, whose torch.tensor and new_tensor give what requires none."""
    assert not copied(torch.ones((), requires_grad=True)).requires_grad

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * copied(SLOPE[h]) + copied(score * 0.5)

    def detached(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * SLOPE[h].detach() + (score * 0.5).detach()

    for found, wanted in zip(_gradients(mod), _dense(detached), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mod", [_inference, _decorated])
def test_the_whole_mod_may_be_without_gradient(mod: Any) -> None:
    _, dslope = _gradients(mod)
    assert not bool(dslope.any())


def test_a_trace_without_gradients_serves_a_call_with_them() -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * SLOPE[h]

    q = torch.randn(1, 8, 2, 4)
    with torch.no_grad():
        fovea.attention(q, q, q, score_mod=mod)
    (dslope,) = torch.autograd.grad(fovea.attention(q, q, q, score_mod=mod).sum(), SLOPE)
    assert bool(dslope.any())


def test_autograd_function_is_refused() -> None:
    with pytest.raises(fovea.TraceError, match=r"backward of its own.*test_gradient_modes"):
        _gradients(lambda s, b, h, i, j: Tenth.apply(s))
