"""Block masks that torch made: what their lists show is found once, and no more than they show."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import fovea
from fovea import mods
from fovea.arch import SM90
from fovea.plan import kernel_calls, select
from fovea.problem import AttentionProblem, Request, block_masks, make_dense
from fovea.tiling import listed_mask
from fovea.tiling.exact_lists import exactness

LENGTH = 360
IMAGE = mods.natten_2d(18, 20, 5, 7)
IDS = torch.arange(LENGTH) // 77


@pytest.fixture(autouse=True)
def kernels_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_masks, "_KERNEL_DEVICES", ("cpu",))


def _problem(block_mask: Any) -> AttentionProblem:
    q = torch.zeros(1, LENGTH, 2, 64, dtype=torch.bfloat16)
    return make_dense(q, q, q, Request(block_mask=block_mask))


def _made(mask: Any, size: int | tuple[int, int] = 128) -> Any:
    return torch_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", size)


@pytest.mark.parametrize("size", [128, 256, 32, (64, 128)])
@pytest.mark.parametrize("mask", [mods.document(IDS), lambda b, h, q, kv: (kv < 77) | (kv <= q)])
def test_ranges_are_those_that_fovea_finds(mask: Any, size: Any) -> None:
    found = kernel_calls.as_kernel_call(_problem(_made(mask, size)), SM90)
    ours = fovea.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", size)
    expected = exactness(block_masks.known_lists(ours))
    assert found.key_ranges is not None
    assert expected is not None
    assert expected.ranges is not None
    assert torch.equal(found.key_ranges.rows, expected.ranges.rows)
    assert torch.equal(found.key_ranges.groups, expected.ranges.groups)


def test_a_band_has_ranges_too() -> None:
    found = kernel_calls.as_kernel_call(_problem(_made(mods.causal)), SM90)
    assert found.limits == (None, None)
    assert found.key_ranges is not None
    rows = found.key_ranges.rows[0, 0]
    assert rows[:, 0].tolist() == [0] * LENGTH
    assert rows[:, 1].tolist() == list(range(1, LENGTH + 1))


@pytest.mark.parametrize("size", [128, 32, (64, 16)])
def test_bits_are_those_that_fovea_finds(size: Any) -> None:
    found = kernel_calls.as_kernel_call(_problem(_made(IMAGE, size)), SM90)
    ours = fovea.create_block_mask(IMAGE, None, None, LENGTH, LENGTH, "cpu", size)
    expected = exactness(block_masks.known_lists(ours))
    assert found.mask_bits is not None
    assert expected is not None
    assert expected.bits is not None
    assert torch.equal(found.mask_bits.words, expected.bits.words)
    assert torch.equal(found.mask_bits.lists.states(), expected.bits.lists.states())


@pytest.mark.parametrize("mask", [mods.causal, mods.document(IDS)])
def test_lists_that_hide_more_than_their_mask_are_honoured(mask: Any) -> None:
    block_mask = _made(mask)
    block_mask.kv_num_blocks[0, 0, 2] = 0  # the diagonal block of rows 256 to 359
    found = kernel_calls.as_kernel_call(_problem(block_mask), SM90)
    assert found.limits == (None, None)
    assert found.key_ranges is not None
    rows = found.key_ranges.rows[0, 0]
    assert bool((rows[256:, 1] <= 256).all())
    assert torch.equal(rows[:256, 1], torch.arange(1, 257, dtype=torch.int32))


def test_full_blocks_that_the_mask_would_hide_are_honoured() -> None:
    block_mask = _made(IMAGE)
    block_mask.full_kv_num_blocks[0, 0, 0] = 3
    block_mask.full_kv_indices[0, 0, 0] = torch.arange(3)
    found = kernel_calls.as_kernel_call(_problem(block_mask), SM90)
    assert found.mask_bits is not None
    states = found.mask_bits.lists.states()
    assert states[0, 0, 0].tolist() == [2, 2, 2]


def test_lists_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    look = listed_mask.look
    monkeypatch.setattr(block_masks, "look", lambda *given: seen.append(given) or look(*given))
    scattered = torch.rand(LENGTH, LENGTH) < 0.5
    for mask in (mods.document(IDS), lambda b, h, q, kv: scattered[q, kv]):
        block_mask = _made(mask)
        for _ in range(3):
            _problem(block_mask)
    assert len(seen) == 2


def test_lists_changed_after_the_look_are_read() -> None:
    block_mask = _made(mods.document(IDS))
    _problem(block_mask)
    block_mask.kv_num_blocks.zero_()
    problem = _problem(block_mask)
    assert kernel_calls.as_kernel_call(problem, SM90) is problem


@pytest.mark.parametrize(("limit", "value"), [("_MOST_POSITIONS", 1000), ("_MOST_BLOCKS", 8)])
def test_large_masks_are_left_alone(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_mask, limit, value)
    problem = _problem(_made(IMAGE))
    assert kernel_calls.as_kernel_call(problem, SM90) is problem


def test_small_blocks_of_a_mask_that_was_looked_at_have_a_kernel() -> None:
    problem = _problem(_made(IMAGE, 32))
    assert select.unsupported(problem, SM90) is None


def test_nothing_is_looked_at_while_a_transform_is_active() -> None:
    block_mask = _made(mods.document(IDS))
    problems: list[AttentionProblem] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        problems.append(_problem(block_mask))
        return x

    torch.func.vmap(run)(torch.zeros(2))
    assert exactness(block_masks.known_lists(block_mask)) is None
    assert problems[0].block_lists is not None
