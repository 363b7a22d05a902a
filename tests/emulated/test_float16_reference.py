"""float16 on Hopper: a row's reference rises when the sums of its exponentials say so."""

from typing import Any

import pytest
import torch
from schedules import slow_unless

import fovea
from fovea.arch import SM90
from fovea.emulator import Options
from fovea.plan.select import forward_plan
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import AttentionProblem, ForwardResult, Request, make_dense
from fovea.runtime.emulated import emulate
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, dense_qkv

LN_2 = 0.6931471805599453


def _problem(
    scores_log2: torch.Tensor, *, seqlen_q: int = 70, head_dim: int = 64, **options: Any
) -> AttentionProblem:
    """Return a call whose scores are these, one a key, and some noise."""
    shape = Shape(
        seqlen_q=seqlen_q,
        seqlen_kv=scores_log2.shape[0],
        heads_q=1,
        heads_kv=1,
        head_dim=head_dim,
    )
    q, k, v = dense_qkv(shape, dtype=torch.float16)
    q[..., 0] = 8.0
    k[..., 0] = (scores_log2 * LN_2 * head_dim**0.5 / 8.0)[None, :, None].half()
    return make_dense(q, k, v, Request(wants_lse=True, **options))


def _launch(problem: AttentionProblem, **options: Any) -> tuple[ForwardResult, float]:
    """Return the result and how many operations the tensor cores did."""
    plan = forward_plan(problem, SM90)
    assert isinstance(plan, ForwardPlan)
    assert plan.settles_sums
    result, launches = emulate(problem, SM90, options=Options(**options))
    assert not any(launch.warnings for launch in launches)
    return result, sum(launch.counters["mma_flops.f16"] for launch in launches)


def _run(problem: AttentionProblem, **options: Any) -> ForwardResult:
    return _launch(problem, **options)[0]


def _one_key(height: float, position: int) -> torch.Tensor:
    scores = torch.zeros(600)
    scores[position] = height
    return scores


# Keys are walked from the last one down.
CURVES = {
    "up to the limit": torch.linspace(14.0, -1.0, 600),
    "past the limit once": torch.linspace(19.0, 0.0, 600),
    "past the limit by degrees": torch.linspace(90.0, -40.0, 600),
    "down": torch.linspace(-90.0, 90.0, 600),
    "beyond float32 at once": _one_key(150.0, 300),
    "nearly beyond float32 at once": _one_key(127.5, 300),
    "one key first": _one_key(40.0, 599),
    "one key last": _one_key(17.0, 0),
    "below": torch.full((600,), -80.0),
}


@pytest.mark.parametrize("name", slow_unless(("past the limit by degrees",), CURVES))
def test_scores_that_move_are_within_the_budget(name: str) -> None:
    problem = _problem(CURVES[name])
    check_forward(problem, _run(problem))


def _stairs(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide the last keys from each row, more from the later ones: a warpgroup walks them first."""
    return kv_idx < 260 - 3 * q_idx


@pytest.mark.parametrize(
    "height",
    slow_unless((-20.0,), (-300.0, -60.0, -20.0, 0.0, 14.0, 60.0, 100.0, 125.5, 300.0)),
)
def test_rows_that_see_nothing_in_their_first_tile_are_within_the_budget(height: float) -> None:
    lists = fovea.create_block_mask(_stairs, None, None, 70, 600, "cpu")
    problem = _problem(height + torch.linspace(0.0, 3.0, 600), block_mask=lists)
    check_forward(problem, _run(problem))


@pytest.mark.slow
def test_rows_whose_first_terms_vanish_in_part_are_within_the_budget() -> None:
    lists = fovea.create_block_mask(_stairs, None, None, 70, 600, "cpu")
    problem = _problem(_one_key(9.0, 20) - 127.0, block_mask=lists)
    check_forward(problem, _run(problem))


@pytest.mark.parametrize(
    "name",
    slow_unless(
        ("past the limit once",), ("past the limit once", "past the limit by degrees", "down")
    ),
)
def test_scores_that_move_are_not_computed_twice(name: str) -> None:
    flat = _launch(_problem(torch.zeros(600)))[1]
    assert flat > 0
    assert _launch(_problem(CURVES[name]))[1] == flat


@pytest.mark.slow
def test_scores_beyond_float32_at_once_are_computed_twice() -> None:
    flat = _launch(_problem(torch.zeros(600)))[1]
    assert _launch(_problem(CURVES["beyond float32 at once"]))[1] > flat


@pytest.mark.slow
def test_row_has_the_same_bits_whatever_its_neighbours_references_do() -> None:
    quiet = _problem(CURVES["up to the limit"])
    loud = _problem(CURVES["up to the limit"])
    loud.q[:, 1::2, :, 0] *= 6.0
    own, beside = _run(quiet), _run(loud)
    assert torch.equal(own.out[:, ::2], beside.out[:, ::2])
    assert torch.equal(own.lse[..., ::2], beside.lse[..., ::2])


@pytest.mark.slow
def test_schedules_agree_bit_for_bit() -> None:
    problem = _problem(CURVES["past the limit by degrees"], seqlen_q=200, causal=True)
    first = _run(problem, seed=1)
    for seed, delay in ((2, "late"), (3, "eager")):
        other = _run(problem, seed=seed, async_delay=delay)
        assert torch.equal(first.out, other.out)
        assert torch.equal(first.lse, other.lse)


def test_nan_and_infinity_reach_the_rows_that_see_them() -> None:
    problem = _problem(torch.zeros(600))
    problem.q[:, 5, :, 0] = torch.nan
    problem.k[:, 100, :, 0] = torch.inf
    result = _run(problem)
    assert result.out.isnan().all()
    assert result.lse.isnan().all()
