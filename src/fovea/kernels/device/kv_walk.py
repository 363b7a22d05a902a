"""Which KV tiles a query tile visits, in which order: a contiguous range or block lists.

Lives here: the walk, made by the load role, and what both roles read off it. Not here: position
limits inside a tile (`masking.py`), the passing on (`work.py`). Invariant: the load role alone
looks at block lists; the compute role is told each tile with its K, and never waits for memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.key_ranges import (
    KeyRangeTensors,
    lane_span,
    narrowed_span,
    united_span,
)
from fovea.kernels.device.masking import Band, TileSpan, tile_span
from fovea.kernels.device.packing import query_span
from fovea.kernels.device.scheduler import Tile, TileOrder
from fovea.kernels.device.sequences import Sequence, band_of_sequence, no_sequence
from fovea.kernels.device.values import select


class BlockListTensors(NamedTuple):
    """torch's BlockMask lists: (batch, heads, q_blocks[, kv_blocks]), batch and heads real or 1.

    With bits, those of `tiling/mask_bits.py`: `mBits` of partial blocks, `mStarts` of each list.
    With `has_order`, `mOrder` says which query tile takes the place of the n-th from the last: it
    puts those with most work first.
    """

    mCount: cute.Tensor
    mIndices: cute.Tensor
    mFullCount: cute.Tensor | None
    mFullIndices: cute.Tensor | None
    mBits: cute.Tensor | None
    mStarts: cute.Tensor | None
    mOrder: cute.Tensor
    has_order: cutlass.Int32
    block_q: cutlass.Int32
    tiles_per_block: cutlass.Int32  # KV tiles per KV block


class Walk(NamedTuple):
    """The KV tiles of one query tile, at least one.

    Rows that see no key (`is_dead`) visit one tile past the keys, all hidden, so that every query
    tile begins with a product.
    A range is walked from its last tile down, so that the tiles cut by the diagonal come first. Of
    block lists the partial blocks come first, then the full ones, each list from its last entry
    down: in a causal mask the first visit is the diagonal, where every row sees a key.
    """

    visits: cutlass.Int32
    range_end: cutlass.Int32
    plain_begin: cutlass.Int32  # tiles in [plain_begin, plain_end) lie inside the band
    plain_end: cutlass.Int32
    partial_visits: cutlass.Int32
    q_block: cutlass.Int32
    first_partial: cutlass.Int32  # number of the list's first partial block among all, with bits
    is_dead: cutlass.Int32
    m_idx: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32
    lead: cutlass.Int32  # uses of the K and V rings before the first visit: for the other CTA
    uses: cutlass.Int32  # of the rings in all, `visits` without a cluster
    sequence: Sequence | tuple  # of packed batches, else ()
    lane_span: TileSpan | tuple  # with ranges of keys, while the load role has the walk, else ()


def _list_row(
    lists: BlockListTensors, batch: cutlass.Int32, head: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Return the lists' own batch and head: those of the call, or 0 where one row serves all."""
    return (
        cutlass.Int32(cutlass.min(batch, lists.mCount.shape[0] - 1)),
        cutlass.Int32(cutlass.min(head, lists.mCount.shape[1] - 1)),
    )


def _end_past_keys(band: Band, plan) -> cutlass.Int32:
    """Return the end of the range that holds the one tile past the keys."""
    return (band.seqlen_kv + plan.tile_n - 1) // plan.tile_n + 1


@cute.jit
def reorder(
    tile: Tile,
    order: TileOrder,
    lists: BlockListTensors | None,
    ranges: KeyRangeTensors | None = None,
) -> Tile:
    """Return the query tile that the lists' or ranges' own order puts in the place of this one."""
    m_idx = tile.m_idx
    if cutlass.const_expr(ranges is not None):
        m_idx = ranges.mOrder[order.num_m_tiles - 1 - m_idx]
    if cutlass.const_expr(lists is not None):
        if lists.has_order != 0:
            m_idx = lists.mOrder[order.num_m_tiles - 1 - m_idx]
    return Tile(m_idx, tile.head, tile.batch)


