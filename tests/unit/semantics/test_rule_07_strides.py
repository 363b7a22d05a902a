"""Rule 7: any strides give the result of contiguous copies; the output is dense in q's order."""

import itertools

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv, normal

SHAPE = Shape(batch=2, seqlen_q=5, seqlen_kv=7, heads_q=3, head_dim=8)


def _permuted(x, order):
    """Return x with its axes nested in memory as `order` says, outermost first."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def _sliced(x):
    """Return x as part of a larger tensor: last stride 1, odd other strides, base unaligned."""
    wide = torch.full(
        (x.shape[0], x.shape[1], x.shape[2], x.shape[3] + 3), torch.nan, dtype=x.dtype
    )
    wide[..., 1 : 1 + x.shape[3]] = x
    return wide[..., 1 : 1 + x.shape[3]]


def _every_second(x):
    """Return x with last stride 2."""
    wide = torch.full((*x.shape[:3], x.shape[3] * 2), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


LAYOUTS = {
    "heads_outside": lambda x: _permuted(x, (0, 2, 1, 3)),
    "dims_outside": lambda x: _permuted(x, (3, 0, 1, 2)),
    "sliced": _sliced,
    "last_stride_two": _every_second,
}


def _run(q, k, v):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = fovea.attention(*leaves, causal=True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, torch.autograd.grad((out * weight).sum(), leaves)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout_gives_the_result_of_contiguous_inputs(dtype, which, layout):
    tensors = list(dense_qkv(SHAPE, dtype=dtype))
    expected, expected_grads = _run(*tensors)
    tensors[which] = layout(tensors[which])
    out, grads = _run(*tensors)
    torch.testing.assert_close(out, expected)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_output_is_dense_in_the_stride_order_of_q(order):
    q, k, v = dense_qkv(SHAPE)
    q = _permuted(q, order)
    assert fovea.attention(q, k, v).stride() == q.stride()


def test_output_of_a_sliced_query_is_dense():
    q, k, v = dense_qkv(SHAPE)
    out = fovea.attention(_sliced(_permuted(q, (0, 2, 1, 3))), k, v)
    assert out.is_contiguous()


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_expanded_inputs_are_right_and_so_are_their_gradients(axis):
    sizes = [2, 7, 3, 8]
    sizes[axis] = 1
    q = normal((2, 5, 3, 8), seed=0, dtype=torch.float64)
    small = [normal(sizes, seed=i, dtype=torch.float64).requires_grad_() for i in (1, 2)]

    def run(expand):
        k, v = (expand(x) for x in small)
        out = fovea.attention(q, k, v)
        return out, torch.autograd.grad(out.square().sum(), small)

    out, grads = run(lambda x: x.expand(2, 7, 3, 8))
    expected, expected_grads = run(lambda x: x.expand(2, 7, 3, 8).contiguous())
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (0, 1, 2), (3,), (0, 3)], ids=str)
def test_expanded_query_gives_a_dense_output(axes):
    sizes = [1 if axis in axes else extent for axis, extent in enumerate((2, 5, 3, 8))]
    q = normal(sizes, seed=0).expand(2, 5, 3, 8)
    _, k, v = dense_qkv(SHAPE)
    out = fovea.attention(q, k, v)
    assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
    assert out.stride(3) == 1
    torch.testing.assert_close(out, fovea.attention(q.contiguous(), k, v))


def test_fakes_agree_on_the_strides_of_expanded_inputs():
    sizes = [(1, 5, 1, 8), (1, 7, 3, 8), (2, 7, 1, 8)]
    wide = [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8)]
    small = [normal(size, seed=i) for i, size in enumerate(sizes)]

    def run(attend):
        leaves = [x.expand(size).requires_grad_() for x, size in zip(small, wide, strict=True)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out.sum(), leaves)

    expected = run(fovea.attention)
    found = run(torch.compile(lambda *x: fovea.attention(*x), backend="aot_eager", fullgraph=True))
    for wanted, got in zip(expected, found, strict=True):
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)


def test_inputs_are_left_as_they_were():
    tensors = dense_qkv(SHAPE)
    copies = [x.clone() for x in tensors]
    fovea.attention(*tensors, causal=True, softcap=3.0)
    for x, copy in zip(tensors, copies, strict=True):
        assert torch.equal(x, copy)
