"""Few queries on the emulator: heads of a group in one tile, keys in parts, and their merge."""

import functools

import pytest
import torch
from schedules import check_schedules, run_once

from fovea.arch import arch_named
from fovea.plan.select import forward_plan
from fovea.problem import (
    AttentionProblem,
    ForwardResult,
    Request,
    VarlenRequest,
    make_dense,
    make_varlen,
)
from fovea.reference.decode import split_forward
from fovea.runtime.emulated import emulate
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, cumulative, dense_qkv

SM90 = arch_named("sm90")


def problem_of(shape: Shape, *, is_first: bool = False, **keywords) -> AttentionProblem:
    """Return a call that wants its lse; with `is_first`, of its first batch entry alone."""
    q, k, v = dense_qkv(shape, dtype=torch.bfloat16)
    if is_first:
        q, k, v = q[:1], k[:1], v[:1]
    return make_dense(q, k, v, Request(wants_lse=True, **keywords))


def run(problem: AttentionProblem, splits: int, seed: int = 0, num_sms: int = 2) -> ForwardResult:
    """Return the results, of one launch or of two where there is something to merge."""
    assert forward_plan(problem, SM90).packs_heads
    num_launches = 1 if splits == 1 else 2
    return run_once(
        problem, SM90, seed=seed, num_sms=num_sms, splits=splits, num_launches=num_launches
    )


def shape(seqlen_q: int, seqlen_kv: int, group: int, **changes) -> Shape:
    sizes = {"head_dim": 64, "heads_q": group, "heads_kv": 1, **changes}
    return Shape(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, **sizes)


@pytest.mark.parametrize("splits", [1, 2, pytest.param(3, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "group"),
    [
        (1, 500, 4),
        (17, 9, 7),  # rows without keys, and more parts than tiles
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((1, 900, 4), (2, 129, 7), (5, 500, 8), (17, 300, 4), (64, 64, 1))
        ),
    ],
)
def test_causal_rows_are_within_the_budget_for_every_number_of_parts(
    seqlen_q, seqlen_kv, group, splits
):
    problem = problem_of(shape(seqlen_q, seqlen_kv, group), causal=True)
    check_forward(problem, run(problem, splits))


@pytest.mark.parametrize("splits", [1, 3])
def test_sink_joins_once_and_maximum_is_exact(splits):
    sizes = shape(5, 700, 4, batch=2, heads_q=8, heads_kv=2)
    problem = problem_of(sizes, sink=torch.linspace(-2, 4, 8), wants_max_score=True, window=(90, 2))
    check_forward(problem, run(problem, splits))


@pytest.mark.parametrize("splits", [1, 5])
def test_mods_see_the_head_of_each_row(splits):
    table = torch.linspace(-1, 1, 6)
    problem = problem_of(
        shape(9, 700, 6),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx) * 0.01,
        mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx + h) % 3 != 0,
    )
    check_forward(problem, run(problem, splits))


@pytest.mark.parametrize("splits", [2, 7])
def test_rows_without_a_key_are_exact_zeros_whatever_v_holds(splits):
    problem = problem_of(shape(6, 600, 2), mask_mod=lambda b, h, q_idx, kv_idx: q_idx + h < 4)
    result = run(problem, splits)
    rows = torch.arange(6)[:, None] + torch.arange(2) >= 4
    assert bool((result.out[0][rows] == 0).all())
    assert bool((result.lse[0].T[rows] == -torch.inf).all())
    check_forward(problem, result)


def test_parts_of_tiles_without_keys_weigh_nothing():
    """Two tiles in seven parts, the keys of some hidden: most parts have nothing to say."""
    problem = problem_of(shape(3, 150, 4), window=(40, 0))
    check_forward(problem, run(problem, 7))


def test_numbers_that_differ_widely_between_parts_are_merged():
    q, k, v = dense_qkv(shape(4, 640, 4), dtype=torch.bfloat16)
    k = k * torch.linspace(0.01, 40, 640)[None, :, None, None].to(k.dtype)
    problem = make_dense(q, k, v, Request(wants_lse=True, causal=True))
    check_forward(problem, run(problem, 5))


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_packed_sequences_of_different_lengths_are_within_the_budget(splits):
    """Idle rows among them, and a sequence without keys: the sink is not theirs to join."""
    lengths, used = [(5, 600), (1, 9), (0, 3), (7, 0), (2, 300)], [3, 1, 0, 5, 2]
    rows, keys = (torch.tensor([pair[side] for pair in lengths]) for side in (0, 1))
    total_q, total_kv = int(rows.sum()) + 4, int(keys.sum())
    q, _, _ = dense_qkv(shape(total_q, 1, 8), dtype=torch.bfloat16)
    _, k, v = dense_qkv(shape(1, total_kv, 8, heads_kv=2), dtype=torch.bfloat16)
    where = VarlenRequest(
        cu_seqlens_q=cumulative(rows.tolist(), "cpu"),
        cu_seqlens_kv=cumulative(keys.tolist(), "cpu"),
        max_seqlen_q=5,
        max_seqlen_kv=600,
        seqused_q=torch.tensor(used, dtype=torch.int32),
    )
    request = Request(wants_lse=True, causal=True, sink=torch.linspace(-2, 4, 8))
    problem = make_varlen(q[0], k[0], v[0], where, request)
    assert forward_plan(problem, SM90).packs_heads
    result, launches = emulate(problem, SM90, splits=splits, num_sms=3)
    assert len(launches) == (2 if splits == 1 else 3)  # the table of sequences comes first
    check_forward(problem, result)
    assert bool((result.out[-4:] == 0).all())
    assert bool((result.lse[:, -4:] == -torch.inf).all())


@functools.cache
def _first_run() -> ForwardResult:
    return run(problem_of(shape(5, 900, 8, batch=2), causal=True), 3)


@pytest.mark.parametrize(
    ("seed", "num_sms"),
    [(1, 3), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((2, 1), (3, 132)))],
)
def test_bits_depend_on_the_number_of_parts_alone(seed, num_sms):
    again = run(problem_of(shape(5, 900, 8, batch=2), causal=True), 3, seed, num_sms)
    assert torch.equal(again.out, _first_run().out)
    assert torch.equal(again.lse, _first_run().lse)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
def test_bits_are_the_same_under_10_schedules_and_no_race_is_reported(splits):
    problem = problem_of(shape(5, 700, 8, batch=2, head_dim=128), causal=True)
    check_schedules(functools.partial(run, problem, splits), 10, (1, 2, 3))


def test_bits_of_a_row_do_not_depend_on_its_batch():
    alone = run(problem_of(shape(5, 900, 8, batch=2), is_first=True, causal=True), 3)
    assert torch.equal(alone.out[0], _first_run().out[0])
    assert torch.equal(alone.lse[0], _first_run().lse[0])


@pytest.mark.parametrize("splits", [1, 4])
def test_result_is_close_to_the_reference_in_as_many_parts(splits):
    problem = problem_of(shape(2, 800, 4), causal=True, wants_max_score=False)
    tile_n = forward_plan(problem, SM90).tile_n
    expected = split_forward(problem, num_splits=splits, tile_n=tile_n)
    result = run(problem, splits)
    torch.testing.assert_close(result.lse, expected.lse, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(result.out, expected.out, rtol=2**-7, atol=2**-10)
