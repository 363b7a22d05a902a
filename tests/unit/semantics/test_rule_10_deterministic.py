"""Rule 10: deterministic=True is bit-reproducible or raises; it is never ignored."""

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv, normal

SHAPE = Shape(batch=1, seqlen_q=160, heads_q=8, heads_kv=2, head_dim=16)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _run(deterministic):
    """Return output and gradients of a call whose captured gradients meet in few elements."""
    q, k, v = (x.requires_grad_() for x in dense_qkv(SHAPE))
    slopes = normal((8,), seed=7).requires_grad_()
    table = normal((5,), seed=8).requires_grad_()
    sink = normal((8,), seed=9).requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * table[(q_idx * 3 + kv_idx) % 5]

    out = fovea.attention(q, k, v, score_mod=score_mod, sink=sink, deterministic=deterministic)
    weight = normal(out.shape, seed=10)
    return out, *torch.autograd.grad((out * weight).sum(), [q, k, v, slopes, table, sink])


@pytest.mark.usefixtures("two_threads")
def test_deterministic_runs_agree_in_every_bit():
    first = _run(True)
    for _ in range(4):
        for once, again in zip(first, _run(True), strict=True):
            assert torch.equal(once, again)


@pytest.mark.usefixtures("two_threads")
def test_deterministic_second_orders_agree_in_every_bit():
    def run():
        q, k, v = (x.requires_grad_() for x in dense_qkv(SHAPE))
        table = normal((3,), seed=8).requires_grad_()

        def score_mod(score, b, h, q_idx, kv_idx):
            return score * table[(h + q_idx * 7 + kv_idx * 5) % 3].exp()

        out = fovea.attention(q, k, v, score_mod=score_mod, deterministic=True)
        first = torch.autograd.grad(out.square().sum(), [q, k, v, table], create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), [q, k, v, table])

    for one, again in zip(run(), run(), strict=True):
        assert torch.equal(one, again)


def test_deterministic_result_is_that_of_the_default():
    for asked, default in zip(_run(True), _run(None), strict=True):
        torch.testing.assert_close(asked, default)


def test_default_follows_torch_use_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        found = _run(None)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, _run(True), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("value", [1, "yes", 0.0])
def test_deterministic_that_is_no_bool_raises(value):
    q, k, v = dense_qkv(SHAPE)
    with pytest.raises(TypeError, match="deterministic"):
        fovea.attention(q, k, v, deterministic=value)
