"""Masks by which every query row sees one range of keys, as those ranges.

Lives here: the search for them in a block mask that was just made, block by block. Documents in
one sequence, prefixes, chunks and windows of any kind are such masks. Not here: which call runs by
ranges (`plan/kernel_calls.py`), which masks are known to have any (`exact_lists.py`). Invariant:
ranges exist only where they show exactly the keys that the mask shows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fovea.tiling.block_states import (
    FULL,
    PARTIAL,
    BlockGrid,
    MaskProgram,
    batch_positions,
    every,
    is_new,
    pieces,
)

GROUP_ROWS = 64  # rows that a warpgroup works on
_MOST_GROUPS = 4  # of a query tile
# Begin of a row that sees nothing, its end being 0: it widens no union and fits in no tile.
NOWHERE = 2**30
# On a CPU, positions in partial blocks up to which ranges are looked for: nothing there runs by
# them but the emulator, and the kernels compiled for a GPU.
_MOST_POSITIONS_CPU = 2**26
_STEP_BLOCKS = 2**20  # block states read at a time


class KeyRanges(NamedTuple):
    """The keys that each row sees, first to one past the last.

    Shapes:
        rows: (batch or 1, heads or 1, seqlen_q, 2) int32.
        groups: (batch or 1, heads or 1, groups of 64 rows, 4) int32: the least begin, the largest
            end, the largest begin and the least end of its rows.
        orders: for query tiles of 1 to 4 groups (tiles,) int32, those with most keys first.
    """

    rows: Tensor
    groups: Tensor
    orders: tuple[Tensor, ...]


def find_key_ranges(program: MaskProgram, grid: BlockGrid, states: Tensor) -> KeyRanges | None:
    """Return the ranges of a mask with these block states; None where a row has several.

    Partial blocks are evaluated whole: on a CPU None, too, where those are many.
    """
    num_partial = int(torch.count_nonzero(states == PARTIAL))  # a sum would widen all to int64
    is_large = num_partial * grid.block_q * grid.block_kv > _MOST_POSITIONS_CPU
    if states.numel() == 0 or (grid.device.type == "cpu" and is_large):
        return None
    found = _of_partial_blocks(program, grid, (states == PARTIAL).nonzero())
    if found is None:
        return None
    begin, end, count = (
        torch.stack((of_partial, of_full))
        for of_partial, of_full in zip(found, _of_full_blocks(grid, states), strict=True)
    )
    begin, end, count = begin.amin(0), end.amax(0), count.sum(0)
    is_empty = count == 0
    if not bool((is_empty | (end - begin == count)).all()):
        return None
    rows = torch.stack((begin.masked_fill(is_empty, NOWHERE), end), -1)
    rows = rows.to(torch.int32).reshape(grid.batch, grid.heads, grid.seqlen_q, 2)
    groups = _groups(rows)
    return KeyRanges(rows, groups, _orders(groups))


def _of_partial_blocks(
    program: MaskProgram, grid: BlockGrid, partial: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (begin, end, count) of the keys that each row sees in partial blocks, all rows flat.

    None as soon as a row has several ranges in one block.
    """
    # One place more, for rows past the last.
    num_rows = grid.batch * grid.heads * grid.seqlen_q
    begin = torch.full((num_rows + 1,), NOWHERE, dtype=torch.int64, device=grid.device)
    end, count = torch.zeros_like(begin), torch.zeros_like(begin)
    at_once = batch_positions(grid.device) // program.width // (grid.block_q * grid.block_kv)
    for part in pieces(partial, max(1, at_once)):
        boxes = grid.boxes(part, 0)
        q_idx = every(boxes.q_first, boxes.q_last, grid.block_q)
        kv_idx = every(boxes.kv_first, boxes.kv_last, grid.block_kv)
        visible = program.evaluate(
            boxes.b[:, None, None], boxes.h[:, None, None], q_idx[:, :, None], kv_idx[:, None, :]
        )
        # Positions past an end repeat the last one.
        is_key = is_new(kv_idx)
        visible = (visible & is_key[:, None, :]).expand(*q_idx.shape, kv_idx.shape[1])
        seen = visible.sum(2)
        first = torch.where(visible, kv_idx[:, None, :], NOWHERE).amin(2)
        past = torch.where(visible, kv_idx[:, None, :] + 1, 0).amax(2)
        if not bool(((seen == 0) | (past - first == seen)).all()):
            return None
        row = (boxes.b * grid.heads + boxes.h)[:, None] * grid.seqlen_q + q_idx
        row = torch.where(is_new(q_idx), row, num_rows).flatten()
        begin.scatter_reduce_(0, row, first.flatten(), "amin")
        end.scatter_reduce_(0, row, past.flatten(), "amax")
        count.index_add_(0, row, seen.flatten())
    return begin[:-1], end[:-1], count[:-1]


def _of_full_blocks(grid: BlockGrid, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (begin, end, count) of the keys that each row sees in full blocks, all rows flat."""
    first_key = torch.arange(states.shape[3], device=grid.device) * grid.block_kv
    past = (first_key + grid.block_kv).clamp(max=grid.seqlen_kv)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    # Some block rows at a time: positions take eight times as much memory as states.
    for part in torch.split(states, max(1, _STEP_BLOCKS // states.shape[3]), 2):
        is_full = part == FULL
        begin = torch.where(is_full, first_key, NOWHERE).amin(3)
        end = torch.where(is_full, past, 0).amax(3)
        found.append((begin, end, torch.where(is_full, past - first_key, 0).sum(3)))
    begin, end, count = (
        torch.cat(values, 2).repeat_interleave(grid.block_q, 2)[:, :, : grid.seqlen_q].flatten()
        for values in zip(*found, strict=True)
    )
    return begin, end, count


def _groups(rows: Tensor) -> Tensor:
    """Return `KeyRanges.groups` of its rows; rows past the last change nothing."""
    batch, heads, seqlen_q, _ = rows.shape
    num_groups = -(-seqlen_q // GROUP_ROWS)
    begin, end = rows.unbind(-1)

    def grouped(values: Tensor, neutral: int) -> Tensor:
        padded = values.new_full((batch, heads, num_groups * GROUP_ROWS), neutral)
        padded[:, :, :seqlen_q] = values
        return padded.reshape(batch, heads, num_groups, GROUP_ROWS)

    return torch.stack(
        (
            grouped(begin, NOWHERE).amin(3),
            grouped(end, 0).amax(3),
            grouped(begin, 0).amax(3),
            grouped(end, NOWHERE).amin(3),
        ),
        3,
    )


def _orders(groups: Tensor) -> tuple[Tensor, ...]:
    orders: list[Tensor] = []
    for size in range(1, _MOST_GROUPS + 1):
        num_tiles = -(-groups.shape[2] // size)
        # The last group again stands for those past the end.
        place = torch.arange(num_tiles * size, device=groups.device)
        chosen = groups[:, :, place.clamp(max=groups.shape[2] - 1), :2]
        members = chosen.view(*groups.shape[:2], num_tiles, size, 2)
        keys = (members[..., 1].amax(3) - members[..., 0].amin(3)).clamp(min=0)
        work = keys.sum((0, 1))
        orders.append(work.argsort(descending=True, stable=True).to(torch.int32))
    return tuple(orders)
