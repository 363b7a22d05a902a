"""Register fragments of warpgroup matrix instructions.

What lives here: which register of which lane holds which matrix element, as pure array reshapes
between registers and matrices. Not here: warp-level mma.sync fragments (isa/matrix.py) or
arithmetic.

Invariant: `*_to_registers` undoes `*_from_registers`. Registers are arrays [warp, register, lane]
of uint32 with four warps; warp w holds rows 16w to 16w + 15.

Source: PTX ISA, "Asynchronous warpgroup level matrix instructions: register fragments".
"""

import numpy as np
from numpy.typing import NDArray

Registers = NDArray[np.uint32]


def accumulator_from_registers(registers: Registers) -> NDArray[np.uint32]:
    """Return the 64 x N matrix of 32-bit accumulators (f32 or s32 bits).

    Shapes:
        registers: [4, N / 2, 32]. Register 4j + 2h + e of lane 4r + c holds row 16w + 8h + r,
            column 8j + 2c + e.
    """
    columns = registers.shape[1] // 4
    # axes: warp, j, h, e, r, c -> warp, h, r, j, c, e
    parts = registers.reshape(4, columns, 2, 2, 8, 4)
    return parts.transpose(0, 2, 4, 1, 5, 3).reshape(64, 8 * columns)


def accumulator_to_registers(matrix: NDArray[np.uint32]) -> Registers:
    """Return the [4, N / 2, 32] registers that hold a 64 x N matrix of 32-bit accumulators."""
    columns = matrix.shape[1] // 8
    parts = matrix.reshape(4, 2, 8, columns, 4, 2)
    return parts.transpose(0, 3, 1, 5, 2, 4).reshape(4, 4 * columns, 32)


def packed_accumulator_from_registers(registers: Registers) -> NDArray[np.uint16]:
    """Return the 64 x N matrix of 16-bit accumulators.

    Shapes:
        registers: [4, N / 4, 32]. Register 2j + h of lane 4r + c holds row 16w + 8h + r,
            columns 8j + 2c (low half) and 8j + 2c + 1 (high half).
    """
    columns = registers.shape[1] // 2
    halves = np.ascontiguousarray(registers).view(np.uint16)
    # axes: warp, j, h, r, c, e -> warp, h, r, j, c, e
    parts = halves.reshape(4, columns, 2, 8, 4, 2)
    return parts.transpose(0, 2, 3, 1, 4, 5).reshape(64, 8 * columns)


def packed_accumulator_to_registers(matrix: NDArray[np.uint16]) -> Registers:
    """Return the [4, N / 4, 32] registers that hold a 64 x N matrix of 16-bit accumulators."""
    columns = matrix.shape[1] // 8
    parts = matrix.reshape(4, 2, 8, columns, 4, 2).transpose(0, 3, 1, 2, 4, 5)
    return np.ascontiguousarray(parts).reshape(4, 2 * columns, 64).view(np.uint32)


def operand_from_registers(registers: Registers, element_bytes: int) -> NDArray[np.generic]:
    """Return the 64 x K matrix of an A operand held in four registers, as unsigned integers.

    K is 32 bytes of elements. Register 2g + h of lane 4r + c holds row 16w + 8h + r and the
    4 bytes of columns that start at (16g + 4c) bytes.

    Shapes:
        registers: [4, 4, 32].
    """
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[element_bytes]
    # axes: warp, g, h, r, c -> warp, h, r, g, c
    parts = registers.reshape(4, 2, 2, 8, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(parts).reshape(64, 8).view(dtype)


def operand_to_registers(matrix: NDArray[np.generic]) -> Registers:
    """Return the [4, 4, 32] registers that hold a 64 x (32 bytes) A operand."""
    words = np.ascontiguousarray(matrix).view(np.uint32).reshape(4, 2, 8, 2, 4)
    return words.transpose(0, 3, 1, 2, 4).reshape(4, 4, 32)
