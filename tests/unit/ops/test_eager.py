"""The quick path under autograd: what is saved, when it is freed, and every kind of gradient."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import fovea
from fovea import AuxRequest, dispatch
from fovea.ops import eager
from fovea.ops.functions import Attention
from fovea.ops.program import pack
from fovea.problem import GradientNeeds
from fovea.problem.parts import tensors_of

LSE = AuxRequest(lse=True)


def leaves(dtype=torch.float64):
    shapes = ((2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 3))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def by_function(problem):
    """Run a problem through the operators, whatever its tensors are."""
    packed = pack(problem, None)
    facts = (packed.program, tuple(packed.ints), len(packed.captures))
    return Attention.apply(*facts, *packed[:4], *packed.captures, *packed.constants)


def gradients(outputs, problem):
    tensors = [t for t in tensors_of(problem) if t is not None and t.requires_grad]
    out, lse = outputs[:2]
    loss = (out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum()
    loss = loss + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
    return torch.autograd.grad(loss, tensors)


def test_quick_path_and_operators_give_the_same(problem):
    problem = replace(problem, wants_lse=True)
    choice = dispatch.choose(problem, None)
    quick, _ = eager.attend_problem(problem, choice)
    slow = by_function(problem)
    for one, other in zip(quick, slow, strict=True):
        assert one is None or torch.equal(one, other)
    if problem.is_paged:
        assert not quick[0].requires_grad
        return
    for one, other in zip(gradients(quick, problem), gradients(slow, problem), strict=True):
        assert torch.equal(one, other)


def test_plain_call_takes_the_quick_path_and_watched_ones_do_not():
    q = torch.randn(2, 3)
    assert eager.is_plain([q, None, torch.nn.Parameter(q)])
    assert not eager.is_plain([q, torch.nn.UninitializedBuffer()])
    assert not eager.is_plain([q.to("meta")])
    with torch.profiler.profile():
        assert not eager.is_plain([q])
    torch.func.vmap(lambda x: x if not eager.is_plain([q]) else None)(q)


def test_nothing_is_saved_under_no_grad_or_for_inputs_without_grad():
    q, k, v = leaves()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        with torch.no_grad():
            assert not fovea.attention(q, k, v).requires_grad
        with torch.inference_mode():
            fovea.attention(q, k, v)
        assert not fovea.attention(*(t.detach() for t in (q, k, v))).requires_grad
    assert saved == []


def test_saved_tensors_pass_through_hooks():
    """Offloading works: the backward sees what the hooks return, and nothing else is held."""
    q, k, v = leaves()
    table = torch.randn(4, dtype=torch.float64)

    def call():
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h] * j)

    expected = torch.autograd.grad(call().square().sum(), (q, k, v))
    packed = []

    def pack_hook(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
        out = call()
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert {q.shape, k.shape, v.shape, table.shape} <= set(packed)


def test_captured_tensors_are_freed_with_the_graph():
    q, k, v = leaves()
    table = torch.randn(4, dtype=torch.float64)
    watch = weakref.ref(table)

    def call(table):
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h])

    out = call(table)
    del table
    assert watch() is not None
    out.sum().backward()
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("victim", ["q", "table", "mask", "sink", "blocks"])
def test_tensor_changed_between_forward_and_backward_raises(victim):
    q, k, v = leaves()
    base = q * 1
    table, sink = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    mask = torch.ones(7, dtype=torch.bool)
    block_mask = fovea.create_block_mask(lambda b, h, i, j: i >= j - 2, 1, 1, 5, 7, device="cpu")
    out = fovea.attention(
        base,
        k,
        v,
        score_mod=lambda s, b, h, i, j: s + table[h],
        mask_mod=lambda b, h, i, j: mask[j],
        sink=sink,
        block_mask=block_mask,
    )
    tensors = {"q": base, "table": table, "mask": mask, "sink": sink}
    tensors["blocks"] = block_mask.kv_num_blocks
    with torch.no_grad():
        tensors[victim].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_uses_the_scalars_of_the_forward():
    """Captured numbers and 0-d tensors are read in the forward; later values must not matter."""
    q, k, v = leaves()
    scale = torch.tensor(0.3)

    class Knob:
        value = 0.25

    def call(value):
        return fovea.attention(
            q, k, v, scale=scale, score_mod=lambda s, b, h, i, j: s + value * (j - i)
        )

    out = call(Knob.value)
    Knob.value = 100.0
    expected = torch.autograd.grad(call(0.25).square().sum(), (q, k, v))
    scale.fill_(100.0)
    for one, other in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True
    ):
        assert torch.equal(one, other)


def test_gradcheck_of_out_and_lse_with_sink_and_captures():
    q, k, v = leaves()
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, table, sink):
        out, aux = fovea.attention(
            q,
            k,
            v,
            causal=True,
            softcap=3.0,
            sink=sink,
            score_mod=lambda s, b, h, i, j: s * table[h] + table[(i + j) % 4],
            return_aux=LSE,
        )
        return out, aux.lse

    assert torch.autograd.gradcheck(call, (q, k, v, table, sink), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (q, k, v, table, sink), fast_mode=True)


def test_gradient_through_lse_alone():
    q, k, v = leaves()
    _, aux = fovea.attention(q, k, v, return_aux=LSE)
    found = torch.autograd.grad(aux.lse.sum(), (q, k, v), allow_unused=True)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, dim=2)) / 2
    expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert torch.equal(found[2], torch.zeros_like(v))


def test_max_score_carries_no_gradient():
    q, k, v = leaves()
    out, aux = fovea.attention(q, k, v, return_aux=AuxRequest(max_score=True))
    assert out.requires_grad
    assert not aux.max_score.requires_grad


def test_gradient_of_a_part_of_the_inputs_leaves_the_rest_alone():
    q, k, v = (tensor.detach() for tensor in leaves())
    k.requires_grad_()
    (found,) = torch.autograd.grad(fovea.attention(q, k, v).square().sum(), k)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(fovea.attention(q, k, v).square().sum(), k)
    assert torch.equal(found, expected)


def test_only_needed_gradients_are_asked_of_the_backend(monkeypatch):
    q, k, v = (tensor.detach() for tensor in leaves())
    q.requires_grad_()
    seen = []
    backward = dispatch.backward

    def spy(problem, choice, **keywords):
        seen.append(keywords["needs"])
        return backward(problem, choice, **keywords)

    monkeypatch.setattr(dispatch, "backward", spy)
    fovea.attention(q, k, v).sum().backward()
    assert seen == [GradientNeeds(True, False, False, False, ())]


def test_third_order_gradient_equals_that_of_plain_torch():
    q, k, v = (tensor[:1, :3, :2].contiguous() for tensor in leaves())

    def third(attention):
        x = q.detach().requires_grad_()
        y = attention(x).square().sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y

    def plain(x):
        s = torch.einsum("bmhd,bnhd->bhmn", x, k) / 2
        return torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v)

    torch.testing.assert_close(third(lambda x: fovea.attention(x, k, v)), third(plain))


def test_backward_twice_with_retained_graph_gives_the_same():
    q, k, v = leaves()
    loss = fovea.attention(q, k, v).square().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (q, k, v)), strict=True):
        assert torch.equal(one, other)
