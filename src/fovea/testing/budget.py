"""How wrong a result may be: budgets derived from the inputs, never tuned.

Lives here: `check_forward` and `check_backward`, which compare results with the float64 oracle.
The budget of each tensor is 2 x (error of plain torch attention in the same precision + rounding
band); the band is the dtype's eps times the terms before they cancel. Not here: the oracle
(`reference/dense.py`). Invariant: the largest error and the root mean square error both have to
fit, each its own budget; NaN and infinities have to be where the oracle has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.problem import AttentionProblem, ForwardResult, GradientNeeds, Gradients
from fovea.reference.dense import (
    EXACT,
    DenseResult,
    DenseTerms,
    dense_backward,
    dense_terms,
    plain_precision,
    with_precision,
)
from fovea.reference.numerics import accumulation_dtype
from fovea.reference.sequences import Piece, Span, join_packed, pieces

FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """One tensor to judge; all of one shape, the last three in float64."""

    name: str
    actual: Tensor
    oracle: Tensor
    plain: Tensor
    band: Tensor

    def problem(self) -> str | None:
        """Return what is wrong, or None when the tensor is within its budget."""
        if self.actual.shape != self.oracle.shape:
            return f"{self.name}: shape {tuple(self.actual.shape)}, not {tuple(self.oracle.shape)}"
        if self.actual.numel() == 0:
            return None
        actual = self.actual.detach().double()
        is_finite = self.oracle.isfinite()
        same = torch.where(self.oracle.isnan(), actual.isnan(), actual == self.oracle)
        if not bool((same | is_finite).all()):
            return f"{self.name}: a NaN or infinity of the oracle is something else"
        if not bool(actual[is_finite].isfinite().all()):
            return f"{self.name}: not finite where the oracle is"
        error = (actual - self.oracle)[is_finite].abs()
        plain = (self.plain.double() - self.oracle)[is_finite].abs()
        band = self.band[is_finite]
        for norm, of in (("max", _largest), ("rms", _rms)):
            budget = FACTOR * (of(plain) + of(band))
            if of(error) > budget:
                return (
                    f"{self.name}: {norm} error {of(error):.3e} exceeds the budget {budget:.3e} = "
                    f"{FACTOR:g} x (plain torch {of(plain):.3e} + rounding band {of(band):.3e})"
                )
        return None


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() > 0 else 0.0


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() > 0 else 0.0


class Bands(NamedTuple):
    """Rounding bands in float64, shaped as the results they belong to; captures by autograd."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    captures: tuple[Tensor, ...]


def check_forward(problem: AttentionProblem, result: ForwardResult) -> None:
    """Raise AssertionError unless out, lse and max_score are within their budgets."""
    needs = GradientNeeds(q=False, k=False, v=False, sink=False, score_captures=())
    needs = needs._replace(score_captures=(False,) * _num_captures(problem))
    dout = torch.zeros_like(result.out)
    exact, plain = _references(problem, dout, None, needs)
    bands = rounding_bands(problem, dout, None)
    judged = _judged_forward(result, exact, plain, bands)
    _raise_on(judged)


def check_backward(
    problem: AttentionProblem,
    gradients: Gradients,
    *,
    dout: Tensor,
    dlse: Tensor | None,
    needs: GradientNeeds,
) -> None:
    """Raise AssertionError unless every gradient asked for is within its budget."""
    exact, plain = _references(problem, dout, dlse, needs)
    bands = rounding_bands(problem, dout, dlse)
    named = (
        ("dq", gradients.dq, exact.gradients.dq, plain.gradients.dq, bands.dq),
        ("dk", gradients.dk, exact.gradients.dk, plain.gradients.dk, bands.dk),
        ("dv", gradients.dv, exact.gradients.dv, plain.gradients.dv, bands.dv),
        ("dsink", gradients.dsink, exact.gradients.dsink, plain.gradients.dsink, bands.dsink),
        *(
            (f"d capture {i}", actual, exact_capture, plain_capture, band)
            for i, (actual, exact_capture, plain_capture, band) in enumerate(
                zip(
                    gradients.score_captures,
                    exact.gradients.score_captures,
                    plain.gradients.score_captures,
                    bands.captures,
                    strict=True,
                )
            )
        ),
    )
    judged: list[Judged] = []
    for name, actual, oracle, plain_value, band in named:
        if oracle is None:
            assert actual is None, f"{name}: a gradient that nobody asked for"
            continue
        assert actual is not None, f"{name}: the gradient asked for is missing"
        assert plain_value is not None
        assert band is not None
        judged.append(Judged(name=name, actual=actual, oracle=oracle, plain=plain_value, band=band))
    _raise_on(judged)


