"""The small kernel before a packed forward: it makes the table in which tiles are found.

Lives here: its launch, and what of a launcher's arguments it reads. Not here: the table itself
(`device/sequences.py`). Invariant: lengths are read on the device alone, so the host never waits.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.pages import Pages
from fovea.kernels.device.sequences import (
    TABLE_THREADS,
    SequenceTable,
    SequenceTensors,
    fill_table,
)


class PackedBatch(NamedTuple):
    """Where the sequences of a call lie, the table to make of it, and its pages if it has any.

    `total_kv` counts all keys, of a paged cache those that a row of the page table can hold.
    """

    where: SequenceTensors
    table: SequenceTable
    pages: Pages | None
    total_kv: cutlass.Int32


def packed_batch(sequences: tuple, mK: cute.Tensor, mV: cute.Tensor, *, is_paged: bool):
    """Return the batch of a launcher's arguments."""
    words, page_table, *where = sequences
    where = SequenceTensors(*where)
    # The batch, and the rows behind it.
    table = SequenceTable(words, where.mStartQ.shape[0])
    if not is_paged:
        return PackedBatch(where, table, None, mK.shape[0])
    head_strides = (cutlass.Int32(mK.stride[2]), cutlass.Int32(mV.stride[2]))
    pages = Pages(page_table, mK.shape[1], *head_strides)
    return PackedBatch(where, table, pages, page_table.shape[1] * mK.shape[1])


class SequenceTableKernel:
    """The kernel of one forward plan, whose walks have `tile_rows` rows."""

    def __init__(self, tile_rows: int, *, is_paged: bool) -> None:
        self.tile_rows = tile_rows
        self.is_paged = is_paged

    @cute.jit
    def __call__(
        self,
        where: SequenceTensors,
        table: SequenceTable,
        total_q: cutlass.Int32,
        total_kv: cutlass.Int32,
        heads_a_row: cutlass.Int32 | int,
        stream: Any,
    ):
        """Launch it; a row takes `heads_a_row` rows of a tile."""
        self.kernel(where, table, total_q, total_kv, heads_a_row).launch(
            grid=(cute.ceil_div(table.num_sequences, TABLE_THREADS), 1, 1),
            block=(TABLE_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        where: SequenceTensors,
        table: SequenceTable,
        total_q: cutlass.Int32,
        total_kv: cutlass.Int32,
        heads_a_row: cutlass.Int32,
    ):
        """Write the table."""
        fill_table(where, table, total_q, total_kv, self.tile_rows, self.is_paged, heads_a_row)
