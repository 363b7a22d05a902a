"""A traced mod evaluates to what the same Python function gives under torch.vmap."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.graph import Graph
from fovea.mods.trace import TracedMod, trace_mask_mod, trace_score_mod

B, H, M, N = 2, 3, 7, 9
GENERATOR = torch.Generator().manual_seed(11)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR).to(dtype)


def directly(mod: Any, score: Tensor | None) -> Tensor:
    """Return the mod's values over the whole grid by torch's own vmap."""
    first: tuple[Any, ...] = () if score is None else (0,)
    for dims in (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, None),
        (0,) + (None,) * 3,
    ):
        mod = torch.vmap(mod, in_dims=(*first, *dims))
    indices = [torch.arange(extent) for extent in (B, H, M, N)]
    return mod(*(() if score is None else (score,)), *indices)


def evaluated(traced: TracedMod, score: Tensor | None) -> Tensor:
    """Return the graph's values over the same grid, from its text."""
    b, h, q_idx, kv_idx = (
        torch.arange(extent).reshape(shape)
        for extent, shape in ((B, (-1, 1, 1, 1)), (H, (-1, 1, 1)), (M, (-1, 1)), (N, (-1,)))
    )
    result = evaluate(
        Graph.parse(traced.graph.text()),
        Positions(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx),
        score=score,
        captures=traced.captures,
        scalars=traced.scalars,
    )
    return result.expand(B, H, M, N)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


SLOPES = random(H)
HALF_TABLE = random(H, N, dtype=torch.bfloat16)
TABLE = random(H, 4, dtype=torch.float16)
BIAS = random(B, H, M, N)
DOUBLES = random(N, dtype=torch.float64)
ZERO_D = torch.tensor(0.75)
ZERO_D_INT = torch.tensor(3, dtype=torch.int32)
DOC = integers(0, 3, B, N, dtype=torch.int32)
PERMUTATION = torch.randperm(N, generator=GENERATOR)
BYTES = integers(0, 255, N, dtype=torch.uint8)
FLAGS = integers(0, 2, N).bool()
PAIRS = integers(0, N, B, 2)
TOP_K = integers(0, 5, B, H, M, 4)
Q_ROWS, K_ROWS = random(B, H, M, 6), random(B, N, 6)
MATRIX = random(6, 6)


def scaled_and_shifted(w: int, c: float) -> Any:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inside = (q_idx - kv_idx <= w) & (q_idx >= kv_idx)
        return torch.where(inside, score * c + 2 * w, -float("inf"))

    return mod


def nested_closure(w: int) -> Any:
    def distance(q: Any, kv: Any, clip: int = 4) -> Any:
        return (q - kv).clamp(-clip, min(clip, w + 1))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + SLOPES[h] * distance(q_idx, kv_idx)

    return mod


class Method:
    """A callable object whose attributes are constants."""

    def __init__(self, w: int) -> None:
        self.w = w
        self.table = random(H)

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.w + self.table[h]

    def bound(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, extra: int = 2) -> Any:
        return score - self.table[h] * extra + self.w


