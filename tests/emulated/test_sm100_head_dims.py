"""Head dims above 128 on Blackwell: one query tile or two, K and V in parts, one O for streams."""

from functools import partial

import pytest
import torch
from schedules import check_schedules, moving, run_once, slow_unless, two_heads
from torch.nn.attention.flex_attention import create_block_mask

from fovea.arch import SM100, SM103
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, ForwardResult, Request, make_dense
from fovea.testing.budget import check_forward


def problem_of(
    sizes: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: str = "bf16",
    *,
    falling: float = 0.0,
    **keywords,
) -> AttentionProblem:
    """Return a call of two heads; where keys fall, the maximum of every row moves."""
    q, k, v = two_heads(sizes, head_dims, dtype)
    if falling:
        q, k = moving(q, k, falling)
    return make_dense(q, k, v, Request(wants_lse=True, **keywords))


def run(problem: AttentionProblem, seed: int = 0, num_sms: int = 2) -> ForwardResult:
    """Return the results under one schedule."""
    return run_once(problem, SM100, seed=seed, num_sms=num_sms)


def late_blocks() -> dict:
    """Return block lists by which a query tile's first blocks hold no key of its upper rows."""

    def mask(b, h, q_idx, kv_idx):
        return kv_idx < 150 + (q_idx % 128) * 2

    lists = create_block_mask(mask, None, None, 200, 400, device="cpu")
    return {"block_mask": lists}


CASES = {
    "192 128 causal": ((130, 300), (192, 128), "bf16", {"causal": True}),
    "192 128 few": ((5, 300), (192, 128), "bf16", {}),
    "192 128 max_score": ((129, 200), (192, 128), "bf16", {"wants_max_score": True}),
    "192 128 window fp16": ((150, 280), (192, 128), "fp16", {"window": (90, 20)}),
    "192 192 sink": ((140, 150), (192, 192), "bf16", {"sink": torch.tensor([0.5, 4.0])}),
    "176 136": ((129, 129), (176, 136), "bf16", {}),
    "256 causal": ((129, 300), (256, 256), "bf16", {"causal": True}),
    "256 odd tiles": ((7, 129), (256, 256), "bf16", {}),
    "256 falling": ((40, 520), (256, 256), "bf16", {"falling": 60.0}),
    "256 falling fp16 causal": ((300, 300), (256, 256), "fp16", {"falling": 3.0, "causal": True}),
    "256 max_score dead rows": ((150, 9), (256, 256), "bf16", {"wants_max_score": True}),
    "256 dead rows sink": (
        (300, 129),
        (256, 256),
        "bf16",
        {"causal": True, "sink": torch.tensor([0.5, 4.0])},
    ),
    "256 blocks": ((200, 400), (256, 256), "bf16", "blocks"),
    "200 40": ((129, 300), (200, 40), "bf16", {"window": (100, 0)}),
    "256 mod": ((60, 300), (256, 256), "bf16", "mod"),
    "40 248 late keys": ((60, 400), (40, 248), "bf16", "late"),
}
QUICK = ("256 falling fp16 causal",)


def _score(score, b, h, q_idx, kv_idx):
    return score - (h + 1) * 0.01 * (q_idx - kv_idx).abs()


def _late(b, h, q_idx, kv_idx):
    return kv_idx >= 3 * q_idx + 100


def _case(name: str) -> AttentionProblem:
    sizes, head_dims, dtype, options = CASES[name]
    if options == "blocks":
        options = late_blocks()
    elif options == "mod":
        options = {"score_mod": _score}
    elif options == "late":
        options = {"mask_mod": _late}
    return problem_of(sizes, head_dims, dtype, **options)


@pytest.mark.parametrize("name", slow_unless(QUICK, CASES))
def test_call_is_within_the_budget(name: str) -> None:
    problem = _case(name)
    check_forward(problem, run(problem, seed=list(CASES).index(name)))


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        pytest.param("192 128 causal", 2, marks=pytest.mark.slow),
        *(
            pytest.param(name, 10, marks=pytest.mark.slow)
            for name in ("256 falling", "192 128 causal", "256 falling fp16 causal", "192 192 sink")
        ),
    ],
)
def test_every_schedule_is_silent_and_gives_the_same_bits(name: str, seeds: int) -> None:
    check_schedules(partial(run, _case(name)), seeds)


@pytest.mark.parametrize(
    ("arch", "head_dims", "dtype", "seqlen_q"),
    [
        (SM100, (192, 128), "bf16", 300),
        *(
            pytest.param(arch, head_dims, dtype, seqlen_q, marks=pytest.mark.slow)
            for arch, head_dims, dtype, seqlen_q in (
                (SM103, (256, 256), "bf16", 300),
                (SM103, (192, 128), "fp16", 300),
                (SM100, (192, 128), "bf16", 1),
                (SM100, (192, 192), "bf16", 300),
                (SM103, (192, 192), "fp16", 1),
                (SM100, (256, 256), "bf16", 300),
                (SM100, (256, 256), "fp16", 300),
                (SM100, (64, 256), "bf16", 300),
                (SM103, (256, 128), "bf16", 1),
            )
        ),
    ],
    ids=str,
)
def test_kernel_uses_no_local_memory_and_the_plans_threads(arch, head_dims, dtype, seqlen_q):
    plan = forward_plan(problem_of((seqlen_q, 1), head_dims, dtype), arch)
    record = compile_variant(ForwardVariant(plan), CompileTarget(arch=arch.target)).record
    used = next(each for name, each in record.kernels.items() if name.startswith(record.name))
    assert sum(each.stack_bytes + each.local_bytes for each in record.kernels.values()) == 0
    assert used.threads == plan.threads
