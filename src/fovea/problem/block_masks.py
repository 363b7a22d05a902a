"""BlockMasks seen before, so that checking one again costs little.

Lives here: one table from live BlockMask objects to their validated lists. Not here: the validation
(`tiling/block_lists.py`). Invariant: an entry is used only while the mask still holds the very
tensors and sizes that were validated; tensor contents may change freely.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor

from fovea.tiling.block_lists import BlockLists

_FIELDS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)

type_of_entry = tuple[weakref.ref[Any], tuple[Tensor | None, ...], tuple[Any, ...], BlockLists]
_entries: dict[int, type_of_entry] = {}


def known_lists(block_mask: object) -> BlockLists:
    """Return the validated lists of a BlockMask.

    Raises:
        TypeError, ValueError: as `BlockLists.from_torch`.
    """
    if torch.compiler.is_compiling():
        return BlockLists.from_torch(block_mask)
    key = id(block_mask)
    entry = _entries.get(key)
    if entry is not None and entry[0]() is block_mask:
        mask = cast(Any, block_mask)
        for name, tensor in zip(_FIELDS, entry[1], strict=True):
            if getattr(mask, name) is not tensor:
                break
        else:
            if (mask.seq_lengths, mask.BLOCK_SIZE) == entry[2]:
                return entry[3]
    return _remember(key, block_mask)


def _remember(key: int, block_mask: object) -> BlockLists:
    lists = BlockLists.from_torch(block_mask)
    mask = cast(Any, block_mask)
    fields = tuple(getattr(mask, name) for name in _FIELDS)
    sizes = (mask.seq_lengths, mask.BLOCK_SIZE)

    def forget(_: object) -> None:
        _entries.pop(key, None)

    try:
        reference = weakref.ref(block_mask, forget)
    except TypeError:  # not torch's own class, but one with its fields: validated every time
        return lists
    _entries[key] = (reference, fields, sizes, lists)
    return lists
