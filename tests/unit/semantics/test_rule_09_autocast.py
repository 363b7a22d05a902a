"""Rule 9: AMP casts q, k and v inside the wrapper, nothing else; mixed dtypes raise."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv, normal

SHAPE = Shape(batch=1, seqlen_q=9, heads_q=2, head_dim=8)
AUX = fovea.AuxRequest(lse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_equals_an_explicit_cast(dtype):
    q, k, v = dense_qkv(SHAPE)
    with torch.autocast("cpu", dtype=dtype):
        out, aux = fovea.attention(q, k, v, causal=True, return_aux=AUX)
    cast = [x.to(dtype) for x in (q, k, v)]
    expected, expected_aux = fovea.attention(*cast, causal=True, return_aux=AUX)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert torch.equal(aux.lse, expected_aux.lse)


def test_autocast_gradients_come_back_in_the_inputs_dtype():
    leaves = [x.requires_grad_() for x in dense_qkv(SHAPE)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fovea.attention(*leaves)
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert {x.dtype for x in grads} == {torch.float32}


def test_autocast_leaves_sink_and_captured_tensors_alone():
    # Both hold a number that bfloat16 cannot: rounded, lse would be off by 2^-10.
    q, k, v = (torch.zeros(1, 1, 1, 8) for _ in range(3))
    sink, table = torch.tensor([1 + 2.0**-10]), torch.tensor([1 + 2.0**-10])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, aux = fovea.attention(
            q, k, v, sink=sink, score_mod=lambda s, b, h, m, n: s + table[h], return_aux=AUX
        )
    expected = 1 + 2.0**-10 + torch.tensor(2.0).log().item()
    assert abs(aux.lse.item() - expected) < 1e-6


def test_autocast_leaves_float64_alone():
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fovea.attention(q, k, v)
    assert torch.equal(out, fovea.attention(q, k, v))


def test_autocast_inside_leaves_the_products_in_float32():
    # Already 16-bit inputs under autocast: the reference's own matrix products must not be cast.
    q, k, v = dense_qkv(SHAPE, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, aux = fovea.attention(q, k, v, return_aux=AUX)
    expected, expected_aux = fovea.attention(q, k, v, return_aux=AUX)
    assert torch.equal(out, expected)
    assert torch.equal(aux.lse, expected_aux.lse)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_mixed_dtypes_raise_and_name_both(which):
    tensors = list(dense_qkv(SHAPE))
    tensors[which] = tensors[which].to(torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match=r"(?s)bfloat16.*float32|float32.*bfloat16"):
        fovea.attention(*tensors)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool], ids=str)
def test_dtypes_that_are_no_float_raise(dtype):
    q = torch.ones(1, 2, 1, 8).to(dtype)
    with pytest.raises((TypeError, ValueError), match=str(dtype)):
        fovea.attention(q, q, q)


def test_sink_of_another_float_dtype_is_taken():
    q, k, v = dense_qkv(SHAPE, dtype=torch.bfloat16)
    sink = normal((2,), seed=1)
    wide = fovea.attention(q, k, v, sink=sink.bfloat16().float())
    assert torch.equal(fovea.attention(q, k, v, sink=sink.bfloat16()), wide)
