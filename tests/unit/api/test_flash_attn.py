"""The drop-in functions: flash-attn's own meanings, against plain torch."""

import inspect

import pytest
import torch

import fovea
from fovea.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def spelled(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Return (out, lse) of flash-attn's documented meaning on (batch, seqlen, heads, dim)."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * (s / softcap).tanh()
    i = torch.arange(q.shape[1]).view(-1, 1) + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if slopes is not None:
        s = s - slopes.view(-1, q.shape[2], 1, 1) * (i - j).abs()
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        visible &= j <= i
    if window[0] >= 0:
        visible &= j >= i - window[0]
    if window[1] >= 0:
        visible &= j <= i + window[1]
    s = s.masked_fill(~visible, -torch.inf)
    p = s.softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhmn,bnhd->bmhd", p, v), s.logsumexp(-1)


def make(seqlen_q=5, seqlen_k=9, batch=2):
    q = torch.randn(batch, seqlen_q, 4, 8, dtype=torch.float64)
    k = torch.randn(batch, seqlen_k, 2, 8, dtype=torch.float64)
    return q, k, torch.randn(batch, seqlen_k, 2, 8, dtype=torch.float64)


SIGNATURES = {
    flash_attn_func: (
        "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "return_attn_probs"
    ),
    flash_attn_varlen_func: (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size softcap alibi_slopes deterministic return_attn_probs block_table"
    ),
    flash_attn_with_kvcache: (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_positional_parameters_are_those_of_flash_attn(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert positional == SIGNATURES[function].split()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (-1, 1), (2, 0)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_func_equals_plain_torch(causal, window, softcap):
    q, k, v = make()
    found = flash_attn_func(
        q, k, v, causal=causal, window_size=window, softcap=softcap, return_attn_probs=True
    )
    expected = spelled(q, k, v, causal=causal, window=window, softcap=softcap)
    torch.testing.assert_close(found[:2], expected)
    assert found[2] is None


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_slopes_equal_plain_torch_and_keep_gradients(shape):
    q, k, v = (t.requires_grad_() for t in make())
    slopes = torch.rand(shape, dtype=torch.float64)
    out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    expected, _ = spelled(q, k, v, causal=True, slopes=slopes)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(found, wanted)


def test_alibi_slopes_of_wrong_shape_raise():
    with pytest.raises(ValueError, match=r"alibi_slopes\.shape=\(3,\)"):
        flash_attn_func(*make(), alibi_slopes=torch.rand(3))


@pytest.mark.parametrize("with_slopes", [False, True])
def test_varlen_func_equals_func_on_each_sequence(with_slopes):
    q, k, v = (t[0] for t in make(10, 12, 1))
    slopes = torch.rand(4, dtype=torch.float64) if with_slopes else None
    bounds_q, bounds_k = [0, 3, 10], [0, 4, 12]
    out, lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        torch.tensor(bounds_q, dtype=torch.int32),
        torch.tensor(bounds_k, dtype=torch.int32),
        7,
        8,
        causal=True,
        window_size=(2, -1),
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    for b in range(2):
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        parts = (q[None, rows], k[None, keys], v[None, keys])
        expected = spelled(*parts, causal=True, window=(2, -1), slopes=slopes)
        torch.testing.assert_close(out[rows], expected[0][0])
        torch.testing.assert_close(lse[:, rows], expected[1][0])


def test_varlen_func_with_block_table_equals_the_same_keys_packed():
    q, k, v = (t[0] for t in make(6, 12, 1))
    bounds_q = torch.tensor([0, 2, 6], dtype=torch.int32)
    bounds_k = torch.tensor([0, 5, 12], dtype=torch.int32)
    expected = flash_attn_varlen_func(q, k, v, bounds_q, bounds_k, 4, 7, causal=True)
    pages = torch.full((6, 4, 2, 8), torch.nan, dtype=torch.float64)
    table = torch.tensor([[5, 0], [2, 3]], dtype=torch.int32)
    paged = []
    for packed in (k, v):
        cache = pages.clone()
        cache[5], cache[0, :1] = packed[:4], packed[4:5]
        cache[2], cache[3, :3] = packed[5:9], packed[9:12]
        paged.append(cache)
    found = flash_attn_varlen_func(
        q, *paged, bounds_q, bounds_k, 4, 8, causal=True, block_table=table
    )
    torch.testing.assert_close(found, expected)


def test_kvcache_appends_and_attends_to_what_is_used():
    q, k, v = make(2, 20)
    new_k, new_v = (torch.randn(2, 2, 2, 8, dtype=torch.float64) for _ in range(2))
    used = torch.tensor([7, 15], dtype=torch.int32)
    k_cache, v_cache = k.clone(), v.clone()
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        new_k,
        new_v,
        cache_seqlens=used,
        causal=True,
        num_splits=3,
        return_softmax_lse=True,
    )
    for b, length in enumerate(used.tolist()):
        keys = torch.cat([k[b, :length], new_k[b]])[None]
        values = torch.cat([v[b, :length], new_v[b]])[None]
        expected = spelled(q[b : b + 1], keys, values, causal=True)
        torch.testing.assert_close(out[b], expected[0][0])
        torch.testing.assert_close(lse[b], expected[1][0])
        assert torch.equal(k_cache[b, length : length + 2], new_k[b])
        assert torch.equal(k_cache[b, length + 2 :], k[b, length + 2 :])


def test_kvcache_rows_are_chosen_by_cache_batch_idx():
    q, k, v = make(1, 10, batch=3)
    found = flash_attn_with_kvcache(
        q[:2], k, v, cache_seqlens=6, cache_batch_idx=torch.tensor([2, 0])
    )
    expected, _ = spelled(q[:2], k[[2, 0], :6], v[[2, 0], :6])
    torch.testing.assert_close(found, expected)


def test_kvcache_without_lengths_uses_the_whole_cache():
    q, k, v = make(3, 10)
    slopes = torch.rand(4, dtype=torch.float64)
    found = flash_attn_with_kvcache(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(found, spelled(q, k, v, causal=True, slopes=slopes)[0])


@pytest.mark.parametrize(
    ("bounds_k", "pages", "words"),
    [
        ([0, 17, 20], [0, 1, 2, 3], r"cu_seqlens_k\.diff\(\)\[0\]=17 .*block_table more columns"),
        ([0, 10, 5], [0, 1, 2, 3], r"cu_seqlens_k\.diff\(\)\[1\]=-5"),
        ([0, 10, 20], [4, 5, 8, 7], r"block_table\[0, 2\]=8"),
    ],
)
def test_varlen_func_with_a_wrong_block_table_names_its_own_arguments(bounds_k, pages, words):
    q, cache = torch.randn(6, 2, 8), torch.randn(8, 4, 2, 8)
    bounds_q, bounds_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 6], bounds_k))
    table = torch.tensor([pages, pages], dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        flash_attn_varlen_func(q, cache, cache, bounds_q, bounds_k, 3, 20, block_table=table)


def test_kvcache_with_block_table_appends_across_a_page():
    q, k, v = make(1, 8, batch=1)
    table = torch.tensor([[3, 1, 0]], dtype=torch.int32)
    caches = []
    for row in (k[0], v[0]):
        cache = torch.zeros(4, 4, 2, 8, dtype=torch.float64)
        cache[3], cache[1] = row[:4], row[4:8]
        caches.append(cache)
    new = torch.randn(2, 1, 3, 2, 8, dtype=torch.float64)
    used = torch.tensor([7], dtype=torch.int32)
    found = flash_attn_with_kvcache(
        q, *caches, new[0], new[1], cache_seqlens=used, block_table=table
    )
    keys, values = torch.cat([k[:, :7], new[0]], 1), torch.cat([v[:, :7], new[1]], 1)
    torch.testing.assert_close(found, spelled(q, keys, values)[0])
    assert torch.equal(caches[0][0, :2], new[0][0, 1:])


REFUSED = {
    "dropout": (lambda q, k, v: flash_attn_func(q, k, v, dropout_p=0.1), "dropout_p=0.1"),
    "rotary": (
        lambda q, k, v: flash_attn_with_kvcache(q, k, v, rotary_cos=q, rotary_sin=q),
        "rotary_cos",
    ),
    "left padding": (
        lambda q, k, v: flash_attn_with_kvcache(q, k, v, cache_leftpad=torch.zeros(2)),
        "cache_leftpad",
    ),
    "gradient of a cache": (
        lambda q, k, v: flash_attn_with_kvcache(q.requires_grad_(), k, v),
        "required by q",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_raises_and_names_the_way_out(name):
    call, part = REFUSED[name]
    with pytest.raises(fovea.UnsupportedError, match=part) as error:
        call(*make())
    assert "allowed: " in str(error.value)


def test_deterministic_reaches_the_call(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fovea.flash_attn.attention",
        lambda *a, **k: seen.append(k["deterministic"]) or (a[0], fovea.Aux()),
    )
    flash_attn_func(*make(), deterministic=True)
    flash_attn_func(*make())
    assert seen == [True, None]


def test_learnable_sink_joins_the_denominator():
    q, k, v = make()
    sink = torch.randn(4, dtype=torch.float64)
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, learnable_sink=sink)
    expected = torch.logaddexp(spelled(q, k, v)[1], sink.view(1, 4, 1))
    torch.testing.assert_close(lse, expected)


@pytest.mark.parametrize("window_size", [(2,), (1, 2, 3), 4, "no"])
def test_window_size_that_is_no_pair_raises_type_error(window_size):
    with pytest.raises(TypeError, match=r"window_size.*pair"):
        flash_attn_func(*make(), window_size=window_size)


@pytest.mark.parametrize(
    ("lengths", "pages", "message"),
    [
        ([3, 14], [0, 1], r"cache_seqlens\[1\]=14"),
        ([-3, 4], [0, 1], r"cache_seqlens\[0\]=-3"),
        ([3, 4], [-1, 1], r"block_table\[0, 0\]=-1"),
    ],
    ids=["too long", "negative length", "negative page"],
)
def test_kvcache_checks_before_it_writes(lengths, pages, message):
    q, k, v = make(seqlen_k=5)
    cache = torch.zeros(2, 16, 2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(
            q,
            cache,
            cache,
            k,
            v,
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(pages, dtype=torch.int32).view(2, 1),
        )
    assert not cache.any()


@pytest.mark.parametrize("window", [(-2, 3), (3, -7)])
def test_window_below_minus_one_names_window_size(window):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"window_size=-\d is not valid.*pass -1"):
        flash_attn_func(q, q, q, window_size=window)


def test_negative_softcap_says_that_zero_is_none():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"softcap=-1\.0 is not valid.*pass 0"):
        flash_attn_func(q, q, q, softcap=-1.0)
