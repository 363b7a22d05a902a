"""vmap: where the batch may grow it does, elsewhere the call is repeated, and both are right."""

import pytest
import torch

import fovea
from fovea.ops import folding


def stack(function, *tensors):
    return torch.stack([function(*parts) for parts in zip(*tensors, strict=True)])


def inputs(*shapes):
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


Q, K, V = (3, 2, 5, 4, 4), (3, 2, 7, 2, 4), (3, 2, 7, 2, 3)


@pytest.fixture
def loops(monkeypatch):
    """Count the calls that were repeated."""
    seen = []
    loop = folding._loop
    monkeypatch.setattr(folding, "_loop", lambda *a: seen.append(1) or loop(*a))
    return seen


def test_dense_call_folds(loops):
    q, k, v = inputs(Q, K, V)

    def call(q, k, v):
        return fovea.attention(q, k, v, causal=True, window=(3, None), softcap=2.0)

    torch.testing.assert_close(torch.vmap(call)(q, k, v), stack(call, q, k, v))
    assert loops == []


def test_nested_vmap_folds(loops):
    q, k, v = (t.expand(2, *t.shape) * 1 for t in inputs(Q, K, V))
    q[1] += 1

    def call(q, k, v):
        return fovea.attention(q, k, v)

    expected = torch.stack([stack(call, q[i], k[i], v[i]) for i in range(2)])
    torch.testing.assert_close(torch.vmap(torch.vmap(call))(q, k, v), expected)
    assert loops == []


def test_mod_that_reads_b_is_repeated(loops):
    """Folded, b would count through all mapped entries."""
    q, k, v = inputs(Q, K, V)
    bias = torch.randn(2, dtype=torch.float64)

    def call(q, k, v):
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * bias[b])

    torch.testing.assert_close(torch.vmap(call)(q, k, v), stack(call, q, k, v))
    assert loops == [1]


def test_mapped_capture_is_repeated(loops):
    q, k, v = inputs(Q, K, V)
    tables = torch.randn(3, 4, dtype=torch.float64)

    def call(q, k, v, table):
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h] * j)

    found = torch.vmap(call)(q, k, v, tables)
    torch.testing.assert_close(found, stack(call, q, k, v, tables))
    assert loops == [1]


def test_mapped_sink_is_repeated(loops):
    q, k, v = inputs(Q, K, V)
    sinks = torch.randn(3, 4, dtype=torch.float64)

    def call(q, k, v, sink):
        return fovea.attention(q, k, v, sink=sink)

    torch.testing.assert_close(torch.vmap(call)(q, k, v, sinks), stack(call, q, k, v, sinks))
    assert loops == [1]


@pytest.mark.parametrize("batch", [1, 2])
def test_block_mask_folds_only_if_shared_by_the_batch(loops, batch):
    q, k, v = inputs(Q, K, V)
    block_mask = fovea.create_block_mask(
        lambda b, h, i, j: i >= j - 2, batch, 1, 5, 7, device="cpu", BLOCK_SIZE=2
    )

    def call(q, k, v):
        return fovea.attention(q, k, v, block_mask=block_mask)

    torch.testing.assert_close(torch.vmap(call)(q, k, v), stack(call, q, k, v))
    assert loops == [1] * (batch - 1)


def test_varlen_is_repeated(loops):
    q, k = inputs((3, 7, 4, 4), (3, 9, 2, 4))
    bounds_q = torch.tensor([0, 3, 7], dtype=torch.int32)
    bounds_kv = torch.tensor([0, 4, 9], dtype=torch.int32)

    def call(q, k):
        return fovea.attention_varlen(q, k, k, bounds_q, bounds_kv, 4, 5, causal=True)

    torch.testing.assert_close(torch.vmap(call)(q, k), stack(call, q, k))
    assert loops == [1]


def test_scale_mapped_as_a_tensor_is_repeated(loops):
    (q,) = inputs((2, 5, 4, 4))
    scales = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)

    def call(scale):
        return fovea.attention(q, q, q, scale=scale)

    found = torch.vmap(call)(scales)
    torch.testing.assert_close(found, torch.stack([call(float(s)) for s in scales]))
    assert loops == [1]


@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, 0), (None, 0, None)])
def test_per_sample_gradients_equal_a_loop(loops, in_dims):
    q, k, v = inputs(Q, K, V)
    arguments = [t if dim == 0 else t[0] for t, dim in zip((q, k, v), in_dims, strict=True)]

    def loss(q, k, v):
        return fovea.attention(q, k, v, causal=True).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    found = torch.vmap(grad, in_dims=in_dims)(*arguments)
    for i in range(3):
        one = grad(*(t[i] if d == 0 else t for t, d in zip(arguments, in_dims, strict=True)))
        for a, b in zip(found, one, strict=True):
            torch.testing.assert_close(a[i], b)
    assert loops == []


def test_per_sample_gradients_of_a_shared_sink_equal_a_loop():
    """Folded, the backward would add the samples' gradients up."""
    q, k, v = inputs(Q, K, V)
    (sink,) = inputs((4,))

    def loss(sink, q, k, v):
        return fovea.attention(q, k, v, sink=sink).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(sink, q, k, v)
    expected = [torch.func.grad(loss)(sink, q[i], k[i], v[i]) for i in range(3)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_lse_and_max_score_of_a_vmapped_call():
    q, k, v = inputs(Q, K, V)

    def call(q, k, v):
        aux = fovea.attention(q, k, v, return_aux=fovea.AuxRequest(lse=True, max_score=True))[1]
        return aux.lse, aux.max_score

    found = torch.vmap(call)(q, k, v)
    for i in range(3):
        for one, other in zip(found, call(q[i], k[i], v[i]), strict=True):
            torch.testing.assert_close(one[i], other)


def test_hessian_equals_that_of_plain_torch():
    q, k, v = (t[0, :1, :3, :2].contiguous() for t in inputs(Q, K, V))

    def loss(q):
        return fovea.attention(q, k, v).square().sum()

    def plain(q):
        s = torch.einsum("bmhd,bnhd->bhmn", q, k) / 2
        return torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v).square().sum()

    hessian = torch.func.jacrev(torch.func.grad(loss))(q)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.grad(plain))(q))


def test_gradient_of_a_shared_capture_through_vmap_equals_the_sum():
    q, k, v = inputs(Q, K, V)
    (table,) = inputs((7,))

    def loss(table, q, k, v):
        out = fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * table[j])
        return out.square().sum()

    one_by_one = torch.stack([torch.func.grad(loss)(table, q[i], k[i], v[i]) for i in range(3)])
    in_dims = (None, 0, 0, 0)
    each = torch.vmap(torch.func.grad(loss), in_dims=in_dims)(table, q, k, v)
    torch.testing.assert_close(each, one_by_one)
    whole = torch.func.grad(lambda t: torch.vmap(loss, in_dims=in_dims)(t, q, k, v).sum())(table)
    torch.testing.assert_close(whole, one_by_one.sum(0))


@pytest.mark.parametrize("needs_batch", [False, True], ids=["folded", "repeated"])
@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad], ids=["forward", "grad"])
def test_vmap_over_nothing_gives_nothing(needs_batch, transform):
    def attend(q):
        out = fovea.attention(q, q, q, score_mod=mod)
        return out if transform is not torch.func.grad else out.sum()

    mod = (lambda s, b, h, i, j: s + b) if needs_batch else (lambda s, b, h, i, j: s + i)
    mapped = torch.vmap(transform(attend), in_dims=1)(torch.zeros(2, 0, 5, 4, 8))
    assert mapped.shape == (0, 2, 5, 4, 8)
