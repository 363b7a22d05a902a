"""Jagged nested tensors through fovea.attention."""

import pytest
import torch

import fovea

LENGTHS_Q, LENGTHS_KV = (3, 1, 6), (4, 5, 2)


def parts(lengths, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, 8, generator=generator, dtype=torch.float64) for n in lengths]


def jagged(tensors):
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def make():
    return parts(LENGTHS_Q, 4, 0), parts(LENGTHS_KV, 2, 1), parts(LENGTHS_KV, 2, 2)


def test_each_sequence_attends_to_itself_and_gradients_flow():
    leaves = [[t.requires_grad_() for t in tensors] for tensors in make()]
    q, k = jagged(leaves[0]), jagged(leaves[1])
    v = torch.nested.nested_tensor_from_jagged(torch.cat(leaves[2]), offsets=k.offsets())
    out = fovea.attention(q, k, v, causal=True)
    assert out.is_nested
    expected = [
        fovea.attention(q[None], k[None], v[None], causal=True)[0]
        for q, k, v in zip(*leaves, strict=True)
    ]
    for one, other in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(one, other)
    flat = [t for tensors in leaves for t in tensors]
    found = torch.autograd.grad(out.values().square().sum(), flat)
    wanted = torch.autograd.grad(sum(e.square().sum() for e in expected), flat)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_lengths_that_are_equal_but_made_apart_are_taken():
    q, k, v = (jagged(tensors) for tensors in make())
    assert fovea.attention(q, k, v).unbind()[2].shape == (6, 4, 8)


def test_lse_is_packed():
    q, k, v = (jagged(tensors) for tensors in make())
    _, aux = fovea.attention(q, k, v, return_aux=fovea.AuxRequest(lse=True))
    assert aux.lse.shape == (4, sum(LENGTHS_Q))


def test_lengths_of_v_that_differ_from_k_raise():
    q, k, _ = (jagged(tensors) for tensors in make())
    v = jagged(parts((4, 4, 3), 2, 2))
    with pytest.raises(ValueError, match="lengths in v"):
        fovea.attention(q, k, v)


def test_mix_of_nested_and_dense_raises():
    q, k, v = (jagged(tensors) for tensors in make())
    with pytest.raises(TypeError, match="layouts of q, k, v"):
        fovea.attention(q, k, v.values()[None])


def test_transposed_nested_tensor_raises_and_says_where_the_jagged_axis_goes():
    q, k, v = (jagged(tensors).transpose(1, 2) for tensors in make())
    with pytest.raises(ValueError, match=r"q\.transpose\(1, 2\)"):
        fovea.attention(q, k, v)


def test_strided_nested_tensor_raises():
    q = torch.nested.nested_tensor(make()[0])
    with pytest.raises(TypeError, match=r"torch\.jagged"):
        fovea.attention(q, q, q)


def test_jagged_with_holes_raises():
    values = torch.randn(10, 2, 8)
    offsets, lengths = torch.tensor([0, 5, 10]), torch.tensor([3, 4])
    q = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths)
    with pytest.raises(fovea.UnsupportedError, match="holes"):
        fovea.attention(q, q, q)
