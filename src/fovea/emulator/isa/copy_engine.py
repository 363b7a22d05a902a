"""What bulk and tensor copies share: addresses, barriers, tiles and per-thread groups.

What lives here: resolving the operands of a copy and moving a tile. Not here: the forms
(`isa/tensor_copy.py`, `isa/bulk_copy.py`) or which bytes a tile has (`layout/tensor_tile.py`).

Invariant: a copy reads its tensor map and its operands when it is issued; memory is touched only
inside effects, by the operation's own access.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fovea.emulator.async_engine import Effect, Operation
from fovea.emulator.errors import IllegalOperand, Misaligned, OutOfBounds, RaceError
from fovea.emulator.isa.barrier import wide_address
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.layout.descriptor import CHUNK_BYTES
from fovea.emulator.layout.tensor_map import MAP_BYTES, TensorMap, decode_tensor_map
from fovea.emulator.layout.tensor_tile import Tile, clip_box, shared_chunks
from fovea.emulator.machine.barrier import MBarrier
from fovea.emulator.machine.memory import RANK_SHIFT
from fovea.emulator.races import Access

_OFFSET_MASK = (1 << RANK_SHIFT) - 1
_TENSOR_ALIGNMENT = 128


def start(warp: Any, i: Instruction, effects: Sequence[Effect], **more: Any) -> Operation:
    """Submit an operation of the asynchronous proxy to the cluster's engine."""
    operation: Operation = warp.cta.cluster.engine.submit(warp, i, effects, **more)
    return operation


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """A place in the shared memory of a CTA of the cluster."""

    cta: Any
    offset: int

    def in_cta(self, rank: int) -> "SharedPlace":
        """Return the same offset in another CTA of the cluster."""
        return SharedPlace(self.cta.cluster.ctas[rank], self.offset)


def barrier_channel(places: Sequence[SharedPlace]) -> tuple[Any, ...]:
    """Return the channel of an operation whose completion mbarriers at `places` tell of."""
    return ("mbarrier", places[0].offset, *(place.cta.rank for place in places))


def bulk_channel(warp: Any, lane: int) -> tuple[Any, ...]:
    """Return the channel of the bulk async-groups of one thread."""
    return ("bulk", warp.access.agent, lane)


def shared_place(
    i: Instruction, warp: Any, lane: int, address: int, *, alignment: int, what: str
) -> SharedPlace:
    """Return where a 32-bit shared address points.

    Raises:
        OutOfBounds: no CTA of the cluster has it.
        Misaligned: the address is no multiple of `alignment`.
    """
    cta = warp.cta.cluster.cta_of(address)
    where = warp.where(i, lane=lane, address=address, space="shared")
    if address >> 32:
        raise OutOfBounds(
            f"{what}: {wide_address('shared')}; convert it with cvta.to.shared.u64", where
        )
    if cta is None:
        raise OutOfBounds(
            f"{what} names CTA {address >> RANK_SHIFT} of a cluster of "
            f"{len(warp.cta.cluster.ctas)}",
            where,
        )
    if address % alignment:
        raise Misaligned(f"{what} must be a multiple of {alignment} bytes", where)
    return SharedPlace(cta, address & _OFFSET_MASK)


def own_shared_place(
    i: Instruction, warp: Any, lane: int, address: int, *, alignment: int, what: str
) -> SharedPlace:
    """Return where a `.shared::cta` address points; it must be in the executing CTA."""
    place = shared_place(i, warp, lane, address, alignment=alignment, what=what)
    if place.cta is not warp.cta:
        raise IllegalOperand(
            f"{what} is .shared::cta but points into CTA {place.cta.rank} of the cluster",
            warp.where(i, lane=lane, address=address, space="shared"),
        )
    return place


def multicast_ranks(i: Instruction, warp: Any, lane: int, mask: int) -> list[int]:
    """Return the CTA ranks of a multicast mask."""
    size = len(warp.cta.cluster.ctas)
    mask &= 0xFFFF
    if not mask or mask >> size:
        raise IllegalOperand(
            f"ctaMask {mask:#06x} does not name CTAs of a cluster of {size}",
            warp.where(i, lane=lane),
        )
    return [rank for rank in range(size) if mask >> rank & 1]


