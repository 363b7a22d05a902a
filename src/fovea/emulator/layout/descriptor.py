"""Shared-memory matrix descriptors: which bytes a matrix operand occupies.

What lives here: decoding of the 64-bit descriptors of wgmma (sm_90a) and tcgen05 (sm_100a), and the
table of 16-byte chunks that an operand of given shape reads. Not here: reading memory or
multiplying.

Invariant: a chunk table depends only on the descriptor's strides, the swizzle and the start address
modulo 1024 bytes, so tables are cached and a start address is decoded to a table plus an offset.

Layouts, with rows of `width` bytes (the swizzle width, 16 without swizzle), T elements per 16 bytes
and addresses before swizzling; M is the row index of A or the column index of B:
    K-major:  (M % 8) * width + (M // 8) * stride + chunk, where the k-th 16-byte chunk is at
              16 * k if swizzled and leading * k if not.
    MN-major: chunks of T consecutive M. Swizzled: (c % (width / 16)) * 16 + (c // (width / 16)) *
              leading + (K % 8) * width + (K // 8) * stride. Not swizzled: c * stride + (K % 8) * 16
              + (K // 8) * leading.

The start address may point inside a swizzle atom (how a K-major operand is stepped along K):
offsets are added to it first and the sum is swizzled.

Source: PTX ISA, "Asynchronous warpgroup level matrix: shared memory matrix layout" and "tcgen05
shared memory descriptor"; CUTLASS's canonical layouts (mma_sm90_desc, mma_sm100_desc).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.layout.swizzle import SWIZZLE_PERIOD_BYTES, swizzle, swizzle_32_byte_atoms

CHUNK_BYTES = 16
_WGMMA_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SWIZZLES = {0: 0, 1: 128, 2: 128, 4: 64, 6: 32}
_TCGEN05_32_BYTE_ATOMS = 1


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """A decoded descriptor; offsets and the start address are in bytes."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int
    has_32_byte_atoms: bool = False
    is_leading_absolute: bool = False

    def __str__(self) -> str:
        atoms = " in 32-byte atoms" if self.has_32_byte_atoms else ""
        return (
            f"start {self.start:#x}, leading {self.leading}, stride {self.stride}, base offset "
            f"{self.base_offset}, swizzle {self.swizzle or 'none'}{atoms}"
        )


def decode_wgmma_descriptor(value: int) -> MatrixDescriptor:
    """Return the fields of a wgmma shared-memory descriptor.

    Raises:
        ValueError: when a bit that must be zero is set.
    """
    _check_zero_bits(value, 0x3FF1_C000_C000_C000, "wgmma")
    return MatrixDescriptor(
        start=(value & 0x3FFF) << 4,
        leading=(value >> 16 & 0x3FFF) << 4,
        stride=(value >> 32 & 0x3FFF) << 4,
        base_offset=value >> 49 & 7,
        swizzle=_WGMMA_SWIZZLES[value >> 62 & 3],
    )


def decode_tcgen05_descriptor(value: int) -> MatrixDescriptor:
    """Return the fields of a tcgen05 shared-memory descriptor.

    Raises:
        ValueError: when the version field is not 0 or 1, the layout type is unknown or a bit that
            must be zero is set.
    """
    _check_zero_bits(value, 0x1FE1_0000_C000_C000, "tcgen05")
    # The manual fixes these bits to 1; compiled kernels that run on the hardware also have 0.
    version = value >> 46 & 3
    if version > 1:
        raise ValueError(
            f"tcgen05 descriptor {value:#018x} has {version} in bits 46-47 (allowed: 1, and 0)"
        )
    layout = value >> 61 & 7
    if layout not in _TCGEN05_SWIZZLES:
        raise ValueError(
            f"tcgen05 descriptor {value:#018x} has layout type {layout} in bits 61-63 "
            f"(known: {sorted(_TCGEN05_SWIZZLES)})"
        )
    return MatrixDescriptor(
        start=(value & 0x3FFF) << 4,
        leading=(value >> 16 & 0x3FFF) << 4,
        stride=(value >> 32 & 0x3FFF) << 4,
        base_offset=value >> 49 & 7,
        swizzle=_TCGEN05_SWIZZLES[layout],
        has_32_byte_atoms=layout == _TCGEN05_32_BYTE_ATOMS,
        is_leading_absolute=bool(value >> 52 & 1),
    )


