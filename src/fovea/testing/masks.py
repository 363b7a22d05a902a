"""Block masks of arbitrary content for tests: lists that no mask_mod would give.

Lives here: BlockMasks from a matrix of block states. Not here: masks from a mask_mod
(`tiling/block_mask.py`). Invariant: what the lists say and what the mask_mod says are independent,
so a backend that reads only one of them is caught.
"""

from typing import Any

import torch
from torch import Tensor

from fovea.tiling.block_lists import BlockLists

UNLISTED, PARTIAL, FULL = 0, 1, 2


def random_states(
    batch: int, heads: int, blocks_q: int, blocks_kv: int, *, seed: int = 0
) -> Tensor:
    """Return (batch, heads, blocks_q, blocks_kv) int8 block states, each a third of the time."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, blocks_q, blocks_kv)
    return torch.randint(0, 3, shape, generator=generator).to(torch.int8)


def block_mask_of(
    states: Tensor, *, seqlen_q: int, seqlen_kv: int, block_q: int, block_kv: int, mask_mod: Any
) -> Any:
    """Return torch's BlockMask with these block states and this mask_mod."""
    from torch.nn.attention.flex_attention import BlockMask

    lists = BlockLists.from_states(
        states, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_q=block_q, block_kv=block_kv
    )
    return BlockMask.from_kv_blocks(
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
        BLOCK_SIZE=(block_q, block_kv),
        mask_mod=mask_mod,
        seq_lengths=(seqlen_q, seqlen_kv),
    )


def dense_states(states: Tensor, *, block_q: int, block_kv: int) -> Tensor:
    """Return states as one entry a position of the padded score matrix."""
    return states.repeat_interleave(block_q, dim=-2).repeat_interleave(block_kv, dim=-1)
