"""Forward attention as the kernels compute it, in plain torch: online softmax over KV tiles.

Lives here: the loop over tiles and the state of a row. Not here: the softmax arithmetic
(`numerics.py`), which pairs are visible (`visibility.py`), varlen (`sequences.py`). Invariant: a
step never holds more than one score tile, so memory grows with the lengths, not their product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.plan.numerics import REFERENCE_TILE_N
from fovea.problem import AttentionProblem, ForwardResult
from fovea.reference.numerics import (
    ReferenceRule,
    accumulation_dtype,
    exp_relative,
    exp_relative_,
    finite_reference,
    fits_optimistically,
    log_sum,
    optimistic_reference,
    round_operand,
    updated_reference,
)
from fovea.reference.packing import pack_keys, pack_rows, rows_per_step
from fovea.reference.scores import ScoreChain
from fovea.reference.sequences import Piece, pieces
from fovea.reference.visibility import BlockStates, Visibility


class RowState(NamedTuple):
    """What a chunk of rows carries from tile to tile.

    Shapes:
        acc: (batch, heads_q, M, head_dim_v), unnormalised; others (batch, heads_q, M, 1).

    Units:
        acc and row_sum are relative to exp(reference); reference and maximum natural, -inf while a
        row has seen nothing.
    """

    acc: Tensor
    row_sum: Tensor
    reference: Tensor
    maximum: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceForward:
    """The forward of one dense piece."""

    problem: AttentionProblem
    piece: Piece
    visibility: Visibility
    scores: ScoreChain
    k: Tensor  # (batch * heads_kv, seqlen_kv, head_dim), accumulation dtype
    v: Tensor
    tile_n: int
    rule: ReferenceRule

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        piece: Piece,
        blocks: BlockStates | None,
        *,
        tile_n: int,
        rule: ReferenceRule = ReferenceRule.RUNNING,
    ) -> "PieceForward":
        """Return the forward of a piece, its keys and values packed."""
        dtype = accumulation_dtype(problem.dtype)
        return cls(
            problem=problem,
            piece=piece,
            visibility=Visibility.of(problem, piece, blocks),
            scores=ScoreChain.of(problem, piece),
            k=pack_keys(piece.k.to(dtype)),
            v=pack_keys(piece.v.to(dtype)),
            tile_n=tile_n,
            rule=rule,
        )

    def run(self, result: ForwardResult) -> None:
        """Write the results of all rows of the piece into those of the whole problem."""
        for begin, end in self.chunks():
            state = self.rows(begin, end, self.rule)
            if self.rule is ReferenceRule.OPTIMISTIC:
                state = self._redone(state, begin, end)
            out, lse = finished(state, self.sink())
            self.store(result, begin, end, out, lse, state.maximum)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the rows of each step."""
        piece = self.piece
        num_heads = piece.batch * piece.heads_q
        if num_heads == 0:
            return
        step = rows_per_step(num_heads, piece.seqlen_q, self.tile_n, is_cuda=piece.q.is_cuda)
        for begin in range(0, piece.seqlen_q, step):
            yield begin, min(begin + step, piece.seqlen_q)

    def store(
        self,
        result: ForwardResult,
        begin: int,
        end: int,
        out: Tensor,
        lse: Tensor,
        maximum: Tensor,
    ) -> None:
        """Write rows begin..end of the piece.

        Shapes:
            out: (batch, heads_q, M, head_dim_v); lse, maximum: (batch, heads_q, M, 1).
        """
        piece = self.piece
        piece.q_rows(result.out)[:, begin:end] = out.transpose(1, 2)
        piece.row_stats(result.lse)[:, :, begin:end] = lse.squeeze(-1)
        if result.max_score is not None:
            piece.row_stats(result.max_score)[:, :, begin:end] = maximum.squeeze(-1)

    def sink(self) -> Tensor | None:
        """Return the sink as (1, heads_q, 1, 1) in the accumulation dtype."""
        sink = self.problem.sink
        return None if sink is None else sink.to(self.k.dtype).view(1, -1, 1, 1)

    def rows(
        self, begin: int, end: int, rule: ReferenceRule, tiles: range | None = None
    ) -> RowState:
        """Return the state of rows begin..end after their last tile.

        Args:
            begin, end: query rows of the piece.
            rule: how the reference moves; nothing is redone here.
            tiles: the KV tiles to visit, by number; None = all that have something visible.
        """
        piece = self.piece
        q = pack_rows(piece.q[:, begin:end].to(self.k.dtype), piece.heads_kv)
        stats_shape = (piece.batch, piece.heads_q, end - begin, 1)
        nothing = self.k.new_full(stats_shape, -torch.inf)
        state = RowState(
            acc=self.k.new_zeros((*stats_shape[:3], self.v.shape[-1])),
            row_sum=self.k.new_zeros(stats_shape),
            reference=nothing,
            maximum=nothing,
        )
        is_first = True
        for tile, hidden in self.visibility.tiles(begin, end, self.tile_n):
            if tiles is not None and tile.kv_begin // self.tile_n not in tiles:
                continue
            keys = slice(tile.kv_begin, tile.kv_end)
            raw = torch.bmm(q, self.k[:, keys].transpose(1, 2)).mul_(self.problem.scale)
            scores = self.scores.apply(raw.view(*stats_shape[:3], -1), tile, hidden).final
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            keeps_reference = rule is ReferenceRule.OPTIMISTIC and not is_first
            state = self._step(state, scores, self.v[:, keys], keeps_reference=keeps_reference)
            is_first = False
        return state

    def _redone(self, state: RowState, begin: int, end: int) -> RowState:
        """Return the state with the running maximum's result in rows that nearly overflowed."""
        fits = fits_optimistically(state.row_sum, state.acc, state.maximum)
        if bool(fits.all()):
            return state
        redone = self.rows(begin, end, ReferenceRule.RUNNING)
        return RowState(*(torch.where(fits, x, y) for x, y in zip(state, redone, strict=True)))

    def _step(
        self, state: RowState, scores: Tensor, v: Tensor, *, keeps_reference: bool
    ) -> RowState:
        """Return the state after one more tile."""
        tile_maximum = scores.amax(dim=-1, keepdim=True)
        if keeps_reference:
            reference = optimistic_reference(state.reference)
        else:
            reference = updated_reference(state.reference, tile_maximum)
        finite = finite_reference(reference)
        decay = exp_relative(state.reference, finite)
        p = exp_relative_(scores, finite)
        row_sum = state.row_sum.mul_(decay).add_(p.sum(dim=-1, keepdim=True))
        packed = (v.shape[0], -1)
        acc = state.acc.mul_(decay)
        acc.view(*packed, v.shape[-1]).baddbmm_(
            round_operand(p, self.problem.dtype).view(*packed, v.shape[1]), v
        )
        maximum = torch.maximum(state.maximum, tile_maximum)
        return RowState(acc=acc, row_sum=row_sum, reference=reference, maximum=maximum)


