"""Index lists from a matrix of block states and back, a bounded number of rows at a time.

Lives here: the passes over lists that may hold 64 million entries each. Not here: what the lists
mean (`block_lists.py`). Invariant: a row of indices is a permutation of all columns, the listed
ones ascending, then the others ascending, as torch has them.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

# Entries read or written per step. On a CPU small enough for the cache of a core, int64 positions
# included; larger steps are slower and add to the peak memory. A GPU wants fewer launches.
_STEP_CPU = 1 << 18
_STEP_ACCELERATOR = 1 << 24
# Rows of a transposed matrix made dense at a time; matrices this small go by whole batches.
_DENSE_ROWS = 256
_SMALL_MATRIX = 1 << 14
# Rows with more changes than this between listed and unlisted, on average, are laid out by a
# scatter, and so are short ones; fewer pieces are copied one by one, at a fifth of the cost.
_MOST_CHANGES = 16
_LONG_ROW = 512


def lists_of(states: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Return (counts, indices) of the columns whose state is `wanted`, row by row.

    Shapes:
        states: (batch, heads, rows, columns) int8, any strides; counts: (batch, heads, rows)
            int32; indices: (batch, heads, rows, columns) int32.
    """
    batch, heads, rows, columns = states.shape
    counts = torch.zeros((batch, heads, rows), dtype=torch.int32, device=states.device)
    indices = torch.empty((batch, heads, rows, columns), dtype=torch.int32, device=states.device)
    column = torch.arange(columns, dtype=torch.int32, device=states.device)
    step = _rows_per_step(columns, states.device)
    if 0 in (rows, columns):
        return counts, indices
    flat_counts, flat_indices = counts.view(-1), indices.view(-1, columns)
    for first_row, dense in _dense_pieces(states):
        for begin in range(0, dense.shape[0], step):
            is_listed = dense[begin : begin + step] == wanted
            part = slice(first_row + begin, first_row + begin + is_listed.shape[0])
            flat_counts[part] = is_listed.sum(-1, dtype=torch.int32)
            _lay_out(is_listed, flat_counts[part], column, flat_indices[part])
    return counts, indices


def _dense_pieces(states: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first row, contiguous rows), rows counted through batch and heads."""
    batch, heads, rows, columns = states.shape
    if rows * columns <= _SMALL_MATRIX:
        for b in range(batch):
            yield b * heads * rows, states[b].reshape(-1, columns)
        return
    for number in range(batch * heads):
        matrix = states[number // heads, number % heads]
        for begin in range(0, rows, _DENSE_ROWS):
            part = slice(begin, begin + _DENSE_ROWS)
            if matrix.stride(-1) == 1:
                yield number * rows + begin, matrix[part]
            else:
                # torch copies a whole dense transpose tile by tile, a slice of one byte by byte.
                yield number * rows + begin, matrix.t()[:, part].contiguous().t().contiguous()


def _lay_out(is_listed: Tensor, counts: Tensor, column: Tensor, out: Tensor) -> None:
    """Write the permutation of each row of `is_listed` (rows, columns) into `out`."""
    if is_listed.device.type == "cpu" and column.numel() >= _LONG_ROW:
        changes = (is_listed[:, 1:] != is_listed[:, :-1]).nonzero()
        if changes.shape[0] <= _MOST_CHANGES * is_listed.shape[0]:
            starts_listed = cast(list[bool], is_listed[:, 0].tolist())  # pyright: ignore[reportUnknownMemberType]
            _copy_pieces(starts_listed, changes, column, out)
            return
    # A stable partition: a listed column goes to its rank among the listed, an unlisted one to the
    # count plus its rank among the unlisted.
    rank = is_listed.cumsum(-1, dtype=torch.int32)
    place = torch.where(is_listed, rank - 1, counts.unsqueeze(-1) + column - rank)
    out.scatter_(-1, place.long(), column.expand_as(place))


def _copy_pieces(starts_listed: list[bool], changes: Tensor, column: Tensor, out: Tensor) -> None:
    """Write each row as its listed runs of columns followed by the runs between them.

    Args:
        starts_listed: of each row, whether column 0 is listed.
        changes: (n, 2) row and column after which listed and unlisted change over, ascending.
        column: 0, 1, 2, ...
        out: (rows, columns) int32.
    """
    edges: list[list[int]] = [[0] for _ in starts_listed]
    pairs = cast(list[list[int]], changes.tolist())  # pyright: ignore[reportUnknownMemberType]
    for row, last in pairs:
        edges[row].append(last + 1)
    for row, begins in enumerate(edges):
        ends = [*begins[1:], column.numel()]
        runs = [column[begin:end] for begin, end in zip(begins, ends, strict=True)]
        first = 0 if starts_listed[row] else 1
        torch.cat([*runs[first::2], *runs[1 - first :: 2]], out=out[row])


def _rows_per_step(columns: int, device: torch.device) -> int:
    entries = _STEP_CPU if device.type == "cpu" else _STEP_ACCELERATOR
    return max(1, entries // max(columns, 1))


def mark(states: Tensor, counts: Tensor, indices: Tensor, value: int) -> None:
    """Write `value` at the listed columns of each row of `states`, contiguous, in place."""
    batch, heads, rows, columns = states.shape
    width = indices.shape[-1]
    if 0 in (rows, columns, width):
        return
    entry = torch.arange(width, device=states.device)
    step = _rows_per_step(max(width, columns), states.device)
    for b in range(batch):
        # One batch at a time: lists expanded over the batch would be copied whole otherwise.
        some_counts, some_indices = counts[b].reshape(-1, 1), indices[b].reshape(-1, width)
        some_states = states[b].view(heads * rows, columns)
        for begin in range(0, heads * rows, step):
            part = slice(begin, begin + step)
            # Entries behind the count mean nothing: they all go to a spare last column.
            is_listed = entry < some_counts[part]
            target = torch.where(is_listed, some_indices[part], columns).long()
            marked = states.new_zeros((target.shape[0], columns + 1))
            marked.scatter_(-1, target, value)
            some_states[part] = torch.maximum(some_states[part], marked[:, :columns])
