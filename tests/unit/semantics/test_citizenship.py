"""Design 1.3: torch.func transforms, captured gradients of every kind, nothing kept needlessly."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv, normal
from fovea.testing.spelled_out import spelled_out

SHAPE = Shape(batch=2, seqlen_q=5, seqlen_kv=7, heads_q=4, heads_kv=2, head_dim=4)


def test_func_grad_equals_autograd():
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)

    def loss(q, k, v):
        return fovea.attention(q, k, v, causal=True).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for one, other in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_func_grad_of_grad_equals_autograd():
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)

    def first(q):
        return torch.func.grad(lambda q: fovea.attention(q, k, v).square().sum())(q).square().sum()

    found = torch.func.grad(first)(q)
    leaf = q.clone().requires_grad_()
    out = spelled_out(leaf, k, v).out.square().sum()
    (grad,) = torch.autograd.grad(out, [leaf], create_graph=True)
    (expected,) = torch.autograd.grad(grad.square().sum(), [leaf])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (2, 1, 0)])
def test_vmap_equals_a_loop(in_dims):
    tensors = []
    for x, dim in zip(dense_qkv(SHAPE, dtype=torch.float64), in_dims, strict=True):
        several = torch.stack([x, x * 2, -x])
        tensors.append(several.movedim(0, dim) if dim is not None else x)
    call = lambda q, k, v: fovea.attention(q, k, v, causal=True, softcap=2.0)  # noqa: E731
    found = torch.vmap(call, in_dims=in_dims)(*tensors)
    for i in range(3):
        parts = [
            x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=True)
        ]
        torch.testing.assert_close(found[i], call(*parts), rtol=1e-12, atol=1e-13)


CAPTURES = {
    "0-d": ((), lambda t: lambda s, b, h, q, k: s * t),
    "per head": ((4,), lambda t: lambda s, b, h, q, k: s + t[h]),
    "relative": ((11,), lambda t: lambda s, b, h, q, k: s + t[q - k + 6]),
    "full bias": ((2, 4, 5, 7), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
    "broadcast bias": ((1, 4, 1, 7), lambda t: lambda s, b, h, q, k: s + t[0, h, 0, k]),
    "negative index": ((7,), lambda t: lambda s, b, h, q, k: s + t[-1 - k]),
    "two gathers": ((9,), lambda t: lambda s, b, h, q, k: s + t[q] * t[k + 2]),
    "not of the score": ((7,), lambda t: lambda s, b, h, q, k: t[k] * 1.0),
    "rows": ((9, 3), lambda t: lambda s, b, h, q, k: s + (t[q] * t[k]).sum()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "mod"), CAPTURES.values(), ids=CAPTURES.keys())
def test_captured_tensors_get_gradients(shape, mod, dtype):
    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    value = normal(shape, seed=3, dtype=torch.float64)

    def gradient(run):
        leaf = value.to(dtype).requires_grad_()
        out = run(leaf)
        weight = normal(out.shape, seed=4, dtype=torch.float64)
        return torch.autograd.grad((out * weight).sum(), [leaf])[0]

    found = gradient(lambda t: fovea.attention(q, k, v, causal=True, score_mod=mod(t)))
    expected = gradient(lambda t: _looped(q, k, v, mod(t)))
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == dtype


def _looped(q, k, v, mod):
    """Return causal attention whose mod is called on one score at a time, as it was written for."""
    s = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, dim=2)) / 2
    batch, heads, rows, keys = s.shape
    flat = []
    for b in range(batch):
        for h in range(heads):
            for m in range(rows):
                for n in range(keys):
                    index = [torch.tensor(i) for i in (b, h, m, n)]
                    hidden = n > m + keys - rows
                    flat.append(
                        torch.tensor(-torch.inf, dtype=s.dtype)
                        if hidden
                        else mod(s[b, h, m, n], *index).to(s.dtype)
                    )
    p = torch.stack(flat).view(s.shape).softmax(-1)
    return torch.einsum("bhmn,bnhd->bmhd", p, v.repeat_interleave(2, dim=2))


def test_no_grad_saves_nothing():
    q, k, v = (x.requires_grad_() for x in dense_qkv(SHAPE))
    saved: list[torch.Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        out = fovea.attention(q, k, v)
    assert not saved
    assert not out.requires_grad


def test_changing_an_input_before_backward_raises():
    q, k, v = dense_qkv(SHAPE)
    bias = torch.zeros(4)
    q.requires_grad_()
    out = fovea.attention(q, k, v, score_mod=lambda s, b, h, m, n: s + bias[h])
    bias.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_meta_tensors_give_shapes_to_any_order():
    q, k, v = (x.to("meta").requires_grad_() for x in dense_qkv(SHAPE))

    def mod(score, b, h, q_idx, kv_idx):
        return score + q_idx

    with torch.autocast("cpu", torch.bfloat16):
        out = fovea.attention(q, k, v, causal=True, score_mod=mod)
        first = torch.autograd.grad(out.sum(), [q, k, v], create_graph=True)
        second = torch.autograd.grad(sum(x.sum() for x in first), [q, k, v])
    assert out.is_meta
    assert out.shape == q.shape
    for once, twice, x in zip(first, second, (q, k, v), strict=True):
        assert once.shape == twice.shape == x.shape


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_raises_and_names_reverse_mode(requires_grad):
    q, k, v = (x.requires_grad_(requires_grad) for x in dense_qkv(SHAPE))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(fovea.UnsupportedError, match="jacrev"),
    ):
        fovea.attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(fovea.UnsupportedError, match="jacrev"):
        torch.func.jvp(lambda x: fovea.attention(x, k, v), (q,), (q,))
