"""Batches of cotangents give what one backward an entry gives."""

import pytest
import torch

import fovea

SHAPES = ((1, 3, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))


def leaves():
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in SHAPES
    ]


class Subclass(torch.Tensor):
    """Not a plain tensor: takes the way over the operators."""


@pytest.mark.parametrize("is_plain", [True, False], ids=["eager", "operators"])
@pytest.mark.parametrize("asks_lse", [True, False])
def test_batched_grads_equal_a_loop(is_plain, asks_lse):
    q, k, v = leaves()
    slopes = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    first = q if is_plain else q.as_subclass(Subclass)
    out, aux = fovea.attention(
        first,
        k,
        v,
        score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[h],
        return_aux=fovea.AuxRequest(lse=True),
    )
    target = (aux.lse if asks_lse else out).as_subclass(torch.Tensor)
    inputs = [q, k, slopes] if asks_lse else [q, k, v, slopes]
    cotangents = torch.randn((3, *target.shape), dtype=torch.float64)
    found = torch.autograd.grad(
        target, inputs, cotangents, is_grads_batched=True, retain_graph=True
    )
    for entry, cotangent in enumerate(cotangents):
        wanted = torch.autograd.grad(target, inputs, cotangent, retain_graph=True)
        for got, grad in zip(found, wanted, strict=True):
            torch.testing.assert_close(got[entry], grad)


def test_vectorized_jacobian_and_hessian_equal_the_loops():
    q, k, v = (x.detach() for x in leaves())

    def attend(x):
        return fovea.attention(x, k, v)

    def loss(x):
        return attend(x).sin().sum()

    for derivative, function in (("jacobian", attend), ("hessian", loss)):
        compute = getattr(torch.autograd.functional, derivative)
        torch.testing.assert_close(compute(function, q, vectorize=True), compute(function, q))
