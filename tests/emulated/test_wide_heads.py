"""Head dims beyond 256 on Hopper: V in slices, wide Q and K, in every feature and schedule.

The same features at a GPU's sizes are cases of `tests/gpu/cases.py`.
"""

from functools import partial

import pytest
import torch
from schedules import check_schedules, moving, run_once, slow_unless, two_heads

import fovea
from fovea.arch import SM90, SM100
from fovea.plan.select import forward_plan, unsupported
from fovea.problem import AttentionProblem, ForwardResult, Request, make_dense
from fovea.runtime.emulated import emulate
from fovea.testing.budget import check_forward


def _bias(score, b, h, q_idx, kv_idx):
    return score - (h + 1) * 0.01 * (q_idx - kv_idx).abs()


def _late(b, h, q_idx, kv_idx):
    return kv_idx >= 3 * q_idx + 40


def _ranges(b, h, q_idx, kv_idx):
    return q_idx // 45 == kv_idx // 60


def _problem(
    sizes: tuple[int, int], head_dims: tuple[int, int], dtype: str = "bf16", **options
) -> AttentionProblem:
    """Return a call of two heads.

    With `falling` the maximum of every row moves; with `huge_from` O overflows from that column of
    V on unless the reference moves along.
    """
    q, k, v = two_heads(sizes, head_dims, dtype)
    falling = options.pop("falling", 0.0)
    huge_from = options.pop("huge_from", head_dims[1])
    v[..., huge_from:] *= 1e30
    if falling:
        q, k = moving(q, k, falling)
    if options.pop("ranges", False):
        options["block_mask"] = fovea.create_block_mask(_ranges, None, None, *sizes, "cpu")
    return make_dense(q, k, v, Request(wants_lse=True, **options))


_SINK = torch.tensor([0.5, 4.0])
CASES = {
    "64 512": ((65, 97), (64, 512), "bf16", {"causal": True}),
    "64 512 fp16": ((130, 150), (64, 512), "fp16", {}),
    "64 512 pairs": ((257, 170), (64, 512), "bf16", {}),
    "64 512 redo": ((70, 200), (64, 512), "bf16", {"falling": -40.0}),
    "64 512 redo of one slice": ((70, 200), (64, 512), "bf16", {"falling": 3.0, "huge_from": 300}),
    "64 512 sink": ((129, 31), (64, 512), "bf16", {"causal": True, "sink": _SINK}),
    "64 512 max_score": ((65, 129), (64, 512), "bf16", {"wants_max_score": True}),
    "512": ((70, 100), (512, 512), "bf16", {}),
    "512 causal fp16": ((140, 161), (512, 512), "fp16", {"causal": True}),
    "512 window": ((129, 200), (512, 512), "bf16", {"window": (70, 20)}),
    "512 ranges": ((150, 200), (512, 512), "bf16", {"ranges": True}),
    "512 mods": ((66, 130), (512, 512), "bf16", {"score_mod": _bias, "mask_mod": _late}),
    "512 softcap": ((65, 65), (512, 512), "bf16", {"softcap": 3.0}),
    "512 one query": ((1, 200), (512, 512), "bf16", {"causal": True}),
    "264 328": ((65, 80), (264, 328), "bf16", {"causal": True}),
    "130 257": ((65, 80), (130, 257), "fp16", {}),
    "512 64": ((100, 70), (512, 64), "bf16", {}),
    "576 512": ((65, 80), (576, 512), "bf16", {"causal": True}),
    "40 520": ((65, 80), (40, 520), "bf16", {"wants_max_score": True}),
    "576 512 full": ((129, 80), (576, 512), "fp16", {}),
}
QUICK = ("64 512",)


def _run(problem: AttentionProblem, seed: int = 0, num_sms: int = 2) -> ForwardResult:
    return run_once(problem, SM90, seed=seed, num_sms=num_sms)


@pytest.mark.parametrize("name", slow_unless(QUICK, CASES))
def test_call_is_within_the_budget(name: str) -> None:
    sizes, head_dims, dtype, options = CASES[name]
    problem = _problem(sizes, head_dims, dtype, **options)
    check_forward(problem, _run(problem, seed=list(CASES).index(name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["64 512", "64 512 pairs", "64 512 redo", "512", "512 causal fp16", "512 ranges"]
)
def test_every_schedule_is_silent_and_gives_the_same_bits(name: str) -> None:
    sizes, head_dims, dtype, options = CASES[name]
    problem = _problem(sizes, head_dims, dtype, **options)
    check_schedules(partial(_run, problem), 10, (2, 4, 132))


@pytest.mark.slow
def test_a_slice_whose_output_overflows_is_redone_alone() -> None:
    sizes, head_dims, dtype, options = CASES["64 512 redo of one slice"]
    flops = []
    for huge_from in (512, 300, 0):
        problem = _problem(sizes, head_dims, dtype, **(options | {"huge_from": huge_from}))
        result, launches = emulate(problem, SM90, num_sms=2)
        check_forward(problem, result)
        flops.append(launches[0].counters["mma_flops.bf16"])
    none, one, both = flops
    assert both == 2 * none
    assert 2 * one == none + both


@pytest.mark.parametrize(
    ("head_dims", "tiles", "slices"),
    [
        ((64, 512), (64, 256), 2),
        ((64, 257), (64, 192), 2),
        ((512, 512), (512, 256), 2),
        ((264, 328), (384, 192), 2),
        ((512, 40), (512, 64), 1),
        ((576, 512), (576, 256), 2),
        ((8, 576), (64, 192), 3),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"score_mod": _bias}, {"ranges": True}])
def test_plan_rounds_up_and_cuts_v_into_slices(head_dims, tiles, slices, options):
    plan = forward_plan(_problem((200, 200), head_dims, **options), SM90)
    assert ((plan.head_dim, plan.head_dim_v), plan.v_slices) == (tiles, slices)
    assert plan.kv_stages >= 2


def test_few_queries_of_wide_heads_are_not_packed():
    assert not forward_plan(_problem((1, 3000), (512, 512)), SM90).packs_heads


def test_blackwell_refuses_wide_heads_and_says_what_it_takes():
    assert "take up to 256" in str(unsupported(_problem((9, 9), (64, 512)), SM100))
