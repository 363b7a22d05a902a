"""Packed sequences on the device: where each lies, the table of them, and views that end with one.

Lives here: all that the kernels know of varlen packing. Not here: limits by position inside a
sequence (`masking.py`), the walk that carries a `Sequence` (`kv_walk.py`). Invariant: rows and keys
count from the start of their sequence everywhere but in this file; a copy through `bounded` never
touches a row past the sequence's end, whatever tile it is asked for.

The bound costs nothing: a tensor map has one axis of rows, of extent N, and a second one of the
same stride, whose only purpose is to shift. A sequence that ends at row `end` and has `length` rows
is read at rows N - length + i of the first axis and at place `end` of the second: N rows too far,
and the copy engine cuts off, or fills with zeros, what passes the first axis. A third axis takes
the N rows back: its place N is 2^64 bytes less N rows further on, and addresses wrap around. The
base stays that of the tensor: one N rows before it faults where no memory is mapped there, in
loads, not in stores. (Both facts and the arithmetic as in Triton's and quack's ragged descriptors:
https://github.com/triton-lang/triton/blob/main/python/triton/tools/ragged_tma.py.)
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.masking import Band
from fovea.kernels.device.scheduler import Tile, TileOrder, decode_tile
from fovea.plan.sequences import RECORD_WORDS

TABLE_THREADS = 128
ROWS = 2**30  # N: the extent of the first axis of rows
WRAP = 2**64 // ROWS  # a stride, in elements or bytes, that N steps of make no difference
LARGEST = 2**31 - 1
_TILES_END, _NUMBER, _ROW_BEGIN, _NUMROWS, _SEQLEN_Q, _SEQLEN_KV, _KV_BEGIN = range(7)


class SequenceTensors(NamedTuple):
    """Where the sequences lie, as the caller says (`fovea.problem.Varlen`).

    An absent tensor is some other int32 vector, never read, and its flag 0.
    """

    mStartQ: cute.Tensor  # (batch + 1,)
    mStartKV: cute.Tensor  # (batch + 1,)
    mUsedQ: cute.Tensor  # (batch,)
    mUsedKV: cute.Tensor  # (batch,)
    has_used_q: cutlass.Int32
    has_used_kv: cutlass.Int32


class SequenceTable(NamedTuple):
    """Every sequence, those with most keys first, and the counter that Hopper draws tiles from.

    One more sequence than the batch has: the rows behind the last one, none of them used.
    """

    words: cute.Tensor  # RECORD_WORDS for each, then the counter
    num_sequences: cutlass.Int32


class Sequence(NamedTuple):
    """One sequence.

    Its rows from `seqlen_q` to `num_rows` are idle: written as rows that see nothing.
    """

    seqlen_q: cutlass.Int32
    seqlen_kv: cutlass.Int32
    num_rows: cutlass.Int32
    row_begin: cutlass.Int32  # in the packed tensors
    kv_begin: cutlass.Int32


def no_sequence() -> Sequence:
    """Return a sequence without rows and keys."""
    return Sequence(*(cutlass.Int32(0) for _ in Sequence._fields))


def counter_of(table: SequenceTable) -> cute.Tensor:
    """Return the counter behind the table's records."""
    place = table.num_sequences * RECORD_WORDS
    return cute.make_tensor(table.words.iterator + place, cute.make_layout(1))


# --- making the table -----------------------------------------------------------------------------


@cute.jit
def _sequence_at(
    where: SequenceTensors,
    number: cutlass.Int32,
    total_q: cutlass.Int32,
    total_kv: cutlass.Int32,
    is_paged: cutlass.Constexpr,
) -> Sequence:
    """Return a sequence; of wrong bounds one that lies inside the tensors all the same."""
    batch = where.mStartQ.shape[0] - 1
    row_begin = where.mStartQ[number]
    row_end = cutlass.Int32(total_q)
    seqlen_q = cutlass.Int32(0)
    seqlen_kv = cutlass.Int32(0)
    kv_begin = cutlass.Int32(0)
    if number < batch:
        row_end = where.mStartQ[number + 1]
        seqlen_q = row_end - row_begin
        if cutlass.const_expr(is_paged):
            seqlen_kv = cutlass.Int32(total_kv)
        else:
            kv_begin = where.mStartKV[number]
            seqlen_kv = where.mStartKV[number + 1] - kv_begin
        if where.has_used_q != 0:
            seqlen_q = cutlass.min(seqlen_q, where.mUsedQ[number])
        if where.has_used_kv != 0:
            seqlen_kv = cutlass.min(seqlen_kv, where.mUsedKV[number])
    row_begin = cutlass.min(cutlass.max(row_begin, 0), total_q)
    num_rows = cutlass.min(cutlass.max(row_end - row_begin, 0), total_q - row_begin)
    kv_begin = cutlass.min(cutlass.max(kv_begin, 0), total_kv)
    return Sequence(
        seqlen_q=cutlass.min(cutlass.max(seqlen_q, 0), num_rows),
        seqlen_kv=cutlass.min(cutlass.max(seqlen_kv, 0), total_kv - kv_begin),
        num_rows=num_rows,
        row_begin=row_begin,
        kv_begin=kv_begin,
    )


