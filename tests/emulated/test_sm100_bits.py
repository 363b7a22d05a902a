"""Block masks of any block size by bits of partial blocks on Blackwell, emulated, against float64.

The call table of `tests/gpu/cases.py`, which `test_sm100.py` runs, has more of them.
"""

from typing import Any

import pytest
import torch
from schedules import check_schedules, run_once, slow_unless, two_heads
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import fovea
from fovea import mods
from fovea.arch import SM100, SM103
from fovea.mods.trace import trace_mask_mod
from fovea.plan import select
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.problem.block_masks import known_lists
from fovea.testing.budget import check_forward
from fovea.tiling.listed_mask import look

_BIAS = torch.linspace(-1.0, 1.0, 700)


def _random(density: float) -> Any:
    generator = torch.Generator().manual_seed(3)
    shown = torch.rand(400, 400, generator=generator) < density
    shown[::37] = False  # rows that see nothing
    return lambda b, h, q_idx, kv_idx: shown[q_idx, kv_idx]


def _checkerboard(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 8 + kv_idx // 16) % 2 == 0


def _by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx + kv_idx * 3) % (h + 2) == 0) & (kv_idx < 300 - 100 * h)


def _far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Show two ranges of a row, so that there are empty, partial and full blocks."""
    return (kv_idx <= q_idx - 40) | (kv_idx >= q_idx + 90)


def _bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + _BIAS[kv_idx - q_idx + 300]


SINK: dict[str, Any] = {"sink": torch.tensor([0.5, 4.0])}
ALIBI: dict[str, Any] = {"score_mod": mods.alibi(2), "window": (200, 150), **SINK}
NATTEN = mods.natten_2d(15, 20, 5, 7)
DOCUMENTS = mods.document(torch.arange(400) // 77)  # ranges, which Blackwell does not take
# Block size, mask, (queries, keys), (head_dim, head_dim_v), dtype, what the call asks for beside.
CASES: dict[str, tuple[Any, Any, tuple[int, int], tuple[int, int], str, dict[str, Any]]] = {
    "64 random": (64, _random(0.3), (130, 300), (64, 64), "bf16", {}),
    "16 random d128": (16, _random(0.02), (200, 333), (128, 128), "bf16", {}),
    "32 natten": (32, NATTEN, (300, 300), (128, 128), "bf16", {}),
    "64 128 checkerboard sink": ((64, 128), _checkerboard, (260, 270), (64, 64), "bf16", SINK),
    "256 far": (256, _far, (400, 400), (128, 128), "bf16", {}),
    "100 7 far causal": ((100, 7), _far, (200, 300), (64, 64), "bf16", {"causal": True}),
    "64 far window alibi": (64, _far, (300, 300), (128, 128), "bf16", ALIBI),
    "32 by head fp16": (32, _by_head, (150, 333), (64, 64), "fp16", {}),
    "16 far max_score": (16, _far, (260, 300), (128, 128), "bf16", {"wants_max_score": True}),
    "64 random softcap": (64, _random(0.3), (140, 200), (128, 128), "bf16", {"softcap": 3.0}),
    "32 far loop": (32, _far, (200, 300), (128, 128), "bf16", {"score_mod": _bias}),
    "32 far d192": (32, _far, (200, 400), (192, 192), "bf16", {}),
    "64 far d256": (64, _far, (200, 400), (256, 256), "bf16", {}),
    "64 random loop d256": (64, _random(0.3), (60, 300), (256, 256), "bf16", {"score_mod": _bias}),
    "64 documents": (64, DOCUMENTS, (300, 400), (128, 128), "bf16", {}),
    "32 few queries": (32, _random(0.3), (7, 300), (64, 64), "bf16", {}),
}


def _problem(name: str, *, by_torch: bool = False) -> AttentionProblem:
    block_size, mask, sizes, head_dims, dtype, options = CASES[name]
    q, k, v = two_heads(sizes, head_dims, dtype)
    counts = (q.shape[0], 2) if mask is _by_head else (None, None)
    create = torch_block_mask if by_torch else fovea.create_block_mask
    block_mask = create(mask, *counts, *sizes, "cpu", block_size)
    if by_torch:  # what a first call on a GPU does
        look(known_lists(block_mask), trace_mask_mod(mask))
    return make_dense(q, k, v, Request(wants_lse=True, block_mask=block_mask, **options))


def _check(problem: AttentionProblem) -> None:
    plan = select.forward_plan(problem, SM100)
    assert plan.features.block_bits
    assert plan.features.block_mask_mod is None
    check_forward(problem, run_once(problem, SM100))


@pytest.mark.parametrize("name", slow_unless(("64 random",), CASES))
def test_call_is_within_the_budget(name: str) -> None:
    _check(_problem(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["64 random", "32 natten", "64 documents"])
def test_mask_that_torch_made_is_within_the_budget(name: str) -> None:
    _check(_problem(name, by_torch=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["16 random d128", "64 far d256"])
def test_every_schedule_is_silent_and_gives_the_same_bits(name: str) -> None:
    problem = _problem(name)
    check_schedules(lambda seed, sms: run_once(problem, SM100, seed=seed, num_sms=sms), 10)


@pytest.mark.parametrize("arch", [SM100, SM103], ids=str)
def test_long_calls_with_bits_get_no_pairs(arch) -> None:
    size = select.PAIR_QUERIES
    block_mask = fovea.create_block_mask(
        mods.natten_2d(32, 64, 3, 3), None, None, size, size, "cpu", 64
    )
    q = torch.empty(1, size, 1, 128, dtype=torch.bfloat16)
    plan = select.forward_plan(make_dense(q, q, q, Request(block_mask=block_mask)), arch)
    assert plan.features.block_bits
    assert plan.cluster == 1
    assert plan.tile_m == 128
