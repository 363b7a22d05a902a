"""Block lists known to say exactly what their mask_mod says, since fovea made them from it.

Lives here: the table of such lists, and of the ranges of keys or the bits that say the same. Not
here: their making (`block_mask.py`, `key_ranges.py`, `mask_bits.py`), what follows from it
(`plan/kernel_calls.py`). Invariant: lists count as exact only as long as they are the very tensors
that were made, unchanged, beside the same mask with the same numbers and the same captured tensors,
unchanged.
"""

import weakref
from typing import NamedTuple

from torch import Tensor

from fovea.mods.trace import TracedMod
from fovea.tiling.block_lists import BlockLists
from fovea.tiling.key_ranges import KeyRanges
from fovea.tiling.mask_bits import MaskBits


class Exactness(NamedTuple):
    """The lists of one mask as they were made."""

    tensors: tuple[weakref.ref[Tensor] | None, ...]
    captures: tuple[weakref.ref[Tensor], ...]  # of the mask
    versions: tuple[tuple[weakref.ref[Tensor], int], ...]  # of all of both
    mask: str  # canonical text
    scalars: tuple[int | float, ...]
    sizes: tuple[int, int, int, int]
    ranges: KeyRanges | None
    bits: MaskBits | None  # beside ranges only where blocks are not whole ones of 128 x 128
    shows_mask: bool  # all that the mask shows: fovea made the lists of it

    def holds(self) -> bool:
        """Return whether lists and captures are still there and unchanged."""
        for reference, version in self.versions:
            tensor = reference()
            if tensor is None or tensor._version != version:  # pyright: ignore
                return False
        return True

    def says(
        self, mask: str, scalars: tuple[int | float, ...], captures: tuple[Tensor, ...]
    ) -> bool:
        """Return whether the lists were made of this mask: its text, numbers and tensors."""
        return (
            self.mask == mask
            and self.scalars == scalars
            and len(captures) == len(self.captures)
            and all(
                reference() is tensor
                for reference, tensor in zip(self.captures, captures, strict=True)
            )
        )


_table: dict[int, Exactness] = {}


def record(
    lists: BlockLists,
    mask: TracedMod,
    ranges: KeyRanges | None,
    bits: MaskBits | None,
    *,
    shows_mask: bool,
) -> None:
    """Remember what lists show beside their mask, and the ranges or bits that say the same."""
    tensors = _tensors(lists)
    if any(t is not None and t.is_inference() for t in (*tensors, *mask.captures)):
        return  # they have no versions
    key = id(lists.kv_num_blocks)

    def forget(_: object) -> None:
        _table.pop(key, None)

    references = tuple(
        None if t is None else weakref.ref(t, forget if place == 0 else None)
        for place, t in enumerate(tensors)
    )
    captures = tuple(weakref.ref(t) for t in mask.captures)
    _table[key] = Exactness(
        references,
        captures,
        tuple(
            (reference, t._version)  # pyright: ignore
            for reference, t in zip(
                (*references, *captures), (*tensors, *mask.captures), strict=True
            )
            if reference is not None and t is not None
        ),
        mask.graph.text(),
        mask.scalars,
        _sizes(lists),
        ranges,
        bits,
        shows_mask,
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


def exact_for(lists: BlockLists, mask: TracedMod) -> Exactness | None:
    """Return what is known of lists that say exactly what a mask says; None of any others."""
    found = exactness(lists)
    if found is None or not found.says(mask.graph.text(), mask.scalars, mask.captures):
        return None
    return found


def ranges_beside(kv_num_blocks: Tensor) -> KeyRanges:
    """Return the ranges of a mask whose lists are exact, by the first of them."""
    ranges = _table[id(kv_num_blocks)].ranges
    assert ranges is not None
    return ranges


def bits_beside(kv_num_blocks: Tensor) -> MaskBits:
    """Return the bits of a mask whose lists are exact, by the first of them."""
    bits = _table[id(kv_num_blocks)].bits
    assert bits is not None
    return bits


def _tensors(lists: BlockLists) -> tuple[Tensor | None, ...]:
    return (
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
    )


def _sizes(lists: BlockLists) -> tuple[int, int, int, int]:
    return (lists.block_q, lists.block_kv, lists.seqlen_q, lists.seqlen_kv)
