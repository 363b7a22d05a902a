"""Rule 1: s = scale * q.k; softcap; score_mod; mask to -inf; accumulation in at least fp32."""

import math

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv
from fovea.testing.spelled_out import band, spelled_out

SHAPE = Shape(batch=2, seqlen_q=9, seqlen_kv=12, heads_q=4, heads_kv=2, head_dim=8)
LSE = fovea.AuxRequest(lse=True)


def test_scale_then_softcap_then_score_mod_then_mask():
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * 3 + h - 0.5 * (q_idx - kv_idx)

    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    out, aux = fovea.attention(
        q, k, v, causal=True, score_mod=score_mod, softcap=0.7, scale=0.9, return_aux=LSE
    )
    s = 0.9 * torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, dim=2))
    s = 0.7 * torch.tanh(s / 0.7)
    h, q_idx, kv_idx = torch.arange(4).view(4, 1, 1), torch.arange(9).view(9, 1), torch.arange(12)
    s = s * 3 + h - 0.5 * (q_idx - kv_idx)
    s = s.masked_fill(kv_idx > q_idx + 3, -torch.inf)
    expected = torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.lse, s.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_score_mod_cannot_reveal_what_the_mask_hides():
    def lifts_minus_infinity(score, b, h, q_idx, kv_idx):
        return torch.where(score < -1e6, 5.0, score)

    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    plain = fovea.attention(q, k, v, causal=True)
    lifted = fovea.attention(q, k, v, causal=True, score_mod=lifts_minus_infinity)
    torch.testing.assert_close(lifted, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_over_many_keys_are_not_kept_in_16_bits(dtype):
    # A bfloat16 sum of ones stops at 256, a float16 one at 2048.
    keys = 4096
    q = torch.zeros(1, 1, 1, 16, dtype=dtype)
    k, v = torch.ones(1, keys, 1, 16, dtype=dtype), torch.ones(1, keys, 1, 16, dtype=dtype)
    out, aux = fovea.attention(q, k, v, return_aux=LSE)
    assert torch.equal(out, torch.ones_like(out))
    torch.testing.assert_close(aux.lse.item(), math.log(keys), rtol=1e-6, atol=0)


def test_products_of_16_bit_inputs_are_summed_in_float32():
    # 1 + 2^-12 + ... needs more mantissa than either 16-bit format has.
    q = torch.ones(1, 1, 1, 256, dtype=torch.bfloat16)
    k = torch.full((1, 1, 1, 256), 2.0**-12, dtype=torch.bfloat16)
    k[..., 0] = 1.0
    _, aux = fovea.attention(q, k, k, scale=1.0, return_aux=LSE)
    assert aux.lse.item() == 1 + 255 * 2.0**-12


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_score_mod_sees_scores_in_float32_or_float64(dtype, seen):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (2.0**-20 if score.dtype == seen else 7.0)

    q = torch.zeros(1, 1, 1, 4, dtype=dtype)
    _, aux = fovea.attention(q, q, q, score_mod=score_mod, return_aux=LSE)
    assert aux.lse.item() == 2.0**-20


@pytest.mark.parametrize("scale", [0, -1, -0.25, 0.0, 1.5, torch.tensor(0.3), torch.tensor(-2.0)])
def test_scale_may_be_any_finite_number(scale):
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    out = fovea.attention(q, k, v, scale=scale, causal=True)
    expected = spelled_out(q, k, v, scale=float(scale), visible=band(9, 12, causal=True))
    torch.testing.assert_close(out, expected.out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [0.5, 30, torch.tensor(2.0)])
def test_softcap_limits_the_scaled_score(softcap):
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    out, aux = fovea.attention(
        q, k, v, softcap=softcap, scale=2.0, return_aux=fovea.AuxRequest(max_score=True)
    )
    expected = spelled_out(q, k, v, scale=2.0, softcap=float(softcap))
    torch.testing.assert_close(out, expected.out, rtol=1e-12, atol=1e-12)
    assert bool((aux.max_score <= float(softcap)).all())


def test_scale_defaults_to_one_over_the_root_of_head_dim():
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(
        fovea.attention(q, k, v), fovea.attention(q, k, v, scale=8**-0.5), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_row_sums_of_unrounded_exponentials_give_lse_to_float32_precision(dtype):
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=16, seqlen_kv=300, heads_q=2), dtype=dtype)
    _, aux = fovea.attention(q, k, v, return_aux=LSE)
    expected = spelled_out(*(x.double() for x in (q, k, v))).lse
    torch.testing.assert_close(aux.lse.double(), expected, rtol=1e-6, atol=1e-6)
