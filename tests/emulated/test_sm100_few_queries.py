"""Few queries on Blackwell: heads of a group in one tile, keys in parts, and their merge."""

import functools

import pytest
import torch
from schedules import check_schedules, run_once

from fovea.arch import SM100, SM103
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, ForwardResult, Request, make_dense
from fovea.reference.decode import split_forward
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, dense_qkv


def problem_of(
    sizes: tuple[int, int, int],
    head_dims: tuple[int, int] = (64, 64),
    *,
    batch: int = 1,
    heads_kv: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    is_first: bool = False,
    **keywords,
) -> AttentionProblem:
    """Return a call of (queries, keys, query heads of a group); with `is_first` of one entry."""
    shape = Shape(
        batch=batch,
        seqlen_q=sizes[0],
        seqlen_kv=sizes[1],
        heads_q=sizes[2] * heads_kv,
        heads_kv=heads_kv,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
    )
    q, k, v = dense_qkv(shape, dtype=dtype)
    if is_first:
        q, k, v = q[:1], k[:1], v[:1]
    return make_dense(q, k, v, Request(wants_lse=True, **keywords))


def run(problem: AttentionProblem, splits: int, seed: int = 0, num_sms: int = 2) -> ForwardResult:
    """Return the results, of one launch or of two where there is something to merge."""
    assert forward_plan(problem, SM100).packs_heads
    num_launches = 1 if splits == 1 else 2
    return run_once(
        problem, SM100, seed=seed, num_sms=num_sms, splits=splits, num_launches=num_launches
    )


@pytest.mark.parametrize(
    "splits", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 7]
)
@pytest.mark.parametrize(
    ("sizes", "head_dims"),
    [
        ((1, 500, 4), (64, 64)),
        ((17, 9, 7), (64, 64)),  # rows without keys, and more parts than tiles
        *(
            pytest.param(sizes, head_dims, marks=pytest.mark.slow)
            for sizes, head_dims in (
                ((1, 900, 4), (128, 128)),
                ((5, 500, 8), (192, 128)),
                ((64, 300, 5), (128, 128)),  # three tiles of rows
                ((3, 300, 4), (20, 36)),
                ((2, 700, 4), (256, 256)),
                ((40, 129, 7), (192, 192)),
            )
        ),
    ],
)
def test_causal_rows_are_within_the_budget_for_every_number_of_parts(sizes, head_dims, splits):
    problem = problem_of(sizes, head_dims, causal=True)
    check_forward(problem, run(problem, splits))


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("head_dims", [(64, 64), pytest.param((256, 256), marks=pytest.mark.slow)])
def test_sink_joins_once_and_maximum_is_exact(head_dims, splits):
    problem = problem_of(
        (5, 700, 4),
        head_dims,
        batch=2,
        heads_kv=2,
        sink=torch.linspace(-2, 4, 8),
        wants_max_score=True,
        window=(90, 2),
    )
    check_forward(problem, run(problem, splits))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 5])
def test_mods_see_the_head_of_each_row(splits):
    table = torch.linspace(-1, 1, 6)
    problem = problem_of(
        (9, 700, 6),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx) * 0.01,
        mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx + h) % 3 != 0,
    )
    check_forward(problem, run(problem, splits))


@pytest.mark.parametrize("splits", [2, 7])
def test_rows_without_a_key_are_exact_zeros_whatever_v_holds(splits):
    problem = problem_of((6, 600, 2), mask_mod=lambda b, h, q_idx, kv_idx: q_idx + h < 4)
    result = run(problem, splits)
    rows = torch.arange(6)[:, None] + torch.arange(2) >= 4
    assert bool((result.out[0][rows] == 0).all())
    assert bool((result.lse[0].T[rows] == -torch.inf).all())
    check_forward(problem, result)


def test_numbers_that_differ_widely_between_parts_are_merged():
    q, k, v = dense_qkv(
        Shape(seqlen_q=4, seqlen_kv=640, heads_q=4, heads_kv=1, head_dim=64), dtype=torch.bfloat16
    )
    k = k * torch.linspace(0.01, 40, 640)[None, :, None, None].to(k.dtype)
    problem = make_dense(q, k, v, Request(wants_lse=True, causal=True))
    check_forward(problem, run(problem, 5))


@functools.cache
def _first_run() -> ForwardResult:
    return run(problem_of((5, 900, 8), batch=2, causal=True), 3)


@pytest.mark.parametrize(
    ("seed", "num_sms"),
    [pytest.param(*p, marks=pytest.mark.slow) for p in ((2, 3), (1, 1), (3, 132))],
)
def test_bits_depend_on_the_number_of_parts_alone(seed, num_sms):
    again = run(problem_of((5, 900, 8), batch=2, causal=True), 3, seed, num_sms)
    assert torch.equal(again.out, _first_run().out)
    assert torch.equal(again.lse, _first_run().lse)


def test_bits_of_a_row_do_not_depend_on_its_batch():
    alone = run(problem_of((5, 900, 8), batch=2, is_first=True, causal=True), 3)
    assert torch.equal(alone.out[0], _first_run().out[0])
    assert torch.equal(alone.lse[0], _first_run().lse[0])


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("head_dims", [(128, 128), (256, 256)])
def test_bits_are_the_same_under_10_schedules_and_no_race_is_reported(head_dims, splits):
    problem = problem_of((5, 700, 8), head_dims, batch=2, causal=True)
    check_schedules(functools.partial(run, problem, splits), 10, (1, 2, 3))


@pytest.mark.parametrize("splits", [1, 4])
def test_result_is_close_to_the_reference_in_as_many_parts(splits):
    problem = problem_of((2, 800, 4), causal=True)
    tile_n = forward_plan(problem, SM100).tile_n
    expected = split_forward(problem, num_splits=splits, tile_n=tile_n)
    result = run(problem, splits)
    torch.testing.assert_close(result.lse, expected.lse, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(result.out, expected.out, rtol=2**-7, atol=2**-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dims", "dtype"),
    [
        (SM100, (128, 128), torch.bfloat16),
        (SM103, (64, 64), torch.float16),
        (SM100, (192, 128), torch.bfloat16),
        (SM103, (256, 256), torch.bfloat16),
    ],
    ids=str,
)
def test_kernels_use_no_local_memory(arch, head_dims, dtype):
    plan = forward_plan(problem_of((1, 300, 4), head_dims, dtype=dtype), arch)
    record = compile_variant(ForwardVariant(plan), CompileTarget(arch=arch.target)).record
    assert len(record.kernels) == 2  # and the merge
    for used in record.kernels.values():
        assert used.stack_bytes + used.local_bytes == 0
