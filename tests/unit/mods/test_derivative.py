"""Derivative graphs against torch autograd in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.derivative import derivative
from fovea.mods.evaluate import Positions
from fovea.mods.pull_back import evaluate_derivative
from fovea.mods.trace import trace_mask_mod, trace_score_mod

B, H, M, N = 2, 3, 5, 7
EPS = torch.finfo(torch.float64).eps


def leaf(*shape: int, dtype: torch.dtype = torch.float64, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) * 7 + sum(shape))
    return (torch.randn(shape, generator=generator) + offset).to(dtype).requires_grad_()


def grid() -> dict[str, Tensor]:
    return {
        "b": torch.arange(B).reshape(-1, 1, 1, 1),
        "h": torch.arange(H).reshape(-1, 1, 1),
        "q_idx": torch.arange(M).reshape(-1, 1),
        "kv_idx": torch.arange(N),
    }


def inputs(positive: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    score = torch.randn(B, H, M, N, generator=generator, dtype=torch.float64)
    grad = torch.randn(B, H, M, N, generator=generator, dtype=torch.float64)
    return (score.abs() + 0.1 if positive else score), grad


def by_graph(mod: Any, score: Tensor, grad: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Return d_score and the gradients of captured tensors, by identity."""
    traced = trace_score_mod(mod, torch.float64)
    d_score, d_captures = evaluate_derivative(
        derivative(traced.graph),
        Positions(**grid()),
        score=score,
        grad=grad,
        captures=[capture.detach() for capture in traced.captures],
        scalars=traced.scalars,
    )
    totals: dict[int, Tensor] = {}
    for capture, total in zip(traced.captures, d_captures):
        if total is None:
            continue
        assert capture.requires_grad
        if capture.is_leaf:
            totals[id(capture)] = totals.get(id(capture), 0) + total
        else:  # a view made inside the mod: autograd carries its gradient on
            leaves = [SCALE, TABLE]
            for t, part in zip(
                leaves, torch.autograd.grad(capture, leaves, total, allow_unused=True)
            ):
                if part is not None:
                    totals[id(t)] = totals.get(id(t), 0) + part
    return d_score, totals


def by_autograd(mod: Any, score: Tensor, grad: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    score = score.detach().requires_grad_()
    first: tuple[Any, ...] = (0,)
    vmapped = mod
    for dims in (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, None),
        (0, None, None, None),
    ):
        vmapped = torch.vmap(vmapped, in_dims=(*first, *dims))
    out = vmapped(score, *(torch.arange(extent) for extent in (B, H, M, N)))
    grads = torch.autograd.grad(out, [score, *wanted], grad, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip([score, *wanted], grads)]


def close(actual: Tensor, expected: Tensor, terms: int) -> bool:
    """Compare up to the rounding of `terms` operations on values of the result's size."""
    return bool((actual - expected).abs().max() <= terms * EPS * (1 + expected.abs().max()))


UNARY = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "asin": lambda x: torch.asin(x / 8),
    "acos": lambda x: torch.acos(x / 8),
    "atanh": lambda x: torch.atanh(x / 8),
    "acosh": lambda x: torch.acosh(x + 2),
    "abs": lambda x: torch.abs(x - 1),
    "neg": torch.neg,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "floor": lambda x: torch.floor(x * 3) + x,
    "detach": lambda x: x.detach() * x,
    "pow_scalar": lambda x: x**2.7 + x**3 + x**-1.5,
    "pow_base": lambda x: 1.7**x,
    "mod": lambda x: x % 0.37,
    "fmod": lambda x: torch.fmod(x, 0.37),
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "softplus": torch.nn.functional.softplus,
    "elu": lambda x: torch.nn.functional.elu(x - 1),
    "relu": lambda x: torch.relu(x - 1),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x - 1),
    "logsigmoid": torch.nn.functional.logsigmoid,
    "mish": torch.nn.functional.mish,
    "clamp": lambda x: x.clamp(0.3, 1.0),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x),
    "cast": lambda x: x.float().double() * 2,
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "logit": lambda x: torch.logit(x / 8),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "logaddexp": lambda x: torch.logaddexp(x, x * x),
}


