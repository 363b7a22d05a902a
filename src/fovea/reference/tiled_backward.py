"""Backward attention as the kernels compute it, in plain torch: P is recomputed tile by tile.

Lives here: the loop over tiles and the five products. Not here: the derivative of softcap and
score_mod (`score_gradients.py`), which pairs are visible (`visibility.py`), varlen
(`sequences.py`). Invariants: gradients are sums in a fixed order, so they are bit-reproducible;
nothing that autograd saved is overwritten, so `torch.func.vjp` through `backward` is the second
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.plan.numerics import REFERENCE_TILE_N
from fovea.problem import AttentionProblem, GradientNeeds, Gradients, strides_in_order
from fovea.reference.numerics import (
    accumulation_dtype,
    exp_relative,
    exp_relative_,
    finite_reference,
    round_operand,
)
from fovea.reference.packing import (
    pack_keys,
    pack_rows,
    rows_per_step,
    unpack_keys,
    unpack_rows,
)
from fovea.reference.score_gradients import ScoreGradients
from fovea.reference.scores import ScoreChain
from fovea.reference.sequences import Piece, Span, join_packed, pieces
from fovea.reference.visibility import BlockStates, Visibility


class Saved(NamedTuple):
    """Results of the forward and their gradients, as `backward` gets them or cut to a piece.

    Shapes:
        out, dout: as the output; lse, dlse: `AttentionProblem.lse_shape`; dlse None when unused.
    """

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def of_piece(self, piece: Piece) -> "Saved":
        """Return the parts that belong to one piece."""
        return Saved(
            out=piece.q_rows(self.out),
            lse=piece.row_stats(self.lse),
            dout=piece.q_rows(self.dout),
            dlse=None if self.dlse is None else piece.row_stats(self.dlse),
        )


class Rows(NamedTuple):
    """What a chunk of query rows needs for every tile.

    Shapes:
        q: (batch * heads_kv, group_size * M, head_dim); dout: likewise with head_dim_v;
        lse, delta: (batch, heads_q, M, 1); lse is 0 instead of -inf on rows that saw nothing.
        delta = rowsum(dout * out) - dlse.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class KeyGradients:
    """Sums of dK and dV, one tensor a KV tile: out-of-place sums that stay small."""

    dk: list[Tensor | None]
    dv: list[Tensor | None]

    @classmethod
    def of(cls, num_tiles: int) -> "KeyGradients":
        """Return empty sums."""
        return cls(dk=[None] * num_tiles, dv=[None] * num_tiles)


