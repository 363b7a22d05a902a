"""Block lists of a mask_mod (`BlockLists`, re-exported from `block_lists.py`)."""

from fovea.tiling.block_lists import BlockLists

__all__ = ["BlockLists"]