class Share(NamedTuple):
    """What packed plans know of a tile beside its number: its heads, and its part of the keys."""

    group_size: cutlass.Int32
    split: cutlass.Int32
    num_splits: cutlass.Int32


def _part(span: TileSpan, share: Share) -> TileSpan:
    """Return a part of a tile's KV tiles: the twin of `tiling.split_kv.split_range`.

    The product of all tiles and parts could leave 32 bits, that of a remainder cannot.
    """
    tiles = span.end - span.begin
    each = tiles // share.num_splits
    rest = tiles - each * share.num_splits
    after = share.split + 1
    return span._replace(
        begin=span.begin + each * share.split + rest * share.split // share.num_splits,
        end=span.begin + each * after + rest * after // share.num_splits,
    )


@cute.jit
def make_walk(
    tile: Tile,
    band: Band,
    lists: BlockListTensors | None,
    plan: cutlass.Constexpr,
    share: Share | None = None,
    sequence: Sequence | tuple = (),
    ranges: KeyRangeTensors | None = None,
) -> Walk:
    """Return the walk of a query tile, `band` being that of its sequence. Run by a whole warp."""
    row_begin = tile.m_idx * plan.tile_m
    row_end = row_begin + plan.tile_m
    if cutlass.const_expr(plan.packs_heads):
        row_begin, row_end = query_span(row_begin, row_end, share.group_size)
    span = tile_span(row_begin, row_end, band, plan.tile_n, plan.features)
    if cutlass.const_expr(plan.packs_heads):
        span = _part(span, share)
    own_span = ()
    if cutlass.const_expr(plan.features.key_ranges):
        own_span = lane_span(ranges, tile, plan)
        span = narrowed_span(span, united_span(own_span))
    visits = span.end - span.begin
    partial_visits = cutlass.Int32(0)
    q_block = cutlass.Int32(0)
    first_partial = cutlass.Int32(0)
    if cutlass.const_expr(plan.features.block_lists):
        q_block = row_begin // lists.block_q
        if cutlass.const_expr(plan.features.varlen):
            # Idle rows behind the longest sequence have no block.
            q_block = cutlass.min(q_block, lists.mCount.shape[2] - 1)
        partial_visits = (
            lists.mCount[*_list_row(lists, tile.batch, tile.head), q_block] * lists.tiles_per_block
        )
        visits = partial_visits
        if cutlass.const_expr(plan.features.block_bits):
            first_partial = lists.mStarts[*_list_row(lists, tile.batch, tile.head), q_block]
        if cutlass.const_expr(plan.features.full_lists):
            full = lists.mFullCount[*_list_row(lists, tile.batch, tile.head), q_block]
            visits = visits + full * lists.tiles_per_block
    is_dead = visits <= 0
    if cutlass.const_expr(plan.passes_uses or plan.features.varlen):
        # The last pair may have one query tile. Where no use can be passed over, the other is
        # computed all the same; none of its rows is stored. Of packed sequences some rows are idle.
        is_dead = is_dead | (row_begin >= band.seqlen_q)
        visits = select(is_dead, cutlass.Int32(0), visits)
    return Walk(
        visits=cutlass.max(visits, 1),
        range_end=select(is_dead, _end_past_keys(band, plan), span.end),
        plain_begin=span.plain_begin,
        plain_end=span.plain_end,
        partial_visits=partial_visits,
        q_block=q_block,
        first_partial=first_partial,
        is_dead=select(is_dead, cutlass.Int32(1), cutlass.Int32(0)),
        m_idx=tile.m_idx,
        head=tile.head,
        batch=tile.batch,
        lead=cutlass.Int32(0),
        uses=cutlass.max(visits, 1),
        sequence=sequence,
        lane_span=own_span,
    )


def pause_walk(walk: Walk, order: TileOrder, band: Band, plan) -> Walk:
    """Return the walk of a pause: one tile of zeros, past the rows and past the keys."""
    if plan.features.varlen:
        walk = walk._replace(sequence=no_sequence())
        band = band._replace(seqlen_kv=cutlass.Int32(0))
    return walk._replace(
        visits=cutlass.Int32(1),
        range_end=_end_past_keys(band, plan),
        partial_visits=cutlass.Int32(0),
        is_dead=cutlass.Int32(1),
        m_idx=order.num_m_tiles * plan.cluster,
        lead=cutlass.Int32(0),
        uses=cutlass.Int32(1),
    )