class PieceGradients(NamedTuple):
    """Gradients of one piece, in the inputs' dtypes but for dsink.

    Shapes:
        dq (batch, seqlen_q, heads_q, head_dim), dk, dv likewise; dsink (heads_q,).
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsink: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceBackward:
    """The backward of one dense piece."""

    problem: AttentionProblem
    piece: Piece
    saved: Saved
    needs: GradientNeeds
    visibility: Visibility
    scores: ScoreChain
    score_gradients: ScoreGradients
    k: Tensor  # (batch * heads_kv, seqlen_kv, head_dim), accumulation dtype
    v: Tensor
    tile_n: int

    def run(self) -> PieceGradients:
        """Return the gradients of the piece."""
        piece, needs = self.piece, self.needs
        keys = KeyGradients.of(-(-piece.seqlen_kv // self.tile_n))
        dq_chunks: list[Tensor] = []
        dsink: Tensor | None = None
        step = rows_per_step(
            piece.batch * piece.heads_q, piece.seqlen_q, self.tile_n, is_cuda=piece.q.is_cuda
        )
        num_rows = piece.seqlen_q if piece.batch * piece.heads_q > 0 else 0
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            rows = self._rows(begin, end)
            dq = self._visit_tiles(rows, begin, end, keys)
            if needs.q:
                dq_chunks.append(self._dq_chunk(dq, end - begin))
            if needs.sink:
                part = self._dsink(rows)
                dsink = part if dsink is None else dsink + part
        if needs.sink and dsink is None:
            dsink = self.k.new_zeros(piece.heads_q)
        return PieceGradients(
            dq=_cat_rows(dq_chunks, piece.q) if needs.q else None,
            dk=self._key_gradient(keys.dk, piece.k, self.problem.scale) if needs.k else None,
            dv=self._key_gradient(keys.dv, piece.v, None) if needs.v else None,
            dsink=dsink,
        )

    def _rows(self, begin: int, end: int) -> Rows:
        piece, saved, dtype = self.piece, self.saved, self.k.dtype
        lse = saved.lse[:, :, begin:end].unsqueeze(-1)
        is_dead = lse == -torch.inf
        dout = saved.dout[:, begin:end].to(dtype)
        # What flows into a row that saw nothing is dropped here, not multiplied by P = 0 later.
        dout = dout.masked_fill(is_dead.transpose(1, 2), 0.0)
        delta = (dout * saved.out[:, begin:end].to(dtype)).sum(dim=-1, keepdim=True)
        delta = delta.transpose(1, 2)
        if saved.dlse is not None:
            dlse = saved.dlse[:, :, begin:end].unsqueeze(-1).to(dtype)
            delta = delta - dlse.masked_fill(is_dead, 0.0)
        return Rows(
            q=pack_rows(piece.q[:, begin:end].to(dtype), piece.heads_kv),
            dout=pack_rows(dout, piece.heads_kv),
            lse=finite_reference(lse),
            delta=delta,
        )

    def _visit_tiles(self, rows: Rows, begin: int, end: int, keys: KeyGradients) -> Tensor | None:
        """Add the rows' parts to dK and dV; return their dQ without the scale, packed."""
        needs, dtype = self.needs, self.problem.dtype
        needs_ds = needs.q or needs.k or any(needs.score_captures)
        if not (needs_ds or needs.v):
            return None
        packed_rows = rows.q.shape[:2]
        dq: Tensor | None = None
        for tile, hidden in self.visibility.tiles(begin, end, self.tile_n):
            span = slice(tile.kv_begin, tile.kv_end)
            k, v = self.k[:, span], self.v[:, span]
            raw = torch.bmm(rows.q, k.transpose(1, 2)).mul_(self.problem.scale)
            raw = raw.view(*rows.lse.shape[:3], -1)
            scores = self.scores.apply(raw, tile, hidden)
            p = self._probabilities(scores.final, hidden, rows.lse)
            index = tile.kv_begin // self.tile_n
            if needs.v:
                packed_p = round_operand(p, dtype).view(*packed_rows, -1)
                keys.dv[index] = _add_product(keys.dv[index], packed_p.transpose(1, 2), rows.dout)
            if not needs_ds:
                continue
            dp = torch.bmm(rows.dout, v.transpose(1, 2)).view(p.shape)
            ds = p * dp.sub_(rows.delta)
            if hidden is not None:
                ds.masked_fill_(hidden, 0.0)
            ds = self.score_gradients.pull_back(ds, scores)
            packed_ds = round_operand(ds, dtype).view(*packed_rows, -1)
            if needs.q:
                dq = _add_product(dq, packed_ds, k)
            if needs.k:
                keys.dk[index] = _add_product(keys.dk[index], packed_ds.transpose(1, 2), rows.q)
        return dq

    def _probabilities(self, final: Tensor, hidden: Tensor | None, lse: Tensor) -> Tensor:
        if hidden is None:
            return exp_relative_(final, lse)
        return exp_relative_(final.masked_fill(hidden, -torch.inf), lse)

    def _dq_chunk(self, dq: Tensor | None, rows: int) -> Tensor:
        piece = self.piece
        if dq is None:
            return piece.q.new_zeros((piece.batch, rows, *piece.q.shape[2:]))
        group = piece.heads_q // piece.heads_kv
        scaled = dq * self.problem.scale
        return unpack_rows(scaled, piece.batch, piece.heads_kv, group).to(piece.q.dtype)

    def _dsink(self, rows: Rows) -> Tensor:
        """Return the rows' part of d sink: P of the sink times (0 - delta), summed."""
        assert self.problem.sink is not None  # GradientNeeds asked for it
        sink = self.problem.sink.to(self.k.dtype).view(1, -1, 1, 1)
        p = exp_relative(sink, rows.lse)
        return -(p * rows.delta).sum(dim=(0, 2, 3))

    def _key_gradient(
        self, tiles: Sequence[Tensor | None], like: Tensor, scale: float | Tensor | None
    ) -> Tensor:
        """Return the tiles' sums as one tensor of the shape and dtype of `like`."""
        batch, seqlen, heads, dim = like.shape
        whole: list[Tensor] = []
        for index, tile in enumerate(tiles):
            rows = min(self.tile_n, seqlen - index * self.tile_n)
            if tile is None:
                whole.append(like.new_zeros((batch, rows, heads, dim)))
                continue
            scaled = tile if scale is None else tile * scale
            whole.append(unpack_keys(scaled, batch).to(like.dtype))
        return _cat_rows(whole, like)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b, total not overwritten: autograd may hold it."""
    return torch.bmm(a, b) if total is None else torch.baddbmm(total, a, b)


def _cat_rows(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts), dim=1) if parts else like.new_zeros(like.shape)


def in_stride_order(x: Tensor, like: Tensor) -> Tensor:
    """Return x dense with the stride order of `like`, by operations that autograd knows."""
    strides = strides_in_order(tuple(x.shape), like.stride())
    if x.stride() == strides:
        return x
    order = sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis))
    inverse = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


def backward(
    problem: AttentionProblem,
    *,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs: GradientNeeds,
    tile_n: int = REFERENCE_TILE_N,
) -> Gradients:
    """Return the gradients that `needs` asks for.

    A function of (q, k, v, sink, captures, out, lse, dout, dlse) made of differentiable
    operations: second order flows back to the forward through out and lse as well.

    Shapes:
        out, lse: as `tiled_forward.forward` returned them; dout, dlse: like them.
    """
    assert not problem.is_paged  # problem.py: a paged call never requires gradients
    saved = Saved(out=out, lse=lse, dout=dout, dlse=dlse)
    blocks = BlockStates.of(problem)
    dtype = accumulation_dtype(problem.dtype)
    score_gradients = ScoreGradients.of(problem, needs)
    parts: list[PieceGradients] = []
    all_pieces = pieces(problem)
    for piece in all_pieces:
        run = PieceBackward(
            problem=problem,
            piece=piece,
            saved=saved.of_piece(piece),
            needs=needs,
            visibility=Visibility.of(problem, piece, blocks),
            scores=ScoreChain.of(problem, piece),
            score_gradients=score_gradients,
            k=pack_keys(piece.k.to(dtype)),
            v=pack_keys(piece.v.to(dtype)),
            tile_n=tile_n,
        )
        parts.append(run.run())
    rows, keys = [p.rows for p in all_pieces], [p.keys for p in all_pieces]
    return Gradients(
        dq=_joined([part.dq for part in parts], rows, problem.q) if needs.q else None,
        dk=_joined([part.dk for part in parts], keys, problem.k) if needs.k else None,
        dv=_joined([part.dv for part in parts], keys, problem.v) if needs.v else None,
        dsink=_summed([part.dsink for part in parts], problem.sink) if needs.sink else None,
        score_captures=score_gradients.results(),
    )


def _joined(parts: Sequence[Tensor | None], spans: Sequence[Span | None], like: Tensor) -> Tensor:
    """Return the gradients of all pieces as one tensor laid out as `like`."""
    present = [part for part in parts if part is not None]
    packed_spans = [span for span in spans if span is not None]
    if present and not packed_spans:
        return in_stride_order(present[0], like)
    joined = join_packed(
        [part.squeeze(0) for part in present],
        packed_spans,
        total=like.shape[0],
        axis=0,
        empty=lambda rows: like.new_zeros((rows, *like.shape[1:])),
    )
    return in_stride_order(joined, like)


def _summed(parts: Sequence[Tensor | None], sink: Tensor | None) -> Tensor:
    assert sink is not None
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return torch.zeros_like(sink) if total is None else total.to(sink.dtype)
