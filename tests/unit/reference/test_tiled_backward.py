import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fovea.problem import GradientNeeds, Request, make_dense
from fovea.reference import tiled_backward, tiled_forward
from fovea.testing.inputs import Shape, dense_qkv, normal
from fovea.testing.problems import all_needs, check_reference, dense_problem, varlen_problem

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SMALL = Shape(batch=2, seqlen_q=33, seqlen_kv=50, heads_q=6, heads_kv=2, head_dim=24, head_dim_v=8)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": "top_left"},
    "window": {"window": (7, 3)},
    "causal_window": {"causal": True, "window": (5, 0)},
    "softcap": {"softcap": 1.5},
    "scale_zero": {"scale": 0.0},
    "scale_negative": {"scale": -0.3},
    "sink": {"sink": torch.tensor([0.0, 1.0, -2.0, 5.0, -torch.inf, 0.5])},
    "causal_sink_softcap": {"sink": torch.zeros(6), "causal": "top_left", "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_backward_of_every_option_is_within_budget(options, dtype):
    check_reference(dense_problem(SMALL, dtype=dtype, **options), tile_n=16)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv"), list(itertools.product([1, 16, 17, 40], [1, 15, 16, 33]))
)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_backward_at_ragged_edges_is_within_budget(seqlen_q, seqlen_kv, causal):
    shape = Shape(batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=3, heads_kv=1)
    check_reference(dense_problem(shape, causal=causal), tile_n=16)


def test_backward_of_more_rows_than_a_step_is_within_budget():
    check_reference(
        dense_problem(Shape(seqlen_q=300, heads_q=8, seqlen_kv=70), causal=True), tile_n=64
    )


def test_backward_of_a_packed_call_is_within_budget():
    problem = varlen_problem(
        [3, 0, 20, 7],
        [5, 4, 33, 0],
        Shape(heads_q=4, heads_kv=2),
        causal=True,
        sink=torch.zeros(4),
        seqused_q=torch.tensor([2, 0, 20, 1], dtype=torch.int32),
        seqused_kv=torch.tensor([5, 0, 30, 0], dtype=torch.int32),
    )
    check_reference(problem, tile_n=8)