@pytest.mark.parametrize("name", UNARY)
def test_derivative_of_function_equals_autograd(name: str) -> None:
    function = UNARY[name]
    score, grad = inputs(positive=True)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(s)

    (expected,) = by_autograd(mod, score, grad, [])
    actual, _ = by_graph(mod, score, grad)
    # float32 round trip of "cast": the derivative passes it unchanged
    assert close(actual, expected, 2**30 if name == "cast" else 32)


BIAS = leaf(H, N)
SLOPES = leaf(H)
SCALE = leaf(offset=1.0)
TEMPERATURE = torch.tensor(1.5, dtype=torch.float32).requires_grad_()
HALF = leaf(H, N, dtype=torch.bfloat16)
IDS = torch.tensor([[0, 2, 2, 1, 0, 3, 3], [3, 3, 3, 3, 0, 1, 2]])
TABLE = leaf(4)
TABLE_2D = leaf(4, H)
Q_ROWS = leaf(B, H, M, 6)
K_ROWS = leaf(B, N, 6)
UNUSED = leaf(3)
INTEGER = torch.arange(N)

CAPTURES: dict[str, tuple[Any, list[Tensor]]] = {
    "bias": (lambda s, b, h, q, k: s + BIAS[h, k], [BIAS]),
    "slopes_times_distance": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), [SLOPES]),
    "zero_d": (lambda s, b, h, q, k: s * SCALE, [SCALE]),
    "zero_d_index": (lambda s, b, h, q, k: torch.tanh(s * SCALE[()]) / SCALE, [SCALE]),
    "single_precision": (lambda s, b, h, q, k: s / TEMPERATURE, [TEMPERATURE]),
    "gather_of_gather": (lambda s, b, h, q, k: s * TABLE[IDS[b, INTEGER[k]]], [TABLE]),
    "repeated_index": (lambda s, b, h, q, k: s + TABLE[q % 4] * TABLE[k % 4] + TABLE[0], [TABLE]),
    "negative_index": (lambda s, b, h, q, k: s + TABLE[-1] * TABLE[(q - k) % 4 - 4], [TABLE]),
    "two_tensors": (
        lambda s, b, h, q, k: s * SLOPES[h].exp() + BIAS[h, k] * TABLE_2D[IDS[b, k], h],
        [SLOPES, BIAS, TABLE_2D],
    ),
    "independent_of_score": (lambda s, b, h, q, k: BIAS[h, k] * 2, [BIAS]),
    "dot_product": (
        lambda s, b, h, q, k: s + (Q_ROWS[b, h, q] * K_ROWS[b, k]).sum(-1) * SCALE,
        [Q_ROWS, K_ROWS, SCALE],
    ),
    "row_times_score": (lambda s, b, h, q, k: (K_ROWS[b, k] * s).sum(), [K_ROWS]),
    "row_of_exponentials": (lambda s, b, h, q, k: torch.exp(K_ROWS[b, k] * s).mean(), [K_ROWS]),
    "amax": (lambda s, b, h, q, k: s * K_ROWS[b, k].amax() + K_ROWS[b, k].amin(), [K_ROWS]),
    "prod": (lambda s, b, h, q, k: s * K_ROWS[b, k].prod(), [K_ROWS]),
    "outer": (
        lambda s, b, h, q, k: s + (K_ROWS[b, k][:, None] * Q_ROWS[b, h, q][None, :]).sum(),
        [K_ROWS, Q_ROWS],
    ),
    "maximum": (
        lambda s, b, h, q, k: torch.maximum(s, BIAS[h, k]) + torch.minimum(s, SCALE),
        [BIAS, SCALE],
    ),
    "atan2": (lambda s, b, h, q, k: torch.atan2(s, BIAS[h, k]), [BIAS]),
    "pow": (lambda s, b, h, q, k: torch.pow(s.abs() + 0.5, BIAS[h, k]), [BIAS]),
    "division": (lambda s, b, h, q, k: s / (BIAS[h, k] ** 2 + 1), [BIAS]),
    "where": (lambda s, b, h, q, k: torch.where(q >= k, s * SCALE, BIAS[h, k] * s), [SCALE, BIAS]),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_derivative_for_captures_equals_autograd(name: str) -> None:
    mod, wanted = CAPTURES[name]
    score, grad = inputs()
    expected = by_autograd(mod, score, grad, wanted)
    d_score, totals = by_graph(mod, score, grad)
    assert close(d_score, expected[0], 64)
    for tensor, wanted_grad in zip(wanted, expected[1:]):
        if tensor.dtype == torch.float64:
            # each element sums over at most the whole grid
            assert close(totals[id(tensor)], wanted_grad, 2 * B * H * M * N)
        else:
            # ours is fp64 before the final rounding, theirs was rounded to the capture's dtype
            eps = torch.finfo(tensor.dtype).eps
            gap = (totals[id(tensor)] - wanted_grad).abs().max()
            assert gap <= eps * grad.numel() * wanted_grad.abs().max()


