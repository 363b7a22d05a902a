import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

from fovea.problem import GradientNeeds, Request, make_dense
from fovea.reference.dense import EXACT, oracle, oracle_backward, plain_precision
from fovea.testing.inputs import Shape, dense_qkv, normal
from fovea.testing.problems import all_needs
from fovea.testing.spelled_out import band, spelled_out

SHAPE = Shape(batch=2, seqlen_q=9, seqlen_kv=13, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=6)


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.0, 3.0, -2.0, -torch.inf]).double()])
def test_oracle_equals_attention_spelled_out(causal, sink):
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    request = Request(causal=causal, sink=sink, softcap=2.0, window=(3, None))
    found = oracle(make_dense(q, k, v, request))
    visible = band(9, 13, causal=causal, window=(3, None))
    expected = spelled_out(q, k, v, visible=visible, sink=sink, softcap=2.0)
    for ours, theirs in zip(found, expected, strict=True):
        _close(ours, theirs)


def test_oracle_equals_torch_math_attention():
    q, k, v = dense_qkv(Shape(batch=2, seqlen_q=9, heads_q=4), dtype=torch.float64)
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*by_heads, is_causal=True).transpose(1, 2)
    _close(oracle(make_dense(q, k, v, Request(causal=True))).out, expected)


def test_oracle_equals_torch_flex_attention_in_eager(monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 4

    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    mask = torch_flex.create_block_mask(window, 1, 1, 9, 13, device="cpu", BLOCK_SIZE=4)
    expected, aux = torch_flex.flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=alibi,
        block_mask=mask,
        enable_gqa=True,
        return_aux=torch_flex.AuxRequest(lse=True),
    )
    found = oracle(make_dense(q, k, v, Request(score_mod=alibi, block_mask=mask)))
    _close(found.out, expected.transpose(1, 2))
    # torch keeps lse in fp32.
    torch.testing.assert_close(found.lse.float(), aux.lse.float(), rtol=1e-6, atol=1e-6)


def test_oracle_backward_equals_autograd_of_attention_spelled_out():
    leaves = [x.requires_grad_() for x in dense_qkv(SHAPE, dtype=torch.float64)]
    sink = torch.randn(4, dtype=torch.float64).requires_grad_()
    expected = spelled_out(*leaves, visible=band(9, 13, causal="top_left"), sink=sink)
    dout = normal(expected.out.shape, seed=1, dtype=torch.float64)
    dlse = normal(expected.lse.shape, seed=2, dtype=torch.float64)
    loss = (expected.out * dout).sum() + (expected.lse * dlse).sum()
    grads = torch.autograd.grad(loss, [*leaves, sink])
    problem = make_dense(*leaves, Request(causal="top_left", sink=sink))
    found = oracle_backward(problem, dout=dout, dlse=dlse, needs=all_needs(problem))
    for ours, theirs in zip(found.gradients[:4], grads, strict=True):
        _close(ours, theirs)


def test_oracle_backward_leaves_the_inputs_alone():
    q, k, v = dense_qkv(SHAPE)
    needs = GradientNeeds(q=True, k=True, v=True, sink=False, score_captures=())
    problem = make_dense(q, k, v, Request())
    dout = torch.ones(2, 9, 4, 6)
    found = oracle_backward(problem, dout=dout, dlse=None, needs=needs).gradients
    assert not q.requires_grad
    assert found.dq.dtype == torch.float64
    assert found.dsink is None


def test_oracle_of_bfloat16_inputs_rounds_nothing():
    q, k, v = dense_qkv(SHAPE, dtype=torch.bfloat16)
    wide = [x.double() for x in (q, k, v)]
    ours, theirs = (oracle(make_dense(*x, Request())) for x in ((q, k, v), wide))
    assert torch.equal(ours.out, theirs.out)
    assert ours.out.dtype == torch.float64


def test_plain_precision_is_that_of_torch():
    assert plain_precision(torch.bfloat16) == (torch.float32, torch.bfloat16)
    assert plain_precision(torch.float32) == (torch.float32, None)
    assert plain_precision(torch.float64) == EXACT
