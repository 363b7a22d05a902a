"""The oracle: attention written out densely in float64, with autograd for the gradients.

Lives here: design 1.2 in the shortest form that can be read against it, sharing neither tiles nor
arithmetic with `tiled_forward.py` and `tiled_backward.py`. Not here: speed or small memory.
Invariant: the oracle widens every input float to float64 before anything is computed, so what
remains is the rounding of the inputs themselves. The same formula in the inputs' own precision is
"plain torch attention", the yardstick of error budgets.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.trace import TracedMod
from fovea.problem import AttentionProblem, ForwardResult, GradientNeeds, Gradients
from fovea.reference.sequences import Piece, pieces


class Precision(NamedTuple):
    """In which floats the dense formula runs.

    Attributes:
        compute: of everything.
        operand: what P is rounded to before it meets V, and the results at the end; None = not.
    """

    compute: torch.dtype
    operand: torch.dtype | None


EXACT = Precision(compute=torch.float64, operand=None)


class DenseResult(NamedTuple):
    """Results and gradients of one dense evaluation."""

    forward: ForwardResult
    gradients: Gradients


def oracle(problem: AttentionProblem) -> ForwardResult:
    """Return out, lse and max_score in float64; max_score is always there."""
    with torch.no_grad():
        return dense_forward(with_precision(problem, EXACT), EXACT)


def oracle_backward(
    problem: AttentionProblem, *, dout: Tensor, dlse: Tensor | None, needs: GradientNeeds
) -> DenseResult:
    """Return float64 results and the gradients that `needs` asks for, see `dense_backward`."""
    return dense_backward(problem, EXACT, dout=dout, dlse=dlse, needs=needs)


def plain_precision(dtype: torch.dtype) -> Precision:
    """Return the precision of plain torch attention on inputs of `dtype`.

    Scores and softmax in fp32 (fp64 for fp64), P and the output in the inputs' dtype: what torch's
    scaled_dot_product_attention does with 16-bit inputs.
    """
    if dtype in (torch.float32, torch.float64):
        return Precision(compute=dtype, operand=None)
    return Precision(compute=torch.float32, operand=dtype)


def dense_backward(
    problem: AttentionProblem,
    precision: Precision,
    *,
    dout: Tensor,
    dlse: Tensor | None,
    needs: GradientNeeds,
) -> DenseResult:
    """Return results and gradients of `sum(out * dout) + sum(lse * dlse)`, by autograd.

    Shapes:
        dout: of the output; dlse: of lse, where -inf entries of lse are ignored.
    """
    wide = with_precision(problem, precision)
    captures = () if wide.score_mod is None else wide.score_mod.captures
    wanted = [
        (needs.q, wide.q),
        (needs.k, wide.k),
        (needs.v, wide.v),
        (needs.sink, wide.sink),
        *zip(needs.score_captures, captures, strict=True),
    ]
    leaves = [x.requires_grad_() for is_wanted, x in wanted if is_wanted and x is not None]
    with torch.enable_grad():
        result = dense_forward(wide, precision)
        loss = (result.out * dout.to(precision.compute)).sum()
        if dlse is not None:
            is_dead = result.lse == -torch.inf
            finite = result.lse.masked_fill(is_dead, 0.0)
            weight = dlse.to(precision.compute).masked_fill(is_dead, 0.0)
            loss = loss + (finite * weight).sum()
    found = iter(
        torch.autograd.grad(loss, leaves, allow_unused=True)
        if loss.requires_grad
        else [None] * len(leaves)
    )
    grads: list[Tensor | None] = []
    for is_wanted, x in wanted:
        grad = next(found) if is_wanted and x is not None else None
        grads.append(torch.zeros_like(x) if is_wanted and x is not None and grad is None else grad)
    assert result.max_score is not None
    return DenseResult(
        forward=ForwardResult(
            out=result.out.detach(), lse=result.lse.detach(), max_score=result.max_score.detach()
        ),
        gradients=Gradients(
            dq=grads[0], dk=grads[1], dv=grads[2], dsink=grads[3], score_captures=tuple(grads[4:])
        ),
    )


def with_precision(problem: AttentionProblem, precision: Precision) -> AttentionProblem:
    """Return the problem with every narrower float widened to `precision.compute`.

    The tensors are new leaves: nothing flows back to the originals.
    """
    dtype = precision.compute
    sink = problem.sink
    return replace(
        problem,
        q=_widened(problem.q, dtype),
        k=_widened(problem.k, dtype),
        v=_widened(problem.v, dtype),
        sink=None if sink is None else _widened(sink, dtype),
        score_mod=_widened_mod(problem.score_mod, dtype),
    )


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    is_narrower = x.is_floating_point() and x.element_size() < dtype.itemsize
    return x.detach().to(dtype if is_narrower else x.dtype, copy=True)


def _widened_mod(mod: TracedMod | None, dtype: torch.dtype) -> TracedMod | None:
    """Return the mod with wider captures; `evaluate` widens the graph for a float64 score."""
    if mod is None:
        return None
    return replace(mod, captures=tuple(_widened(x, dtype) for x in mod.captures))


def dense_forward(problem: AttentionProblem, precision: Precision) -> ForwardResult:
    """Return the results of a problem already in `precision.compute`; differentiable."""
    parts = [(piece, _piece_forward(problem, piece, precision)) for piece in pieces(problem)]
    if problem.varlen is None:
        return parts[0][1]
    out = problem.q.new_zeros((*problem.q.shape[:-1], problem.head_dim_v))
    lse = problem.q.new_full(problem.lse_shape, -torch.inf)
    max_score = torch.full_like(lse, -torch.inf)
    for piece, part in parts:
        assert piece.rows is not None
        assert part.max_score is not None
        begin = piece.rows.begin
        rows = torch.arange(begin, begin + piece.rows.used, device=problem.device)
        out = out.index_copy(0, rows, part.out.squeeze(0))
        lse = lse.index_copy(1, rows, part.lse.squeeze(0))
        max_score = max_score.index_copy(1, rows, part.max_score.squeeze(0))
    return ForwardResult(out=out, lse=lse, max_score=max_score)


class DenseTerms(NamedTuple):
    """The matrices of one piece.

    Shapes:
        raw, scores, p: (batch, heads_q, M, N); v: (batch, heads_q, N, head_dim_v);
        lse, max_score: (batch, heads_q, M). raw = scale * q.k, scores after the mods and masks,
        p normalised, exactly 0 where not visible.
    """

    raw: Tensor
    scores: Tensor
    p: Tensor
    v: Tensor
    lse: Tensor
    max_score: Tensor


def dense_terms(problem: AttentionProblem, piece: Piece) -> DenseTerms:
    """Return scores and probabilities of one piece; differentiable."""
    group = piece.heads_q // max(piece.heads_kv, 1)
    q = piece.q.transpose(1, 2)
    k = piece.k.transpose(1, 2).repeat_interleave(group, dim=1)
    v = piece.v.transpose(1, 2).repeat_interleave(group, dim=1)
    raw = (q @ k.transpose(2, 3)) * problem.scale
    scores = _modified(problem, piece, raw)
    visible = _visible(problem, piece) & (scores != -torch.inf)
    scores = scores.masked_fill(~visible, -torch.inf)
    # amax has no value over no keys; one more column of -inf gives it one.
    padded = torch.nn.functional.pad(scores.detach(), (0, 1), value=-torch.inf)
    max_score = padded.amax(dim=-1)
    reference = max_score
    sink = None
    if problem.sink is not None:
        sink = problem.sink.to(raw.dtype).view(1, -1, 1)
        reference = torch.maximum(reference, sink.detach())
    reference = reference.masked_fill(reference == -torch.inf, 0.0)
    # Two selections: the inner one keeps exp's derivative away from -inf, the outer one is rule 3.
    exponent = torch.where(visible, scores - reference.unsqueeze(-1), 0.0)
    p = torch.where(visible, exponent.exp(), 0.0)
    total = p.sum(dim=-1)
    if sink is not None:
        total = total + (sink - reference).exp()
    is_empty = total == 0
    positive = torch.where(is_empty, 1.0, total)
    return DenseTerms(
        raw=raw,
        scores=scores,
        p=p / positive.unsqueeze(-1),
        v=v,
        lse=torch.where(is_empty, -torch.inf, reference + positive.log()),
        max_score=max_score,
    )


def _piece_forward(problem: AttentionProblem, piece: Piece, precision: Precision) -> ForwardResult:
    terms = dense_terms(problem, piece)
    p = terms.p
    if precision.operand is not None:
        p = p.to(precision.operand).to(p.dtype)
    out = (p @ terms.v).transpose(1, 2)
    if precision.operand is not None:
        out = out.to(precision.operand).to(out.dtype)
    return ForwardResult(out=out, lse=terms.lse, max_score=terms.max_score)


def _modified(problem: AttentionProblem, piece: Piece, raw: Tensor) -> Tensor:
    """Return the scores after softcap and score_mod."""
    scores = raw
    if problem.softcap is not None:
        scores = torch.tanh(scores / problem.softcap) * problem.softcap
    if problem.score_mod is not None and scores.numel() > 0:
        scores = _evaluated(problem.score_mod, piece, scores).to(scores.dtype)
    return scores.expand(raw.shape)


def _visible(problem: AttentionProblem, piece: Piece) -> Tensor:
    """Return which pairs are visible, (batch, heads_q, M, N)."""
    device = piece.q.device
    rows, keys = piece.seqlen_q, piece.seqlen_kv
    shape = (piece.batch, piece.heads_q, rows, keys)
    visible = torch.ones(shape, dtype=torch.bool, device=device)
    if visible.numel() == 0:
        return visible
    q_idx = torch.arange(rows, device=device).view(-1, 1)
    kv_idx = torch.arange(keys, device=device)
    diagonal = q_idx if problem.causal == "top_left" else q_idx + keys - rows
    left, right = problem.window
    if problem.causal is not None:
        visible = visible & (kv_idx <= diagonal)
    if left is not None:
        visible = visible & (kv_idx >= diagonal - left)
    if right is not None:
        visible = visible & (kv_idx <= diagonal + right)
    if problem.mask_mod is not None:
        visible = visible & _evaluated(problem.mask_mod, piece, None)
    if problem.block_lists is not None:
        visible = visible & _listed(problem, piece)
    return visible


def _listed(problem: AttentionProblem, piece: Piece) -> Tensor:
    """Return where the block lists, and the BlockMask's own mask_mod, let a pair be seen."""
    lists = problem.block_lists
    assert lists is not None
    listed, full = (
        blocks.repeat_interleave(lists.block_q, dim=2)[:, :, : piece.seqlen_q].repeat_interleave(
            lists.block_kv, dim=3
        )[:, :, :, : piece.seqlen_kv]
        for blocks in (lists.visible_blocks(), lists.full_blocks())
    )
    if piece.sequence is not None and listed.shape[0] > 1:
        listed = listed[piece.sequence].unsqueeze(0)
        full = full[piece.sequence].unsqueeze(0)
    if problem.block_mask_mod is None:
        return listed
    return listed & (full | _evaluated(problem.block_mask_mod, piece, None))


def _evaluated(mod: TracedMod, piece: Piece, score: Tensor | None) -> Tensor:
    """Return a mod's value on all pairs of a piece."""
    device = piece.q.device
    return evaluate(
        mod.graph,
        Positions(
            b=piece.batch_index,
            h=torch.arange(piece.heads_q, device=device).view(1, -1, 1, 1),
            q_idx=torch.arange(piece.seqlen_q, device=device).view(1, 1, -1, 1),
            kv_idx=torch.arange(piece.seqlen_kv, device=device).view(1, 1, 1, -1),
        ),
        score=score,
        captures=mod.captures,
        scalars=mod.scalars,
    )
