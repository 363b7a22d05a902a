"""Pairs of CTAs on Blackwell: one product for both, K and V in halves, one redo for both."""

from functools import partial

import pytest
import torch
from schedules import check_schedules, moving, run_once, slow_unless, two_heads
from torch import Tensor

from fovea.arch import SM100, SM103
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.plan import select
from fovea.problem import AttentionProblem, ForwardResult, Request, make_dense
from fovea.testing.budget import check_forward


@pytest.fixture(autouse=True)
def pairs_from_the_first_query_on(monkeypatch):
    """A pair takes thousands of queries before it pays, and a second to emulate a few hundred."""
    monkeypatch.setattr(select, "PAIR_QUERIES", 1)


def overflowing(q: Tensor, k: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Return q and k of which some rows alone overflow: their scores rise along the walk."""
    large, k = moving(q, k, 60.0)
    small = torch.full_like(q, 2**-7)
    small[:, rows] = large[:, rows]
    return small, k


CASES = {
    "128": ((600, 300), (128, 128), "bf16", {}),
    "128 one row": ((513, 130), (128, 128), "bf16", {"sink": torch.tensor([0.5, 4.0])}),
    "128 redo of the second": ((400, 300), (128, 128), "bf16", slice(140, 150)),
    "128 redo of the first": ((600, 200), (128, 128), "bf16", slice(257, 300)),
    "128 max_score fp16": ((300, 200), (128, 128), "fp16", {"wants_max_score": True}),
    "128 mod": ((300, 200), (128, 128), "bf16", "mod"),
    "96 128": ((300, 257), (96, 128), "bf16", {}),
    "192 128": ((600, 400), (192, 128), "bf16", {}),
    "192 128 fp16": ((270, 129), (192, 128), "fp16", {}),
    "256": ((300, 300), (256, 256), "bf16", {}),
    "256 causal": ((600, 500), (256, 256), "bf16", {"causal": True}),
    "256 causal dead rows": ((300, 129), (256, 256), "bf16", {"causal": True}),
    "256 window fp16": ((400, 400), (256, 256), "fp16", {"window": (150, 40)}),
    "256 redo of the second": ((256, 520), (256, 256), "bf16", slice(130, 256)),
    "40 256": ((257, 130), (40, 256), "bf16", {"causal": True}),
}
QUICK = ("192 128 fp16",)


def _score(score, b, h, q_idx, kv_idx):
    return score - (h + 1) * 0.01 * (q_idx - kv_idx).abs()


def problem_of(
    sizes: tuple[int, int], head_dims: tuple[int, int], dtype: str, options
) -> AttentionProblem:
    q, k, v = two_heads(sizes, head_dims, dtype)
    if isinstance(options, slice):
        q, k = overflowing(q, k, options)
        options = {}
    elif options == "mod":
        options = {"score_mod": _score}
    return make_dense(q, k, v, Request(wants_lse=True, **options))


def run(problem: AttentionProblem, seed: int = 0, num_sms: int = 2) -> ForwardResult:
    """Return the results under one schedule."""
    assert select.forward_plan(problem, SM100).cluster == 2
    return run_once(problem, SM100, seed=seed, num_sms=num_sms)


@pytest.mark.parametrize("name", slow_unless(QUICK, CASES))
def test_call_is_within_the_budget(name: str) -> None:
    problem = problem_of(*CASES[name])
    check_forward(problem, run(problem, seed=list(CASES).index(name)))


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("128 redo of the second", 2),
        *(
            pytest.param(name, 10, marks=pytest.mark.slow)
            for name in ("128", "128 redo of the first", "192 128 fp16", "256 causal")
        ),
        pytest.param("256 redo of the second", 10, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_is_silent_and_gives_the_same_bits(name: str, seeds: int) -> None:
    problem = problem_of(*CASES[name])
    check_schedules(partial(run, problem), seeds, (2, 5, 132))


@pytest.mark.parametrize(
    ("arch", "head_dims", "dtype"),
    [
        (SM100, (128, 128), "bf16"),
        *(
            pytest.param(arch, head_dims, dtype, marks=pytest.mark.slow)
            for arch, head_dims, dtype in (
                (SM103, (128, 128), "fp16"),
                (SM100, (192, 128), "bf16"),
                (SM103, (192, 128), "bf16"),
                (SM100, (256, 256), "bf16"),
                (SM103, (256, 256), "fp16"),
            )
        ),
    ],
    ids=str,
)
def test_kernel_uses_no_local_memory_and_the_plans_threads(arch, head_dims, dtype):
    plan = select.forward_plan(problem_of((300, 1), head_dims, dtype, {}), arch)
    record = compile_variant(ForwardVariant(plan), CompileTarget(arch=arch.target)).record
    (used,) = record.kernels.values()
    assert used.stack_bytes + used.local_bytes == 0
    assert used.threads == plan.threads
