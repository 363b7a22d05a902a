"""Rule 3: a row that sees no key gives exactly 0, lse -inf (or the sink), and no gradient."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, cumulative, dense_qkv, normal

ROWS, KEYS = 12, 10
SHAPE = Shape(batch=2, seqlen_q=ROWS, seqlen_kv=KEYS, heads_q=4, heads_kv=2, head_dim=8)
DEAD = torch.arange(ROWS) % 3 == 1
AUX = fovea.AuxRequest(lse=True, max_score=True)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _hides_dead_rows(b, h, q_idx, kv_idx):
    return q_idx % 3 != 1


def _score_hides_dead_rows(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx % 3 == 1, -float("inf"), score)


WAYS = {
    "mask_mod": {"mask_mod": _hides_dead_rows},
    "score_mod": {"score_mod": _score_hides_dead_rows},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_row_is_exactly_zero_with_lse_minus_infinity(dtype, options):
    q, k, v = dense_qkv(SHAPE, dtype=dtype)
    out, aux = fovea.attention(q, k, v, return_aux=AUX, **options)
    assert bool((out[:, DEAD] == 0).all())
    assert bool((aux.lse[..., DEAD] == -torch.inf).all())
    assert bool((aux.max_score[..., DEAD] == -torch.inf).all())
    assert bool(aux.lse[..., ~DEAD].isfinite().all())
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_rows_add_exactly_nothing_to_any_gradient(dtype, options):
    def gradients(rows):
        q, k, v = dense_qkv(SHAPE, dtype=dtype)
        leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        out, aux = fovea.attention(q, k, v, return_aux=AUX, **options)
        # Huge cotangents in dead rows: a sum of 0 * x would not stay 0 in 16 bits.
        dout = normal(out.shape, seed=5, dtype=dtype).masked_fill(~rows.view(-1, 1, 1), 0.0)
        finite = torch.where(DEAD, 0.0, aux.lse)
        loss = (out * dout).sum() + finite.masked_fill(~rows, 0.0).sum().to(dtype)
        return torch.autograd.grad(loss, leaves)

    everything = gradients(torch.ones(ROWS, dtype=torch.bool))
    live_only = gradients(~DEAD)
    assert bool((everything[0][:, DEAD] == 0).all())
    for all_rows, live in zip(everything, live_only, strict=True):
        assert torch.equal(all_rows, live)
        assert bool(all_rows.isfinite().all())


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_dead_rows_drop_even_a_nan_that_flows_into_them(options):
    # The gradient of a loss on lse = -inf is rarely finite; it belongs to a constant.
    def gradients(fill):
        leaves = [x.requires_grad_() for x in dense_qkv(SHAPE)]
        out, aux = fovea.attention(*leaves, return_aux=AUX, **options)
        dout, dlse = torch.ones_like(out), torch.ones_like(aux.lse)
        dout[:, DEAD], dlse[..., DEAD] = fill, fill
        return torch.autograd.grad([out, aux.lse], leaves, [dout, dlse])

    for with_nan, clean in zip(gradients(torch.nan), gradients(0.0), strict=True):
        assert torch.equal(with_nan, clean)
        assert bool(clean.isfinite().all())


def test_dead_rows_give_captured_tensors_exactly_nothing():
    bias = normal((ROWS, KEYS), seed=3).requires_grad_()
    q, k, v = dense_qkv(SHAPE)

    def biased(score, b, h, q_idx, kv_idx):
        # The logarithm's derivative is infinite on dead rows, where q_idx % 3 == 1.
        return score + bias[q_idx, kv_idx] * torch.log((q_idx % 3 - 1).abs() * 1.0)

    out = fovea.attention(q, k, v, score_mod=biased, mask_mod=_hides_dead_rows)
    (found,) = torch.autograd.grad(out.square().sum(), [bias])
    assert bool(found.isfinite().all())
    assert bool((found[DEAD] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_row_with_a_sink_is_zero_and_its_lse_is_the_sink(dtype):
    q, k, v = dense_qkv(SHAPE, dtype=dtype)
    sink = torch.tensor([0.5, -3.0, 20.0, -100.0]).requires_grad_()
    out, aux = fovea.attention(q, k, v, mask_mod=_hides_dead_rows, sink=sink, return_aux=AUX)
    assert bool((out[:, DEAD] == 0).all())
    expected = sink.detach().view(1, 4, 1).expand(2, 4, int(DEAD.sum()))
    assert torch.equal(aux.lse[..., DEAD].float(), expected)
    assert bool((aux.max_score[..., DEAD] == -torch.inf).all())


def test_dead_row_with_a_sink_has_derivative_one_of_lse_by_sink():
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    sink = torch.randn(4, dtype=torch.float64).requires_grad_()
    out, aux = fovea.attention(q, k, v, mask_mod=_hides_dead_rows, sink=sink, return_aux=AUX)
    (found,) = torch.autograd.grad(aux.lse[..., DEAD].sum(), [sink], retain_graph=True)
    assert torch.equal(found, torch.full((4,), 2.0 * int(DEAD.sum()), dtype=torch.float64))
    (found,) = torch.autograd.grad(out[:, DEAD].sum(), [sink])
    assert torch.equal(found, torch.zeros(4, dtype=torch.float64))


def test_lse_includes_the_sink_and_max_score_does_not():
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    sink = torch.tensor([50.0, 0.0, -1.0, -torch.inf], dtype=torch.float64)
    _, with_sink = fovea.attention(q, k, v, sink=sink, return_aux=AUX)
    _, without = fovea.attention(q, k, v, return_aux=AUX)
    expected = torch.logaddexp(without.lse, sink.view(1, 4, 1))
    torch.testing.assert_close(with_sink.lse, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(with_sink.max_score, without.max_score)


def test_causal_rows_before_the_first_key_are_dead():
    q, k, v = dense_qkv(Shape(seqlen_q=9, seqlen_kv=4))
    out, aux = fovea.attention(q, k, v, causal=True, return_aux=AUX)
    assert bool((out[:, :5] == 0).all())
    assert bool((aux.lse[..., :5] == -torch.inf).all())
    assert bool(aux.lse[..., 5:].isfinite().all())


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_axes_are_legal_forward_and_backward(sizes):
    batch, seqlen_q, seqlen_kv = sizes
    shape = Shape(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=2)
    leaves = [x.requires_grad_() for x in dense_qkv(shape)]
    sink = torch.zeros(2, requires_grad=True)
    out, aux = fovea.attention(*leaves, sink=sink, return_aux=AUX, causal=True)
    assert out.shape == (batch, seqlen_q, 2, 16)
    assert bool((out == 0).all())
    assert bool((aux.lse == 0).all())
    found = torch.autograd.grad(out.sum() + aux.lse.sum(), [*leaves, sink])
    for gradient, leaf in zip(found[:3], leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))
    assert torch.equal(found[3], torch.full((2,), float(batch * seqlen_q)))


@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 3, 0], [2, 0, 0]), ([2], [3])])
def test_packed_sequences_may_be_empty(lengths):
    lengths_q, lengths_kv = lengths
    q = normal((sum(lengths_q), 2, 8), seed=0).requires_grad_()
    k, v = (normal((sum(lengths_kv), 2, 8), seed=i).requires_grad_() for i in (1, 2))
    out, aux = fovea.attention_varlen(
        q, k, v, cumulative(lengths_q), cumulative(lengths_kv), 3, 3, return_aux=AUX
    )
    sees = torch.tensor([n > 0 for m, n in zip(lengths_q, lengths_kv) for _ in range(m)]).bool()
    assert torch.equal((out != 0).all(dim=-1).all(dim=-1), sees)
    assert torch.equal(aux.lse.isfinite().all(dim=0), sees)
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), [q, k, v]), (q, k, v), strict=True):
        assert gradient.shape == leaf.shape
        assert bool(gradient.isfinite().all())
