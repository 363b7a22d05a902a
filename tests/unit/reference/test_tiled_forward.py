import itertools

import pytest
import torch
import torch.nn.functional as F

from fovea.problem import AttentionProblem, Request, make_dense
from fovea.reference import tiled_forward
from fovea.reference.packing import rows_per_step
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, dense_qkv, normal
from fovea.testing.problems import dense_problem, varlen_problem

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SMALL = Shape(batch=2, seqlen_q=33, seqlen_kv=50, heads_q=6, heads_kv=2, head_dim=24, head_dim_v=8)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": "top_left"},
    "window": {"window": (7, 3)},
    "window_left": {"window": (9, None)},
    "causal_window": {"causal": True, "window": (5, 0)},
    "top_left_window": {"causal": "top_left", "window": (5, None)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.9},
    "scale_zero": {"scale": 0.0},
    "scale_negative": {"scale": -0.3},
    "sink": {"sink": torch.tensor([0.0, 1.0, -2.0, 5.0, -torch.inf, 0.5])},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_forward_of_every_option_is_within_budget(options, dtype):
    problem = dense_problem(SMALL, dtype=dtype, **options)
    check_forward(problem, tiled_forward.forward(problem, tile_n=16))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv"),
    list(itertools.product([1, 15, 16, 17, 31], [1, 15, 16, 17, 48])),
)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_forward_at_ragged_edges_is_within_budget(seqlen_q, seqlen_kv, causal):
    shape = Shape(batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=3, heads_kv=1)
    problem = dense_problem(shape, causal=causal)
    check_forward(problem, tiled_forward.forward(problem, tile_n=16))


@pytest.mark.parametrize("head_dim", [1, 3, 80, 256])
def test_forward_of_any_head_dim_is_within_budget(head_dim):
    problem = dense_problem(Shape(seqlen_q=20, head_dim=head_dim, head_dim_v=head_dim // 2 + 1))
    check_forward(problem, tiled_forward.forward(problem, tile_n=8))


def test_forward_agrees_with_torch_math_attention():
    q, k, v = dense_qkv(Shape(batch=2, seqlen_q=65, heads_q=4, head_dim=32), dtype=torch.float64)
    problem = make_dense(q, k, v, Request(causal=True))
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*by_heads, is_causal=True)
    result = tiled_forward.forward(problem)
    torch.testing.assert_close(result.out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_forward_of_another_tile_width_differs_by_rounding_alone():
    problem = dense_problem(Shape(seqlen_q=40, seqlen_kv=100), dtype=torch.float64)
    wide, narrow = (tiled_forward.forward(problem, tile_n=n) for n in (100, 7))
    torch.testing.assert_close(wide.out, narrow.out, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(wide.lse, narrow.lse, rtol=1e-13, atol=0)
    # The sums of a product depend on its width, on some processors.
    torch.testing.assert_close(wide.max_score, narrow.max_score, rtol=1e-14, atol=0)


def test_forward_of_more_rows_than_a_step_gives_each_row_the_same_result():
    shape = Shape(batch=1, seqlen_q=700, heads_q=16, seqlen_kv=140)
    assert rows_per_step(16, 700, 128, is_cuda=False) < 700
    q, k, v = dense_qkv(shape)
    whole = tiled_forward.forward(make_dense(q, k, v, Request()))
    part = tiled_forward.forward(make_dense(q[:, 600:], k, v, Request()))
    torch.testing.assert_close(whole.out[:, 600:], part.out, rtol=1e-6, atol=1e-6)


def test_forward_max_score_is_the_largest_score_exactly():
    problem = dense_problem(SMALL, causal=True, sink=torch.full((6,), 100.0), scale=0.25)
    result = tiled_forward.forward(problem, tile_n=16)
    # With a power of two as the scale and these few terms no rounding depends on the tile.
    scores = torch.einsum(
        "bmhd,bnhd->bhmn", problem.q.double(), problem.k.double().repeat_interleave(3, dim=2)
    )
    hidden = torch.ones(33, 50).tril(50 - 33) == 0
    largest = (scores * 0.25).masked_fill(hidden, -torch.inf).amax(-1)
    torch.testing.assert_close(result.max_score.double(), largest, rtol=1e-6, atol=1e-6)


def test_forward_without_max_score_returns_none():
    q, k, v = dense_qkv(Shape())
    assert tiled_forward.forward(make_dense(q, k, v, Request())).max_score is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_forward_output_keeps_the_stride_order_of_q(order):
    q, k, v = dense_qkv(Shape(batch=2, seqlen_q=5, heads_q=3, head_dim=4))
    q = q.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    result = tiled_forward.forward(make_dense(q, k, v, Request()))
    assert result.out.stride() == q.stride()
    expected = tiled_forward.forward(make_dense(q.contiguous(), k, v, Request()))
    torch.testing.assert_close(result.out, expected.out)


def test_forward_of_expanded_and_sliced_inputs_equals_that_of_copies():
    q = normal((2, 10, 4, 32), seed=0)[:, ::2, :, 8:24]
    k = normal((1, 7, 1, 16), seed=1).expand(2, 7, 4, 16)
    v = normal((2, 4, 7, 16), seed=2).transpose(1, 2)
    result = tiled_forward.forward(make_dense(q, k, v, Request()))
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    expected = tiled_forward.forward(make_dense(*copies, Request()))
    torch.testing.assert_close(result.out, expected.out)
    torch.testing.assert_close(result.lse, expected.lse)


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)])
def test_forward_of_empty_axes_is_legal(sizes):
    batch, seqlen_q, seqlen_kv = sizes
    shape = Shape(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=2)
    result = tiled_forward.forward(dense_problem(shape, causal=True))
    assert result.out.shape == (batch, seqlen_q, 2, 16)
    assert bool((result.out == 0).all())
    assert bool((result.lse == -torch.inf).all())