def _check_zero_bits(value: int, mask: int, kind: str) -> None:
    if value & mask:
        raise ValueError(
            f"{kind} descriptor {value:#018x} sets bits {value & mask:#018x}, which must be zero; "
            "is the register really a descriptor?"
        )


def operand_chunks(
    descriptor: MatrixDescriptor, *, rows: int, k_bytes: int, element_bytes: int, is_k_major: bool
) -> tuple[NDArray[np.int64], int]:
    """Return the chunk numbers an operand reads, and the first chunk they count from.

    Args:
        descriptor: where the operand is.
        rows: extent along M (for A) or N (for B).
        k_bytes: extent along K in bytes, 32 for one instruction.
        element_bytes: size of an element.
        is_k_major: whether K is contiguous in memory.

    Shapes:
        result: [rows, k_bytes / 16] if K-major, else [K, rows * element_bytes / 16]; chunk i of
            shared memory is bytes 16 (i + first) to 16 (i + first) + 15.

    Raises:
        ValueError: when the shape does not fit the layout.
    """
    if descriptor.is_leading_absolute:
        raise ValueError(
            "the descriptor's leading offset is an absolute address (bit 52), which is not "
            "implemented; use a relative leading byte offset"
        )
    start_in_period = descriptor.start % SWIZZLE_PERIOD_BYTES
    table = _chunk_table(
        replace(descriptor, start=start_in_period), rows, k_bytes, element_bytes, is_k_major
    )
    return table, (descriptor.start - start_in_period) // CHUNK_BYTES


@lru_cache(maxsize=4096)
def _chunk_table(
    descriptor: MatrixDescriptor, rows: int, k_bytes: int, element_bytes: int, is_k_major: bool
) -> NDArray[np.int64]:
    if is_k_major:
        offsets = _k_major_offsets(descriptor, rows, k_bytes)
    else:
        offsets = _mn_major_offsets(descriptor, rows, k_bytes, element_bytes)
    addresses = offsets + descriptor.start
    if descriptor.has_32_byte_atoms:
        addresses = swizzle_32_byte_atoms(addresses)
    else:
        addresses = swizzle(addresses, descriptor.swizzle, phase_shift=descriptor.base_offset)
    table = addresses // CHUNK_BYTES
    table.flags.writeable = False
    return table


def _k_major_offsets(descriptor: MatrixDescriptor, rows: int, k_bytes: int) -> NDArray[np.int64]:
    width = descriptor.swizzle
    row = np.arange(rows, dtype=np.int64)[:, None]
    chunk = np.arange(k_bytes // CHUNK_BYTES, dtype=np.int64)[None, :]
    chunk_step = CHUNK_BYTES if width else descriptor.leading
    return (row % 8) * (width or CHUNK_BYTES) + (row // 8) * descriptor.stride + chunk * chunk_step


def _mn_major_offsets(
    descriptor: MatrixDescriptor, rows: int, k_bytes: int, element_bytes: int
) -> NDArray[np.int64]:
    leading, stride, width = descriptor.leading, descriptor.stride, descriptor.swizzle
    if rows * element_bytes % CHUNK_BYTES:
        raise ValueError(
            f"an MN-major operand of {rows} elements of {element_bytes} bytes is no whole "
            "number of 16-byte chunks"
        )
    k = np.arange(k_bytes // element_bytes, dtype=np.int64)[:, None]
    chunk = np.arange(rows * element_bytes // CHUNK_BYTES, dtype=np.int64)[None, :]
    if not width:
        return chunk * stride + (k % 8) * CHUNK_BYTES + (k // 8) * leading
    per_row = width // CHUNK_BYTES
    return (
        (chunk % per_row) * CHUNK_BYTES
        + (chunk // per_row) * leading
        + (k % 8) * width
        + (k // 8) * stride
    )
