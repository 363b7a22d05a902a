"""Which KV tiles of its CTA's walk a warpgroup visits: those that its own rows may see.

Lives here: the part of a range that belongs to 64 of a query tile's rows. Not here: the CTA's walk
(`kv_walk.py`), how the others are skipped (`sm90/forward/steps.py`). A causal diagonal or a window
hides up to `tile_m / 64 - 1` tiles of 64 keys from a warpgroup, and cuts fewer of the rest.
Invariant: at least one visit, the same uses of the rings as the CTA.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.key_ranges import narrowed_span
from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.masking import Band, TileSpan, tile_span
from fovea.kernels.device.values import select


class OwnVisits(NamedTuple):
    """A warpgroup's walk, and the visits of the CTA's walk before and behind it."""

    walk: Walk
    before: cutlass.Int32
    behind: cutlass.Int32


@cute.jit
def own_visits(
    plan: cutlass.Constexpr,
    walk: Walk,
    band: Band,
    first_row: cutlass.Int32,
    num_rows: cutlass.Constexpr,
    group_span: TileSpan | None = None,
) -> OwnVisits:
    """Return the visits of the rows from `first_row` on, narrowed to `group_span`.

    Rows that see nothing go through the whole walk: that is rare. Those that are not there visit
    one tile, where a plan can skip far, else all.
    """
    own = walk
    before, behind = cutlass.Int32(0), cutlass.Int32(0)
    if cutlass.const_expr(plan.skips_hidden):
        span = tile_span(first_row, first_row + num_rows, band, plan.tile_n, plan.features)
        if cutlass.const_expr(group_span is not None):
            span = narrowed_span(span, group_span)
        is_idle, is_whole = first_row >= band.seqlen_q, walk.is_dead != 0
        begin, end = walk.range_end - walk.visits, walk.range_end
        # A walk may be a part of the range.
        own_begin, own_end = cutlass.max(begin, span.begin), cutlass.min(end, span.end)
        if cutlass.const_expr(plan.skips_far):
            # The walk's first tile is as good as any.
            own_begin, own_end = select(is_idle, end - 1, own_begin), select(is_idle, end, own_end)
        else:
            is_whole = is_whole | is_idle
        is_whole = is_whole | (own_begin >= own_end)
        own_begin, own_end = select(is_whole, begin, own_begin), select(is_whole, end, own_end)
        before, behind = end - own_end, own_begin - begin
        own = walk._replace(
            visits=own_end - own_begin,
            range_end=own_end,
            plain_begin=select(is_whole, walk.plain_begin, span.plain_begin),
            plain_end=select(is_whole, walk.plain_end, span.plain_end),
        )
    return OwnVisits(own, before, behind)
