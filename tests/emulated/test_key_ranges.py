"""Block masks that run as a range of keys a row, on the emulator, against float64."""

from typing import Any

import pytest
import torch

import fovea
from fovea import mods
from fovea.arch import arch_named
from fovea.emulator import Options
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.runtime.emulated import emulate
from fovea.testing.budget import check_forward
from fovea.testing.inputs import Shape, dense_qkv

SM90 = arch_named("sm90")


def _documents(*lengths: int) -> Any:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def _far(shape: Shape, jump: int) -> Any:
    """Return a mask whose groups of 64 rows see a few keys, neighbours far from each other."""
    row = torch.arange(shape.seqlen_q)
    begin = (row // 64 % 2) * jump + row % 7
    end = begin + 1 + row % 33
    end[::50] = begin[::50]  # rows that see nothing

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= begin[q_idx]) & (kv_idx < end[q_idx])

    return mask


def _by_head(shape: Shape) -> Any:
    generator = torch.Generator().manual_seed(2)
    sizes = (shape.batch, shape.heads_q, shape.seqlen_q, 2)
    ends = torch.randint(0, shape.seqlen_kv + 1, sizes, generator=generator)
    begin, end = ends.amin(-1), ends.amax(-1)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= begin[b, h, q_idx]) & (kv_idx < end[b, h, q_idx])

    return mask


def _problem(
    shape: Shape, mask: Any, dtype: torch.dtype = torch.bfloat16, *, each: bool = False, **options
) -> AttentionProblem:
    q, k, v = dense_qkv(shape, dtype=dtype)
    sizes = (shape.batch, shape.heads_q) if each else (None, None)
    block_mask = fovea.create_block_mask(mask, *sizes, shape.seqlen_q, shape.seqlen_kv, "cpu")
    return make_dense(q, k, v, Request(wants_lse=True, block_mask=block_mask, **options))


def _check(problem: AttentionProblem) -> None:
    plan = forward_plan(problem, SM90)
    assert plan.features.key_ranges
    assert not plan.features.block_lists
    result, launches = emulate(problem, SM90)
    assert not any(launch.warnings for launch in launches)
    check_forward(problem, result)


def _shape(seqlen_q: int, seqlen_kv: int, head_dim: int = 64, **changes) -> Shape:
    return Shape(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, head_dim=head_dim, **changes)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_documents_are_within_the_budget(head_dim: int) -> None:
    _check(_problem(_shape(400, 400, head_dim), _documents(30, 170, 1, 199)))


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_warpgroups_that_skip_more_than_the_ring_holds_go_on(head_dim: int) -> None:
    shape = _shape(600, 1500, head_dim, batch=1)
    _check(_problem(shape, _far(shape, 1400)))


def test_ranges_of_a_batch_entry_and_head_are_their_own() -> None:
    shape = _shape(150, 200, batch=2, heads_q=4, heads_kv=2)
    _check(_problem(shape, _by_head(shape), each=True))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"window": (40, 3)},
                {"score_mod": mods.alibi(2)},
                {"mask_mod": mods.document(torch.arange(300) // 77)},
                {"softcap": 3.0, "sink": torch.tensor([0.5, -1.0])},
            )
        ),
    ],
)
def test_ranges_meet_other_features(options: dict[str, Any]) -> None:
    shape = _shape(300, 300, batch=1, heads_q=2, heads_kv=1)
    _check(_problem(shape, _documents(90, 10, 200), **options))


def test_float16_is_within_the_budget() -> None:
    _check(_problem(_shape(300, 300, batch=1), _documents(90, 10, 200), torch.float16))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_other_head_dims_are_within_the_budget(head_dim: int) -> None:
    shape = _shape(300, 900, head_dim, batch=1)
    _check(_problem(shape, _far(shape, 800)))


def test_rows_whose_first_tile_is_hidden_and_scores_vanish_are_redone() -> None:
    shape = _shape(200, 200, batch=1, heads_q=1, heads_kv=1)
    q, k, v = dense_qkv(shape, dtype=torch.bfloat16)
    # Rows of the first document see nothing in the last tile, where they would get their reference.
    q[:, :70] = 30.0
    k[:, :70] = -30.0
    block_mask = fovea.create_block_mask(_documents(70, 130), None, None, 200, 200, "cpu")
    _check(make_dense(q, k, v, Request(wants_lse=True, block_mask=block_mask)))


def test_schedules_agree_bit_for_bit() -> None:
    shape = _shape(300, 700, 128, batch=1, heads_q=1, heads_kv=1)
    problem = _problem(shape, _far(shape, 600))
    results = [
        emulate(problem, SM90, options=Options(seed=seed, async_delay=delay))[0]
        for seed, delay in ((1, "random"), (2, "late"))
    ]
    assert torch.equal(results[0].out, results[1].out)
    assert torch.equal(results[0].lse, results[1].lse)


def test_captured_tensor_that_changed_is_honoured() -> None:
    ids = torch.arange(300) // 100
    shape = _shape(300, 300, batch=1, heads_q=1, heads_kv=1)
    problem = _problem(shape, mods.document(ids))
    ids[150:200] = 7
    assert not forward_plan(problem, SM90).features.key_ranges
    result, _ = emulate(problem, SM90)
    check_forward(problem, result)
