"""Zero-column masks of tcgen05.mma.ws: which columns of B count as zero, and where B starts.

Lives here: decoding of the 64-bit descriptor. Not here: products (`isa/tcgen05_product.py`).
Invariant: a mask has a bit for each column of D.

Source: PTX ISA 9.7.16.4.3. Its table exchanges the two spans: its examples (and silicon, as others
report) use the columns for "use span" + 1 and zero them for "skip span" + 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RESERVED = 0xC0000070_00000000


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMask:
    """A decoded mask.

    Attributes:
        zero: for each column of D, whether B counts as zero there.
        shift: the column of B that is multiplied into column 0 of D.
    """

    zero: tuple[bool, ...]
    shift: int

    def apply(self, b: NDArray[Any], columns: int) -> NDArray[Any]:
        """Return the rows of B (one a column of D) that count, zeros in the masked ones."""
        used = b[self.shift : self.shift + columns].copy()
        used[np.array(self.zero)] = 0
        return used


def decode_column_mask(value: int, rows: int, columns: int, reuse_shift: int) -> ColumnMask:
    """Return a mask.

    Args:
        value: the descriptor.
        rows: M, 32, 64 or 128: there are 128 / M masks side by side.
        columns: N.
        reuse_shift: the largest shift the instruction descriptor (bits 30, 31) allows.

    Raises:
        ValueError: a reserved bit, or a shift beyond what M or the instruction descriptor allow.
    """
    if value & _RESERVED:
        raise ValueError(
            f"zero-column mask {value:#018x} sets reserved bits {value & _RESERVED:#018x}"
        )
    shift, limit = value >> 56 & 0x3F, min(16 if rows == 32 else 32, reuse_shift)
    if shift > limit:
        raise ValueError(
            f"zero-column mask shifts B by {shift} columns (allowed: up to {limit} with M={rows} "
            "and the shift in bits 30 and 31 of the instruction descriptor)"
        )
    parts = 128 // rows
    width = columns // parts
    zero: list[bool] = []
    for part in range(parts):
        zero += _part(value, part, width)
    return ColumnMask(zero=tuple(zero), shift=shift)


def _part(value: int, part: int, width: int) -> list[bool]:
    if not value >> 39 & 1:
        return [False] * width
    spans = {True: (value >> 40 & 0xFF) + 1, False: (value >> 48 & 0xFF) + 1}
    is_zero = bool(value >> 32 + part & 1)
    # the first span is cut, but one column of it stays
    left = spans[is_zero] - min(value >> 8 * part & 0xFF, spans[is_zero] - 1)
    mask: list[bool] = []
    while len(mask) < width:
        mask += [is_zero] * left
        is_zero = not is_zero
        left = spans[is_zero]
    return mask[:width]
