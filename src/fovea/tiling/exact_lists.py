"""Block lists known to say exactly what their mask_mod says, since fovea made them from it.

Lives here: the table of such lists. Not here: their making (`block_mask.py`), what follows from it
(`plan/band_calls.py`). Invariant: lists count as exact only as long as they are the very tensors
that were made, unchanged, beside the same mask with the same numbers.
"""

import weakref
from typing import NamedTuple

from torch import Tensor

from fovea.mods.trace import TracedMod
from fovea.tiling.block_lists import BlockLists


class Exactness(NamedTuple):
    """The lists of one mask as they were made."""

    tensors: tuple[weakref.ref[Tensor] | None, ...]
    versions: tuple[int, ...]
    mask: str  # canonical text
    scalars: tuple[int | float, ...]
    sizes: tuple[int, int, int, int]

    def holds(self) -> bool:
        """Return whether the lists are still there and unchanged."""
        alive = [None if reference is None else reference() for reference in self.tensors]
        return tuple(0 if t is None else t._version for t in alive) == self.versions  # pyright: ignore


_table: dict[int, Exactness] = {}


def record(lists: BlockLists, mask: TracedMod) -> None:
    """Remember that lists are exact. Nothing is remembered of masks that captured tensors."""
    tensors = _tensors(lists)
    if mask.captures or any(t is not None and t.is_inference() for t in tensors):
        return
    key = id(lists.kv_num_blocks)

    def forget(_: object) -> None:
        _table.pop(key, None)

    _table[key] = Exactness(
        tuple(
            None if t is None else weakref.ref(t, forget if place == 0 else None)
            for place, t in enumerate(tensors)
        ),
        tuple(0 if t is None else t._version for t in tensors),  # pyright: ignore
        mask.graph.text(),
        mask.scalars,
        _sizes(lists),
    )


def exactness(lists: BlockLists) -> Exactness | None:
    """Return what is known of lists that are exact for some mask; None where nothing is."""
    found = _table.get(id(lists.kv_num_blocks))
    if found is None or found.sizes != _sizes(lists) or not found.holds():
        return None
    for reference, tensor in zip(found.tensors, _tensors(lists), strict=True):
        if (None if reference is None else reference()) is not tensor:
            return None
    return found


def is_exact(lists: BlockLists, mask: TracedMod) -> bool:
    """Return whether lists say exactly what a mask says."""
    found = exactness(lists)
    return found is not None and found.mask == mask.graph.text() and found.scalars == mask.scalars


def _tensors(lists: BlockLists) -> tuple[Tensor | None, ...]:
    return (
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
    )


def _sizes(lists: BlockLists) -> tuple[int, int, int, int]:
    return (lists.block_q, lists.block_kv, lists.seqlen_q, lists.seqlen_kv)
