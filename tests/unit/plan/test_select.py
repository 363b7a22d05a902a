"""Which plan calls get, and into how many parts keys are cut."""

import pytest
import torch

import fovea
from fovea import mods
from fovea.arch import SM90
from fovea.plan.select import FEW_QUERIES, forward_plan, num_splits, unsupported
from fovea.problem import Request, make_dense


def problem_of(batch, seqlen_q, seqlen_kv, heads_q=32, heads_kv=8, head_dim=128, **keywords):
    q = torch.empty(batch, seqlen_q, heads_q, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, seqlen_kv, heads_kv, head_dim, dtype=torch.bfloat16, device="meta")
    return make_dense(q, k, k, Request(**keywords))


def splits_of(*sizes, num_sms=132, **keywords):
    problem = problem_of(*sizes, **keywords)
    return num_splits(problem, forward_plan(problem, SM90), num_sms)


def test_heads_are_packed_for_few_queries_alone():
    for seqlen_q in (1, FEW_QUERIES):
        assert forward_plan(problem_of(2, seqlen_q, 5000), SM90).packs_heads
    assert not forward_plan(problem_of(2, FEW_QUERIES + 1, 5000), SM90).packs_heads


def test_heads_of_block_lists_are_not_packed():
    mask = fovea.create_block_mask(mods.prefix_lm(9), None, None, 1, 1000, "cpu")
    q = torch.empty(1, 1, 4, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 1000, 4, 128, dtype=torch.bfloat16)
    problem = make_dense(q, k, k, Request(block_mask=mask))
    plan = forward_plan(problem, SM90)
    assert not plan.packs_heads
    assert num_splits(problem, plan, 132) == 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 512), 1),  # four KV tiles
        ((1, 1, 4096), 16),  # 32 KV tiles in parts of two: 128 CTAs
        ((4, 1, 32768), 4),  # 32 tiles: 128 CTAs
        ((8, 1, 32768), 2),
        ((16, 1, 32768), 1),
        ((64, 1, 131072), 1),
        ((1, 17, 32768), 8),  # 68 rows a KV head make two tiles, so 16 in all
        ((1, 65, 32768), 1),  # another plan
    ],
)
def test_keys_are_cut_until_the_sms_are_busy(sizes, expected):
    assert splits_of(*sizes) == expected


def test_keys_outside_a_window_are_not_counted():
    assert splits_of(1, 1, 32768, causal=True, window=(600, None)) == splits_of(1, 1, 640)


def test_every_sm_count_gives_parts_that_hold_a_tile():
    for num_sms in (1, 2, 7, 78, 114, 132, 148):
        for batch in (1, 2, 3, 5, 20):
            for seqlen_kv in (1, 129, 4096, 100_000):
                found = splits_of(batch, 1, seqlen_kv, num_sms=num_sms)
                assert 1 <= found <= max(1, seqlen_kv // 128)


def _lack_of_mod(**mods):
    q = torch.empty(1, 9, 1, 64, dtype=torch.bfloat16)
    return unsupported(make_dense(q, q, q, Request(**mods)), SM90)


def test_masks_that_need_float64_are_not_for_kernels():
    times = torch.arange(9, dtype=torch.float64)

    def near(b, h, q_idx, kv_idx):
        return (times[q_idx] - times[kv_idx]).abs() < 45

    lack = _lack_of_mod(mask_mod=near)
    assert lack is not None
    assert "float64 in the mask_mod" in lack
    assert ".float()" in lack
    times = times.float()
    assert _lack_of_mod(mask_mod=near) is None


@pytest.mark.parametrize(
    ("score_mod", "is_refused"),
    [
        (lambda s, b, h, i, j: s + (_WIDE[i] - _WIDE[j]).float(), True),
        (lambda s, b, h, i, j: s + _WIDE[j], True),
        (lambda s, b, h, i, j: _WIDE[j], False),
        (lambda s, b, h, i, j: s.double().exp().float(), True),
        (lambda s, b, h, i, j: s + _WIDE[j].int(), True),
        (lambda s, b, h, i, j: torch.where(_WIDE[j].bool(), s, 0.0), True),
        (lambda s, b, h, i, j: s + _WIDE[j].float(), False),
        ((lambda number: lambda s, b, h, i, j: s * number)(1.37), False),
        ((lambda number: lambda s, b, h, i, j: (s.half() * number).float())(1.37), False),
        ((lambda number: lambda s, b, h, i, j: s.double() * number)(1.37), True),
        (lambda s, b, h, i, j: s + (_WIDE[i].half() - _WIDE[j].half()) * 0.1, False),
    ],
)
def test_scores_that_compute_in_float64_are_not_for_kernels(score_mod, is_refused):
    lack = _lack_of_mod(score_mod=score_mod)
    assert (lack is not None) == is_refused
    assert lack is None or "float64 in the score_mod" in lack


@pytest.mark.parametrize("score_mod", [fovea.mods.alibi(8), fovea.mods.softcap(5.5)])
def test_python_floats_that_a_mod_captures_are_for_kernels(score_mod):
    """As scalars they are float64, which a kernel converts where it reads them."""
    assert _lack_of_mod(score_mod=score_mod) is None
    rate = 0.3
    assert _lack_of_mod(score_mod=lambda s, b, h, i, j: s - (i - j) * rate) is None
    assert _lack_of_mod(mask_mod=lambda b, h, i, j: (i - j) * rate < 2.5) is None


_WIDE = torch.arange(9, dtype=torch.float64)
