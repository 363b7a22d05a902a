"""The reference against float64 on problems that combine every feature."""

import pytest
import torch

from fovea.reference import tiled_forward
from fovea.reference.decode import split_forward
from fovea.reference.numerics import ReferenceRule
from fovea.testing.budget import check_forward
from fovea.testing.problems import check_reference
from fovea.testing.random_problems import Limits, random_problem

WIDE = Limits(dtypes=(torch.float32, torch.bfloat16))


def _check(seed):
    problem = random_problem(seed)
    check_reference(problem, tile_n=(7, 16, 128)[seed % 3])


@pytest.mark.parametrize("seed", range(60))
def test_reference_of_a_random_problem_is_within_budget(seed):
    _check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(40))
def test_reference_of_many_random_problems_is_within_budget(batch):
    for seed in range(1000 + 25 * batch, 1000 + 25 * (batch + 1)):
        try:
            _check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("seed", range(200, 230))
def test_split_and_optimistic_forward_of_a_random_problem_are_within_budget(seed):
    problem = random_problem(seed, WIDE)
    check_forward(problem, split_forward(problem, num_splits=1 + seed % 4, tile_n=16))
    optimistic = tiled_forward.forward(problem, tile_n=16, rule=ReferenceRule.OPTIMISTIC)
    check_forward(problem, optimistic)


def test_random_problem_of_a_seed_is_always_the_same():
    first, second = random_problem(5), random_problem(5)
    assert torch.equal(first.q, second.q)
    assert first.scale == second.scale
    assert first.causal == second.causal
