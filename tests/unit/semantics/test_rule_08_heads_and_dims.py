"""Rule 8: head dims 1..576, q/k and v apart; heads_q any multiple of heads_kv; every dtype."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv
from fovea.testing.problems import check_reference, dense_problem
from fovea.testing.spelled_out import band, spelled_out

DIMS = [1, 2, 7, 8, 16, 31, 64, 80, 96, 127, 128, 192, 255, 256, 512]


def _check(shape):
    ours = [x.requires_grad_() for x in dense_qkv(shape, dtype=torch.float64)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    out = fovea.attention(*ours, causal=True)
    visible = band(shape.q[1], shape.k[1], causal=True)
    expected = spelled_out(*theirs, visible=visible).out
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), ours)
    for found, wanted in zip(
        grads, torch.autograd.grad(expected.square().sum(), theirs), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("head_dim", DIMS)
def test_equal_head_dims(head_dim):
    _check(Shape(batch=1, seqlen_q=9, seqlen_kv=11, heads_q=2, head_dim=head_dim))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 128), (128, 192), (1, 256), (65, 3), (576, 512)]
)
def test_head_dim_of_v_may_differ(head_dim, head_dim_v):
    _check(Shape(batch=2, seqlen_q=9, heads_q=2, head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize(
    ("heads_q", "heads_kv"),
    [(1, 1), (2, 1), (3, 1), (6, 2), (10, 2), (7, 1), (9, 3), (12, 12), (71, 1)],
)
def test_heads_q_is_any_multiple_of_heads_kv(heads_q, heads_kv):
    _check(Shape(batch=2, seqlen_q=6, seqlen_kv=9, heads_q=heads_q, heads_kv=heads_kv, head_dim=8))


@pytest.mark.parametrize("head_dim", [8, 40, 128])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_dtype_is_within_its_budget(dtype, head_dim):
    shape = Shape(batch=2, seqlen_q=40, seqlen_kv=70, heads_q=4, heads_kv=2, head_dim=head_dim)
    check_reference(dense_problem(shape, dtype=dtype, causal=True), tile_n=32)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_outputs_and_gradients_keep_the_dtype(dtype):
    leaves = [x.requires_grad_() for x in dense_qkv(Shape(seqlen_q=4), dtype=dtype)]
    out = fovea.attention(*leaves)
    assert out.dtype == dtype
    assert {x.dtype for x in torch.autograd.grad(out.sum(), leaves)} == {dtype}