def _num_captures(problem: AttentionProblem) -> int:
    return 0 if problem.score_mod is None else len(problem.score_mod.captures)


def _raise_on(judged: Sequence[Judged]) -> None:
    problems = [text for one in judged if (text := one.problem()) is not None]
    if problems:
        raise AssertionError("\n".join(problems))


def _references(
    problem: AttentionProblem, dout: Tensor, dlse: Tensor | None, needs: GradientNeeds
) -> tuple[DenseResult, DenseResult]:
    """Return the float64 oracle and plain torch attention in the problem's precision."""
    exact = dense_backward(problem, EXACT, dout=dout, dlse=dlse, needs=needs)
    precision = plain_precision(problem.dtype)
    return exact, dense_backward(problem, precision, dout=dout, dlse=dlse, needs=needs)


def _judged_forward(
    result: ForwardResult, exact: DenseResult, plain: DenseResult, bands: Bands
) -> list[Judged]:
    judged = [
        Judged(
            name="out",
            actual=result.out,
            oracle=exact.forward.out,
            plain=plain.forward.out,
            band=bands.out,
        ),
        Judged(
            name="lse",
            actual=result.lse,
            oracle=exact.forward.lse,
            plain=plain.forward.lse,
            band=bands.lse,
        ),
    ]
    if result.max_score is not None:
        assert exact.forward.max_score is not None
        assert plain.forward.max_score is not None
        judged.append(
            Judged(
                name="max_score",
                actual=result.max_score,
                oracle=exact.forward.max_score,
                plain=plain.forward.max_score,
                band=bands.lse,
            )
        )
    return judged


def rounding_bands(problem: AttentionProblem, dout: Tensor, dlse: Tensor | None) -> Bands:
    """Return eps times the sums of absolute values that each result is made of."""
    wide = with_precision(problem, EXACT)
    wide.q.requires_grad_()  # so that autograd can pull back through the mods to the raw scores
    eps = torch.finfo(problem.dtype).eps
    eps_lse = torch.finfo(accumulation_dtype(problem.dtype)).eps
    captures = () if wide.score_mod is None else wide.score_mod.captures
    leaves = tuple(x.requires_grad_() for x in captures if x.is_floating_point())
    parts = [
        _piece_bands(wide, piece, _PieceCotangents.of(piece, dout, dlse), leaves, eps_lse / eps)
        for piece in pieces(wide)
    ]
    by_leaf = [_total([part.captures[i] for part in parts]) for i in range(len(leaves))]
    places = iter(by_leaf)
    capture_bands = tuple(
        next(places) * max(eps, _eps_of(original.dtype)) if x.is_floating_point() else x
        for x, original in zip(
            captures, () if problem.score_mod is None else problem.score_mod.captures, strict=True
        )
    )
    dsink = None
    if problem.sink is not None:
        dsink = _total([p.dsink for p in parts if p.dsink is not None]) * max(
            eps, _eps_of(problem.sink.dtype)
        )
    rows, keys = [p.rows for p in pieces(wide)], [p.keys for p in pieces(wide)]
    return Bands(
        out=_joined([p.out for p in parts], rows, wide.q.shape[0], 0) * eps,
        lse=_joined([p.lse for p in parts], rows, wide.q.shape[0], 1) * eps_lse,
        dq=_joined([p.dq for p in parts], rows, wide.q.shape[0], 0) * eps,
        dk=_joined([p.dk for p in parts], keys, wide.k.shape[0], 0) * eps,
        dv=_joined([p.dv for p in parts], keys, wide.v.shape[0], 0) * eps,
        dsink=dsink,
        captures=capture_bands,
    )


def _eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(dim=0)


