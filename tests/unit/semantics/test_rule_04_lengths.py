"""Rule 4: what lies past a length is never read, and comes out as 0, -inf and zero gradients."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, cumulative, dense_qkv, normal, paged
from fovea.testing.spelled_out import band, spelled_out

LENGTHS_Q, USED_Q, TAIL_Q = [5, 4, 0, 7], [3, 4, 0, 0], 3
LENGTHS_KV, USED_KV, TAIL_KV = [6, 9, 2, 8], [6, 5, 0, 7], 2
AUX = fovea.AuxRequest(lse=True, max_score=True)


def _used(lengths, used, total):
    """Return (total,) bool: rows that belong to a sequence's used part."""
    rows = torch.zeros(total, dtype=torch.bool)
    begin = 0
    for length, count in zip(lengths, used, strict=True):
        rows[begin : begin + count] = True
        begin += length
    return rows


USED_ROWS = _used(LENGTHS_Q, USED_Q, sum(LENGTHS_Q) + TAIL_Q)
USED_KEYS = _used(LENGTHS_KV, USED_KV, sum(LENGTHS_KV) + TAIL_KV)


def _inputs(dtype, fill):
    q = normal((USED_ROWS.numel(), 4, 8), seed=0, dtype=dtype)
    k = normal((USED_KEYS.numel(), 2, 8), seed=1, dtype=dtype)
    v = normal((USED_KEYS.numel(), 2, 8), seed=2, dtype=dtype)
    q[~USED_ROWS], k[~USED_KEYS], v[~USED_KEYS] = fill, fill, fill
    return [x.requires_grad_() for x in (q, k, v)]


def _call(q, k, v, **options):
    return fovea.attention_varlen(
        q,
        k,
        v,
        cumulative(LENGTHS_Q),
        cumulative(LENGTHS_KV),
        max(LENGTHS_Q),
        max(LENGTHS_KV),
        seqused_q=torch.tensor(USED_Q, dtype=torch.int32),
        seqused_kv=torch.tensor(USED_KV, dtype=torch.int32),
        return_aux=AUX,
        **options,
    )


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_past_a_length_reach_no_result(dtype, causal):
    def run(fill):
        q, k, v = _inputs(dtype, fill)
        out, aux = _call(q, k, v, causal=causal, sink=torch.zeros(4))
        dout = normal(out.shape, seed=4, dtype=dtype)
        dout[~USED_ROWS] = fill
        return out, aux, torch.autograd.grad(out, [q, k, v], dout)

    clean, clean_aux, clean_grads = run(0.0)
    out, aux, grads = run(torch.nan)
    assert torch.equal(out, clean)
    assert torch.equal(aux.lse, clean_aux.lse)
    assert torch.equal(aux.max_score, clean_aux.max_score)
    for ours, expected in zip(grads, clean_grads, strict=True):
        assert torch.equal(ours, expected)


def test_rows_past_a_length_are_zero_with_lse_minus_infinity():
    q, k, v = _inputs(torch.float32, torch.nan)
    out, aux = _call(q, k, v, sink=torch.ones(4))
    assert bool((out[~USED_ROWS] == 0).all())
    assert bool((aux.lse[:, ~USED_ROWS] == -torch.inf).all())
    assert bool((aux.max_score[:, ~USED_ROWS] == -torch.inf).all())
    assert bool(aux.lse[:, USED_ROWS].isfinite().all())


def test_gradients_past_a_length_are_zero():
    q, k, v = _inputs(torch.float32, torch.nan)
    out, _ = _call(q, k, v)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert bool((dq[~USED_ROWS] == 0).all())
    assert bool((dk[~USED_KEYS] == 0).all())
    assert bool((dv[~USED_KEYS] == 0).all())
    assert bool((dk[USED_KEYS] != 0).any())


@pytest.mark.parametrize("causal", [True, "top_left"])
def test_the_diagonal_goes_by_the_used_lengths(causal):
    q, k, v = (x.detach() for x in _inputs(torch.float64, torch.nan))
    out, aux = _call(q, k, v, causal=causal, window=(4, None))
    # Sequence 1: rows 5..9 of which all 4 are used, keys 6..15 of which 5 are.
    rows, keys = slice(5, 9), slice(6, 11)
    visible = band(4, 5, causal=causal, window=(4, None))
    expected = spelled_out(q[rows][None], k[keys][None], v[keys][None], visible=visible)
    torch.testing.assert_close(out[rows], expected.out[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.lse[:, rows], expected.lse[0], rtol=1e-12, atol=1e-12)


def test_nan_behind_the_last_key_of_a_longer_buffer_is_not_read():
    # The keys of a dense call are a slice of a buffer whose next rows are NaN.
    q, k, v = dense_qkv(Shape(batch=2, seqlen_q=9, seqlen_kv=200, heads_q=2))
    expected = fovea.attention(q, k[:, :131], v[:, :131])
    k[:, 131:], v[:, 131:] = torch.nan, torch.nan
    assert torch.equal(fovea.attention(q, k[:, :131], v[:, :131]), expected)


def test_nan_in_pages_past_a_length_is_not_read():
    keys = [normal((n, 2, 8), seed=n) for n in (5, 0, 11)]
    cache = paged(keys, page_size=4)
    assert bool(cache.pages.isnan().any())
    q = normal((3, 4, 8), seed=0)
    out, aux = fovea.attention_varlen(
        q,
        cache.pages,
        cache.pages,
        cumulative([1, 1, 1]),
        None,
        1,
        11,
        seqused_kv=torch.tensor([5, 0, 11], dtype=torch.int32),
        page_table=cache.page_table,
        return_aux=AUX,
    )
    assert bool(out.isfinite().all())
    assert torch.equal(aux.lse.isfinite().all(dim=0), torch.tensor([True, False, True]))
