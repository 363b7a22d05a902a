"""The partial blocks of a mask as bits, position by position, in the order that a kernel reads.

Lives here: the evaluation of partial blocks into words, and lists of 128 x 128 blocks beside them
for masks of any block size. Not here: which masks have them (`exact_lists.py`), masks by which a
row sees one range of keys, which need no bits (`key_ranges.py`). Invariant: bits and lists together
show exactly the keys that the mask shows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fovea.tiling.block_lists import BlockLists
from fovea.tiling.block_states import (
    PARTIAL,
    BlockGrid,
    MaskProgram,
    batch_positions,
    every,
    is_new,
    pieces,
)

BLOCK = 128  # rows and keys of a block
LANES = 4  # threads that share a row of scores
_WORD_BITS = BLOCK // LANES
# Bytes that bits may take, and positions that a CPU evaluates for them.
_MOST_BYTES = 2**27
_MOST_POSITIONS_CPU = 2**26


def are_whole(block_q: int, block_kv: int) -> bool:
    """Return whether blocks are made of whole ones of 128 x 128, so that kernels read lists."""
    return block_q % BLOCK == 0 and block_kv % BLOCK == 0


class MaskBits(NamedTuple):
    """A mask as lists of blocks, and bits of those that are partial.

    Shapes:
        words: (partial blocks, at least one, 128, 4) int32: bit 2 j + p of word c of a row is the
            key 8 j + 2 c + p, the order of a wgmma accumulator's registers. A thread of Hopper has
            one word of each of its rows, one of Blackwell all four of its row.
        starts: (batch, heads, blocks of queries) int32, the first partial block of each list.

    Attributes:
        lists: of 128 x 128 blocks; their batch and heads are 1 where the mask does not read them.
    """

    lists: BlockLists
    words: Tensor
    starts: Tensor


def find_mask_bits(program: MaskProgram, grid: BlockGrid, states: Tensor) -> MaskBits | None:
    """Return the bits of a mask with these states of 128 x 128 blocks, None where they are many."""
    # A sum would widen all states to int64.
    positions = int(torch.count_nonzero(states == PARTIAL)) * BLOCK * BLOCK
    is_large = positions // 8 > _MOST_BYTES
    if is_large or (grid.device.type == "cpu" and positions > _MOST_POSITIONS_CPU):
        return None
    partial = (states == PARTIAL).nonzero()
    words = torch.zeros(
        max(1, partial.shape[0]), BLOCK, LANES, dtype=torch.int32, device=grid.device
    )
    at_once = max(1, batch_positions(grid.device) // program.width // (BLOCK * BLOCK))
    first = 0
    for part in pieces(partial, at_once):
        words[first : first + part.shape[0]] = _words(program, grid, part)
        first += part.shape[0]
    lists = BlockLists.from_states(
        states,
        seqlen_q=grid.seqlen_q,
        seqlen_kv=grid.seqlen_kv,
        block_q=BLOCK,
        block_kv=BLOCK,
    )
    counts = lists.kv_num_blocks
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).to(torch.int32)
    return MaskBits(lists, words, starts)


def _words(program: MaskProgram, grid: BlockGrid, blocks: Tensor) -> Tensor:
    """Return (n, 128, 4) int32 of the blocks (n, 4)."""
    boxes = grid.boxes(blocks, 0)
    q_idx = every(boxes.q_first, boxes.q_last, BLOCK)
    kv_idx = every(boxes.kv_first, boxes.kv_last, BLOCK)
    visible = program.evaluate(
        boxes.b[:, None, None], boxes.h[:, None, None], q_idx[:, :, None], kv_idx[:, None, :]
    )
    visible = (visible & is_new(kv_idx)[:, None, :]).expand(-1, BLOCK, BLOCK)
    # Keys 8 j + 2 c + p as (j, c, p), then as word c with bits (j, p).
    bits = (
        visible.reshape(-1, BLOCK, BLOCK // 2 // LANES, LANES, 2)
        .transpose(2, 3)
        .flatten(3)
        .to(torch.int64)
    )
    place = torch.arange(_WORD_BITS, device=grid.device)
    unsigned = (bits << place).sum(3)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)