def signal(
    place: SharedPlace, operation: Operation, change: Callable[[MBarrier, Access], str]
) -> None:
    """Let a completed operation change an mbarrier; `change` returns what is wrong, or "".

    Raises:
        IllegalOperand: no mbarrier lies there, or its counts do not allow the change.
    """
    access = operation.access
    barrier = place.cta.mbarriers.get(place.offset)
    where = access.warp.where(access.instruction, address=place.offset, space="shared")
    if barrier is None:
        raise IllegalOperand(
            f"{operation.kind}: no initialised mbarrier at shared {place.offset:#x} of CTA "
            f"{place.cta.index}",
            where,
        )
    problem = barrier.check_known(access)
    if problem:
        rule = "mbarrier.init must be ordered before every other use of the mbarrier"
        raise RaceError(f"race: {problem}", where, rule=rule)
    barrier.users[access.agent] = access.time, access.instruction
    problem = change(barrier, access)
    if problem:
        raise IllegalOperand(problem, where)
    access.warp.machine.notify()


def complete_bytes(place: SharedPlace, size: int, operation: Operation) -> None:
    """Signal bytes that have arrived at an mbarrier.

    Raises:
        RaceError: the CTA that they were for has exited; its shared memory may be another's by now.
    """
    if place.cta.is_exited:
        access = operation.access
        raise RaceError(
            f"{operation.kind} arrives in shared memory of CTA {place.cta.index}, which has exited",
            access.warp.where(access.instruction, address=place.offset, space="shared"),
            rule="every copy into a CTA must be waited for before the CTA exits",
        )
    signal(place, operation, lambda barrier, access: barrier.complete_tx(size, access))


# --- tensor maps --------------------------------------------------------------------------------

_decode = lru_cache(maxsize=256)(decode_tensor_map)


def tensor_map_at(i: Instruction, warp: Any, lane: int, address: int, mask: Array) -> TensorMap:
    """Return the tensor map at a generic address.

    Raises:
        OutOfBounds, Misaligned: no 128 bytes lie there, or not at a multiple of 64.
        IllegalOperand: the bytes are no usable tensor map.
    """
    where = warp.where(i, lane=lane, address=address)
    if address % 64:
        raise Misaligned("a tensor map must be a multiple of 64 bytes", where)
    found = warp.machine.segment(warp, address)
    if found is None:
        raise OutOfBounds(
            f"no memory at the tensor map's address; {warp.machine.memory.nearest(address)}", where
        )
    segment, offset = found
    # a map is read through a proxy of its own, whose fences are not modelled
    segment.check_bounds(offset, MAP_BYTES, warp.touch(i, mask))
    data = segment.data[offset : offset + MAP_BYTES]
    try:
        return _decode(data.tobytes())
    except ValueError as error:
        raise IllegalOperand(f"tensor map: {error}", where) from error


