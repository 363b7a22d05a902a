import pytest
import torch

from fovea.reference import tiled_forward
from fovea.reference.decode import Partial, combine, split_forward
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, normal
from fovea.testing.problems import dense_problem, varlen_problem


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_split_forward_is_within_budget(num_splits, dtype):
    shape = Shape(batch=2, seqlen_q=3, seqlen_kv=77, heads_q=4, heads_kv=2)
    problem = dense_problem(shape, dtype=dtype, causal=True, sink=torch.randn(4))
    check_forward(problem, split_forward(problem, num_splits=num_splits, tile_n=8))


def test_split_forward_of_one_part_equals_the_unsplit_forward():
    problem = dense_problem(Shape(batch=1, seqlen_q=5, seqlen_kv=40), dtype=torch.float64)
    split = split_forward(problem, num_splits=1, tile_n=8)
    whole = tiled_forward.forward(problem, tile_n=8)
    assert torch.equal(split.out, whole.out)
    assert torch.equal(split.max_score, whole.max_score)
    torch.testing.assert_close(split.lse, whole.lse, rtol=1e-15, atol=0)


def test_split_forward_of_parts_that_see_nothing_is_within_budget():
    # A window of the last keys: most parts are empty, and the packed sequence of no keys is dead.
    problem = varlen_problem(
        [2, 3], [60, 0], Shape(heads_q=2), window=(3, 0), sink=torch.tensor([1.0, -torch.inf])
    )
    check_forward(problem, split_forward(problem, num_splits=5, tile_n=4))


def test_combine_of_an_empty_part_ignores_what_it_holds():
    out = torch.tensor([[[1.0, 2.0]], [[torch.nan, torch.inf]]])
    lse = torch.tensor([[0.5], [-torch.inf]])
    merged, merged_lse = combine(Partial(out=out, lse=lse))
    assert torch.equal(merged, out[0])
    assert torch.equal(merged_lse, lse[0])


def test_combine_of_empty_parts_alone_is_a_dead_row():
    out, lse = combine(Partial(out=torch.ones(3, 2, 4), lse=torch.full((3, 2), -torch.inf)))
    assert torch.equal(out, torch.zeros(2, 4))
    assert torch.equal(lse, torch.full((2,), -torch.inf))


def test_combine_weighs_by_exponentials_of_lse():
    out, lse = normal((4, 5, 3), seed=0), normal((4, 5), seed=1) * 50
    merged, merged_lse = combine(Partial(out=out.double(), lse=lse.double()))
    weight = lse.double().softmax(dim=0)
    torch.testing.assert_close(merged, (out.double() * weight.unsqueeze(-1)).sum(0))
    torch.testing.assert_close(merged_lse, lse.double().logsumexp(0))
