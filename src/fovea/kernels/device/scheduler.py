"""Device side of the tile order: which query tile, head and sequence a CTA takes next.

Lives here: the run-time description of the order and its decoding. The order itself is specified by
`tiling/order.py`, which a test compares with this. Invariant: every role of a CTA walks the same
sequence of tile numbers, so no role tells another what comes next.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute


class TileOrder(NamedTuple):
    """A static order over all query tiles.

    Tiles come longest first (the last query tile of every head before the one above it) inside a
    section of heads whose K and V fit the L2 cache together. With `num_splits` the parts of a query
    tile are tiles of their own, one after the other: parts of its keys, where `heads` are those of
    K and V, or slices of V's columns.
    """

    num_m_tiles: cutlass.Int32
    heads: cutlass.Int32
    head_rows: cutlass.Int32  # heads * batch
    section_heads: cutlass.Int32
    num_splits: cutlass.Int32 | None = None


class Tile(NamedTuple):
    """One query tile of one head of one sequence."""

    m_idx: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32


def num_tiles(order: TileOrder) -> cutlass.Int32:
    """Return the number of tiles of the whole problem."""
    tiles = order.num_m_tiles * order.head_rows
    return tiles if order.num_splits is None else tiles * order.num_splits


def split_of(tile_number: cutlass.Int32, order: TileOrder) -> cutlass.Int32:
    """Return which part of its keys, or which slice of V, a tile works on."""
    if order.num_splits is None:
        return cutlass.Int32(0)
    return tile_number - tile_number // order.num_splits * order.num_splits


@cute.jit
def decode_tile(tile_number: cutlass.Int32, order: TileOrder) -> Tile:
    """Return the tile with this number."""
    if cutlass.const_expr(order.num_splits is not None):
        tile_number = tile_number // order.num_splits
    per_section = order.section_heads * order.num_m_tiles
    section = tile_number // per_section
    in_section = tile_number - section * per_section
    first_row = section * order.section_heads
    rows_here = cutlass.min(order.section_heads, order.head_rows - first_row)
    from_last = in_section // rows_here
    row = first_row + in_section - from_last * rows_here
    batch = row // order.heads
    return Tile(
        m_idx=order.num_m_tiles - 1 - from_last, head=row - batch * order.heads, batch=batch
    )