def test_derivative_for_half_capture_accumulates_in_wide_precision() -> None:
    score, grad = inputs()
    _, totals = by_graph(lambda s, b, h, q, k: s + HALF[h, k] * 0.5, score, grad)
    expected = (grad * 0.5).sum(dim=(0, 2))
    assert totals[id(HALF)].dtype == grad.dtype
    gap = (totals[id(HALF)] - expected).abs().max()
    assert gap <= torch.finfo(torch.float32).eps * B * M * expected.abs().max()


def test_derivative_ignores_captures_without_grad() -> None:
    fixed = torch.randn(H, dtype=torch.float64)
    score, grad = inputs()
    d_score, totals = by_graph(lambda s, b, h, q, k: s * fixed[h], score, grad)
    assert totals == {}
    assert torch.equal(d_score, grad * fixed.reshape(1, H, 1, 1))


def test_derivative_score_not_used_is_zero() -> None:
    score, grad = inputs()
    d_score, _ = by_graph(lambda s, b, h, q, k: BIAS[h, k], score, grad)
    assert d_score.shape == grad.shape
    assert not d_score.any()


def poisoned(safe: bool) -> dict[str, Any]:
    """Return mods whose untaken branch is infinite, or the same mods with that branch made safe."""

    def inner(x: Any, condition: Any) -> Any:
        return torch.where(condition, x, 1.0) if safe else x

    return {
        "log": lambda s, b, h, q, k: torch.where(
            q > 1, torch.log(inner((q - 1) * s.abs(), q > 1)), s
        ),
        "sqrt": lambda s, b, h, q, k: torch.where(
            s > 0, torch.sqrt(inner(s, s > 0)) * SCALE, SCALE * 2
        ),
        "division": lambda s, b, h, q, k: torch.where(
            q != k, s / inner((q - k).double(), q != k) * BIAS[h, k], 0.0
        ),
        "captured_infinity": lambda s, b, h, q, k: torch.where(
            k > 0, torch.log(inner(POWERS[k], k > 0)) * s, s * SCALE
        ),
        "nested": lambda s, b, h, q, k: torch.where(
            q > k,
            torch.where(k > 1, torch.rsqrt(inner(s * 0 + k - 1.0, (q > k) & (k > 1))) * s, s),
            s * SCALE,
        ),
        "two_paths": lambda s, b, h, q, k: (
            torch.where(q > 2, torch.log(inner(q - 2 + s * 0, q > 2)), 0.0)
            + torch.where(q > 3, 1 / inner(q - 3 + s * 0, q > 3), 0.0)
        ),
        "row": lambda s, b, h, q, k: torch.where(
            q > 0, torch.log(inner(K_ROWS[b, k].abs() * q, q > 0)).sum() * s, s
        ),
    }


