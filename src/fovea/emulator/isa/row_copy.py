"""Copies of four rows of a two-dimensional tensor: .tile::gather4 and .tile::scatter4.

What lives here: the four rows as one box of shared memory. Not here: the forms
(`isa/tensor_copy.py`), one box (`isa/copy_engine.py`).

Invariant: in shared memory the four rows lie as a box of four rows would, swizzle included; each is
clipped against the tensor's bounds by itself.

Source: PTX ISA 5.5.3.4; the map's box is one row (CUTLASS's gather4 atoms; evidence: inferred).
"""

from dataclasses import dataclass, replace
from typing import Any

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa.copy_engine import TileCopy, tile_copy
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.layout.descriptor import CHUNK_BYTES
from fovea.emulator.layout.tensor_map import TensorMap
from fovea.emulator.layout.tensor_tile import shared_chunks
from fovea.emulator.races import Access

_ROWS = 4


@dataclass(frozen=True, slots=True)
class RowsCopy:
    """Four rows of a tensor and their place in shared memory.

    Attributes:
        tensor: the tensor map with a box of four rows.
        rows: the copy of each row.
    """

    tensor: TensorMap
    rows: tuple[TileCopy, ...]

    def shared_offsets(self, address: int) -> Array:
        """Return the offsets of the 16-byte chunks at shared offset `address`."""
        table, first = shared_chunks(self.tensor, address)
        return (table + first) * CHUNK_BYTES

    def check_read(self, access: Access) -> None:
        """Check a read of the rows for races on global memory."""
        for row in self.rows:
            row.check_read(access)


def rows_copy(
    i: Instruction, warp: Any, lane: int, tensor: TensorMap, coordinates: tuple[int, ...]
) -> RowsCopy:
    """Return the copy of the rows that {column, row 0, row 1, row 2, row 3} name.

    Raises:
        IllegalOperand: the tensor has not two dimensions, or its box more than one row.
        OutOfBounds: the tensor the map describes leaves its allocation.
    """
    if tensor.rank != 2 or tensor.box[1] != 1:
        raise IllegalOperand(
            f".{i['rows']} needs a two-dimensional tensor map with a box of one row; this one has "
            f"{tensor.rank} dimensions and a box of {tensor.box}",
            warp.where(i, lane=lane),
        )
    column, *numbers = coordinates
    rows = tuple(tile_copy(i, warp, lane, tensor, (column, number)) for number in numbers)
    return RowsCopy(replace(tensor, box=(tensor.box[0], _ROWS)), rows)
