"""The descent alone, with masks whose interval analysis is written by hand or absent."""

import pytest
import torch

from fovea.tiling.block_states import (
    EMPTY,
    FULL,
    PARTIAL,
    UNDECIDED,
    BlockGrid,
    Boxes,
    block_states,
)


class NoAnalysis:
    """A mask that nothing is known of; counts the positions it is asked for."""

    width = 1

    def __init__(self, function) -> None:
        self.function = function
        self.positions = 0
        self.largest = 0

    def classify(self, boxes: Boxes) -> torch.Tensor:
        return torch.full_like(boxes.b, UNDECIDED, dtype=torch.int8)

    def evaluate(self, b, h, q_idx, kv_idx) -> torch.Tensor:
        count = q_idx.numel() * kv_idx.shape[-1]
        self.positions += count
        self.largest = max(self.largest, count)
        return self.function(b, h, q_idx, kv_idx)


class Causal(NoAnalysis):
    """q >= kv, with its exact analysis."""

    def __init__(self) -> None:
        super().__init__(lambda b, h, q, kv: q >= kv)

    def classify(self, boxes: Boxes) -> torch.Tensor:
        is_full = boxes.q_first >= boxes.kv_last
        is_empty = boxes.q_last < boxes.kv_first
        states = torch.where(is_full, FULL, UNDECIDED)
        return torch.where(is_empty, EMPTY, states).to(torch.int8)


def grid_of(seqlen_q, seqlen_kv, block_q, block_kv, batch=1, heads=1) -> BlockGrid:
    return BlockGrid(
        batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv,
        block_q=block_q, block_kv=block_kv, device=torch.device("cpu"),
    )  # fmt: skip


def brute_force(function, grid: BlockGrid) -> torch.Tensor:
    """Return block states by looking at every position of every block."""
    b = torch.arange(grid.batch)[:, None, None, None]
    h = torch.arange(grid.heads)[:, None, None]
    q = torch.arange(grid.seqlen_q)[:, None]
    kv = torch.arange(grid.seqlen_kv)
    mask = function(b, h, q, kv).expand(grid.batch, grid.heads, grid.seqlen_q, grid.seqlen_kv)
    rows, columns = grid.blocks(0)
    states = torch.zeros(grid.batch, grid.heads, rows, columns, dtype=torch.int8)
    area = grid.block_q * grid.block_kv
    for row in range(rows):
        for column in range(columns):
            block = mask[
                :, :, row * grid.block_q : (row + 1) * grid.block_q,
                column * grid.block_kv : (column + 1) * grid.block_kv,
            ]  # fmt: skip
            seen = block.sum((-2, -1))
            states[:, :, row, column] = torch.where(
                seen == area, FULL, torch.where(seen > 0, PARTIAL, EMPTY)
            ).to(torch.int8)
    return states


def one_position(b, h, q, kv):
    return (q == 37) & (kv == 41)


def all_but_one_position(b, h, q, kv):
    return (q != 37) | (kv != 41)


def by_batch_and_head(b, h, q, kv):
    return (q + b * 17 >= kv) & (q - kv < 20 + 11 * h)


def checkerboard(b, h, q, kv):
    return (q + kv) % 2 == 0


@pytest.mark.parametrize(
    "function", [one_position, all_but_one_position, by_batch_and_head, checkerboard]
)
@pytest.mark.parametrize("blocks", [(8, 8), (16, 5), (1, 1), (128, 128), (64, 3)])
@pytest.mark.parametrize("lengths", [(96, 80), (97, 45), (1, 1), (50, 160)])
def test_states_without_analysis_equal_brute_force(function, blocks, lengths):
    grid = grid_of(*lengths, *blocks, batch=2, heads=3)
    assert torch.equal(block_states(NoAnalysis(function), grid), brute_force(function, grid))


@pytest.mark.parametrize("length", [1, 127, 128, 1000, 2048])
def test_states_with_analysis_equal_brute_force(length):
    grid = grid_of(length, length, 16, 16)
    program = Causal()
    assert torch.equal(block_states(program, grid), brute_force(program.function, grid))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_states_of_an_empty_sequence_have_no_block_to_settle(lengths):
    grid = grid_of(*lengths, 4, 4)
    assert block_states(Causal(), grid).shape == (1, 1, *grid.blocks(0))


def test_states_of_a_causal_mask_evaluate_a_few_samples_of_the_diagonal_only():
    program = Causal()
    grid = grid_of(1 << 16, 1 << 16, 128, 128)
    states = block_states(program, grid)
    assert program.positions == 512 * 16
    assert int((states == PARTIAL).sum()) == 512
    assert int((states == FULL).sum()) == 512 * 511 // 2


def test_states_without_structure_evaluate_in_bounded_batches():
    program = NoAnalysis(all_but_one_position)
    grid = grid_of(2048, 2048, 128, 128)
    block_states(program, grid)
    assert program.largest <= 1 << 18
    # every position once, and the samples that came before
    assert program.positions <= 2048 * 2048 * 1.05


@pytest.mark.slow
def test_states_of_a_million_causal_tokens_take_seconds():
    states = block_states(Causal(), grid_of(1 << 20, 1 << 20, 128, 128))
    assert int((states == PARTIAL).sum()) == 8192
    assert int((states == FULL).sum()) == 8192 * 8191 // 2
