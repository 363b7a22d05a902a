"""Rule 12: wrong input raises ValueError or TypeError: argument, value got, allowed, way out."""

import pytest
import torch

import fovea
from fovea.errors import FoveaError, UnsupportedError
from fovea.testing.inputs import Shape, cumulative, dense_qkv
from fovea.testing.masks import block_mask_of, random_states

SHAPE = Shape(batch=2, seqlen_q=8, seqlen_kv=12, heads_q=4, heads_kv=2, head_dim=8)


def _block_mask(seqlen_q=8, seqlen_kv=12, batch=1, heads=1):
    states = random_states(batch, heads, -(-seqlen_q // 4), -(-seqlen_kv // 4))
    return block_mask_of(
        states,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        block_q=4,
        block_kv=4,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    )


BAD_OPTIONS = {
    "causal": ({"causal": "lower_left"}, r"causal.*lower_left.*bottom_right.*top_left"),
    "window_negative": ({"window": (-1, 0)}, r"window.*-1"),
    "window_shape": ({"window": 5}, r"window.*5"),
    "window_three": ({"window": (1, 2, 3)}, r"window.*\(1, 2, 3\)"),
    "window_float": ({"window": (1.5, 0)}, r"window.*1\.5"),
    "softcap_zero": ({"softcap": 0.0}, r"softcap.*0"),
    "softcap_negative": ({"softcap": -3.0}, r"softcap.*-3"),
    "softcap_nan": ({"softcap": float("nan")}, r"softcap.*nan"),
    "scale_nan": ({"scale": float("nan")}, r"scale.*nan"),
    "scale_inf": ({"scale": float("inf")}, r"scale.*inf"),
    "scale_text": ({"scale": "big"}, r"scale"),
    "scale_vector": ({"scale": torch.ones(2)}, r"scale"),
    "sink_shape": ({"sink": torch.zeros(3)}, r"sink.*3.*4"),
    "sink_dtype": ({"sink": torch.zeros(4, dtype=torch.int32)}, r"sink.*int32"),
    "score_mod_arity": ({"score_mod": lambda s, b, h, q: s}, r"score_mod|score, b, h, q_idx"),
    "mask_mod_arity": ({"mask_mod": lambda b, h, q: q > 0}, r"mask_mod|b, h, q_idx"),
    "mask_mod_type": ({"mask_mod": lambda b, h, q, k: q + k}, r"bool"),
    "score_mod_no_callable": ({"score_mod": 3}, r"score_mod"),
    "block_mask_type": ({"block_mask": torch.ones(8, 12)}, r"block_mask"),
    "block_mask_length": ({"block_mask": _block_mask(seqlen_kv=16)}, r"block_mask.*16.*12"),
    "block_mask_batch": ({"block_mask": _block_mask(batch=3)}, r"block_mask.*3.*2"),
    "block_mask_heads": ({"block_mask": _block_mask(heads=3)}, r"block_mask.*3.*4"),
    "return_aux": ({"return_aux": True}, r"return_aux"),
    "scale_requires_grad": (
        {"scale": torch.tensor(1.0, requires_grad=True)},
        r"scale.*score_mod",
    ),
}


@pytest.mark.parametrize(("options", "match"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_option_raises_and_names_itself(options, match):
    q, k, v = dense_qkv(SHAPE)
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}") as caught:
        fovea.attention(q, k, v, **options)
    assert len(str(caught.value)) > 40


BAD_TENSORS = {
    "q_rank": (lambda q, k, v: (q[0], k, v), r"q"),
    "k_batch": (lambda q, k, v: (q, k[:1], v), r"batch"),
    "v_length": (lambda q, k, v: (q, k, v[:, :5]), r"v.*5.*12"),
    "k_head_dim": (lambda q, k, v: (q, k[..., :4], v), r"head_dim.*4.*8|head_dim.*8.*4"),
    "head_ratio": (lambda q, k, v: (q[:, :, :3], k, v), r"heads.*3.*2"),
    "kv_heads": (lambda q, k, v: (q, k, v[:, :, :1]), r"heads"),
    "no_tensor": (lambda q, k, v: (q, k, [1.0]), r"v"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), r"meta"),
}


@pytest.mark.parametrize(("change", "match"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_bad_tensor_raises_and_names_itself(change, match):
    tensors = change(*dense_qkv(SHAPE))
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}") as caught:
        fovea.attention(*tensors)
    assert len(str(caught.value)) > 40


def test_head_dim_above_576_raises():
    q, k, v = dense_qkv(Shape(seqlen_q=2, head_dim=584))
    with pytest.raises((ValueError, UnsupportedError), match=r"head_dim.*584.*576"):
        fovea.attention(q, k, v)


def _varlen(cu_q, cu_kv, **options):
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=8, seqlen_kv=8, heads_q=2))
    return fovea.attention_varlen(q[0], k[0], v[0], cu_q, cu_kv, 8, 8, **options)


@pytest.mark.parametrize(
    ("cu_seqlens", "match"),
    [
        ([1, 4, 8], r"cu_seqlens_q.*1"),
        ([0, 5, 4, 8], r"cu_seqlens_q"),
        ([0, 4, 9], r"cu_seqlens_q.*9"),
    ],
)
def test_bad_contents_of_cu_seqlens_raise(cu_seqlens, match):
    bad = torch.tensor(cu_seqlens, dtype=torch.int32)
    good = cumulative([8] + [0] * (len(cu_seqlens) - 2))
    with pytest.raises(ValueError, match=match):
        _varlen(bad, good)


def test_max_seqlen_too_small_raises():
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=8))
    cu_seqlens = cumulative([8])
    with pytest.raises(ValueError, match=r"max_seqlen_q.*7"):
        fovea.attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 7, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_cu_seqlens_of_a_wrong_dtype_raises(dtype):
    with pytest.raises((TypeError, ValueError), match="cu_seqlens_q"):
        _varlen(cumulative([8]).to(dtype), cumulative([8]))


def test_gather_out_of_range_at_a_visible_position_raises():
    table = torch.zeros(10)
    q, k, v = dense_qkv(SHAPE)

    def call(**options):
        return fovea.attention(
            q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[kv_idx], **options
        )

    with pytest.raises(IndexError, match=r"\(10,\).*test_rule_12_errors.py"):
        call()
    call(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 10)


def test_unsupported_is_a_not_implemented_error_of_fovea():
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(UnsupportedError, FoveaError)
