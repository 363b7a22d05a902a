import itertools

import pytest
import torch

from fovea.mods.pull_back import scatter_add_
from fovea.problem import GradientNeeds
from fovea.reference import tiled_backward, tiled_forward
from fovea.reference.numerics import accumulation_dtype
from fovea.testing.inputs import Shape, normal
from fovea.testing.problems import all_needs, check_reference, dense_problem

SHAPE = Shape(batch=2, seqlen_q=21, seqlen_kv=30, heads_q=4, heads_kv=2)


def _looped(total, index, value, shape):
    """Add element by element."""
    result = total.clone()
    index = [number.expand(shape) for number in index]
    value = value.expand(shape)
    for place in itertools.product(*(range(extent) for extent in shape)):
        result[tuple(number[place] for number in index)] += value[place]
    return result


@pytest.mark.parametrize(
    "index_shapes",
    [
        [(2, 1, 1, 1)],
        [(1, 3, 1, 1), (1, 1, 4, 5)],
        [(2, 3, 4, 5)],
        [(1, 1, 1, 1)],
        [(1, 1, 4, 1), (2, 1, 1, 1), (5,)],
    ],
    ids=str,
)
@pytest.mark.parametrize("value_shape", [(2, 3, 4, 5), (1, 3, 1, 5), (1, 1, 1, 1), ()], ids=str)
def test_scatter_add_equals_a_loop_over_elements(index_shapes, value_shape):
    shape = (2, 3, 4, 5)
    total = normal([3] * len(index_shapes), seed=0, dtype=torch.float64)
    index = [torch.randint(-3, 3, sizes) for sizes in index_shapes]
    value = normal(value_shape, seed=1, dtype=torch.float64)
    expected = _looped(total, index, value, shape)
    scatter_add_(total, index, value, shape)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)


def test_scatter_add_without_index_sums_everything():
    total = torch.zeros((), dtype=torch.float64)
    scatter_add_(total, [], torch.ones(1, 3, 1), (2, 3, 4))
    assert total.item() == 24


def test_scatter_add_of_nothing_adds_nothing():
    total = torch.zeros(3, dtype=torch.float64)
    scatter_add_(total, [torch.zeros(1, dtype=torch.int64)], torch.ones(1), (0,))
    assert torch.equal(total, torch.zeros(3, dtype=torch.float64))


def _mods(dtype):
    """Return score_mods by name, each with the tensors it captures, float32 or float64."""
    slopes = normal((4,), seed=1, dtype=dtype).requires_grad_()
    table = normal((60,), seed=2, dtype=dtype).requires_grad_()
    bias = normal((2, 4, 21, 30), seed=3, dtype=torch.bfloat16).requires_grad_()
    rows = normal((30, 3), seed=4, dtype=dtype).requires_grad_()
    number = torch.tensor(0.7, dtype=dtype).requires_grad_()
    frozen = normal((30,), seed=5, dtype=dtype)
    return {
        "slopes": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "relative": lambda s, b, h, q, k: s + table[q - k + 29],
        "bias": lambda s, b, h, q, k: s + bias[b, h, q, k],
        "product": lambda s, b, h, q, k: s * (rows[q] * rows[k]).sum(),
        "number": lambda s, b, h, q, k: torch.tanh(s * number) * number,
        "frozen": lambda s, b, h, q, k: s * frozen[k] + slopes[h],
        "nonlinear": lambda s, b, h, q, k: torch.log(torch.sigmoid(s) + 0.1) + table[k].exp(),
        "not of the score": lambda s, b, h, q, k: table[q + k] * 2.0,
        "minus infinity": lambda s, b, h, q, k: torch.where(
            q % 4 == 1, -float("inf"), torch.where(k > q, -float("inf"), s * slopes[h])
        ),
        "log of relu": lambda s, b, h, q, k: torch.log(torch.relu(s)) + table[k],
    }


@pytest.mark.parametrize("name", _mods(torch.float32).keys())
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_gradients_of_captures_are_within_budget(name, dtype):
    mod = _mods(accumulation_dtype(dtype))[name]
    problem = dense_problem(SHAPE, dtype=dtype, score_mod=mod, causal=True, softcap=4.0)
    _, gradients = check_reference(problem, tile_n=8)
    for gradient, capture in zip(gradients.score_captures, problem.score_mod.captures, strict=True):
        assert (gradient is None) == (not capture.requires_grad)
        assert gradient is None or gradient.dtype == capture.dtype


def test_gradients_of_captures_alone_need_no_other():
    problem = dense_problem(SHAPE, score_mod=_mods(torch.float32)["slopes"])
    result = tiled_forward.forward(problem)
    nothing = GradientNeeds(q=False, k=False, v=False, sink=False, score_captures=(True,))

    def run(needs):
        return tiled_backward.backward(
            problem,
            out=result.out,
            lse=result.lse,
            dout=torch.ones_like(result.out),
            dlse=None,
            needs=needs,
        )

    alone, everything = run(nothing), run(all_needs(problem))
    assert alone.dq is None
    assert torch.equal(alone.score_captures[0], everything.score_captures[0])