@cute.jit
def fill_table(
    where: SequenceTensors,
    table: SequenceTable,
    total_q: cutlass.Int32,
    total_kv: cutlass.Int32,
    tile_rows: cutlass.Constexpr,
    is_paged: cutlass.Constexpr,
    heads_a_row: cutlass.Int32 | int,
):
    """Write the table. Run by one thread a sequence; none waits for another.

    `total_kv` counts all keys, of a paged cache those that a row of the page table can hold.

    Each looks at all sequences: those before it in the order say its place and its first tile. A
    row takes as many rows of a tile as heads are packed there.
    """
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    number = block * TABLE_THREADS + thread
    if number < table.num_sequences:
        mine = _sequence_at(where, number, total_q, total_kv, is_paged)
        place = cutlass.Int32(0)
        tiles_end = (mine.num_rows * heads_a_row + (tile_rows - 1)) // tile_rows
        for other in cutlass.range(table.num_sequences, unroll=1):
            its = _sequence_at(where, other, total_q, total_kv, is_paged)
            is_longer = its.seqlen_kv > mine.seqlen_kv
            is_alike = (its.seqlen_kv == mine.seqlen_kv) & (other < number)
            if is_longer | is_alike:
                place += 1
                tiles_end += (its.num_rows * heads_a_row + (tile_rows - 1)) // tile_rows
        record = cute.make_tensor(
            table.words.iterator + place * RECORD_WORDS, cute.make_layout(RECORD_WORDS)
        )
        record[_TILES_END] = tiles_end
        record[_NUMBER] = number
        record[_ROW_BEGIN] = mine.row_begin
        record[_NUMROWS] = mine.num_rows
        record[_SEQLEN_Q] = mine.seqlen_q
        record[_SEQLEN_KV] = mine.seqlen_kv
        record[_KV_BEGIN] = mine.kv_begin
        if number == 0:
            counter_of(table)[0] = cutlass.Int32(0)


# --- reading it -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """A query tile, and the sequence that it is of."""

    tile: Tile
    sequence: Sequence


def packed_tiles(table: SequenceTable, order: TileOrder) -> cutlass.Int32:
    """Return the number of tiles of all sequences and heads."""
    tiles = _tiles_end(table, table.num_sequences - 1) * order.heads
    return tiles if order.num_splits is None else tiles * order.num_splits


def _tiles_end(table: SequenceTable, place: cutlass.Int32) -> cutlass.Int32:
    return table.words[place * RECORD_WORDS + _TILES_END]


@cute.jit
def find_tile(tile_number: cutlass.Int32, table: SequenceTable, order: TileOrder) -> Place:
    """Return the query tile with this number. Run by the producer warp, all lanes alike.

    Sequence by sequence; inside one as `decode_tile` has it.
    """
    if cutlass.const_expr(order.num_splits is not None):
        tile_number = tile_number // order.num_splits
    rank = tile_number // order.heads
    low = cutlass.Int32(0)
    high = table.num_sequences - 1
    while low < high:
        middle = (low + high) // 2
        if _tiles_end(table, middle) > rank:
            high = middle
        else:
            low = middle + 1
    first_tile = cutlass.Int32(0)
    if low > 0:
        first_tile = _tiles_end(table, low - 1)
    record = low * RECORD_WORDS
    inside = TileOrder(
        num_m_tiles=_tiles_end(table, low) - first_tile,
        heads=order.heads,
        head_rows=order.heads,
        section_heads=order.section_heads,
    )
    tile = decode_tile(tile_number - first_tile * order.heads, inside)
    return Place(
        tile=Tile(tile.m_idx, tile.head, table.words[record + _NUMBER]),
        sequence=Sequence(
            seqlen_q=table.words[record + _SEQLEN_Q],
            seqlen_kv=table.words[record + _SEQLEN_KV],
            num_rows=table.words[record + _NUMROWS],
            row_begin=table.words[record + _ROW_BEGIN],
            kv_begin=table.words[record + _KV_BEGIN],
        ),
    )


def band_of_sequence(band: Band, sequence: Sequence) -> Band:
    """Return the band of one sequence.

    `band` holds what all share: its offset is 1 where the diagonal ends at the last key, else 0.
    """
    return band._replace(
        offset=band.offset * (sequence.seqlen_kv - sequence.seqlen_q),
        seqlen_q=sequence.seqlen_q,
        seqlen_kv=sequence.seqlen_kv,
    )


# --- views that end with a sequence ---------------------------------------------------------------


def shifting_view(tensor: cute.Tensor, *, is_transposed: bool = False) -> cute.Tensor:
    """Return a (total, heads, head_dim) tensor as (rows, head_dim, head, back, end), see above.

    With `is_transposed` the first two modes change places.
    """
    total, heads, head_dim = tensor.shape
    row_stride, head_stride, column_stride = tensor.stride
    rows, columns = (ROWS, row_stride), (head_dim, column_stride)
    modes = [columns, rows] if is_transposed else [rows, columns]
    modes += [(heads, head_stride), (LARGEST, WRAP - row_stride), (total + 1, row_stride)]
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def bounded(
    view: cute.Tensor,
    head: cutlass.Int32,
    begin: cutlass.Int32,
    length: cutlass.Int32,
    *,
    is_transposed: bool = False,
) -> cute.Tensor:
    """Return a head of `shifting_view` from row `begin` on, cut off after `length` rows."""
    start = (0, ROWS - length) if is_transposed else (ROWS - length, 0)
    return cute.domain_offset(start, view[None, None, head, ROWS, begin + length])