def test_backward_agrees_with_torch_math_attention():
    q, k, v = dense_qkv(Shape(batch=2, seqlen_q=65, heads_q=4), dtype=torch.float64)
    problem = make_dense(q, k, v, Request(causal=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=True
        ).transpose(1, 2)
    dout = normal(out.shape, seed=5, dtype=torch.float64)
    expected = torch.autograd.grad(out, leaves, dout)
    result = tiled_forward.forward(problem)
    found = tiled_backward.backward(
        problem, out=result.out, lse=result.lse, dout=dout, dlse=None, needs=all_needs(problem)
    )
    for ours, theirs in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def _first_order(problem, needs):
    """Return backward as a function of its tensors, for checks of the second order."""

    def run(q, k, v, sink, out, lse, dout, dlse):
        grads = tiled_backward.backward(
            replace(problem, q=q, k=k, v=v, sink=sink),
            out=out,
            lse=lse,
            dout=dout,
            dlse=dlse,
            needs=needs,
            tile_n=4,
        )
        return tuple(x for x in grads[:4] if x is not None)

    return run


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}, {"window": (2, 1)}])
def test_backward_is_itself_differentiable(options):
    shape = Shape(batch=1, seqlen_q=5, seqlen_kv=7, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2)
    sink = torch.tensor([0.3, -0.4], dtype=torch.float64)
    problem = dense_problem(shape, dtype=torch.float64, sink=sink, **options)
    result = tiled_forward.forward(problem, tile_n=4)
    leaves = [problem.q, problem.k, problem.v, sink, result.out, result.lse]
    leaves += [normal(x.shape, seed=7, dtype=torch.float64) for x in (result.out, result.lse)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(_first_order(problem, all_needs(problem)), leaves)


def test_backward_pulled_back_by_functorch_equals_autograd():
    shape = Shape(batch=2, seqlen_q=5, seqlen_kv=9, heads_q=2, heads_kv=2, head_dim=3)
    problem = dense_problem(shape, dtype=torch.float64, causal=True, sink=torch.zeros(2).double())
    result = tiled_forward.forward(problem, tile_n=4)
    tensors = [problem.q, problem.k, problem.v, problem.sink, result.out, result.lse]
    tensors += [normal(x.shape, seed=7, dtype=torch.float64) for x in (result.out, result.lse)]
    run = _first_order(problem, all_needs(problem))
    values, pull = torch.func.vjp(run, *tensors)
    cotangents = tuple(normal(x.shape, seed=8, dtype=torch.float64) for x in values)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(run(*leaves), leaves, cotangents)
    for ours, theirs in zip(pull(cotangents), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sink"])
def test_backward_of_one_need_returns_that_gradient_alone(wanted):
    problem = dense_problem(SMALL, causal=True, sink=torch.zeros(6))
    result = tiled_forward.forward(problem)
    dout = normal(result.out.shape, seed=3)

    def run(needs):
        return tiled_backward.backward(
            problem, out=result.out, lse=result.lse, dout=dout, dlse=None, needs=needs
        )

    nothing = GradientNeeds(q=False, k=False, v=False, sink=False, score_captures=())
    alone = run(nothing._replace(**{wanted: True}))
    everything = run(all_needs(problem))
    for name in ("q", "k", "v", "sink"):
        found, expected = getattr(alone, f"d{name}"), getattr(everything, f"d{name}")
        if name == wanted:
            assert torch.equal(found, expected)
        else:
            assert found is None


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2)], ids=str)
def test_backward_gradients_keep_each_input_stride_order(order):
    inverse = [order.index(i) for i in range(4)]
    q, k, v = (
        x.permute(order).contiguous().permute(inverse)
        for x in dense_qkv(Shape(batch=2, seqlen_q=5, seqlen_kv=7, heads_q=3, head_dim=4))
    )
    problem = make_dense(q, k, v, Request())
    result = tiled_forward.forward(problem)
    found = tiled_backward.backward(
        problem,
        out=result.out,
        lse=result.lse,
        dout=torch.ones_like(result.out),
        dlse=None,
        needs=all_needs(problem),
    )
    assert [x.stride() for x in found[:3]] == [x.stride() for x in (q, k, v)]


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_backward_of_empty_axes_is_zero_of_the_right_shape(sizes):
    batch, seqlen_q, seqlen_kv = sizes
    shape = Shape(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=2)
    problem = dense_problem(shape)
    result = tiled_forward.forward(problem)
    found = tiled_backward.backward(
        problem,
        out=result.out,
        lse=result.lse,
        dout=torch.ones_like(result.out),
        dlse=torch.ones_like(result.lse),
        needs=all_needs(problem),
    )
    for gradient, like in zip(found[:3], (problem.q, problem.k, problem.v), strict=True):
        assert torch.equal(gradient, torch.zeros_like(like))


def test_backward_with_two_threads_is_bit_reproducible():
    problem = dense_problem(Shape(batch=1, seqlen_q=200, heads_q=8), dtype=torch.bfloat16)
    result = tiled_forward.forward(problem)
    dout = normal(result.out.shape, seed=3, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [
            tiled_backward.backward(
                problem,
                out=result.out,
                lse=result.lse,
                dout=dout,
                dlse=None,
                needs=all_needs(problem),
            )
            for _ in range(3)
        ]
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        for first, again in zip(runs[0][:3], run[:3], strict=True):
            assert torch.equal(first, again)


def test_backward_of_hidden_pairs_whose_products_overflow_is_finite():
    # dP = dout . v overflows at key 0 alone, which no query sees: 0 is written there, not 0 * inf.
    q, k, v = dense_qkv(Shape(seqlen_q=8, seqlen_kv=8))
    v[:, 0] = 1e30
    problem = make_dense(q, k, v, Request(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx > 0))
    result = tiled_forward.forward(problem)
    found = tiled_backward.backward(
        problem,
        out=result.out,
        lse=result.lse,
        dout=torch.full_like(result.out, 1e20),
        dlse=None,
        needs=all_needs(problem),
    )
    for gradient in found[:3]:
        assert bool(gradient.isfinite().all())
    assert bool((found.dk[:, 0] == 0).all())