def test_forward_of_rising_scores_stays_within_budget():
    # Each tile's maximum is far above the last one's, so everything seen before decays to nothing.
    q = torch.ones(1, 4, 1, 16, dtype=torch.float32)
    k = (torch.arange(64.0).view(1, 64, 1, 1) * 10).expand(1, 64, 1, 16).clone()
    v = normal((1, 64, 1, 16), seed=0)
    problem = make_dense(q, k, v, Request(scale=1.0))
    check_forward(problem, tiled_forward.forward(problem, tile_n=8))


@pytest.mark.parametrize("sink", [1e4, 0.0, -1e4])
@pytest.mark.parametrize("score", [1e4, 0.0, -1e4])
def test_forward_with_a_sink_far_from_the_scores_does_not_overflow(sink, score):
    q = torch.full((1, 3, 1, 4), score / 4)
    k, v = torch.ones(1, 9, 1, 4), normal((1, 9, 1, 4), seed=0)
    problem = make_dense(
        q, k, v, Request(scale=1.0, sink=torch.tensor([sink]), wants_max_score=True)
    )
    result = tiled_forward.forward(problem, tile_n=4)
    check_forward(problem, result)
    assert bool((result.max_score == score).all())


def test_forward_of_a_packed_call_is_within_budget():
    problem = varlen_problem(
        [3, 0, 20, 7], [5, 4, 33, 0], Shape(heads_q=4, heads_kv=2), causal=True
    )
    check_forward(problem, tiled_forward.forward(problem, tile_n=8))


def test_forward_is_bit_reproducible():
    problem: AttentionProblem = dense_problem(SMALL, dtype=torch.bfloat16)
    first, second = (tiled_forward.forward(problem) for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


def test_forward_rounds_p_to_16_bits_before_v():
    # Only the second key has a value, so the output is its rounded P over the unrounded row sum.
    q = torch.tensor([[[[1.0]]]], dtype=torch.bfloat16)
    k = torch.tensor([[[[0.0]], [[-1.0]]]], dtype=torch.bfloat16)
    v = torch.tensor([[[[0.0]], [[1.0]]]], dtype=torch.bfloat16)
    problem = make_dense(q, k, v, Request(scale=1.0))
    p = torch.tensor(-1.0).exp()
    expected = (p.bfloat16().float() / (1 + p)).bfloat16()
    assert tiled_forward.forward(problem).out.item() == expected.item()