class _PieceCotangents(NamedTuple):
    """|dout| (batch, heads_q, M, head_dim_v) and |dlse| (batch, heads_q, M) of one piece."""

    dout: Tensor
    dlse: Tensor | None

    @classmethod
    def of(cls, piece: Piece, dout: Tensor, dlse: Tensor | None) -> "_PieceCotangents":
        return cls(
            dout=piece.q_rows(dout.detach().double()).transpose(1, 2).abs(),
            dlse=None if dlse is None else piece.row_stats(dlse.detach().double()).abs(),
        )


def _piece_bands(
    problem: AttentionProblem,
    piece: Piece,
    cotangents: _PieceCotangents,
    leaves: Sequence[Tensor],
    relative_eps: float,
) -> Bands:
    """Return the sums of absolute values of one piece, not yet times eps.

    Args:
        problem: in float64.
        piece, cotangents: which part.
        leaves: captured tensors whose gradients are wanted.
        relative_eps: eps of the accumulation dtype over that of the inputs.
    """
    with torch.enable_grad():
        terms = dense_terms(problem, piece)
    terms_d = DenseTerms(*(x.detach() for x in terms))
    group = piece.heads_q // max(piece.heads_kv, 1)
    scale = abs(float(problem.scale))
    q, k = piece.q.detach().transpose(1, 2).abs(), piece.k.transpose(1, 2).abs()
    k = k.repeat_interleave(group, dim=1)
    sizes = q @ k.transpose(2, 3) * scale + terms_d.scores.abs().nan_to_num(posinf=0.0)
    # An absolute error of score or lse is a relative error of P, in the accumulation dtype's eps.
    score_size = torch.nn.functional.pad(sizes, (0, 1)).amax(dim=-1) + 1.0
    score_size = score_size + terms_d.lse.abs().nan_to_num(posinf=0.0)
    p = terms_d.p.nan_to_num()
    p = p * (1 + score_size * relative_eps).unsqueeze(-1)
    dout, dlse = cotangents
    out = (p @ terms_d.v).abs()
    out_band = p @ terms_d.v.abs()
    dp = (dout @ terms_d.v.abs().transpose(2, 3)) * (p > 0)
    delta = (dout * out).sum(dim=-1)
    if dlse is not None:
        delta = delta + dlse
    ds = p * (dp + delta.unsqueeze(-1))
    captures, ds_raw = _through_mods(terms, ds, leaves)
    dsink = None
    if problem.sink is not None:
        sink = problem.sink.detach().view(1, -1, 1)
        dsink = ((sink - terms_d.lse).exp() * delta).nan_to_num().sum(dim=(0, 2))
    return Bands(
        out=out_band.transpose(1, 2),
        lse=score_size,
        dq=(ds_raw @ k * scale).transpose(1, 2),
        dk=_ungrouped(ds_raw.transpose(2, 3) @ q * scale, group),
        dv=_ungrouped(p.transpose(2, 3) @ dout, group),
        dsink=dsink,
        captures=captures,
    )


def _through_mods(
    terms: DenseTerms, ds: Tensor, leaves: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return |ds| pulled back through softcap and score_mod: to captures, and to scale * q.k."""
    is_live = torch.isfinite(terms.scores)
    found = torch.autograd.grad(
        terms.scores,
        [terms.raw, *leaves],
        grad_outputs=torch.where(is_live, ds, 0.0),
        materialize_grads=True,
    )
    pulled = [grad.abs().nan_to_num() for grad in found]
    return tuple(pulled[1:]), pulled[0].detach()


def _ungrouped(x: Tensor, group: int) -> Tensor:
    """Return (batch, N, heads_kv, dim) of (batch, heads_q, N, dim), groups summed."""
    batch, heads, keys, dim = x.shape
    return x.view(batch, heads // group, group, keys, dim).sum(dim=2).transpose(1, 2)


def _joined(parts: Sequence[Tensor], spans: Sequence[Span | None], total: int, axis: int) -> Tensor:
    packed = [span for span in spans if span is not None]
    if not packed and parts:
        return parts[0]
    blocks = [part.squeeze(0) for part in parts]
    assert blocks, "a varlen call without sequences has nothing to judge"
    shape = list(blocks[0].shape)

    def empty(rows: int) -> Tensor:
        return blocks[0].new_zeros([*shape[:axis], rows, *shape[axis + 1 :]])

    return join_packed(blocks, packed, total=total, axis=axis, empty=empty)