def band_of_walk(band: Band, walk: Walk) -> Band:
    """Return the band of a walk's sequence; of a dense call the one there is."""
    return band_of_sequence(band, walk.sequence) if walk.sequence else band


@cute.jit
def kv_tile(
    walk: Walk,
    visit: cutlass.Int32,
    lists: BlockListTensors | None,
    plan: cutlass.Constexpr,
) -> cutlass.Int32:
    """Return the KV tile of the visit-th step of a walk."""
    n_idx = walk.range_end - 1 - visit
    if cutlass.const_expr(plan.features.block_lists):
        if walk.is_dead == 0:
            n_idx = _listed_tile(walk, visit, lists, plan)
    return n_idx


@cute.jit
def _listed_tile(
    walk: Walk, visit: cutlass.Int32, lists: BlockListTensors, plan: cutlass.Constexpr
) -> cutlass.Int32:
    """Return the KV tile of the visit-th step of block lists."""
    is_partial = visit < walk.partial_visits
    end = select(is_partial, walk.partial_visits, walk.visits)
    in_list = end - 1 - visit
    entry = in_list // lists.tiles_per_block
    in_block = in_list - entry * lists.tiles_per_block
    row = (*_list_row(lists, walk.batch, walk.head), walk.q_block)
    block = cutlass.Int32(0)
    if cutlass.const_expr(plan.features.full_lists):
        if is_partial:
            block = lists.mIndices[*row, entry]
        else:
            block = lists.mFullIndices[*row, entry]
    else:
        block = lists.mIndices[*row, entry]
    return block * lists.tiles_per_block + in_block


def use_of(plan, walk: Walk, first_use: cutlass.Int32, visit: cutlass.Int32 | int) -> cutlass.Int32:
    """Return the use of the K and V rings that holds a visit of a walk begun at `first_use`."""
    return first_use + visit if plan.cluster == 1 else first_use + walk.lead + visit


def uses_of(plan, walk: Walk) -> cutlass.Int32:
    """Return the uses of the K and V rings that a walk takes."""
    return walk.visits if plan.cluster == 1 else walk.uses


def is_cut(walk: Walk, n_idx: cutlass.Int32) -> cutlass.Boolean:
    """Return whether a tile holds a position that the band or the lengths hide."""
    return (n_idx < walk.plain_begin) | (n_idx >= walk.plain_end)


class Visit(NamedTuple):
    """One KV tile of a walk, as the compute role needs it."""

    n_idx: cutlass.Int32
    is_partial: cutlass.Boolean  # in a block that is not full: the BlockMask's mask_mod applies
    is_cut: cutlass.Boolean  # by the band or the lengths
    partial: cutlass.Int32 | None = None  # with bits, the number of a partial block, else 0
    bits: tuple[cutlass.Int32, ...] = ()  # or those of the one row that a thread has


@cute.jit
def visit_word(walk: Walk, visit: cutlass.Int32, n_idx: cutlass.Int32) -> cutlass.Int32:
    """Return a visit packed into one word."""
    word = 4 * n_idx + select(is_cut(walk, n_idx), cutlass.Int32(1), cutlass.Int32(0))
    return word + select(visit < walk.partial_visits, cutlass.Int32(2), cutlass.Int32(0))


def unpack_visit(word: cutlass.Int32) -> Visit:
    """Return what `visit_word` packed."""
    return Visit(word >> 2, (word & 2) != 0, (word & 1) != 0)


@cute.jit
def partial_block(walk: Walk, visit: cutlass.Int32, lists: BlockListTensors) -> cutlass.Int32:
    """Return the number of the partial block that a visit is in, 0 in a full one."""
    number = cutlass.Int32(0)
    if visit < walk.partial_visits:
        in_list = walk.partial_visits - 1 - visit
        number = walk.first_partial + in_list // lists.tiles_per_block
    return number
