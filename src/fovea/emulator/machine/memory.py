"""Memories and addresses.

A `Segment` is one piece of byte-addressed memory: a global allocation (host memory), the shared
memory of a CTA, the local memory of a warp, the parameters of a launch. Generic addresses fall in
windows by their top byte; global addresses are host addresses. A 32-bit shared address is
`cluster rank << 24 | offset`, on every architecture, as the hardware forms them; the first 1 KiB
of a CTA's shared memory belongs to the system.

Lives here: bounds, alignment, initialised bytes, the call into race detection. Not here: which
instruction accesses what (`isa/load_store.py`). Invariant: no access leaves its segment.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.arguments import check_kind, listed, wrong
from fovea.emulator.errors import Fault, Misaligned, OutOfBounds, UninitialisedRead
from fovea.emulator.global_races import GlobalShadow
from fovea.emulator.memory_order import Places
from fovea.emulator.races import Access, Shadow

Array = NDArray[Any]

WINDOW_SHIFT = 56
SHARED_WINDOW = 1 << WINDOW_SHIFT
LOCAL_WINDOW = 2 << WINDOW_SHIFT
PARAM_WINDOW = 3 << WINDOW_SHIFT
CONST_WINDOW = 4 << WINDOW_SHIFT
RANK_SHIFT = 24  # SASS forms shared::cluster addresses as rank << 24 | offset (CgaCtaId)
SHARED_RESERVED_BYTES = 1024  # sm_90 and later keep 1 KiB of each CTA (CUDA guide, table of limits)

JUNK_BYTE = 0xA5  # what registers hold of bytes that nobody may look at

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INITIALISED = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class Segment:
    """One piece of memory; offsets are bytes from its start."""

    __slots__ = (
        "_init_views",
        "_views",
        "base",
        "data",
        "initialised",
        "is_aligned",
        "is_read_only",
        "low",
        "name",
        "places",
        "shadow",
        "space",
    )  # fmt: skip

    def __init__(self, name: str, space: str, data: Array, base: int, low: int = 0):
        self.name = name
        self.space = space
        self.data = data
        self.base = base
        self.low = low
        self.initialised: Array | None = None
        self.shadow: Shadow | GlobalShadow | None = None
        self.places = Places()
        self.is_aligned = base % 16 == 0
        self.is_read_only = not data.flags.writeable
        self._views: dict[tuple[int, int], Array] = {}
        self._init_views: dict[tuple[int, int], Array] = {}

    def track_initialised(self) -> None:
        """Start to record which bytes were written."""
        self.initialised = np.zeros(len(self.data), np.uint8)
        self._init_views = {}

    # --- lanes: 32-lane gathers and scatters ------------------------------------------------

    def load(
        self, offsets: Array, item: int, count: int, access: Access, used: Array | None = None
    ) -> Array:
        """Return `(count, lanes)` values of `item` bytes each from `count * item`-aligned offsets.

        `used` says which bytes of each lane's matter (None: all); the others are junk.

        Raises:
            Fault: out of bounds, misaligned, uninitialised or racing.
        """
        width = item * count
        if (
            (offsets & (width - 1)).any()
            if self.is_aligned
            else ((offsets + self.base) & (width - 1)).any()
        ):
            raise self._misaligned(offsets, width, access)
        if used is not None:
            return self._load_used(offsets, item, used, access)
        try:
            if not self.is_aligned:
                values = self._load_bytes(offsets, item, count)
            elif count == 1:
                values = self._view(self._views, self.data, item, 1)[offsets // item][None]
            else:
                view = self._view(self._views, self.data, item, count)
                values = np.ascontiguousarray(view[offsets // width].T)
        except IndexError:
            raise self._out_of_bounds(offsets, width, access) from None
        if self.initialised is not None:
            index = offsets // width
            flags = self._view(self._init_views, self.initialised, item, count)[index]
            if (flags != _INITIALISED[item]).any():
                raise self._uninitialised(offsets, width, access)
        if self.shadow is not None and self.shadow.is_active:
            self._shadow_lanes(self.shadow.on_read, offsets, width, access)
        return values

    def store(self, offsets: Array, values: Array, item: int, access: Access) -> None:
        """Store `(count, lanes)` values of `item` bytes each; the last active lane wins.

        Raises:
            Fault: out of bounds, misaligned or racing.
        """
        count = len(values)
        width = item * count
        if (
            (offsets & (width - 1)).any()
            if self.is_aligned
            else ((offsets + self.base) & (width - 1)).any()
        ):
            raise self._misaligned(offsets, width, access)
        if self.is_read_only:
            raise self._read_only(offsets, access)
        if self.low and len(offsets) and int(offsets.min()) < self.low:
            raise self._out_of_bounds(offsets, width, access, "write")
        try:
            if not self.is_aligned:
                index = offsets.astype(np.int64)[:, None] + np.arange(width)
                self.data[index] = np.ascontiguousarray(values.T).view(np.uint8)
                return
            index = offsets // width
            view = self._view(self._views, self.data, item, count)
            new = values[0] if count == 1 else values.T
            if self.shadow is not None:
                changed = partial(_changed_cells, view, index, new)
                check = partial(self.shadow.on_write, changed=changed)
                self._shadow_lanes(check, offsets, width, access)
            view[index] = new
        except IndexError:
            raise self._out_of_bounds(offsets, width, access) from None
        if self.initialised is not None:
            self._view(self._init_views, self.initialised, item, count)[index] = _INITIALISED[item]
        if self.shadow is not None and not access.strength and not _are_equal(view, index, new):
            instruction = access.instruction
            access.warp.machine.warn(
                f"PTX line {instruction.line} `{instruction.text}`: lanes of one store write "
                "different values to one address; which of them stays is undefined"
            )

    def check_constant(self, offsets: Array, width: int, access: Access) -> None:
        """Raise RaceError if the kernel has written what is read as memory that nobody writes."""
        if isinstance(self.shadow, GlobalShadow):
            self._shadow_lanes(self.shadow.on_constant_read, offsets, width, access)

    # --- bulk: byte ranges and index arrays -------------------------------------------------

    def read(self, offset: int, size: int, access: Access) -> Array:
        """Return a copy of `size` bytes at `offset`, checked as a read of the access."""
        self.check_bounds(offset, size, access)
        self._check_range(offset, size, access)
        return self.data[offset : offset + size].copy()

    def write(
        self, offset: int, values: Array, access: Access, byte_mask: Array | None = None
    ) -> None:
        """Write bytes at `offset`, checked as a write of the access.

        Args:
            offset: where.
            values: the bytes.
            access: who writes.
            byte_mask: for each word, which of its bytes are written (None: all); the others are
                to have the value they have now.
        """
        values = values.view(np.uint8).ravel()
        size = len(values)
        self.check_bounds(offset, size, access)
        if self.is_read_only:
            raise self._read_only(np.array([offset]), access)
        cells = slice(offset // 4, (offset + size + 3) // 4)
        place = slice(offset, offset + size)
        if isinstance(self.shadow, GlobalShadow):
            changed = partial(_changed_words, self.data, place, values)
            self.shadow.on_write(cells, access, 15 if byte_mask is None else byte_mask, changed)
        self.data[place] = values
        if self.initialised is not None:
            self.initialised[place] = 1
        if isinstance(self.shadow, Shadow):
            self.shadow.on_write(cells, access)

    def read_at(self, offsets: Array, unit: int, access: Access) -> Array:
        """Return `offsets.shape + (unit,)` bytes; offsets are multiples of `unit` (1 to 16)."""
        self._check_units(offsets, unit, access)
        index = offsets // unit
        count = len(self.data) // unit * unit
        values = self.data[:count].reshape(-1, unit)[index]
        if self.initialised is not None:
            flags = self.initialised[:count].reshape(-1, unit)[index]
            if not flags.all():
                bad = offsets[~flags.all(axis=-1)].ravel()
                raise self._uninitialised(bad, unit, access)
        if self.shadow is not None and self.shadow.is_active:
            self._shadow_units(self.shadow.on_read, offsets, unit, access)
        return values

    def write_at(self, offsets: Array, values: Array, unit: int, access: Access) -> None:
        """Write `offsets.shape + (unit,)` bytes; offsets are multiples of `unit` (1 to 16)."""
        self._check_units(offsets, unit, access)
        index = offsets // unit
        count = len(self.data) // unit * unit
        self.data[:count].reshape(-1, unit)[index] = values
        if self.initialised is not None:
            self.initialised[:count].reshape(-1, unit)[index] = 1
        if self.shadow is not None:
            self._shadow_units(self.shadow.on_write, offsets, unit, access)

    def check_bounds(self, offset: int, size: int, access: Access) -> None:
        """Raise `OutOfBounds` unless the byte range lies inside the segment."""
        if offset < self.low or offset + size > len(self.data):
            raise self._out_of_bounds(np.array([offset]), size, access)

    # --- inside -----------------------------------------------------------------------------

    def _view(
        self, views: dict[tuple[int, int], Array], data: Array, item: int, count: int
    ) -> Array:
        view = views.get((item, count))
        if view is None:
            width = item * count
            view = data[: len(data) // width * width].view(_UNSIGNED[item])
            if count > 1:
                view = view.reshape(-1, count)
            views[item, count] = view
        return view

    def _load_bytes(self, offsets: Array, item: int, count: int) -> Array:
        index = offsets.astype(np.int64)[:, None] + np.arange(item * count)
        raw = np.ascontiguousarray(self.data[index])
        return np.ascontiguousarray(raw.view(_UNSIGNED[item]).T)

    def _load_used(self, offsets: Array, item: int, used: Array, access: Access) -> Array:
        """Load and check the used bytes alone."""
        width = len(used)
        columns = np.flatnonzero(used)
        index = offsets.astype(np.int64)[:, None] + columns
        outside = ((index < self.low) | (index >= len(self.data))).any(axis=1)
        if outside.any():
            raise self._out_of_bounds(offsets[outside], width, access)
        raw = np.full((len(offsets), width), JUNK_BYTE, np.uint8)
        raw[:, columns] = self.data[index]
        if self.initialised is not None:
            missing = ~self.initialised[index].all(axis=1)
            if missing.any():
                raise self._uninitialised(offsets[missing], width, access)
        if self.shadow is not None and self.shadow.is_active and len(columns):
            cells = index >> 2
            masks = (1 << (index & 3)).astype(np.uint8)
            self.shadow.on_read(cells.ravel(), access, masks.ravel())
        return np.ascontiguousarray(raw.view(_UNSIGNED[item]).T)

    def _check_range(self, offset: int, size: int, access: Access) -> None:
        if self.initialised is not None and not self.initialised[offset : offset + size].all():
            first = offset + int(np.argmin(self.initialised[offset : offset + size]))
            raise self._uninitialised(np.array([first]), 1, access)
        if self.shadow is not None and self.shadow.is_active:
            self.shadow.on_read(slice(offset // 4, (offset + size + 3) // 4), access)

    def _check_units(self, offsets: Array, unit: int, access: Access) -> None:
        if offsets.size == 0:
            return
        if (offsets % unit).any():
            raise self._misaligned(offsets.ravel(), unit, access)
        low, high = int(offsets.min()), int(offsets.max())
        if low < self.low or high + unit > len(self.data):
            bad = offsets.ravel()
            bad = bad[(bad < self.low) | (bad + unit > len(self.data))]
            raise self._out_of_bounds(bad, unit, access)

    def _shadow_lanes(
        self, check: Callable[..., None], offsets: Array, width: int, access: Access
    ) -> None:
        cells = offsets >> 2
        if width >= 4:
            if width > 4:
                cells = (cells[:, None] + np.arange(width // 4, dtype=cells.dtype)).ravel()
            check(cells, access)
        else:
            mask = (1 << width) - 1
            check(cells, access, (mask << (offsets & 3).astype(np.uint8)).astype(np.uint8))

    def _shadow_units(
        self, check: Callable[..., None], offsets: Array, unit: int, access: Access
    ) -> None:
        if unit >= 4:
            cells = (offsets // 4)[..., None] + np.arange(unit // 4)
        else:
            cells = offsets // 4
        check(cells.ravel(), access)

    def _where(self, offsets: Array, position: int, access: Access) -> Any:
        lane = None
        if access.mask is not None and len(offsets) == int(np.count_nonzero(access.mask)):
            lane = int(np.flatnonzero(access.mask)[position])
        address = int(offsets[position]) + (self.base if self.space == "global" else 0)
        return access.warp.where(access.instruction, lane=lane, address=address, space=self.space)

    def _misaligned(self, offsets: Array, width: int, access: Access) -> Fault:
        start = 0 if self.is_aligned else self.base
        position = int(np.argmax((offsets + start) % width != 0))
        return Misaligned(
            f"address is not a multiple of the {width} bytes the access needs",
            self._where(offsets, position, access),
        )

    def _out_of_bounds(self, offsets: Array, width: int, access: Access, why: str = "") -> Fault:
        bad = (offsets < self.low) | (offsets + width > len(self.data))
        position = int(np.argmax(bad))
        return OutOfBounds(
            f"{why or 'access'} outside {self.name} ({len(self.data) - self.low} bytes"
            f"{f' from {self.low:#x}' if self.low else ''})",
            self._where(offsets, position, access),
        )

    def _read_only(self, offsets: Array, access: Access) -> Fault:
        return OutOfBounds(self.read_only_text, self._where(offsets, 0, access))

    @property
    def read_only_text(self) -> str:
        """What to say of a write to it, if it is read-only."""
        if self.space != "global":
            return f"write to {self.name}, which a kernel can only read"
        return (
            f"write to {self.name}, a read-only array: it is not writeable; pass a writeable "
            "array, such as array.copy(), or set array.flags.writeable = True"
        )

    def _uninitialised(self, offsets: Array, width: int, access: Access) -> Fault:
        assert self.initialised is not None
        position = 0
        for position, offset in enumerate(offsets.tolist()):  # noqa: B007
            if not self.initialised[offset : offset + width].all():
                break
        return UninitialisedRead(
            f"{width} bytes of {self.name} are read before they were all written",
            self._where(offsets, position, access),
        )


def _are_equal(memory: Array, place: Any, new: Array) -> bool:
    return np.array_equal(memory[place], new)


def _changed_cells(view: Array, index: Array, new: Array) -> Array:
    """Return which cells of race detection a store of lanes gives other bytes."""
    old, new = view[index], np.ascontiguousarray(new)
    old, new = old.reshape(len(old), -1), new.reshape(len(old), -1)
    if old[0].nbytes >= 4:
        return np.ravel(old.view(np.uint32) != new.view(np.uint32))
    return cast(Array, (old != new).any(axis=1))


def _changed_words(memory: Array, place: slice, new: Array) -> Array:
    """Return which words a write of contiguous bytes gives other ones."""
    start = place.start % 4
    differs = np.zeros(-(-(start + len(new)) // 4) * 4, np.bool_)
    differs[start : start + len(new)] = memory[place] != new
    return cast(Array, differs.reshape(-1, 4).any(axis=1))


class GlobalMemory:
    """All global allocations of a launch, by host address."""

    __slots__ = ("_bases", "_segments", "keep")

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._segments: list[Segment] = []
        self.keep: list[Any] = []

    def __repr__(self) -> str:
        """Return the allocations, by address."""
        parts = [f"{s.name} ({len(s.data)} bytes at {s.base:#x})" for s in self._segments]
        return f"<GlobalMemory: {listed(parts)}>"

    def register(self, array: Array, name: str) -> int:
        """Make the bytes of a contiguous numpy array addressable; return its address.

        Raises:
            LaunchError: it is no array, is not contiguous, or holds Python objects.
        """
        allowed = "a C-contiguous numpy array of numbers"
        remedy = "pass numpy.ascontiguousarray(array), or tensor.numpy() of a CPU tensor"
        check_kind(name, array, np.ndarray, allowed, remedy)
        if not array.flags.c_contiguous or array.dtype.hasobject:
            raise wrong(name, array, allowed, remedy)
        flat = array.reshape(-1).view(np.uint8)
        return self.register_bytes(flat, flat.ctypes.data, name)

    def register_bytes(self, flat: Array, address: int, name: str) -> int:
        """Make bytes addressable at `address`; the same range twice is one allocation.

        Raises:
            LaunchError: `flat` is no array of bytes, or `address` no 64-bit address.
        """
        check_kind("flat", flat, np.ndarray, "a numpy array of uint8", "pass array.view('uint8')")
        if flat.ndim != 1 or flat.dtype != np.uint8:
            raise wrong("flat", flat, "one dimension of uint8", "pass array.ravel().view('uint8')")
        check_kind("address", address, int, "an int", "pass array.ctypes.data")
        if not 0 <= address < 1 << 64:
            raise wrong("address", address, "0 to 2^64 - 1", "pass array.ctypes.data")
        position = bisect_right(self._bases, address)
        if position and self._segments[position - 1].base == address:
            if len(self._segments[position - 1].data) >= len(flat):
                return address
            self._segments[position - 1] = Segment(name, "global", flat, address)
            return address
        self._bases.insert(position, address)
        self._segments.insert(position, Segment(name, "global", flat, address))
        self.keep.append(flat)
        return address

    @property
    def segments(self) -> list[Segment]:
        """The allocations, by address."""
        return self._segments

    def find(self, address: int) -> Segment | None:
        """Return the allocation that holds `address`, or None."""
        position = bisect_right(self._bases, address) - 1
        if position < 0:
            return None
        segment = self._segments[position]
        return segment if address < segment.base + len(segment.data) else None

    def nearest(self, address: int) -> str:
        """Return a description of the allocation before `address`, for reports."""
        position = bisect_right(self._bases, address) - 1
        if position < 0:
            return "no allocation lies below it"
        segment = self._segments[position]
        distance = address - segment.base - len(segment.data)
        return f"{distance} bytes past the end of {segment.name} ({len(segment.data)} bytes)"
