"""Fragments of tensor memory: which cell each register of a warp holds, and where matrices lie.

What lives here: index tables for tcgen05.ld and st, and the lanes of accumulators of tcgen05.mma.
Not
here: the cells (machine/tmem.py) or the instructions (isa/tcgen05_*.py).

Invariant: a table maps (register, thread) to a cell one to one; every cell of the accessed block
is held by exactly one register.

Source: PTX ISA 9.7.16.2.3 (data movement shapes), 9.7.16.10.5 (data path layouts); the figures'
contents were checked against CUTLASS's copy and MMA traits for sm_100.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

_THREADS = 32
REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}


@dataclass(frozen=True, slots=True)
class Access:
    """The cells a warp's tcgen05.ld or st touches, relative to its address.

    Attributes:
        lanes: number of tensor memory lanes.
        columns: number of 32-bit columns of one block.
        rows: lane of [register, thread].
        cells: column of [register, thread]; with `halves`, within the half.
        halves: for 16x32bx2, which of the two blocks holds [thread]; else None.
    """

    lanes: int
    columns: int
    rows: NDArray[np.int64]
    cells: NDArray[np.int64]
    halves: NDArray[np.int64] | None = None


@cache
def access_table(shape: str, repeat: int) -> Access:
    """Return the cells of a shape ("32x32b", "16x64b", ...) repeated along the columns."""
    if shape not in REGISTERS_PER_REPEAT:
        raise ValueError(f"shape={shape!r} is not one of {', '.join(REGISTERS_PER_REPEAT)}")
    thread = np.arange(_THREADS)
    register = np.arange(REGISTERS_PER_REPEAT[shape] * repeat)[:, None]
    zero = np.zeros_like(register)
    if shape == "32x32b":
        return Access(32, repeat, zero + thread, register + 0 * thread)
    if shape == "16x32bx2":
        return Access(16, repeat, zero + thread % 16, register + 0 * thread, thread // 16)
    if shape == "16x64b":
        rows = 8 * (thread % 2) + thread // 4
        return Access(16, 2 * repeat, zero + rows, 2 * register + thread // 2 % 2)
    if shape == "16x128b":
        rows = 8 * (register % 2) + thread // 4
        return Access(16, 4 * repeat, rows, 4 * (register // 2) + thread % 4)
    rows = 8 * (register // 2 % 2) + thread // 4
    return Access(16, 8 * repeat, rows, 8 * (register // 4) + 2 * (thread % 4) + register % 2)


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a matrix and where it lies in one CTA's tensor memory.

    Attributes:
        rows: first row of the matrix, and their number.
        columns: first column of the matrix, and their number.
        lane: first tensor memory lane, relative to the matrix's address.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    lane: int


def accumulator_blocks(
    rows: int,
    columns: int,
    cta_group: int,
    *,
    is_weight_stationary: bool = False,
    is_sparse: bool = False,
) -> tuple[Block, ...]:
    """Return where the part of D in one CTA of tcgen05.mma lies.

    Blocks of other columns than the first ones' have their own copy of A, in the same lanes.

    Args:
        rows: M of the instruction.
        columns: N of the instruction.
        cta_group: 1 or 2; with 2, rows count from the CTA's first row.
        is_weight_stationary: whether the instruction is `.ws`.
        is_sparse: whether it is `.sp`.

    Raises:
        ValueError: when the combination does not exist.
    """
    if is_weight_stationary and rows in (32, 64) and cta_group == 1:
        banks = 128 // rows
        width = columns // banks
        return tuple(Block((0, rows), (width * n, width), rows * n) for n in range(banks))
    if (rows, cta_group) in ((128, 1), (256, 2)):
        return (Block((0, 128), (0, columns), 0),)
    if (rows, cta_group) == (64, 1) or ((rows, cta_group) == (128, 2) and is_sparse):
        # Half of the lanes: 16 of each warp's 32.
        return tuple(Block((16 * w, 16), (0, columns), 32 * w) for w in range(4))
    if (rows, cta_group) == (128, 2):
        half = columns // 2
        return (Block((0, 64), (0, half), 0), Block((0, 64), (half, half), 64))
    raise ValueError(
        f"M={rows} with cta_group::{cta_group} (allowed: 64 and 128 with 1, 128 and 256 with 2)"
    )
