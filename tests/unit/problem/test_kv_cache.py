"""Calls that append to a KV cache: what is wrong raises, and leaves the cache as it was."""

import re

import numpy as np
import pytest
import torch

import fovea
from fovea.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

Q = torch.randn(2, 1, 4, 8)
NEW = torch.ones(2, 1, 2, 8)
PACKED = torch.randn(4, 2, 8)
BOUNDS = torch.tensor([0, 2, 4], dtype=torch.int32)
SLOPES = torch.rand(4)
NESTED = torch.nested.nested_tensor([torch.zeros(4)], layout=torch.strided)
INT32 = torch.int32


def append(**options):
    """Call with new rows on caches of zeros; return those after an error, and its text."""
    keys, values = torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)
    arguments = {"q": Q, "k_cache": keys, "v_cache": values, "k": NEW, "v": NEW}
    arguments |= {"cache_seqlens": 3} | options
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        flash_attn_with_kvcache(**arguments)
    named = [arguments[name] for name in ("k_cache", "v_cache")]
    return [keys, values, *[x for x in named if isinstance(x, torch.Tensor)]], str(caught.value)


WRONG = {
    "window": ({"window_size": (-5, 0)}, "window_size=-5"),
    "window of tensors": ({"window_size": (torch.tensor([1, 2]), 0)}, r"window left=tensor"),
    "softcap": ({"softcap": -1}, "softcap=-1"),
    "softcap text": ({"softcap": ""}, "softcap=''"),
    "softcap list": ({"softcap": []}, r"softcap=\[\]"),
    "causal": ({"causal": "yes"}, "causal='yes'"),
    "scale": ({"softmax_scale": "1"}, "scale='1'"),
    "slopes of three heads": ({"alibi_slopes": torch.rand(3)}, r"alibi_slopes\.shape=\(3,\)"),
    "q in half": ({"q": Q.half()}, r"k_cache\.dtype=torch\.float32.*the dtype of q"),
    "q of three heads": ({"q": Q[:, :, :3]}, "heads of q=3"),
    "q with a gradient": ({"q": Q.clone().requires_grad_()}, "required by q"),
    "k with a gradient": ({"k": NEW.clone().requires_grad_()}, "required by k"),
    "v with a gradient": ({"v": NEW.clone().requires_grad_()}, "required by v"),
    "slopes with a gradient": ({"alibi_slopes": SLOPES.clone().requires_grad_()}, "required by"),
    "v_cache shorter": ({"v_cache": torch.zeros(2, 7, 2, 8)}, r"v_cache\.shape\[:2\]=\(2, 7\)"),
    "q None": ({"q": None}, "q=NoneType"),
    "k_cache None": ({"k_cache": None}, "k_cache=NoneType"),
    "v_cache None": ({"v_cache": None}, "v_cache=NoneType"),
    "k sparse": ({"k": NEW.to_sparse()}, r"k\.layout=torch\.sparse_coo"),
    "k of integers": ({"k": NEW.int()}, r"k\.dtype=torch\.int32"),
    "v in half": ({"v": NEW.half()}, r"v\.dtype=torch\.float16"),
    "expanded k_cache": (
        {"k_cache": torch.zeros(1, 8, 2, 8).expand(2, -1, -1, -1)},
        r"strides of k_cache=\(0,.*contiguous",
    ),
    "overlapping v_cache": (
        {"v_cache": torch.zeros(9 * 16).as_strided((2, 8, 2, 8), (16, 16, 8, 1))},
        r"strides of v_cache=\(16, 16",
    ),
    "length beyond int32": ({"cache_seqlens": torch.tensor([2**32 + 3, 2])}, r"=4294967299 "),
    "length of a call beyond int32": ({"cache_seqlens": 2**40}, "cache_seqlens=1099511627776"),
    "length beyond the cache": ({"cache_seqlens": 8}, "cache_seqlens=8 .*0 to 7"),
    "lengths in an array": ({"cache_seqlens": np.zeros(3)}, "cache_seqlens=array"),
    "sparse lengths": ({"cache_seqlens": BOUNDS.to_sparse()}, r"cache_seqlens\.layout"),
    "nested lengths": ({"cache_seqlens": NESTED}, r"cache_seqlens\.layout=a nested"),
    "nested slopes": ({"alibi_slopes": NESTED}, r"alibi_slopes\.layout=a nested"),
    "no length": ({"cache_seqlens": None}, "cache_seqlens=None"),
    "negative length": ({"cache_seqlens": -1}, "cache_seqlens=-1"),
    "lengths of bools": ({"cache_seqlens": torch.ones(2).bool()}, r"cache_seqlens=.*torch\.bool"),
    "complex lengths": ({"cache_seqlens": torch.ones(2) * 1j}, r"cache_seqlens=.*complex64"),
    "row beyond int32": ({"cache_batch_idx": torch.tensor([2**32, 1])}, r"cache_batch_idx\[0\]=42"),
    "negative row": ({"cache_batch_idx": torch.tensor([0, -1])}, r"cache_batch_idx\[1\]=-1"),
    "rows of floats": ({"cache_batch_idx": torch.tensor([0.7, 1.9])}, "cache_batch_idx.*float32"),
    "rows of bools": ({"cache_batch_idx": torch.tensor([False, True])}, "cache_batch_idx.*bool"),
    "three rows": ({"cache_batch_idx": torch.tensor([0, 1, 0])}, r"cache_batch_idx\.shape\[0\]=3"),
    "one row twice": ({"cache_batch_idx": torch.tensor([1, 1])}, "same place.*0 and 1"),
    "one page twice": (
        {"block_table": torch.tensor([[1], [1]], dtype=INT32)},
        "block_table=the same place",
    ),
    "pages in int64": ({"block_table": torch.tensor([[0], [1]])}, r"block_table\.dtype"),
    "three rows of pages": (
        {"block_table": torch.zeros(3, 1, dtype=INT32)},
        r"block_table\.shape\[0\]=3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_append_that_is_wrong_raises_and_leaves_the_cache_alone(name):
    options, message = WRONG[name]
    caches, text = append(**options)
    assert not any(cache.any() for cache in caches)
    assert "allowed: " in text
    assert re.search(message, text, re.DOTALL), text


def test_gradient_that_nobody_asks_for_is_no_error():
    cache = torch.zeros(2, 8, 2, 8)
    rows = NEW.clone().requires_grad_()
    with torch.no_grad():
        flash_attn_with_kvcache(Q, cache, cache.clone(), rows, rows, cache_seqlens=3)
    assert cache[:, 3].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_narrow_and_wide_integers_are_taken(dtype):
    caches = torch.randn(2, 3, 8, 2, 8)
    expected = flash_attn_with_kvcache(Q, *caches.clone()[:, [2, 0]], NEW, NEW, cache_seqlens=3)
    found = flash_attn_with_kvcache(
        Q,
        *caches,
        NEW,
        NEW,
        cache_seqlens=torch.tensor([3, 3], dtype=dtype),
        cache_batch_idx=torch.tensor([2, 0], dtype=dtype),
    )
    torch.testing.assert_close(found, expected)


def test_transposed_cache_is_appended_to():
    stored = torch.zeros(2, 2, 8, 8)
    flash_attn_with_kvcache(
        Q,
        stored.transpose(1, 2),
        stored.transpose(1, 2).clone(),
        NEW,
        NEW,
        cache_seqlens=np.int64(3),
    )
    assert stored[:, :, 3].eq(1).all()
    assert stored.sum() == NEW.sum()


def test_autocast_sees_the_rows_that_were_appended():
    caches = torch.randn(2, 2, 8, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = flash_attn_with_kvcache(Q, *caches, NEW, NEW, cache_seqlens=3)
        again = flash_attn_with_kvcache(Q, *caches, cache_seqlens=4)
    assert torch.equal(found, again)
    assert caches[0, :, 3].eq(1).all()


def test_append_in_a_graph_equals_that_outside():
    caches = torch.randn(2, 2, 8, 2, 8)
    call = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True, dynamic=True)
    lengths = torch.tensor([3, 4], dtype=INT32)
    expected_caches = caches.clone()
    expected = flash_attn_with_kvcache(Q, *expected_caches, NEW, NEW, cache_seqlens=lengths)
    found = call(Q, *caches, NEW, NEW, cache_seqlens=lengths)
    torch.testing.assert_close(found, expected)
    assert torch.equal(caches, expected_caches)


def varlen(**options):
    arguments = {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": BOUNDS}
    arguments |= {"cu_seqlens_k": BOUNDS, "max_seqlen_q": 2, "max_seqlen_k": 2} | options
    return flash_attn_varlen_func(**arguments)


def dense(**options):
    return flash_attn_func(**({"q": Q, "k": NEW, "v": NEW} | options))


TABLE = torch.zeros(2, 1, dtype=INT32)
NOT_TAKEN = {
    "no bounds": (varlen, {"cu_seqlens_k": None}, "cu_seqlens_k=NoneType"),
    "no bounds with pages": (
        varlen,
        {"cu_seqlens_k": None, "block_table": TABLE},
        "cu_seqlens_k=NoneType",
    ),
    "sparse bounds": (varlen, {"cu_seqlens_q": BOUNDS.to_sparse()}, r"cu_seqlens_q\.layout"),
    "bounds of int64": (varlen, {"cu_seqlens_k": BOUNDS.long()}, r"cu_seqlens_k\.dtype"),
    "bounds of one sequence": (
        varlen,
        {"cu_seqlens_k": BOUNDS[:2], "alibi_slopes": SLOPES[:2]},
        r"cu_seqlens_k\.shape=\(2,\)",
    ),
    "no packed q": (varlen, {"q": None, "alibi_slopes": SLOPES}, "q=NoneType"),
    "no packed k": (varlen, {"k": None, "alibi_slopes": SLOPES[:2]}, "k=NoneType"),
    "nested k": (varlen, {"k": NESTED}, r"k\.layout=torch\.strided, nested"),
    "no q": (dense, {"q": None, "alibi_slopes": SLOPES}, "q=NoneType"),
    "no k": (dense, {"k": None, "alibi_slopes": SLOPES}, "k=NoneType"),
    "softcap text": (dense, {"softcap": ""}, "softcap=''"),
    "deterministic text": (dense, {"deterministic": ""}, "deterministic=''"),
    "packed deterministic list": (varlen, {"deterministic": []}, r"deterministic=\[\]"),
    "dropout text": (dense, {"dropout_p": ""}, "dropout_p=''"),
    "window of tensors": (dense, {"window_size": (torch.tensor([1, 2]), 0)}, "window left=tensor"),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_argument_of_a_drop_in_that_is_wrong_names_itself(name):
    function, options, message = NOT_TAKEN[name]
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}.*allowed: "):
        function(**options)


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), torch.tensor(0.0)], ids=repr)
def test_softcap_of_zero_is_off_however_it_is_written(zero):
    assert torch.equal(dense(softcap=zero), fovea.attention(Q, NEW, NEW))


@pytest.mark.parametrize("compiled", [False, True])
def test_new_rows_that_are_views_of_the_caches_are_appended_as_they_were(compiled):
    q = torch.randn(2, 5, 4, 8)
    keys, values = torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    wanted_k, wanted_v = keys[:, 0:5].clone(), keys[:, 2:7].clone()

    def step(q, keys, values):
        # v too: rows of the cache that k is written to
        return flash_attn_with_kvcache(
            q, keys, values, keys[:, 0:5], keys[:, 2:7], cache_seqlens=3, causal=True
        )

    out = (torch.compile(step, backend="aot_eager") if compiled else step)(q, keys, values)
    assert torch.equal(keys[:, 3:8], wanted_k)
    assert torch.equal(values[:, 3:8], wanted_v)
    again = flash_attn_with_kvcache(q, keys, values, cache_seqlens=8, causal=True)
    assert torch.equal(out, again)
