"""Cuts a problem into dense rectangular pieces, and joins what was computed for them.

Lives here: the only place of the reference that knows varlen packing, used lengths and pages. Not
here: attention itself. Invariant: a piece holds exactly the rows and keys that exist, so nothing
behind a length is ever read, and rows that belong to no piece come out as the fill value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.problem import AttentionProblem, Varlen
from fovea.tiling.paged_kv import gather_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows `begin <= row < begin + used` of a packed tensor; those from there to `end` idle."""

    begin: int
    used: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A dense batch of sequences of equal lengths.

    Shapes:
        q: (batch, seqlen_q, heads_q, head_dim); k, v: (batch, seqlen_kv, heads_kv, ...).
        batch_index: (batch, 1, 1, 1) int64, what a mod sees as `b`.

    Attributes:
        sequence: which sequence of a varlen call this is; None for the whole of a dense call.
        rows, keys: where a varlen piece lies in the packed tensors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    batch_index: Tensor
    sequence: int | None = None
    rows: Span | None = None
    keys: Span | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1]

    @property
    def seqlen_kv(self) -> int:
        return self.k.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[2]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[2]

    def q_rows(self, x: Tensor) -> Tensor:
        """Return the part of x, laid out as q is, that belongs to this piece."""
        return x if self.rows is None else _cut(x, self.rows)

    def row_stats(self, x: Tensor) -> Tensor:
        """Return (batch, heads_q, seqlen_q) of x, laid out as `AttentionProblem.lse_shape`."""
        if self.rows is None:
            return x
        return x[:, self.rows.begin : self.rows.begin + self.rows.used].unsqueeze(0)


def pieces(problem: AttentionProblem) -> list[Piece]:
    """Return the dense pieces of a problem: one for a dense call, one a sequence for varlen."""
    if problem.varlen is None:
        index = torch.arange(problem.batch, dtype=torch.int64, device=problem.device)
        return [
            Piece(q=problem.q, k=problem.k, v=problem.v, batch_index=index.view(-1, 1, 1, 1)),
        ]
    return [
        _varlen_piece(problem, problem.varlen, sequence, rows, keys)
        for sequence, (rows, keys) in enumerate(_spans(problem, problem.varlen))
    ]


def _varlen_piece(
    problem: AttentionProblem, varlen: Varlen, sequence: int, rows: Span, keys: Span
) -> Piece:
    if varlen.page_table is None:
        k, v = _cut(problem.k, keys), _cut(problem.v, keys)
    else:
        assert varlen.seqused_kv is not None  # problem.py: a paged call has seqused_kv
        pages = varlen.page_table[sequence : sequence + 1]
        used = varlen.seqused_kv[sequence : sequence + 1]
        k = gather_rows(problem.k, pages, used, begin=0, end=keys.used)
        v = gather_rows(problem.v, pages, used, begin=0, end=keys.used)
    index = torch.full((1, 1, 1, 1), sequence, dtype=torch.int64, device=problem.device)
    return Piece(
        q=_cut(problem.q, rows),
        k=k,
        v=v,
        batch_index=index,
        sequence=sequence,
        rows=rows,
        keys=keys,
    )


def _cut(x: Tensor, span: Span) -> Tensor:
    return x[span.begin : span.begin + span.used].unsqueeze(0)


def _spans(problem: AttentionProblem, varlen: Varlen) -> list[tuple[Span, Span]]:
    """Return (rows, keys) of each sequence; one transfer to the host for each length tensor."""
    starts_q = _host(varlen.cu_seqlens_q)
    used_q = _host(varlen.seqused_q)
    starts_kv = _host(varlen.cu_seqlens_kv)
    used_kv = _host(varlen.seqused_kv)
    spans: list[tuple[Span, Span]] = []
    for i in range(problem.batch):
        rows = _span(starts_q, used_q, i)
        if starts_kv is None:
            assert used_kv is not None  # problem.py: a paged call has seqused_kv
            used = max(used_kv[i], 0)
            keys = Span(begin=0, used=used, end=used)
        else:
            keys = _span(starts_kv, used_kv, i)
        spans.append((rows, keys))
    return spans


def _span(starts: list[int] | None, used: list[int] | None, i: int) -> Span:
    assert starts is not None
    length = starts[i + 1] - starts[i]
    return Span(
        begin=starts[i],
        used=length if used is None else min(used[i], length),
        end=starts[i + 1],
    )


def _host(x: Tensor | None) -> list[int] | None:
    return None if x is None else [int(value) for value in x.cpu()]


def join_packed(
    parts: Sequence[Tensor],
    spans: Sequence[Span],
    *,
    total: int,
    axis: int,
    empty: Callable[[int], Tensor],
) -> Tensor:
    """Return pieces joined along the packed axis, gaps and the tail filled.

    Concatenation, not assignment into a buffer, so that derivatives pass through.

    Shapes:
        parts: one a span, with `used` rows on `axis`; result has `total` there.

    Args:
        empty: returns a filled block with that many rows.
    """
    blocks: list[Tensor] = []
    row = 0
    for part, span in zip(parts, spans, strict=True):
        blocks.append(part)
        if span.end > span.begin + span.used:
            blocks.append(empty(span.end - span.begin - span.used))
        row = span.end
    if total > row or not blocks:
        blocks.append(empty(total - row))
    return torch.cat(blocks, dim=axis)