@dataclass(frozen=True, slots=True)
class TileCopy:
    """One box of a tensor and its place in shared memory.

    Attributes:
        tensor: the decoded tensor map.
        tile: the part of the box inside the tensor.
        view: that part's bytes in global memory, dimension 0 last; None if nothing is inside.
        segment: the allocation, and `start` the offset of the view's first byte in it.
    """

    tensor: TensorMap
    tile: Tile
    view: Array | None
    segment: Any = None
    start: int = 0

    @property
    def words(self) -> Array | None:
        """The words of the allocation that the view covers; None if its rows end inside one."""
        assert self.view is not None
        shape: tuple[int, ...] = self.view.shape
        strides: tuple[int, ...] = self.view.strides
        row_bytes = shape[-1]
        if any(value % 4 for value in (self.start, row_bytes, *strides[:-1])):
            return None
        first: Array = np.array([self.start])
        for count, stride in zip(shape[:-1], strides):
            first = np.add.outer(first, np.arange(count) * stride).reshape(-1)
        words: Array = np.add.outer(first // 4, np.arange(row_bytes // 4))
        return words.reshape(-1)

    def check_read(self, access: Access) -> None:
        """Check a read of the view for races on global memory."""
        if self.view is None:
            return
        shadow = self.segment.shadow
        if shadow is not None and shadow.is_active:
            words = self.words
            if words is not None:
                shadow.on_read(words, access)

    def write_global(self, new: Array, access: Access) -> None:
        """Put bytes of the view's shape in global memory."""
        view, shadow = self.view, self.segment.shadow
        assert view is not None
        if shadow is not None:
            words = self.words
            if words is not None:
                shadow.on_write(words, access, 15, lambda: (view != new).reshape(-1, 4).any(axis=1))
        view[...] = new

    def inside_of(self, box: Array) -> Array:
        """Return the part of a box of bytes that lies inside the tensor, shaped as the view."""
        assert self.tile.inside is not None
        assert self.view is not None
        part = box[_byte_slices(self.tile.inside, self.tensor.element.size_bytes)]
        return part.reshape(self.view.shape)

    def shared_offsets(self, address: int) -> Array:
        """Return the offsets of the box's 16-byte chunks at shared offset `address`."""
        table, first = shared_chunks(self.tensor, address)
        return (table + first) * CHUNK_BYTES


def tile_copy(
    i: Instruction, warp: Any, lane: int, tensor: TensorMap, coordinates: tuple[int, ...]
) -> TileCopy:
    """Return the copy of one box.

    Raises:
        IllegalOperand: the map and the instruction do not fit each other.
        OutOfBounds: the tensor the map describes leaves its allocation.
    """
    try:
        tile = clip_box(tensor, coordinates)
        shared_chunks(tensor, 0)
    except ValueError as error:
        raise IllegalOperand(str(error), warp.where(i, lane=lane)) from error
    if tile.is_empty:
        return TileCopy(tensor, tile, None)
    element_bytes = tensor.element.size_bytes
    first, end = tile.span(element_bytes)
    segment = warp.machine.memory.find(first)
    if segment is None or end > segment.base + len(segment.data):
        raise OutOfBounds(
            f"the tensor map's box at {coordinates} covers {first:#x}..{end:#x}, which "
            f"leaves its allocation; {warp.machine.memory.nearest(first)}",
            warp.where(i, lane=lane, address=first, space="global"),
        )
    data = segment.data[first - segment.base : end - segment.base]
    if tile.strides[-1] == element_bytes:
        shape = (*tile.counts[:-1], tile.counts[-1] * element_bytes)
        strides = (*tile.strides[:-1], 1)
    else:
        shape, strides = (*tile.counts, element_bytes), (*tile.strides, 1)
    view = as_strided(data, shape, strides)
    return TileCopy(tensor, tile, view, segment, first - segment.base)


def _byte_slices(inside: tuple[slice, ...], size: int) -> tuple[slice, ...]:
    last = inside[-1]
    return (*inside[:-1], slice(last.start * size, last.stop * size))


# --- lanes --------------------------------------------------------------------------------------


def active_lanes(mask: Array) -> list[int]:
    """Return the numbers of the active lanes."""
    return np.flatnonzero(mask).tolist()


def issues(mask: Array, *operands: Array | None) -> list[list[int]]:
    """Return the lanes of each issue of a copy or tensor-core instruction.

    Lanes with equal operands make one issue: the instruction is one of the uniform datapath,
    which a warp executes once (kernels store tiles and reduce them with all 32 lanes active).
    Evidence: inferred from compiled code.
    """
    lanes = active_lanes(mask)
    if len(lanes) == 1:
        return [lanes]
    values = [operand[mask] for operand in operands if operand is not None]
    if all((value == value[0]).all() for value in values):
        return [lanes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, lane in enumerate(lanes):
        groups.setdefault(tuple(int(value[position]) for value in values), []).append(lane)
    return list(groups.values())


def bulk_queue(warp: Any, lane: int) -> Any:
    """Return the bulk async-groups of one thread."""
    return warp.queue(("bulk", lane))


def add_to_bulk_groups(warp: Any, lanes: list[int], operation: Operation) -> None:
    """Put an operation in the open bulk async-group of every thread that issued it."""
    for lane in lanes:
        bulk_queue(warp, lane).add(operation)
