"""Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, and its allocation rules.

Lives here: cells, initialised flags, allocator. Not here: shapes of loads and stores
(`isa/tcgen05_memory.py`). Invariant: every access lies in allocated columns.
Source: PTX ISA 9.7.16 (tcgen05), tensor memory and allocation.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.errors import IllegalOperand, OutOfBounds, UninitialisedRead
from fovea.emulator.races import Access, Shadow

Array = NDArray[Any]

TMEM_LANES = 128
TMEM_COLUMNS = 512
MIN_COLUMNS = 32
LANES_PER_CELL = 16  # race granule: the smallest lane group a tcgen05 access covers


class TensorMemory:
    """Cells and allocator of one CTA."""

    __slots__ = ("_owner", "_relinquished", "cells", "initialised", "shadow")

    def __init__(self, track_initialised: bool):
        self.cells = np.zeros((TMEM_LANES, TMEM_COLUMNS), np.uint32)
        self.initialised = (
            np.zeros((TMEM_LANES, TMEM_COLUMNS), np.bool_) if track_initialised else None
        )
        self.shadow: Shadow | None = None
        self._owner = np.full(TMEM_COLUMNS, -1, np.int32)
        self._relinquished = False

    # --- allocation -------------------------------------------------------------------------

    def allocate(self, columns: int, access: Access) -> int | None:
        """Return the first column of a new allocation, or None if there is no room now.

        Raises:
            IllegalOperand: not a power of two in 32..512, or the permit was relinquished.
        """
        self._check_count(columns, access)
        if self._relinquished:
            raise self._illegal("tcgen05.alloc after relinquish_alloc_permit", access)
        for start in range(0, TMEM_COLUMNS, columns):
            if (self._owner[start : start + columns] < 0).all():
                self._owner[start : start + columns] = start
                if self.initialised is not None:
                    self.initialised[:, start : start + columns] = False
                return start
        return None

    def deallocate(self, start: int, columns: int, access: Access) -> None:
        """Free an allocation.

        Raises:
            IllegalOperand: address and count are not those of one live allocation.
        """
        self._check_count(columns, access)
        owned = self._owner == start
        if int(owned.sum()) != columns or not owned[start : start + columns].all():
            raise self._illegal(
                f"tcgen05.dealloc of {columns} columns at {start}: no such allocation", access
            )
        self._owner[owned] = -1

    def relinquish(self) -> None:
        """Give up the right to allocate."""
        self._relinquished = True

    @property
    def allocated_columns(self) -> int:
        """Number of columns allocated now."""
        return int((self._owner >= 0).sum())

    # --- access -----------------------------------------------------------------------------

    def read(self, lane: int, lanes: int, column: int, columns: int, access: Access) -> Array:
        """Return a `(lanes, columns)` copy of 32-bit cells."""
        self._check_range(lane, lanes, column, columns, access)
        area = (slice(lane, lane + lanes), slice(column, column + columns))
        if self.initialised is not None and not self.initialised[area].all():
            bad = np.argwhere(~self.initialised[area])[0]
            raise UninitialisedRead(
                f"tensor memory lane {lane + int(bad[0])} column {column + int(bad[1])} "
                "is read before it was written",
                access.warp.where(access.instruction),
            )
        if self.shadow is not None:
            self.shadow.on_read(self._shadow_cells(lane, lanes, column, columns), access)
        return self.cells[area].copy()

    def write(self, lane: int, column: int, values: Array, access: Access) -> None:
        """Write a `(lanes, columns)` block of 32-bit cells."""
        lanes, columns = values.shape
        self._check_range(lane, lanes, column, columns, access)
        area = (slice(lane, lane + lanes), slice(column, column + columns))
        self.cells[area] = values
        if self.initialised is not None:
            self.initialised[area] = True
        if self.shadow is not None:
            self.shadow.on_write(self._shadow_cells(lane, lanes, column, columns), access)

    def _shadow_cells(self, lane: int, lanes: int, column: int, columns: int) -> Array:
        groups = np.arange(lane // LANES_PER_CELL, -(-(lane + lanes) // LANES_PER_CELL))
        return (groups[:, None] * TMEM_COLUMNS + np.arange(column, column + columns)).ravel()

    def _check_range(
        self, lane: int, lanes: int, column: int, columns: int, access: Access
    ) -> None:
        inside = lane >= 0 and lane + lanes <= TMEM_LANES and column >= 0
        if not inside or column + columns > TMEM_COLUMNS:
            raise OutOfBounds(
                f"tensor memory lanes {lane}..{lane + lanes - 1}, columns "
                f"{column}..{column + columns - 1} leave 128 x 512",
                access.warp.where(access.instruction),
            )
        if (self._owner[column : column + columns] < 0).any():
            raise OutOfBounds(
                f"tensor memory columns {column}..{column + columns - 1} are not allocated",
                access.warp.where(access.instruction),
            )

    def _check_count(self, columns: int, access: Access) -> None:
        if columns not in (32, 64, 128, 256, 512):
            raise self._illegal(
                f"{columns} tensor memory columns (allowed: 32, 64, 128, 256, 512)", access
            )

    def _illegal(self, message: str, access: Access) -> IllegalOperand:
        where: Any = access.warp.where(access.instruction)
        return IllegalOperand(message, where)
