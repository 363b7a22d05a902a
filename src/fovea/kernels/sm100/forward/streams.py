"""Which KV tiles of a walk a stream takes: those that its rows see, or every other one.

Lives here: the arithmetic that the softmax and the MMA role share, and which stream's S a softmax
warpgroup takes next. Not here: the walk itself (`device/kv_walk.py`). Invariant: if the streams
split the keys, every visit of a walk belongs to one stream; else a stream takes an unbroken run of
visits, which may be empty.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.cluster import Rank
from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.masking import Band, tile_span
from fovea.kernels.device.packing import Row, packed_row
from fovea.kernels.device.values import select
from fovea.plan.sm100_tiles import STREAMS


class Turns(NamedTuple):
    """A stream's visits of a walk: `begin`, `begin + step`, ... below `end`; none may be left.

    Tiles outside [`plain_begin`, `plain_end`) hold a position that the band or the lengths hide
    from one of the stream's rows.
    """

    begin: cutlass.Int32
    end: cutlass.Int32
    plain_begin: cutlass.Int32
    plain_end: cutlass.Int32


@cute.jit
def turns_of(plan: cutlass.Constexpr, walk: Walk, band: Band, stream: cutlass.Int32 | int) -> Turns:
    """Return a stream's part of a walk."""
    turns = Turns(cutlass.Int32(0) + stream, walk.visits, walk.plain_begin, walk.plain_end)
    if cutlass.const_expr(not plan.splits_keys):
        turns = turns._replace(begin=cutlass.Int32(0))
        if cutlass.const_expr(not plan.features.block_lists):
            first_row = walk.m_idx * plan.tile_m + stream * plan.stream_rows
            end_row = first_row + plan.stream_rows
            span = tile_span(first_row, end_row, band, plan.tile_n, plan.features)
            # A walk goes from its last tile down. Of a dead one, past the keys, nothing is taken.
            begin = cutlass.min(cutlass.max(walk.range_end - span.end, 0), walk.visits)
            end = cutlass.min(walk.range_end - span.begin, walk.visits)
            turns = Turns(begin, cutlass.max(begin, end), span.plain_begin, span.plain_end)
    return turns


def rows_of(plan, rank: Rank | None, stream: cutlass.Int32 | int) -> cutlass.Int32:
    """Return which 128 rows of a query tile this CTA has of a stream."""
    if plan.cluster == 1:
        return cutlass.Int32(0) + stream
    return rank.own + stream * plan.cluster


def row_of(plan, in_head: cutlass.Int32, walk: Walk, group_size: cutlass.Int32) -> Row:
    """Return what a row, counted in its head or KV head, is about."""
    if plan.packs_heads:
        return packed_row(in_head, walk.head, group_size)
    return Row(in_head, walk.head)


def num_rows(plan, walk: Walk, band: Band) -> cutlass.Int32:
    """Return how many rows are written of a walk's sequence: its queries, then idle ones."""
    return walk.sequence.num_rows if plan.features.varlen else band.seqlen_q


def numbers_place(plan, walk: Walk, row: Row) -> tuple:
    """Return where lse and maximum of a row go."""
    if plan.features.varlen:
        return (row.head, walk.sequence.row_begin + row.q_idx)
    return (walk.batch, row.head, row.q_idx)


def of_used_row(plan, q_idx: cutlass.Int32, band: Band, number: cutlass.Float32) -> cutlass.Float32:
    """Return a row's lse or maximum, -inf where the row is idle."""
    if not plan.features.varlen:
        return number
    return select(q_idx < band.seqlen_q, number, cutlass.Float32(-cutlass.Float32.inf))


def step_of(plan) -> int:
    """Return how many visits of the walk lie between two of a stream."""
    return STREAMS if plan.splits_keys else 1


def num_turns(plan, turns: Turns) -> cutlass.Int32:
    """Return how many visits a stream has."""
    step = step_of(plan)
    return (turns.end - turns.begin + (step - 1)) // step


class Place(NamedTuple):
    """How many KV tiles a softmax warpgroup has done before a query tile.

    Where it takes those of both streams, `second` says how many came in the second's S; the first
    one's are the rest.
    """

    first: cutlass.Int32
    second: cutlass.Int32


def softmax_turns(plan, walk: Walk, band: Band, group: cutlass.Int32) -> Turns:
    """Return the visits of a walk that a softmax warpgroup takes."""
    if plan.splits_columns:
        return Turns(cutlass.Int32(0), walk.visits, walk.plain_begin, walk.plain_end)
    return turns_of(plan, walk, band, group)


def softmax_step(plan) -> int:
    """Return how many visits of the walk lie between two of a softmax warpgroup."""
    return 1 if plan.splits_columns else step_of(plan)


def num_softmax_turns(plan, turns: Turns) -> cutlass.Int32:
    """Return how many visits a softmax warpgroup has."""
    return turns.end - turns.begin if plan.splits_columns else num_turns(plan, turns)


def which(
    plan, place: Place, group: cutlass.Int32, index: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Return the stream whose S a warpgroup's index-th visit takes, and which one of it that is."""
    if not plan.splits_columns:
        return group, place.first + index
    stream = index & 1
    before = select(stream == 0, place.first - place.second, place.second)
    return stream, before + index // STREAMS


def after(plan, place: Place, turns: Turns) -> Place:
    """Return the place behind a query tile."""
    visits = num_softmax_turns(plan, turns)
    return Place(place.first + visits, place.second + visits // STREAMS)
