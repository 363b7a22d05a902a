"""The bytes one tensor copy moves: which part of the tensor, and where in shared memory.

What lives here: clipping a box against the tensor's bounds, the bytes a load makes of its elements,
and the table of shared-memory chunks a box fills. Not here: the tensor map's format
(tensor_map.py), moving bytes or signalling (isa/tensor_copy.py).

Invariant: a tile is an array with the box's dimensions reversed (dimension 0 last). The part inside
the tensor is a regular slice of it and, in global memory, a regular strided view: no element-wise
addressing.

Source: PTX ISA, "Tensors: tiled mode, out-of-bounds, swizzling modes"; CUDA programming guide on
swizzle wider than the box (rows keep the swizzle's pitch).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.layout.descriptor import CHUNK_BYTES
from fovea.emulator.layout.swizzle import SWIZZLE_PERIOD_BYTES, swizzle
from fovea.emulator.layout.tensor_map import TensorMap

_FLOAT_TYPES = ("f16", "bf16", "f32", "f32.ftz", "f64", "tf32", "tf32.ftz")
# The 16 bits that the NaN fill repeats, whatever the type (silicon-sm90 for f16, bf16 and f32).
_NAN_FILL = 0x7FF7


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a box that lies inside the tensor.

    Attributes:
        inside: slices of the tile array (dimension 0 last), or None if nothing lies inside.
        address: global address of the first element inside.
        counts: elements inside per dimension, dimension 0 last.
        strides: bytes between them per dimension, dimension 0 last.
    """

    inside: tuple[slice, ...] | None
    address: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the box lies outside of the tensor altogether."""
        return self.inside is None

    def span(self, element_bytes: int) -> tuple[int, int]:
        """Return the first address and one past the last address the part inside covers."""
        last = sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True))
        return self.address, self.address + last + element_bytes


def clip_box(tensor: TensorMap, coordinates: tuple[int, ...]) -> Tile:
    """Return what part of the box at `coordinates` lies inside the tensor.

    Args:
        tensor: the tensor map.
        coordinates: signed element coordinates of the box's first element, dimension 0 first.

    Raises:
        ValueError: when the number of coordinates is not the tensor's rank.
    """
    if len(coordinates) != tensor.rank:
        raise ValueError(
            f"{len(coordinates)} coordinates for a tensor map of rank {tensor.rank}; the "
            "instruction's dimension must be the map's rank"
        )
    if coordinates[0] % tensor.pack:
        raise ValueError(
            f"coordinate {coordinates[0]} of dimension 0 must be a multiple of {tensor.pack}: the "
            "elements are packed"
        )
    coordinates = (coordinates[0] // tensor.pack, *coordinates[1:])
    address = tensor.address
    slices: list[slice] = []
    strides: list[int] = []
    for start, count, size, stride, step in zip(
        coordinates,
        tensor.box_counts,
        tensor.sizes,
        tensor.strides,
        tensor.steps,
        strict=True,
    ):
        low = max(0, -(start // step))
        high = min(count, -(-(size - start) // step))
        if low >= high:
            return Tile(None, 0, (0,) * tensor.rank, (0,) * tensor.rank)
        slices.append(slice(low, high))
        strides.append(stride * step)
        address += (start + low * step) * stride
    slices.reverse()
    strides.reverse()
    address %= 1 << 64  # strides may be such that it wraps around
    return Tile(tuple(slices), address, tuple(s.stop - s.start for s in slices), tuple(strides))


def tile_shape(tensor: TensorMap) -> tuple[int, ...]:
    """Return the tile array's shape in bytes: box counts reversed, dimension 0 in bytes."""
    counts = tensor.box_counts
    return (*reversed(counts[1:]), counts[0] * tensor.element.size_bytes)


def loaded_tile(tensor: TensorMap, tile: Tile, view: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Return a box as a load puts it in shared memory, out-of-bounds elements filled.

    Shapes:
        view: the part inside the tensor, as bytes of global memory, dimension 0 last; None if
        nothing is inside.
        result: as `tile_shape`.
    """
    shape, size = tile_shape(tensor), tensor.element.size_bytes
    if tensor.fills_nan and tensor.element.name in _FLOAT_TYPES:
        box = np.full((*shape[:-1], shape[-1] // 2), _NAN_FILL, np.uint16).view(np.uint8)
    else:
        box = np.zeros(shape, np.uint8)
    if view is not None:
        assert tile.inside is not None
        *outer, inner = tile.inside
        place = (*outer, slice(inner.start * size, inner.stop * size))
        box[place] = view.reshape(*view.shape[: len(shape) - 1], -1)
    return _tf32(box) if tensor.element.name.startswith("tf32") else box


def _tf32(box: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return elements rounded to 10 bits, to nearest even.

    The types named .ftz flush nothing: silicon loads their subnormal numbers as any other.
    """
    bits = box.view(np.uint32)
    exponent = bits & np.uint32(0x7F800000)
    rounded = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    is_finite = exponent != np.uint32(0x7F800000)
    return (np.where(is_finite, rounded, bits) & np.uint32(0xFFFFE000)).view(np.uint8)


def shared_chunks(tensor: TensorMap, address: int) -> tuple[NDArray[np.int64], int]:
    """Return the chunk numbers a tile at shared address `address` fills, and the first one.

    Shapes:
        result: [rows, chunks per row], with rows running over dimensions 1 and up, dimension 1
        fastest.
    """
    counts = tensor.box_counts
    row_bytes = counts[0] * tensor.element.size_bytes  # whole chunks: the map is checked for it
    rows = 1
    for count in counts[1:]:
        rows *= count
    phase = address % SWIZZLE_PERIOD_BYTES
    return _chunk_table(rows, row_bytes, tensor.swizzle, phase), (address - phase) // CHUNK_BYTES


@lru_cache(maxsize=1024)
def _chunk_table(rows: int, row_bytes: int, width: int, phase: int) -> NDArray[np.int64]:
    pitch = width or row_bytes
    row = np.arange(rows, dtype=np.int64)[:, None] * pitch
    chunk = np.arange(row_bytes // CHUNK_BYTES, dtype=np.int64)[None, :] * CHUNK_BYTES
    table = swizzle(row + chunk + phase, width) // CHUNK_BYTES
    table.flags.writeable = False
    return table
