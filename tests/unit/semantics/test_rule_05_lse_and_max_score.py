"""Rule 5: lse is a differentiable output in every variant; max_score is exact, without grad."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, cumulative, dense_qkv, normal
from fovea.testing.masks import block_mask_of, random_states
from fovea.testing.spelled_out import band, positions, spelled_out

ROWS, KEYS = 10, 14
SHAPE = Shape(batch=2, seqlen_q=ROWS, seqlen_kv=KEYS, heads_q=4, heads_kv=2, head_dim=8)
AUX = fovea.AuxRequest(lse=True, max_score=True)
STATES = random_states(2, 4, 3, 4, seed=5)


def _distance(score, b, h, q_idx, kv_idx):
    return score * 1.5 - 0.25 * (q_idx - kv_idx).abs()


def _every_other(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


def _block_visible():
    state = STATES.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)[:, :, :ROWS, :KEYS]
    return (state == 2) | ((state == 1) & _every_other(*positions(2, 4, ROWS, KEYS)))


def _block_mask():
    return block_mask_of(
        STATES, seqlen_q=ROWS, seqlen_kv=KEYS, block_q=4, block_kv=4, mask_mod=_every_other
    )


VARIANTS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"visible": band(ROWS, KEYS, causal=True)}),
    "dead_rows": (
        {"window": (1, -0), "causal": "top_left", "mask_mod": _every_other},
        {
            "visible": band(ROWS, KEYS, causal="top_left", window=(1, 0))
            & _every_other(*positions(2, 4, ROWS, KEYS))
        },
    ),
    "softcap": ({"softcap": 1.2}, {"softcap": 1.2}),
    "score_mod": ({"score_mod": _distance}, {"score": _distance}),
    "block_mask": ({"block_mask": _block_mask()}, {"visible": _block_visible()}),
    "scale": ({"scale": -0.7}, {"scale": -0.7}),
}


@pytest.mark.parametrize(("options", "spelled"), VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("has_sink", [False, True])
def test_lse_is_differentiable_in_every_variant(options, spelled, has_sink):
    tensors = list(dense_qkv(SHAPE, dtype=torch.float64))
    if has_sink:
        tensors.append(normal((4,), seed=9, dtype=torch.float64))

    def gradients(function, **arguments):
        leaves = [x.clone().requires_grad_() for x in tensors]
        sink = leaves[3] if has_sink else None
        lse = function(*leaves[:3], sink=sink, **arguments)
        live = lse.isfinite()
        weight = normal(lse.shape, seed=6, dtype=torch.float64)
        # v has no part in lse; its gradient is zero, not missing.
        loss = (torch.where(live, lse, 0.0) * weight).sum() + 0.0 * leaves[2].sum()
        return lse, torch.autograd.grad(loss, leaves)

    def ours(q, k, v, **arguments):
        return fovea.attention(q, k, v, return_aux=AUX, **arguments)[1].lse

    lse, found = gradients(ours, **options)
    expected_lse, expected = gradients(lambda *a, **kw: spelled_out(*a, **kw).lse, **spelled)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("options", "spelled"), VARIANTS.values(), ids=VARIANTS.keys())
def test_max_score_is_the_largest_visible_score(options, spelled):
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    _, aux = fovea.attention(q, k, v, sink=torch.full((4,), 9.0), return_aux=AUX, **options)
    expected = spelled_out(q, k, v, **spelled).max_score
    torch.testing.assert_close(aux.max_score, expected, rtol=1e-14, atol=1e-14)


def test_max_score_carries_no_gradient():
    q, k, v = (x.requires_grad_() for x in dense_qkv(SHAPE))
    out, aux = fovea.attention(q, k, v, return_aux=AUX)
    assert out.requires_grad
    assert aux.lse.requires_grad
    assert not aux.max_score.requires_grad


def test_lse_of_packed_sequences_is_differentiable():
    lengths = [3, 0, 6]
    q, k, v = (normal((9, 2, 8), seed=i, dtype=torch.float64).requires_grad_() for i in range(3))
    cu_seqlens = cumulative(lengths)
    _, aux = fovea.attention_varlen(
        q, k, v, cu_seqlens, cu_seqlens, 6, 6, causal=True, return_aux=AUX
    )
    assert aux.lse.shape == (2, 9)
    weight = normal((2, 9), seed=7, dtype=torch.float64)
    found = torch.autograd.grad((aux.lse * weight).sum(), [q, k])
    parts = [
        spelled_out(*(x[None, a:b] for x in (q, k, v)), visible=band(b - a, b - a, causal=True))
        for a, b in ((0, 3), (3, 9))
    ]
    loss = sum(
        (part.lse[0] * weight[:, a:b]).sum() for part, (a, b) in zip(parts, ((0, 3), (3, 9)))
    )
    for one, other in zip(found, torch.autograd.grad(loss, [q, k]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_lse_and_max_score_are_float32_at_least(dtype, expected):
    q, k, v = dense_qkv(SHAPE, dtype=dtype)
    _, aux = fovea.attention(q, k, v, return_aux=AUX)
    assert aux.lse.dtype == aux.max_score.dtype == expected
    assert aux.lse.shape == aux.max_score.shape == (2, 4, ROWS)


def test_results_not_asked_for_are_none():
    q, k, v = dense_qkv(SHAPE)
    _, aux = fovea.attention(q, k, v, return_aux=fovea.AuxRequest(lse=True))
    assert aux.max_score is None
    _, aux = fovea.attention(q, k, v, return_aux=fovea.AuxRequest(max_score=True))
    assert aux.lse is None


def test_max_score_of_huge_scores_is_exact():
    # Units of log2 and back would round: 3 * log2(e) * ln(2) is not 3.
    q = torch.full((1, 1, 1, 1), 3.0)
    k = torch.tensor([1.0, 30000.0, -5.0]).view(1, 3, 1, 1)
    _, aux = fovea.attention(q, k, k, scale=1.0, return_aux=AUX)
    assert aux.max_score.item() == 90000.0
