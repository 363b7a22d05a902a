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
from fovea.tiling.key_ranges import find_key_ranges
from fovea.tiling.mask_bits import BLOCK, find_mask_bits
from fovea.tiling.traced_program import TracedProgram

# Positions in partial blocks up to which they are evaluated: milliseconds on a GPU.
_MOST_POSITIONS = 2**28


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
    ranges = bits = None
    with torch.no_grad():
        states = lists.states()
        num_partial = int((states == PARTIAL).sum())
        is_small = num_partial * lists.block_q * lists.block_kv <= _MOST_POSITIONS
        if is_small and states.numel() > 0:
            program = TracedProgram(mask, lists.device)
            shown = ListedMask(states, (lists.block_q, lists.block_kv), program)
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
            if ranges is None and BLOCK % lists.block_q == 0 == BLOCK % lists.block_kv:
                wide = replace(grid, block_q=BLOCK, block_kv=BLOCK)
                bits = find_mask_bits(shown, wide, _merged(states, grid))
    record(lists, mask, ranges, bits, shows_mask=False)


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
