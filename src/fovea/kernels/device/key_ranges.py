"""Masks by which every query row sees one range of keys, on the device.

Lives here: what the load role and the compute role read of such ranges. Not here: how they are
found (`tiling/key_ranges.py`), ranges that follow from positions alone (`masking.py`). Invariant:
ranges narrow what the band shows, never widen it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.masking import RowLimits, TileSpan
from fovea.kernels.device.scheduler import Tile
from fovea.kernels.device.values import select


class KeyRangeTensors(NamedTuple):
    """`KeyRanges` of `tiling/key_ranges.py`; batch and heads real or 1, `mOrder` of this plan."""

    mRows: cute.Tensor
    mGroups: cute.Tensor
    mOrder: cute.Tensor


class RowRange(NamedTuple):
    """The keys begin <= kv < end of one row."""

    begin: cutlass.Int32
    end: cutlass.Int32


def _own(tensor: cute.Tensor, batch: cutlass.Int32, head: cutlass.Int32) -> tuple:
    """Return the batch and head of a tensor that serve a call's."""
    return (
        cutlass.Int32(cutlass.min(batch, tensor.shape[0] - 1)),
        cutlass.Int32(cutlass.min(head, tensor.shape[1] - 1)),
    )


def row_range(
    ranges: KeyRangeTensors, batch: cutlass.Int32, head: cutlass.Int32, q_idx: cutlass.Int32
) -> RowRange:
    """Return the keys of a row; of one past the last, those of the last."""
    row = cutlass.min(q_idx, ranges.mRows.shape[2] - 1)
    place = (*_own(ranges.mRows, batch, head), row)
    return RowRange(ranges.mRows[*place, 0], ranges.mRows[*place, 1])


@cute.jit
def lane_span(ranges: KeyRangeTensors, tile: Tile, plan: cutlass.Constexpr) -> TileSpan:
    """Return the KV tiles of one group of a query tile's rows: the n-th lane has the n-th group.

    Lanes past the last group have that one's.
    """
    num_groups = plan.num_consumers
    lane = cutlass.min(cute.arch.lane_idx(), num_groups - 1)
    group = cutlass.min(tile.m_idx * num_groups + lane, ranges.mGroups.shape[2] - 1)
    place = (*_own(ranges.mGroups, tile.batch, tile.head), group)
    least_begin, largest_end, largest_begin, least_end = (
        ranges.mGroups[*place, word] for word in range(4)
    )
    tile_n = plan.tile_n
    end = (largest_end + (tile_n - 1)) // tile_n
    return TileSpan(
        begin=cutlass.min(least_begin // tile_n, end),
        end=end,
        plain_begin=(largest_begin + (tile_n - 1)) // tile_n,
        plain_end=least_end // tile_n,
    )


def narrowed_span(span: TileSpan, by: TileSpan) -> TileSpan:
    """Return the KV tiles that two spans share."""
    end = cutlass.min(span.end, by.end)
    return TileSpan(
        begin=cutlass.min(cutlass.max(span.begin, by.begin), end),
        end=end,
        plain_begin=cutlass.max(span.plain_begin, by.plain_begin),
        plain_end=cutlass.min(span.plain_end, by.plain_end),
    )


def united_span(span: TileSpan) -> TileSpan:
    """Return the KV tiles of a whole query tile from those of each lane. Run by a whole warp."""
    begin = select(span.begin < span.end, span.begin, cutlass.Int32(2**30))
    end = cute.arch.warp_redux_sync(span.end, "max")
    return TileSpan(
        begin=cutlass.min(cute.arch.warp_redux_sync(begin, "min"), end),
        end=end,
        plain_begin=cute.arch.warp_redux_sync(span.plain_begin, "max"),
        plain_end=cute.arch.warp_redux_sync(span.plain_end, "min"),
    )


def narrowed_limits(limits: RowLimits, by: RowRange, first_column: cutlass.Int32) -> RowLimits:
    """Return a row's limits inside its range; both count from `first_column`."""
    begin = by.begin - first_column
    if limits.begin is not None:
        begin = cutlass.max(begin, limits.begin)
    return RowLimits(begin, cutlass.min(limits.end, by.end - first_column))
