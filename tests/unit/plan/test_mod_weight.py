"""Which mods leave registers for which tiles."""

import pytest
import torch

from fovea.arch import SM90
from fovea.plan.mod_weight import adds_line, are_heavy
from fovea.plan.select import forward_plan
from fovea.problem import Request, make_dense

SLOPES = torch.rand(2)
ROWS = torch.rand(300)

LINES = {
    "alibi": lambda score, b, h, q, k: score + SLOPES[h] * (k - q),
    "distance first": lambda score, b, h, q, k: (k - q) * SLOPES[h] + score,
    "taken away": lambda score, b, h, q, k: score - SLOPES[h] * (q - k),
    "by row": lambda score, b, h, q, k: score + ROWS[q],
    "by key and a number": lambda score, b, h, q, k: score + 0.5 * k,
}
OTHERS = {
    "from a number": lambda score, b, h, q, k: SLOPES[h] * (k - q) - score,
    "gathered by key": lambda score, b, h, q, k: score + ROWS[k],
    "product of positions": lambda score, b, h, q, k: score + 0.1 * k * (k - q),
    "scaled score": lambda score, b, h, q, k: 2.0 * score + 0.5 * k,
    "twice the score": lambda score, b, h, q, k: score + score,
    "absolute distance": lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(),
    "product of integers": lambda score, b, h, q, k: score + SLOPES[h] * (k * 1000),
    "score in the line": lambda score, b, h, q, k: score + (score * SLOPES[h] + k),
    "rounded to 16 bits": lambda score, b, h, q, k: score + 0.5 * (k - q).half(),
    "no score": lambda score, b, h, q, k: SLOPES[h] * (k - q),
}


def plan_of(mod, **keywords):
    q = torch.empty(1, 300, 2, 128, dtype=torch.bfloat16)
    return forward_plan(make_dense(q, q, q, Request(score_mod=mod, **keywords)), SM90)


@pytest.mark.parametrize("name", LINES)
def test_sum_linear_in_the_key_is_one(name):
    plan = plan_of(LINES[name], causal=True)
    assert adds_line(plan.features)
    assert (plan.tile_m, plan.tile_n) == (192, 80)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_none(name):
    assert not adds_line(plan_of(OTHERS[name], causal=True).features)


def test_arithmetic_of_16_bits_is_heavy_and_a_load_of_them_is_not():
    halves = ROWS.half()
    loads = plan_of(lambda score, b, h, q, k: score + halves[k]).features
    rounds = plan_of(lambda score, b, h, q, k: score + halves[k] * halves[k]).features
    assert not are_heavy(loads)
    assert are_heavy(rounds)


def test_line_beside_a_mask_mod_or_a_soft_cap_is_none():
    assert not adds_line(plan_of(LINES["alibi"], mask_mod=lambda b, h, q, k: ROWS[k] > 0).features)
    assert not adds_line(plan_of(LINES["alibi"], softcap=30.0).features)
