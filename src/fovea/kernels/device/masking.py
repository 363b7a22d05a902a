"""Masking of score fragments by position: diagonal, window and lengths.

Lives here: the limits of a row and the test of a register against them. Not here: user masks
(`mods.py`) and which tiles need masking (`tiling/bounds.py`). Invariant: a row's visible columns by
position form one interval, so two compares per register are all there is.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.plan.features import ForwardFeatures


class Band(NamedTuple):
    """The visible band: `q + offset - left <= kv <= q + offset + right`, and the lengths.

    A side that the variant does not limit is never read.
    """

    offset: cutlass.Int32
    left: cutlass.Int32
    right: cutlass.Int32
    seqlen_q: cutlass.Int32
    seqlen_kv: cutlass.Int32


class TileSpan(NamedTuple):
    """KV tiles `begin <= n < end` of one query tile; tiles outside [`plain_begin`, `plain_end`)
    hold a masked position.
    """

    begin: cutlass.Int32
    end: cutlass.Int32
    plain_begin: cutlass.Int32
    plain_end: cutlass.Int32


@cute.jit
def tile_span(
    row_begin: cutlass.Int32,
    row_end: cutlass.Int32,
    band: Band,
    tile_n: cutlass.Constexpr,
    features: cutlass.Constexpr,
) -> TileSpan:
    """Return the KV tiles that query rows [row_begin, row_end) visit.

    The twin of `tiling.bounds.kv_range`. Divisions act on numbers >= 0.
    """
    row_end = cutlass.min(row_end, band.seqlen_q)
    end_key = band.seqlen_kv
    plain_end = band.seqlen_kv // tile_n
    if cutlass.const_expr(features.limit_right):
        end_key = cutlass.min(end_key, row_end + band.offset + band.right)
        # The tile of the first row's last key counts as cut even where that key ends it: every row
        # then meets its last key, and so its first reference, in a tile that is not plain.
        last_key = cutlass.max(row_begin + band.offset + band.right, 0)
        plain_end = cutlass.min(plain_end, last_key // tile_n)
    end = (cutlass.max(end_key, 0) + (tile_n - 1)) // tile_n
    begin = cutlass.Int32(0)
    plain_begin = cutlass.Int32(0)
    if cutlass.const_expr(features.limit_left):
        begin = cutlass.max(row_begin + band.offset - band.left, 0) // tile_n
        first_plain_key = cutlass.max(row_end - 1 + band.offset - band.left, 0)
        plain_begin = (first_plain_key + (tile_n - 1)) // tile_n
    return TileSpan(
        begin=cutlass.min(begin, end), end=end, plain_begin=plain_begin, plain_end=plain_end
    )


class RowLimits(NamedTuple):
    """Visible columns of a row, relative to a thread's first register; None = no limit there."""

    begin: cutlass.Int32 | None
    end: cutlass.Int32


def row_limits(
    q_idx: cutlass.Int32, first_column: cutlass.Int32, band: Band, features: ForwardFeatures
) -> RowLimits:
    """Return a row's limits by position in a tile.

    `first_column` is the key of this thread's first register. Relative to it, each register is
    compared with a constant.
    """
    end_key = band.seqlen_kv
    if features.limit_right:
        end_key = cutlass.min(end_key, q_idx + band.offset + band.right + 1)
    begin = None
    if features.limit_left:
        begin = q_idx + band.offset - band.left - first_column
    return RowLimits(begin, cutlass.Int32(end_key - first_column))


def inside(limits: RowLimits, column_offset: int) -> list[cutlass.Boolean]:
    """Return the tests of one register."""
    tests = [limits.end > column_offset]
    if limits.begin is not None:
        tests.append(limits.begin <= column_offset)
    return tests
