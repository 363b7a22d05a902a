"""Arguments of a wrong kind, whichever function takes them: an error that says what is allowed."""

import math

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import fovea
from fovea import flash_attn
from fovea.errors import TraceError
from fovea.testing.inputs import Shape, cumulative, dense_qkv

Q, K, V = dense_qkv(Shape(batch=2, seqlen_q=6, seqlen_kv=8, heads_q=4, heads_kv=2, head_dim=8))
TABLE = np.arange(4, dtype=np.float32)
CU = cumulative([6, 6])


def dense(**options):
    return fovea.attention(Q, K, V, **options)


def flex(**options):
    tensors = (x.transpose(1, 2) for x in (Q, K, V))
    return fovea.flex_attention(*tensors, enable_gqa=True, **options)


def packed(**options):
    q = Q.flatten(0, 1)
    arguments = {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_seqlen_q": 6, "max_seqlen_kv": 6}
    return fovea.attention_varlen(q, q, q, **(arguments | options))


def cached(**options):
    arguments = {"q": Q, "k_cache": K.clone(), "v_cache": V.clone(), "cache_seqlens": 3} | options
    return flash_attn.flash_attn_with_kvcache(**arguments)


def drop_in(**options):
    return flash_attn.flash_attn_func(Q, K, V, **options)


SINK = torch.zeros(4)
NESTED = torch.nested.nested_tensor([torch.zeros(4)], layout=torch.strided)
NEW = torch.zeros(2, 1, 2, 8)
WRONG = {
    "sparse sink": (dense, {"sink": SINK.to_sparse()}, r"sink\.layout=torch\.sparse_coo"),
    "mkldnn sink": (dense, {"sink": SINK.to_mkldnn()}, r"sink\.layout=torch\._mkldnn"),
    "nested sink": (dense, {"sink": NESTED}, r"sink\.layout=a nested tensor"),
    "sparse bounds": (packed, {"cu_seqlens_q": CU.to_sparse()}, r"cu_seqlens_q\.layout"),
    "sparse lengths": (packed, {"seqused_kv": CU[1:].to_sparse()}, r"seqused_kv\.layout"),
    "nested lengths": (packed, {"seqused_q": NESTED}, r"seqused_q\.layout=a nested"),
    "sparse pages": (
        packed,
        {
            "cu_seqlens_kv": None,
            "seqused_kv": CU[1:],
            "page_table": torch.zeros(2, 1, dtype=torch.int32).to_sparse(),
        },
        r"page_table\.layout",
    ),
    "sparse scale": (dense, {"scale": torch.tensor(1.0).to_sparse()}, r"scale\.layout"),
    "causal array": (dense, {"causal": np.zeros(3)}, r"causal=array"),
    "backend array": (dense, {"backend": np.zeros(3)}, r"backend=array"),
    "scale array of one": (dense, {"scale": np.ones(1)}, r"scale=array"),
    "scale array of text": (dense, {"scale": np.array("a")}, r"scale=array"),
    "softcap array": (dense, {"softcap": np.ones(3)}, r"softcap=array"),
    "complex scale of NumPy": (dense, {"scale": np.complex64(1)}, r"scale=np\.complex64"),
    "max_seqlen array": (packed, {"max_seqlen_q": np.array([6])}, r"max_seqlen_q=array"),
    "block mask of three": (
        lambda **options: fovea.attention(Q[:1], K[:1], V[:1], **options),
        {"block_mask": fovea.create_block_mask(lambda b, h, i, j: i >= j, 3, None, 6, 8, "cpu")},
        r"batch\)=3 is not valid \(allowed: 1\); build the block mask with B=1\.$",
    ),
    "softcap beyond float32": (dense, {"softcap": 1e300}, r"softcap=1e\+300.*float32"),
    "softcap that float32 makes 0": (dense, {"softcap": 1e-300}, "softcap=1e-300.*float32"),
    "scale of many digits": (dense, {"scale": -(10**5000)}, r"scale=an integer of 16610 bits"),
    "scale beyond float32": (dense, {"scale": -1e39}, r"scale=-1e\+39.*float32"),
    "kernel_options": (flex, {"kernel_options": 3}, "kernel_options=int"),
    "fovea's AuxRequest in flex": (
        flex,
        {"return_aux": fovea.AuxRequest(lse=True)},
        r"return_aux=fovea.*AuxRequest.*goes to fovea\.attention",
    ),
    "torch's AuxRequest": (dense, {"return_aux": AuxRequest(lse=True)}, "return_aux=AuxRequest"),
    "max_seqlen": (packed, {"max_seqlen_q": 6.0}, r"max_seqlen_q=6\.0"),
    "slopes in a list": (drop_in, {"alibi_slopes": [1, 2, 3, 4]}, "alibi_slopes=list"),
    "NumPy array": (
        dense,
        {"score_mod": lambda s, b, h, i, j: s + TABLE[h]},
        r"NumPy array.*torch\.from_numpy",
    ),
    "cache_seqlens float": (cached, {"cache_seqlens": 3.0}, r"cache_seqlens=3\.0"),
    "cache_seqlens of one": (cached, {"cache_seqlens": torch.tensor([3])}, r"cache_seqlens=\(1,\)"),
    "cache_seqlens floats": (cached, {"cache_seqlens": torch.ones(2)}, r"cache_seqlens=.*float32"),
    "cache of three axes": (cached, {"k_cache": K[0]}, r"k_cache\.shape=\(8, 2, 8\)"),
    "cache no tensor": (cached, {"v_cache": None, "k_cache": [1]}, "k_cache=list"),
    "block_table of one axis": (cached, {"block_table": CU}, r"block_table\.shape=\(3,\)"),
    "k without v": (cached, {"k": NEW}, "v=None"),
    "v without k": (cached, {"v": NEW}, "k=None"),
    "new rows of other heads": (
        cached,
        {"k": NEW, "v": NEW[:, :, :1]},
        r"v\.shape=\(2, 1, 1, 8\).*\(2, 1, 2, 8\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_odd_argument_raises_and_names_itself(name):
    function, options, text = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=f"(?s){text}") as caught:
        function(**options)
    assert "allowed: " in str(caught.value) or isinstance(caught.value, TraceError)


def test_new_rows_of_a_wrong_shape_leave_the_cache_alone():
    cache = K.clone()
    with pytest.raises(ValueError, match=r"v\.shape"):
        cached(k_cache=cache, k=NEW, v=NEW[:, :, :1])
    assert torch.equal(cache, K)


def test_numbers_that_float64_alone_holds_are_taken_with_float64():
    tensors = [x.double() for x in (Q, K, V)]
    wide = fovea.attention(*tensors, softcap=1e300)
    torch.testing.assert_close(wide, fovea.attention(*tensors), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="softcap=inf"):
        fovea.attention(*tensors, softcap=math.inf)


def test_number_beyond_float32_raises_in_a_graph_too():
    @torch.compile(backend="eager", fullgraph=True)
    def call(x, softcap):
        return fovea.attention(x, x, x, softcap=softcap)

    call(Q, torch.tensor(3.0, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"softcap.*float32"):
        call(Q, torch.tensor(1e300, dtype=torch.float64))


def test_integers_of_numpy_are_integers():
    assert torch.equal(packed(max_seqlen_q=np.int64(6), max_seqlen_kv=np.int32(6)), packed())


def test_block_mask_on_a_meta_device_raises():
    with pytest.raises(ValueError, match=r"device=meta .*block_mask\.to\('meta'\)"):
        fovea.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="meta")
