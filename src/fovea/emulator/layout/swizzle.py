"""Shared-memory swizzles: how the tensor engines permute 16-byte chunks.

What lives here: the permutation itself. Not here: who applies it (tensor_map.py for copies,
descriptor.py for matrix operands).

Invariant: a swizzle is an involution on addresses that moves bytes only inside its atom (8 rows of
the swizzle width), and depends on the absolute shared-memory address, not on where a tile starts.

Source: PTX ISA, "Tensor copy: swizzling modes"; checked against CuTe's Swizzle<B, 4, 3>.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Address = TypeVar("Address", int, NDArray[np.int64])

# Swizzle width in bytes -> how many address bits are XORed.
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}

# The pattern of every swizzle repeats at this many bytes: addresses that agree modulo it swizzle
# alike.
SWIZZLE_PERIOD_BYTES = 1024


def swizzle(address: Address, width: int, *, phase_shift: int = 0) -> Address:
    """Return the swizzled address: bits 4.. are XORed with the row number in bits 7...

    Args:
        address: shared-memory byte address or array of addresses.
        width: 0 (none), 32, 64 or 128 bytes.
        phase_shift: rows to subtract before the row number is taken (a descriptor's base offset).
    """
    bits = SWIZZLE_BITS[width]
    if not bits:
        return address
    row = (address >> 7) - phase_shift
    return address ^ ((row & ((1 << bits) - 1)) << 4)


def swizzle_32_byte_atoms(address: Address) -> Address:
    """Return the address under the 128-byte swizzle whose atoms are 32 bytes (sm_100 only).

    Source: CUTLASS Swizzle<2, 5, 2>, the form tf32 operands need when they are MN-major.
    """
    return address ^ (((address >> 7) & 3) << 5)
