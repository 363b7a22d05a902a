"""Operands of the warpgroup and tcgen05 products in shared memory: where each byte lies.

Lives here: the canonical layouts, K-major and MN-major, with and without swizzle, and their
descriptor fields. Source: PTX ISA 9.7.15.5.1 (wgmma) and 9.7.16.5 (tcgen05), whose layouts agree.
Invariant: an operand starts at a multiple of 1024 bytes.
"""

from dataclasses import dataclass

import numpy as np

WGMMA_CODE = {0: 0, 128: 1, 64: 2, 32: 3}
TCGEN05_CODE = {0: 0, 128: 2, 64: 4, 32: 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Bytes of an operand, and its strides in bytes for the descriptor."""

    raw: np.ndarray
    leading: int
    stride: int
    swizzle: int

    def wgmma_fields(self) -> int:
        """Return the descriptor without the address."""
        code = WGMMA_CODE[self.swizzle] << 62
        return self.leading >> 4 << 16 | self.stride >> 4 << 32 | code

    def tcgen05_fields(self) -> int:
        """Return the descriptor without the address; bit 46 is a constant of its version."""
        code = TCGEN05_CODE[self.swizzle] << 61
        return self.leading >> 4 << 16 | self.stride >> 4 << 32 | 1 << 46 | code


def k_major(codes: np.ndarray, swizzle: int) -> Operand:
    """Lay out `(rows, k)` with k contiguous; a row holds `swizzle` bytes (without one: 32)."""
    rows = len(codes)
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(rows, -1)
    width = raw.shape[1]
    out = np.zeros(raw.size, np.uint8)
    if swizzle == 0:
        # cores of 8 rows x 16 bytes; those of the next 8 rows follow, then those of the next k
        for row in range(rows):
            for chunk in range(width // 16):
                at = chunk * rows * 16 + row * 16
                out[at : at + 16] = raw[row, 16 * chunk : 16 * chunk + 16]
        return Operand(raw=out, leading=rows * 16, stride=128, swizzle=0)
    assert width == swizzle
    for row in range(rows):
        for chunk in range(width // 16):
            at = row * width + 16 * chunk
            at ^= (at >> 7 & (width // 16 - 1)) << 4
            out[at : at + 16] = raw[row, 16 * chunk : 16 * chunk + 16]
    return Operand(raw=out, leading=16, stride=8 * width, swizzle=swizzle)


def mn_major(codes: np.ndarray, swizzle: int) -> Operand:
    """Lay out `(rows, k)` of 2-byte elements with the rows contiguous.

    An atom is 8 k by `swizzle` bytes of rows (without a swizzle: 16 bytes). Atoms of the next rows
    follow each other, atoms of the next 8 k come after all of those.
    """
    rows, k = codes.shape
    width = swizzle or 16
    per_atom = width // 2
    num_across = rows // per_atom
    out = np.zeros(rows * k * 2, np.uint8)
    for row in range(rows):
        for step in range(k):
            atom = step // 8 * num_across + row // per_atom
            at = atom * 8 * width + step % 8 * width + row % per_atom * 2
            if swizzle:
                at ^= (at >> 7 & (width // 16 - 1)) << 4
            out[at : at + 2] = codes[row : row + 1, step : step + 1].view(np.uint8).ravel()
    across, along = 8 * width, num_across * 8 * width
    if swizzle == 0:
        # without a swizzle the two strides change places
        return Operand(raw=out, leading=along, stride=across, swizzle=0)
    return Operand(raw=out, leading=across, stride=along, swizzle=swizzle)
