"""BlockMasks seen before, so that checking one again costs little.

Lives here: one table from live BlockMask objects to their validated lists. Not here: the validation
(`tiling/block_lists.py`). Invariant: an entry is used only while the mask still holds the very
tensors and sizes that were validated; tensor contents may change freely.
"""

import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fovea.mods.trace import TracedMod
from fovea.tiling.block_lists import BlockLists
from fovea.tiling.exact_lists import Exactness, exactness
from fovea.tiling.listed_mask import look

_FIELDS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)
_LAYOUT_LIMIT = 4096
_KERNEL_DEVICES = ("cuda",)

_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_num_modes: Callable[[], int] = _torch_c._len_torch_dispatch_stack
_has_transform: Callable[[], bool] = _torch_c._are_functorch_transforms_active
# In builds of torch without CUDA it raises, and has no caller.
_is_capturing: Callable[[], bool] = getattr(_torch_c, "_cuda_isCurrentStreamCapturing", bool)


class KnownLists(NamedTuple):
    """Validated lists, their tensors, and a number for all that is not contents.

    Two masks have the same `layout` exactly if shapes, sizes and devices are the same, and both or
    neither are exact, with ranges, with bits or with neither.
    """

    lists: BlockLists
    tensors: tuple[Tensor | None, ...]
    layout: int
    exactness: Exactness | None = None  # of lists that say what their mask says


class _Entry(NamedTuple):
    reference: weakref.ref[Any]
    attributes: tuple[object, ...]  # all that the mask held, in its order
    indices: Tensor
    shape: torch.Size  # of the indices: a tensor may be resized in place
    known: KnownLists
    is_new: bool  # nobody has looked at what its lists show


_entries: dict[int, _Entry] = {}
_layouts: dict[tuple[Any, ...], int] = {}
_next_layout = itertools.count()


def known_lists(block_mask: object) -> BlockLists:
    """Return the validated lists of a BlockMask.

    Raises:
        TypeError, ValueError: as `BlockLists.from_torch`.
    """
    if torch.compiler.is_compiling():
        return BlockLists.from_torch(block_mask)
    known = recall(block_mask)
    return _remember(id(block_mask), block_mask) if known is None else known.lists


def look_once(block_mask: object, lists: BlockLists, mask: TracedMod) -> None:
    """Find out what the lists of a mask that is new show, where kernels may use it.

    That waits for the device once a mask, so it is left where waiting is not allowed.
    """
    tensor = lists.kv_num_blocks
    if (
        exactness(lists) is not None
        or tensor.device.type not in _KERNEL_DEVICES
        or type(tensor) is not Tensor
        or _must_not_wait()
    ):
        return
    entry = _entries.get(id(block_mask))
    if entry is None or not entry.is_new or entry.known.lists is not lists:
        return
    look(lists, mask)
    known = entry.known._replace(layout=_layout_of(lists), exactness=exactness(lists))
    _entries[id(block_mask)] = entry._replace(known=known, is_new=False)


def _must_not_wait() -> bool:
    cuda = cast(Any, torch.cuda)  # its functions have no types
    return bool(
        torch.compiler.is_compiling()
        or _num_modes()
        or _has_transform()
        or (cuda.is_initialized() and (cuda.get_sync_debug_mode() or _is_capturing()))
    )


def recall(block_mask: object) -> KnownLists | None:
    """Return the lists of a mask that was validated and has not changed since."""
    entry = _entries.get(id(block_mask))
    if entry is None:
        return None
    reference, attributes, indices, shape, known, _ = entry
    held = vars(block_mask).values()
    if (
        reference() is block_mask
        and len(held) == len(attributes)
        and all(map(operator.is_, held, attributes))
        and indices.shape == shape
        and (known.exactness is None or known.exactness.holds())
    ):
        return known
    return None


def _remember(key: int, block_mask: object) -> BlockLists:
    lists = BlockLists.from_torch(block_mask)
    mask = cast(Any, block_mask)
    fields = tuple(getattr(mask, name) for name in _FIELDS)
    tensors = lists.tensors()
    if any(one is not other for one, other in zip(fields, tensors, strict=True)):
        return lists  # converted from int64: a copy, which later contents would not reach

    def forget(_: object) -> None:
        _entries.pop(key, None)

    try:
        reference = weakref.ref(block_mask, forget)
    except TypeError:  # not torch's own class, but one with its fields: validated every time
        return lists
    before = _entries.get(key)
    is_new = before is None or before.is_new or before.reference() is not block_mask
    _entries[key] = _Entry(
        reference,
        tuple(vars(block_mask).values()),
        mask.kv_indices,
        mask.kv_indices.shape,
        KnownLists(lists, tensors, _layout_of(lists), exactness(lists)),
        is_new,
    )
    return lists


def _layout_of(lists: BlockLists) -> int:
    """Return a number that no lists of other shapes, sizes or device have."""
    exact = exactness(lists)
    layout = (
        *(None if t is None else (t.shape, t.stride(), t.device) for t in lists.tensors()),
        *(lists.block_q, lists.block_kv, lists.seqlen_q, lists.seqlen_kv),
        *(lists.batch, lists.heads, _kind(exact)),
    )
    if len(_layouts) >= _LAYOUT_LIMIT:
        _layouts.clear()  # numbers are not used again
    return _layouts.setdefault(layout, next(_next_layout))


def _kind(exact: Exactness | None) -> tuple[bool, ...] | None:
    """Return what decides how a kernel takes lists: None where they have to be read."""
    return None if exact is None else (exact.ranges is not None, exact.bits is not None)