class Module(torch.nn.Module):
    """A module as a mod."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))

    def forward(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.weight[h]


def mutating(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    alias = score = score.clone()
    score += SLOPES[h]
    score.mul_(2)
    return alias


def python_numbers(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    total = 0
    for step in range(3):
        total = total + step * kv_idx
    return score + total if isinstance(score, torch.Tensor) else None


def unpacked(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    low, high = PAIRS[b]
    first, second = K_ROWS[b, kv_idx, :2].unbind(-1)
    return torch.where((kv_idx >= low) & (kv_idx < high), score + first, second)


def outer_product(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = K_ROWS[b, kv_idx]
    return score + (row[:, None] * row[None, :] * MATRIX).sum()


def bilinear(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (Q_ROWS[b, h, q_idx] @ MATRIX) @ K_ROWS[b, kv_idx] + MATRIX[h] @ MATRIX[:, h]


def einsum(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.einsum("i,ij,j->", Q_ROWS[b, h, q_idx], MATRIX, K_ROWS[b, kv_idx])


def stacked(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.stack([score, score * 2, SLOPES[h]]).amax() + torch.stack([q_idx, kv_idx]).sum()


def constants(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    one = score.new_ones(()) + torch.zeros_like(score) + torch.tensor(0.5, dtype=score.dtype)
    two = torch.full((), 2, device=score.device) * q_idx.new_full((), 3)
    return score * one + two + score.new_tensor(0.25) + torch.zeros(()) + torch.scalar_tensor(1.5)


def dtypes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    small = (kv_idx % 100).to(torch.int8) + BYTES[kv_idx]
    return score.to(torch.float64) + DOUBLES[kv_idx] * small.long() + (q_idx > 3) * 2 + True


SCORE_MODS: dict[str, Any] = {
    "unchanged": lambda s, b, h, q, k: s,
    "constant_int": lambda s, b, h, q, k: q - k,
    "captured_scalars": scaled_and_shifted(3, 0.5),
    "nested_closure": nested_closure(2),
    "partial": partial(lambda s, b, h, q, k, w, c=1.0: s * c + w * (q - k), w=3, c=0.25),
    "partial_positional": partial(lambda a, s, b, h, q, k: s * a + k, 2.5),
    "defaults": lambda s, b, h, q, k, w=3, c=0.1: s + w * c,
    "callable_object": Method(3),
    "bound_method": Method(2).bound,
    "module": Module(),
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi_exp2": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q),
    "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
    "bf16_table": lambda s, b, h, q, k: s + HALF_TABLE[h, k] * 0.1,
    "f16_row": lambda s, b, h, q, k: s + TABLE[h].sum() + (TABLE[h] * s).sum() + TABLE[h].amax(),
    "dense_bias": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "dense_bias_negative": lambda s, b, h, q, k: s + BIAS[b, -1, q - M, k - 1],
    "zero_d": lambda s, b, h, q, k: s * ZERO_D + ZERO_D_INT,
    "zero_d_derived": lambda s, b, h, q, k: s * ZERO_D.exp() + ZERO_D_INT[()],
    "gather_of_gather": lambda s, b, h, q, k: s + SLOPES[DOC[b, PERMUTATION[k]].long()],
    "gather_of_row": lambda s, b, h, q, k: s + SLOPES[DOC[b][PERMUTATION[k]]],
    "advanced_rows": lambda s, b, h, q, k: s + K_ROWS[b, PERMUTATION[:3], 1].sum() + k,
    "slice_of_row": lambda s, b, h, q, k: s + K_ROWS[b, k, 1:5:2].sum() + K_ROWS[b, k][-2:].mean(),
    "row_indexed_by_traced": lambda s, b, h, q, k: s + K_ROWS[b, k][(q + k) % 6 - 6],
    "ellipsis": lambda s, b, h, q, k: s + K_ROWS[..., 0][b, k] + K_ROWS[b, ..., 2].max(),
    "dot_product": lambda s, b, h, q, k: s + (Q_ROWS[b, h, q] * K_ROWS[b, k]).sum(-1),
    "torch_dot": lambda s, b, h, q, k: s + torch.dot(Q_ROWS[b, h, q, :], K_ROWS[b, k, :]),
    "outer_product": outer_product,
    "bilinear": bilinear,
    "einsum": einsum,
    "stacked": stacked,
    "unpacked": unpacked,
    "prod": lambda s, b, h, q, k: s * K_ROWS[b, k].prod() + PAIRS[b].prod(),
    "norm": lambda s, b, h, q, k: s / K_ROWS[b, k].norm(),
    "softmax_row": lambda s, b, h, q, k: s * K_ROWS[b, k].softmax(-1)[2],
    "mutating": mutating,
    "python_numbers": python_numbers,
    "constants": constants,
    "dtypes": dtypes,
    "builtin_abs": lambda s, b, h, q, k: s - abs(q - k) * abs(s),
    "floor_division": lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) % 3 - (k - q) // (q + 1),
    "float_division": lambda s, b, h, q, k: s // 0.3 + s % 0.3 + 7 // (k + 1) + 7 % (k + 1),
    "rounding_mode": lambda s, b, h, q, k: (
        torch.div(q - k, 2, rounding_mode="trunc") + torch.fmod(s, 0.7)
    ),
    "fmod_int": lambda s, b, h, q, k: (
        s + torch.fmod(q - k, 3) + torch.div(s, 0.3, rounding_mode="floor")
    ),
    "shifts": lambda s, b, h, q, k: s + (q << 2) + ((q - k) >> 1) + (1 << h) - (1024 >> k),
    "bits": lambda s, b, h, q, k: s + ((q & k) | (h ^ 5)) - (~k & 3),
    "powers": lambda s, b, h, q, k: s**2 + s**3 + (s.abs() + 1) ** 0.5 + q**2 + 2**h + 2.0**-k,
    "pow_tensor": lambda s, b, h, q, k: torch.pow(s.abs() + 0.1, h) + (s.abs() + 1) ** -1,
    "bool_arithmetic": lambda s, b, h, q, k: s + (q > k) * 2 + (q > k) + (FLAGS[k] + FLAGS[q]),
    "chained_where": lambda s, b, h, q, k: torch.where(
        q > k, s, torch.where(q == k, s * 2, torch.where(k > 5, 0, s - 1))
    ),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(k > q, float("-inf")).masked_fill(
        FLAGS[k], 3
    ),
    "clamps": lambda s, b, h, q, k: s.clamp(-1, 1) + torch.clamp(s, min=0) + s.clamp(max=ZERO_D),
    "min_max": lambda s, b, h, q, k: (
        torch.maximum(s, SLOPES[h]) + torch.min(q, k) + torch.fmax(s, ZERO_D)
    ),
    "logical": lambda s, b, h, q, k: torch.where(
        torch.logical_or(q > k, torch.logical_not(FLAGS[k])) & torch.logical_xor(q > 2, k), s, 0
    ),
    "nans": lambda s, b, h, q, k: torch.nan_to_num(torch.log(s), nan=-1.0) + torch.sqrt(s).isnan(),
    "infinities": lambda s, b, h, q, k: torch.where(torch.isinf(s / (q - k)), 0.0, s / (q - k)),
    "trigonometry": lambda s, b, h, q, k: torch.sin(s) + torch.cos(s * q) + torch.atan2(s, s + k),
    "half_arithmetic": lambda s, b, h, q, k: s + TABLE[h, 1] * TABLE[h, 2] + TABLE[h, 0] / 3,
    "numpy_free_int": lambda s, b, h, q, k: (
        s + q.to(torch.int32) * 3 + k.float() * 0.5 + h.double()
    ),
    "size_as_value": lambda s, b, h, q, k: s + SLOPES.shape[0] * 2 + len(DOC) + BIAS.size(2),
    "deep_hash": lambda s, b, h, q, k: s + ((q * 2654435761 + k * 40503) ^ (h << 7)) % 7,
    "wide_product": lambda s, b, h, q, k: s + ((q + 100000) * (k + 100000)) % 1000,
}

MASK_MODS: dict[str, Any] = {
    "always": lambda b, h, q, k: True,
    "never": lambda b, h, q, k: False,
    "causal": lambda b, h, q, k: q >= k,
    "captured_bool": lambda b, h, q, k: FLAGS[k],
    "torch_and": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < 3),
    "torch_or": or_masks(lambda b, h, q, k: q == k, lambda b, h, q, k: k < 2),
    "document": lambda b, h, q, k: (DOC[b, q] == DOC[b, k]) & (q >= k),
    "top_k_any": lambda b, h, q, k: (TOP_K[b, h, q, :] == k // 2).any(),
    "top_k_any_method": lambda b, h, q, k: torch.any(TOP_K[b, h, q] == k // 2, dim=-1),
    "all_of_row": lambda b, h, q, k: (TOP_K[b, h, q] <= k).all() | ~FLAGS[k],
    "isin": lambda b, h, q, k: torch.isin(k, PERMUTATION[:4]) & (q > 0),
    "count": lambda b, h, q, k: torch.count_nonzero(TOP_K[b, h, q] > k) >= 2,
    "python_not_equal": lambda b, h, q, k: (q != k) & (q.bitwise_and(1) == 0),
    "bytes": lambda b, h, q, k: BYTES[k] > BYTES[q],
    "wrapped": lambda b, h, q, k: FLAGS[k - N] & (q % 2 == 1),
    "bool_equal": lambda b, h, q, k: FLAGS[q] == FLAGS[k],
    "invert": lambda b, h, q, k: ~(FLAGS[q] ^ FLAGS[k]) | (h == 1),
}


# Sums over rows: torch adds in another order, so results agree up to the rounding of the sum.
ROW_LENGTHS = {
    **dict.fromkeys(
        ("f16_row", "slice_of_row", "dot_product", "torch_dot", "norm", "softmax_row"), 6
    ),
    **dict.fromkeys(("outer_product", "bilinear", "einsum"), 36),
}


@pytest.mark.parametrize("name", SCORE_MODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_score_mod_traced_equals_vmap(name: str, dtype: torch.dtype) -> None:
    mod = SCORE_MODS[name]
    score = (torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    expected = directly(mod, score)
    traced = trace_score_mod(mod, dtype)
    actual = evaluated(traced, score)
    assert actual.dtype == dtype
    expected = expected.to(dtype)
    if name in ROW_LENGTHS:
        # n additions of terms no larger than the largest result
        band = ROW_LENGTHS[name] * torch.finfo(torch.float32).eps * expected.abs().max()
        assert (actual - expected).abs().max() <= band
    else:
        assert same(actual, expected)
    again = trace_score_mod(mod, dtype)
    assert again.graph == traced.graph
    assert same(evaluated(again, score), actual)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod_traced_equals_vmap(name: str) -> None:
    mod = MASK_MODS[name]
    expected = torch.as_tensor(
        mod(0, 0, 0, 0) if name in ("always", "never") else directly(mod, None)
    )
    traced = trace_mask_mod(mod)
    actual = evaluated(traced, None)
    assert actual.dtype == torch.bool
    assert torch.equal(actual, expected.expand(B, H, M, N))
    assert trace_mask_mod(mod).graph == traced.graph


def test_score_mod_python_rounding_equals_torch_rounding() -> None:
    def with_python(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return math.floor(q_idx / 4) * 4 + math.ceil(kv_idx / 3) + round(score) + math.trunc(score)

    def with_torch(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows = torch.floor(q_idx / 4) * 4 + torch.ceil(kv_idx / 3)
        return rows + torch.round(score) + torch.trunc(score)

    assert trace_score_mod(with_python).graph == trace_score_mod(with_torch).graph


def test_score_mod_python_number_becomes_constant() -> None:
    traced = trace_score_mod(lambda s, b, h, q, k: 1.5)
    assert traced.graph.text() == "mod1 score - - | const:f32{0x1.8000000000000p+0} | 0"


def test_evaluate_float64_score_widens_single_precision_arithmetic() -> None:
    traced = trace_score_mod(lambda s, b, h, q, k: torch.exp(s) * 0.1 + SLOPES[h])
    score = torch.randn(B, H, M, N, dtype=torch.float64)
    expected = torch.exp(score) * 0.1 + SLOPES.double().reshape(1, H, 1, 1)
    assert torch.equal(evaluated(traced, score), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluate_number_beyond_fp32_is_rounded_to_infinity(dtype: torch.dtype) -> None:
    lowest = torch.finfo(torch.float64).min

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.where(q_idx >= kv_idx, 0.0, lowest)

    score = random(B, H, M, N, dtype=dtype)
    hidden = torch.arange(M)[:, None] < torch.arange(N)
    expected = score.masked_fill(hidden, -math.inf)
    assert same(evaluated(trace_score_mod(mod), score), expected)


def test_evaluate_check_names_the_mod_and_the_index_that_leaves_the_tensor() -> None:
    traced = trace_mask_mod(lambda b, h, q, k: FLAGS[k + 2])
    index = torch.arange(N)
    zero = torch.zeros((), dtype=torch.int64)

    def run(check: Tensor) -> Tensor:
        return evaluate(
            traced.graph,
            Positions(b=zero, h=zero, q_idx=zero, kv_idx=index),
            captures=traced.captures,
            scalars=(),
            check=check,
            source=traced.source,
        )

    assert torch.equal(run(index < N - 2)[: N - 2], FLAGS[2:])
    with pytest.raises(
        IndexError, match=r"test_evaluate.py:\d+ .*<lambda>.*=9 is not valid .*-9..8"
    ):
        run(index < N - 1)


def test_evaluate_division_by_zero_at_an_unseen_position_is_harmless() -> None:
    traced = trace_mask_mod(lambda b, h, q, k: torch.where(q > 0, k // q == 1, k % q == 0))
    index = torch.arange(4)
    result = evaluate(
        traced.graph,
        Positions(b=index[0], h=index[0], q_idx=index[:, None], kv_idx=index),
        captures=(),
        scalars=(),
    )
    assert torch.equal(result[1:], index // index[1:, None] == 1)


def test_evaluate_empty_capture_gives_zeros() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    traced = trace_mask_mod(lambda b, h, q, k: empty[k] == 0)
    assert evaluated(traced, None).all()


@pytest.mark.parametrize("swapped", [False, True])
def test_evaluate_dot_product_of_rows_makes_no_tensor_of_all_element_pairs(swapped: bool) -> None:
    long_q, long_k = random(1, 2, 64, 128), random(1, 64, 128)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x, y = long_q[b, h, q], long_k[b, k]
        return s + ((y * x) if swapped else (x * y)).sum()

    traced = trace_score_mod(mod)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Watch():
        result = evaluate(
            traced.graph,
            Positions(
                b=torch.zeros(1, 1, 1, 1, dtype=torch.int64),
                h=torch.arange(2).reshape(1, 2, 1, 1),
                q_idx=torch.arange(64).reshape(1, 1, 64, 1),
                kv_idx=torch.arange(64).reshape(1, 1, 1, 64),
            ),
            score=torch.zeros(1, 2, 64, 64),
            captures=traced.captures,
            scalars=(),
        )
    columns = long_k[:, None].transpose(-1, -2)
    band = 128 * torch.finfo(torch.float32).eps * (long_q.abs() @ columns.abs())
    assert ((result - long_q @ columns).abs() <= band).all()
    assert largest <= 2 * 64 * 128
