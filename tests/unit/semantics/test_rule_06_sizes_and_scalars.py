"""Rule 6: offsets are 64-bit; lengths, windows, strides and scalars are arguments, not keys."""

import pytest
import torch

import fovea
from fovea.mods.trace import trace_mask_mod, trace_score_mod
from fovea.testing.inputs import Shape, dense_qkv, normal

FAR = 2**31 + 1024  # elements: past what a 32-bit offset reaches


def _far_apart(x):
    """Return a copy of x, (2, seqlen, heads, dim), whose sequences lie FAR elements apart."""
    # The pages in between are never touched, so this costs address space, not memory.
    storage = torch.empty(FAR + x[0].numel(), dtype=x.dtype)
    heads, dim = x.shape[2:]
    far = storage.as_strided(x.shape, (FAR, heads * dim, dim, 1))
    far.copy_(x)
    return far


@pytest.mark.parametrize("which", [0, 1, 2])
def test_offsets_beyond_32_bits_are_right(which):
    tensors = list(
        dense_qkv(Shape(batch=2, seqlen_q=3, heads_q=2, head_dim=8), dtype=torch.bfloat16)
    )
    expected = fovea.attention(*tensors, causal=True)
    tensors[which] = _far_apart(tensors[which])
    assert torch.equal(fovea.attention(*tensors, causal=True), expected)


def test_captured_tensor_offsets_beyond_32_bits_are_right():
    q, k, v = dense_qkv(Shape(batch=2, seqlen_q=3))
    bias = normal((2, 1, 3, 3), seed=5)
    far = _far_apart(bias)

    def call(table):
        return fovea.attention(
            q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[b, h, q_idx, kv_idx]
        )

    assert torch.equal(call(far), call(bias))


def test_captured_numbers_are_arguments_of_one_graph():
    def score_with(slope, power):
        return trace_score_mod(lambda s, b, h, q, kv: s + slope * (q - kv) * power)

    def mask_with(width):
        return trace_mask_mod(lambda b, h, q, kv: q - kv < width)

    assert score_with(0.5, 2).graph == score_with(-1.25, 7).graph
    assert mask_with(3).graph == mask_with(1000).graph


@pytest.mark.parametrize("slope", [0.5, -2.0])
@pytest.mark.parametrize("width", [1, 4])
def test_captured_numbers_take_effect_at_each_call(slope, width):
    q, k, v = dense_qkv(Shape(seqlen_q=6), dtype=torch.float64)

    def call(slope, width):
        return fovea.attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, q_idx, kv_idx: s + slope * kv_idx,
            mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < width,
        )

    call(99.0, 3)  # another value first: nothing of it may stay
    index = torch.arange(6)
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) / 4 + slope * index
    s = s.masked_fill((index.view(-1, 1) - index).abs() >= width, -torch.inf)
    expected = torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v)
    torch.testing.assert_close(call(slope, width), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [(2**40, 3), (0, 2**62), (2**31, 2**31)])
def test_windows_wider_than_any_length_are_unlimited(window):
    q, k, v = dense_qkv(Shape(seqlen_q=20, seqlen_kv=31))
    left, right = (None if side > 31 else side for side in window)
    assert torch.equal(
        fovea.attention(q, k, v, window=window), fovea.attention(q, k, v, window=(left, right))
    )
