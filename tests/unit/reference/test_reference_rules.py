"""The optimistic reference gives what the running maximum gives, whatever the scores do."""

import pytest
import torch

from fovea.plan.numerics import OPTIMISTIC_SUM_LIMIT
from fovea.problem import Request, make_dense
from fovea.reference import tiled_forward
from fovea.reference.numerics import ReferenceRule, fits_optimistically, optimistic_reference
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, normal
from fovea.testing.problems import dense_problem

TILE = 16
SHAPE = Shape(batch=1, seqlen_q=33, seqlen_kv=80, heads_q=2)


def _with_keys(k, v=None, *, dtype=torch.bfloat16, **options):
    """Return a problem whose scores are the keys' first elements."""
    q = torch.ones(1, 20, 1, 1, dtype=dtype)
    v = normal((1, k.numel(), 1, 16), seed=1, dtype=dtype) if v is None else v
    keys = k.to(dtype).view(1, -1, 1, 1)
    return make_dense(q, keys, v, Request(scale=1.0, wants_max_score=True, **options))


def _optimistic(problem):
    return tiled_forward.forward(problem, tile_n=TILE, rule=ReferenceRule.OPTIMISTIC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 5)}], ids=str)
def test_optimistic_forward_of_ordinary_scores_is_within_budget(options, dtype):
    problem = dense_problem(SHAPE, dtype=dtype, **options)
    check_forward(problem, _optimistic(problem))


@pytest.mark.parametrize("rise", [10.0, 60.0, 90.0, 300.0, 30000.0])
@pytest.mark.parametrize("direction", [1, -1])
def test_optimistic_forward_of_scores_that_move_by_hundreds_is_within_budget(rise, direction):
    steps = torch.arange(80) // TILE * direction
    problem = _with_keys(steps * rise + torch.linspace(0, 1, 80))
    result = _optimistic(problem)
    check_forward(problem, result)
    assert torch.equal(result.max_score, tiled_forward.forward(problem, tile_n=TILE).max_score)


def test_optimistic_forward_of_huge_values_is_within_budget():
    # The sums stay small, P V does not: 2^60 of the second tile times values of 2^80.
    k = torch.cat([torch.zeros(TILE), torch.full((TILE,), 41.5)])
    v = normal((1, 2 * TILE, 1, 16), seed=1) * 2.0**80
    problem = _with_keys(k, v.bfloat16())
    check_forward(problem, _optimistic(problem))


def test_optimistic_forward_of_rows_without_keys_in_their_first_tiles_is_within_budget():
    def hides_the_first_tiles(b, h, q_idx, kv_idx):
        return kv_idx >= q_idx * 3

    k = torch.linspace(-200, 200, 80)
    problem = _with_keys(k, mask_mod=hides_the_first_tiles)
    check_forward(problem, _optimistic(problem))


def test_optimistic_forward_of_minus_infinity_in_a_plain_tile_is_within_budget():
    problem = _with_keys(
        torch.linspace(-100, 100, 80),
        score_mod=lambda s, b, h, q_idx, kv_idx: torch.where(kv_idx < 40, -float("inf"), s),
    )
    check_forward(problem, _optimistic(problem))


def test_optimistic_forward_redoes_nan_and_infinite_rows_to_nan():
    problem = _with_keys(
        torch.zeros(80),
        score_mod=lambda s, b, h, q_idx, kv_idx: torch.where(
            (q_idx == 3) & (kv_idx == 50), float("inf"), s
        ),
    )
    result = _optimistic(problem)
    rows = torch.arange(20) == 3
    assert bool(result.out[:, rows].isnan().all())
    check_forward(problem, result)


def test_optimistic_reference_stays_where_there_is_one():
    old = torch.tensor([-torch.inf, 1.0, 5.0])
    assert torch.equal(optimistic_reference(old), torch.tensor([0.0, 1.0, 5.0]))


def test_fits_optimistically_judges_sum_and_output():
    acc = torch.zeros(7, 4)
    acc[2, 1] = -torch.inf
    acc[3, 0] = torch.nan
    row_sum = torch.tensor([1.0, OPTIMISTIC_SUM_LIMIT, 1.0, 1.0, torch.nan, 1e-30, 0.0])
    maximum = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -70.0, -torch.inf])
    expected = torch.tensor([True, False, False, False, False, False, True])
    fits = fits_optimistically(row_sum[:, None], acc, maximum[:, None])
    assert torch.equal(fits, expected[:, None])
