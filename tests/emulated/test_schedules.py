"""The forward under many schedules: equal bits, no report, within time and memory."""

import resource
import time

import pytest
import torch
from schedules import check_schedules, run_once

from fovea.arch import SM90
from fovea.plan.select import forward_plan
from fovea.plan.sm90 import ForwardPlan
from fovea.testing.inputs import Shape
from fovea.testing.problems import dense_problem

_SECONDS, _GIGABYTES = 20.0, 2.0  # of one launch on one core, of the whole process


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 2])
def test_forward_gives_the_same_bits_under_20_schedules_in_time_and_memory(num_sms: int) -> None:
    problem = dense_problem(
        Shape(seqlen_q=256, seqlen_kv=512, heads_q=1, heads_kv=1, head_dim=128),
        dtype=torch.bfloat16,
    )
    run_once(problem, SM90)  # has the kernel compiled and parsed
    start = time.process_time()
    check_schedules(
        lambda seed, sms: run_once(problem, SM90, seed=seed, num_sms=sms), 20, (num_sms,)
    )
    assert (time.process_time() - start) / 20 < _SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 < _GIGABYTES


@pytest.mark.parametrize("causal", [pytest.param(None, marks=pytest.mark.slow), "bottom_right"])
@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_spare_q_goes_to_whoever_is_done_first(seeds: int, causal: str | None) -> None:
    """Two warpgroups and three buffers: each tile of a CTA finds them in another order."""
    shape = Shape(seqlen_q=448, seqlen_kv=128, heads_q=1, heads_kv=1, head_dim=256)
    problem = dense_problem(shape, causal=causal, dtype=torch.bfloat16)
    plan = forward_plan(problem, SM90)
    assert isinstance(plan, ForwardPlan)
    assert plan.spare_q
    check_schedules(
        lambda seed, sms: run_once(problem, SM90, seed=seed, num_sms=sms), seeds, (plan.cluster,)
    )
