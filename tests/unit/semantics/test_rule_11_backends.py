"""Rule 11: an explicit backend never falls back; second order is the reference's."""

import pytest
import torch

import fovea
from fovea.errors import UnsupportedError
from fovea.testing.inputs import Shape, dense_qkv, normal

SMALL = Shape(batch=1, seqlen_q=4, seqlen_kv=5, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2)
AUX = fovea.AuxRequest(lse=True)


def test_explicit_cuda_backend_on_cpu_tensors_raises():
    q, k, v = dense_qkv(SMALL)
    with pytest.raises(UnsupportedError, match=r"backend='cuda'.*cpu.*reference"):
        fovea.attention(q, k, v, backend="cuda")


@pytest.mark.parametrize("backend", ["emulator:sm90", "emulator:sm100"])
def test_explicit_emulator_backend_raises_on_what_it_lacks(backend):
    # No kernel takes float64, on any architecture.
    q, k, v = dense_qkv(SMALL, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=backend):
        fovea.attention(q, k, v, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "cpu", "Reference", 3])
def test_unknown_backend_raises_with_the_list(backend):
    q, k, v = dense_qkv(SMALL)
    with pytest.raises(ValueError, match=r"backend.*reference.*cuda.*emulator:sm90"):
        fovea.attention(q, k, v, backend=backend)


def test_default_backend_on_cpu_tensors_is_the_reference():
    q, k, v = dense_qkv(SMALL)
    assert torch.equal(fovea.attention(q, k, v), fovea.attention(q, k, v, backend="reference"))


def _closure(options):
    """Return a function of (q, k, v, sink, bias) and its inputs, for gradient checks."""
    q, k, v = dense_qkv(SMALL, dtype=torch.float64)
    sink, bias = normal((2,), seed=5).double(), normal((2, 4, 5), seed=6).double()

    def run(q, k, v, sink, bias):
        def biased(score, b, h, q_idx, kv_idx):
            return score * 1.5 + bias[h, q_idx, kv_idx] * torch.tanh(score)

        out, aux = fovea.attention(q, k, v, sink=sink, score_mod=biased, return_aux=AUX, **options)
        return out, aux.lse

    return run, [x.requires_grad_() for x in (q, k, v, sink, bias)]


OPTIONS = [{}, {"causal": True}, {"softcap": 2.0, "window": (2, 1)}, {"causal": "top_left"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_first_order_gradients_pass_gradcheck(options):
    run, leaves = _closure(options)
    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("options", OPTIONS)
def test_second_order_gradients_pass_gradgradcheck(options):
    run, leaves = _closure(options)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_second_order_of_dead_rows_is_finite():
    q, k, v = (x.requires_grad_() for x in dense_qkv(Shape(seqlen_q=6, seqlen_kv=3)))
    out = fovea.attention(q, k, v, causal=True, sink=None)
    first = torch.autograd.grad(out.square().sum(), [q, k, v], create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), [q, k, v])
    for x in second:
        assert bool(x.isfinite().all())
    assert bool((second[0][:, :3] == 0).all())
