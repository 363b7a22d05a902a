"""Block lists that fovea did not make, looked at once beside their mask_mod.

Lives here: what lists and mask show together, as ranges of keys or as bits. Not here: when a call
looks (`problem/block_masks.py`). Invariant: the keys shown are those of the lists: full blocks
whole, others as their mask_mod says, unlisted ones not at all.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fovea.mods.trace import TracedMod
from fovea.tiling.block_lists import BlockLists
from fovea.tiling.block_states import EMPTY, FULL, PARTIAL, UNDECIDED, BlockGrid, Boxes
from fovea.tiling.exact_lists import record
from fovea.tiling.key_ranges import KeyRanges, find_key_ranges
from fovea.tiling.mask_bits import BLOCK, MaskBits, are_whole, find_mask_bits
from fovea.tiling.traced_program import TracedProgram

# Positions in partial blocks up to which they are evaluated: milliseconds on a GPU.
_MOST_POSITIONS = 2**28
# Blocks, listed or not, of all heads and batch entries: a byte each.
_MOST_BLOCKS = 2**26


class ListedMask:
    """Lists and their mask as one mask."""

    def __init__(self, states: Tensor, sizes: tuple[int, int], program: TracedProgram) -> None:
        self._states = states
        self._sizes = sizes
        self._program = program
        self.width = program.width + 2

    def classify(self, boxes: Boxes) -> Tensor:
        """Return that nothing is known: the states are there already."""
        return torch.full_like(boxes.b, UNDECIDED, dtype=torch.int8)

    def evaluate(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return what is shown at broadcast positions."""
        state = self._states[b, h, q_idx // self._sizes[0], kv_idx // self._sizes[1]]
        visible = self._program.evaluate(b, h, q_idx, kv_idx)
        return (state == FULL) | ((state == PARTIAL) & visible)


def look(lists: BlockLists, mask: TracedMod) -> None:
    """Record beside lists what they show, if that is ranges or few enough bits. Waits for a device.

    Lists are looked at once: without a result that is recorded, too.
    """
    num_blocks = lists.batch * lists.heads * lists.blocks_q * lists.blocks_kv
    with torch.no_grad():
        found = _found(lists, mask) if 0 < num_blocks <= _MOST_BLOCKS else (None, None)
    record(lists, mask, *found, shows_mask=False)


def _found(lists: BlockLists, mask: TracedMod) -> tuple[KeyRanges | None, MaskBits | None]:
    """Return what lists and mask show."""
    states = lists.states()
    num_partial = int(torch.count_nonzero(states == PARTIAL))
    if num_partial * lists.block_q * lists.block_kv > _MOST_POSITIONS:
        return None, None
    sizes = (lists.block_q, lists.block_kv)
    shown = ListedMask(states, sizes, TracedProgram(mask, lists.device))
    grid = BlockGrid(
        batch=states.shape[0],
        heads=states.shape[1],
        seqlen_q=lists.seqlen_q,
        seqlen_kv=lists.seqlen_kv,
        block_q=lists.block_q,
        block_kv=lists.block_kv,
        device=lists.device,
    )
    ranges = find_key_ranges(shown, grid, states)
    does_without = ranges is not None and are_whole(*sizes)
    if does_without or BLOCK % lists.block_q or BLOCK % lists.block_kv:
        return ranges, None
    wide = replace(grid, block_q=BLOCK, block_kv=BLOCK)
    return ranges, find_mask_bits(shown, wide, _merged(states, grid))


def _merged(states: Tensor, grid: BlockGrid) -> Tensor:
    """Return the states of 128 x 128 blocks: of all smaller ones in it where those agree."""
    down, across = BLOCK // grid.block_q, BLOCK // grid.block_kv
    batch, heads, rows, columns = states.shape
    shape = (batch, heads, -(-rows // down) * down, -(-columns // across) * across)
    padded = states.new_full(shape, EMPTY)
    padded[:, :, :rows, :columns] = states
    blocks = padded.view(batch, heads, shape[2] // down, down, shape[3] // across, across)
    least, most = blocks.amin((3, 5)), blocks.amax((3, 5))
    return torch.where(least == most, least, PARTIAL)