POWERS = torch.arange(N, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", poisoned(False))
def test_derivative_untaken_branch_does_not_poison(name: str) -> None:
    wanted = [SCALE, BIAS, POWERS, K_ROWS]
    score, grad = inputs()
    expected = by_autograd(poisoned(True)[name], score, grad, wanted)
    d_score, totals = by_graph(poisoned(False)[name], score, grad)
    assert close(d_score, expected[0], 64)
    for tensor, wanted_grad in zip(wanted, expected[1:]):
        if id(tensor) in totals:
            assert close(totals[id(tensor)], wanted_grad, 2 * B * H * M * N)


def test_derivative_zero_grad_gives_zero_where_the_mod_is_singular() -> None:
    score, grad = inputs()
    score[0, 0, 0, 0] = 0.0
    grad[0, 0, 0, 0] = 0.0
    d_score, totals = by_graph(lambda s, b, h, q, k: torch.log(s.abs()) * SCALE, score, grad)
    assert d_score[0, 0, 0, 0] == 0
    assert totals[id(SCALE)].isfinite()


def test_derivative_kinks_equal_torch() -> None:
    score = torch.zeros(B, H, M, N, dtype=torch.float64)
    grad = torch.ones_like(score)
    for function in (
        lambda x: x.clamp(0.0, 1.0),
        lambda x: x.clamp(-1.0, 0.0),
        torch.relu,
        torch.abs,
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: torch.nn.functional.hardtanh(x, 0.0, 1.0),
        lambda x: torch.nn.functional.leaky_relu(x),
    ):

        def mod(s: Any, b: Any, h: Any, q: Any, k: Any, function: Any = function) -> Any:
            return function(s)

        assert torch.equal(by_graph(mod, score, grad)[0], by_autograd(mod, score, grad, [])[0])


def test_derivative_of_prod_with_zeros_equals_autograd() -> None:
    rows = torch.tensor([[0.0, 2.0, 3.0], [0.0, 0.0, 3.0]], dtype=torch.float64).requires_grad_()

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * rows[b].prod()

    score, grad = inputs()
    expected = by_autograd(mod, score, grad, [rows])
    d_score, totals = by_graph(mod, score, grad)
    assert close(d_score, expected[0], 4)
    assert close(totals[id(rows)], expected[1], 2 * H * M * N)


def test_derivative_is_differentiable_again() -> None:
    """The reference's second order runs autograd through evaluate_derivative."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q > 0, torch.tanh(s * SCALE), s * s * s)

    traced = trace_score_mod(mod, torch.float64)
    score, grad = inputs()
    score.requires_grad_()
    scale = SCALE.detach().clone().requires_grad_()
    d_score, d_captures = evaluate_derivative(
        derivative(traced.graph),
        Positions(**grid()),
        score=score,
        grad=grad,
        captures=[scale],
        scalars=(),
    )
    assert d_captures[0] is not None
    second = torch.autograd.grad(d_score.sum() + d_captures[0], [score, scale])
    y = torch.where(grid()["q_idx"] > 0, torch.tanh(score * scale), score * score * score)
    first = torch.autograd.grad(y, [score, scale], grad, create_graph=True)
    expected = torch.autograd.grad(first[0].sum() + first[1], [score, scale])
    for actual, wanted in zip(second, expected):
        assert close(actual, wanted, 2 * B * H * M * N)


def test_derivative_of_alibi_is_the_gradient_itself() -> None:
    slopes = torch.randn(H)
    traced = trace_score_mod(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    assert derivative(traced.graph).text() == "mod1 derivative f32*1 - | grad:f32 | 0 | "


def test_derivative_of_mask_raises() -> None:
    with pytest.raises(TraceError, match="has no derivative"):
        derivative(trace_mask_mod(lambda b, h, q, k: q >= k).graph)


def test_derivative_of_softcap_has_no_transcendental_of_its_own() -> None:
    traced = trace_score_mod(lambda s, b, h, q, k: torch.tanh(s / 30.0) * 30.0)
    ops = [node.op for node in derivative(traced.graph).nodes]
    assert ops.count("tanh") == 1
    assert math.prod(op not in ("exp", "cosh", "sigmoid") for op in ops) == 1
