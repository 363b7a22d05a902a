"""Rows of a tile that are (query, head of a group) pairs: query heads that share a KV head.

Lives here: from a packed row to its query and head, and from rows to queries. Not here: the loads
and stores of packed rows (`sm90/forward/packed.py`). Invariant: the heads of a group lie next to
each other, so that a tile of few queries is filled by the heads that read the same keys.
"""

from typing import NamedTuple

import cutlass


class Row(NamedTuple):
    """What a row of a tile is about."""

    q_idx: cutlass.Int32
    head: cutlass.Int32


def packed_row(row: cutlass.Int32, kv_head: cutlass.Int32, group_size: cutlass.Int32) -> Row:
    """Return the query and the query head of a packed row."""
    q_idx = row // group_size
    return Row(q_idx, kv_head * group_size + (row - q_idx * group_size))


def query_span(
    row_begin: cutlass.Int32, row_end: cutlass.Int32, group_size: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Return the queries [begin, end) of packed rows [row_begin, row_end), at least one row."""
    return row_begin // group_size, (row_end - 1) // group_size + 1