def finished(state: RowState, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of rows that have seen all their tiles.

    The sink joins the reference, so exp(sink - reference) is at most 1 however negative the
    scores are. A row that saw nothing has row sum 0: its 0 and -inf are written, not computed.

    Shapes:
        sink: (1, heads_q, 1, 1), natural units; out (batch, heads_q, M, head_dim_v), lse (..., 1).
    """
    acc, row_sum, reference = state.acc, state.row_sum, state.reference
    is_dead = state.maximum == -torch.inf
    if sink is not None:
        joined = torch.maximum(reference, sink)
        finite = finite_reference(joined)
        decay = exp_relative(reference, finite)
        acc = acc * decay
        row_sum = row_sum * decay + exp_relative(sink, finite)
        reference = joined
    out = (acc / row_sum).masked_fill(is_dead, 0.0)
    lse = log_sum(finite_reference(reference), row_sum)
    return out, lse.masked_fill(row_sum == 0, -torch.inf)


def empty_result(problem: AttentionProblem) -> ForwardResult:
    """Return results to write into; what no piece will write is 0 and -inf already."""
    out = problem.empty_out()
    lse = torch.empty(
        problem.lse_shape, dtype=accumulation_dtype(problem.dtype), device=problem.device
    )
    max_score = torch.empty_like(lse) if problem.wants_max_score else None
    if problem.varlen is not None:
        out.zero_()
        lse.fill_(-torch.inf)
        if max_score is not None:
            max_score.fill_(-torch.inf)
    return ForwardResult(out=out, lse=lse, max_score=max_score)


@torch.no_grad()
def forward(
    problem: AttentionProblem,
    *,
    tile_n: int = REFERENCE_TILE_N,
    rule: ReferenceRule = ReferenceRule.RUNNING,
) -> ForwardResult:
    """Return out, lse and max_score of a problem.

    Args:
        problem: the call; any device, float64 to bfloat16.
        tile_n: keys of one step of the online softmax; a kernel's own, to compare with it.
        rule: how the reference moves; the result is the same up to rounding.
    """
    result = empty_result(problem)
    blocks = BlockStates.of(problem)
    for piece in pieces(problem):
        PieceForward.of(problem, piece, blocks, tile_n=tile_n, rule=rule).run(result)
    return result
