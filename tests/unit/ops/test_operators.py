"""The registered operators: torch's own checks, fakes, and what graphs do with them."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fovea
from fovea import dispatch
from fovea.ops import library
from fovea.ops.program import pack
from fovea.problem import Request, make_dense

PASSED = {
    "test_schema": "SUCCESS",
    "test_autograd_registration": "SUCCESS",
    "test_faketensor": "SUCCESS",
    "test_aot_dispatch_dynamic": "SUCCESS",
}


def backward_arguments(problem, with_dlse=True):
    packed = pack(problem, None)
    out, lse, _ = (t.detach() for t in library.FORWARD(*packed))
    tensors = (problem.q, problem.k, problem.v, problem.sink, *packed.captures)
    flags = [tensor is not None and tensor.requires_grad for tensor in tensors]
    dlse = torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0) if with_dlse else None
    first = (torch.randn_like(out), dlse, *packed[:4])
    return (*first, out, lse, *packed[4:], flags)


def test_opcheck_of_forward_passes_all_four(problem):
    assert torch.library.opcheck(library.FORWARD, tuple(pack(problem, None))) == PASSED


def test_opcheck_of_backward_passes_all_four(problem):
    if problem.is_paged:
        pytest.skip("a paged call has no backward")
    assert torch.library.opcheck(library.BACKWARD, backward_arguments(problem)) == PASSED


def test_backward_without_dlse_equals_backward_with_zeros(problem):
    if problem.is_paged:
        pytest.skip("a paged call has no backward")
    arguments = list(backward_arguments(problem, with_dlse=False))
    without = library.BACKWARD(*arguments)
    arguments[1] = torch.zeros_like(arguments[7])
    for one, other in zip(without, library.BACKWARD(*arguments), strict=True):
        torch.testing.assert_close(one, other)


def test_fakes_have_the_shapes_strides_and_dtypes_of_results(problem):
    packed = pack(problem, None)
    real = library.FORWARD(*packed)
    with FakeTensorMode() as mode:
        fake_of = partial(torch.utils._pytree.tree_map_only, torch.Tensor, mode.from_tensor)
        fake = library.FORWARD(*fake_of(tuple(packed)))
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 3, 0)])
def test_output_has_the_stride_order_of_q_in_fakes_and_results(order):
    extents = [torch.Size((2, 5, 4, 8))[axis] for axis in order]
    inverse = [order.index(axis) for axis in range(4)]
    q = torch.randn(extents).permute(inverse)
    k = torch.randn(2, 7, 2, 8)
    v = torch.randn(2, 7, 2, 6)
    out = fovea.attention(q, k, v)
    meta = fovea.attention(q.to("meta"), k.to("meta"), v.to("meta"))
    by_stride = sorted(range(4), key=lambda axis: -out.stride(axis))
    assert by_stride == list(order)
    assert out.is_contiguous() or out.permute(order).is_contiguous()
    assert meta.stride() == out.stride()


@pytest.mark.parametrize(
    ("policy", "runs"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)]
)
def test_selective_checkpoint_sees_the_operator(policy, runs, monkeypatch):
    q = torch.randn(2, 6, 4, 8, requires_grad=True)
    calls = []
    forward = dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *a: calls.append(1) or forward(*a))

    def choose(ctx, operator, *args, **kwargs):
        if operator == library.FORWARD:
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(q):
        return fovea.attention(q * 2, q, q, causal=True).sin()

    contexts = partial(create_selective_checkpoint_contexts, choose)
    out = checkpoint(block, q, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(out.sum(), q)
    assert len(calls) == runs
    (expected,) = torch.autograd.grad(block(q).sum(), q)
    torch.testing.assert_close(found, expected)


def test_profiler_shows_the_operator():
    q = torch.randn(1, 4, 2, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fovea.attention(q, q, q)
    assert "fovea::attention_forward" in {event.key for event in profile.key_averages()}


def test_operators_own_formulas_pass_gradcheck_twice():
    """Graphs differentiate by these; eager calls do not."""
    shapes = ((1, 3, 2, 4), (1, 4, 1, 4), (4,), (2,))
    leaves = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)

    def call(q, k, table, sink):
        request = Request(
            causal=True, scale=0.4, sink=sink, score_mod=lambda s, b, h, i, j: s * table[j]
        )
        return library.FORWARD(*pack(make_dense(q, k, k, request), None))[:2]

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_public_function_and_its_backward_run_on_fake_tensors():
    with FakeTensorMode():
        q = torch.randn(2, 5, 4, 8, requires_grad=True)
        out = fovea.attention(q, q, q, scale=0.3, softcap=2.0)
        out.sum().backward()
        assert (out.shape, q.grad.shape) == (q.shape, q.shape)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_plain_checkpoint_gives_the_same_gradient(use_reentrant):
    q = torch.randn(2, 6, 4, 8, requires_grad=True)

    def block(q):
        return fovea.attention(q * 2, q, q, causal=True)

    (expected,) = torch.autograd.grad(block(q).square().sum(), q)
    checkpoint(block, q, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(q.grad, expected)
