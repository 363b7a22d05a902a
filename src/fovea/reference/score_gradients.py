"""Gradients through softcap and score_mod of one tile, and of the tensors a score_mod captured.

Lives here: the derivative of `scores.py`, and sums over tiles. Not here: the derivative programs
(`mods/derivative.py`) and what their nodes mean (`mods/evaluate.py`). Invariants: a hidden pair
contributes exactly 0 to every gradient, whatever value its derivative has there; every sum has a
fixed order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.mods.derivative import derivative
from fovea.mods.evaluate import run_nodes, surround
from fovea.mods.graph import Scatter, ScoreDerivative
from fovea.mods.trace import TracedMod
from fovea.problem import AttentionProblem, GradientNeeds
from fovea.reference.scores import ScoreTile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreGradients:
    """The derivative of a problem's score chain, and what captured tensors have received so far.

    Shapes:
        totals: one float64 tensor of the capture's shape for each gradient asked for.
    """

    mod: TracedMod | None
    program: ScoreDerivative | None
    totals: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, problem: AttentionProblem, needs: GradientNeeds) -> "ScoreGradients":
        """Return empty sums for the captures that `needs` names."""
        mod = problem.score_mod
        if mod is None:
            return cls(mod=None, program=None, totals=())
        program = derivative(mod.graph)
        if problem.dtype == torch.float64:
            program = program.widened
        # Millions of terms may meet in one element (a slope per head), so the sums are float64.
        totals = tuple(
            torch.zeros(capture.shape, dtype=torch.float64, device=problem.device)
            if is_needed
            else None
            for capture, is_needed in zip(mod.captures, needs.score_captures, strict=True)
        )
        return cls(mod=mod, program=program, totals=totals)

    def pull_back(self, ds: Tensor, scores: ScoreTile) -> Tensor:
        """Return the gradient of scale * q.k from that of the final scores; add captures' parts.

        ds is exactly 0 at hidden pairs, and where it is 0 the program's results are 0.
        """
        if self.mod is not None:
            ds = self._pull_back_mod(ds, scores, self.mod)
        if scores.tanh is not None:
            ds = ds * (1 - scores.tanh.square())
        return ds

    def results(self) -> tuple[Tensor | None, ...]:
        """Return one gradient a captured tensor, in its dtype; None where not asked for."""
        if self.mod is None:
            return ()
        return tuple(
            None if total is None else total.to(dtype=capture.dtype, device=capture.device)
            for total, capture in zip(self.totals, self.mod.captures, strict=True)
        )

    def _pull_back_mod(self, ds: Tensor, scores: ScoreTile, mod: TracedMod) -> Tensor:
        program, indices, mod_input = self.program, scores.indices, scores.mod_input
        assert program is not None
        assert indices is not None
        assert mod_input is not None
        around = surround(
            {
                "score": mod_input,
                "grad": ds,
                "b": indices.b,
                "h": indices.h,
                "q_idx": indices.q_idx,
                "kv_idx": indices.kv_idx,
            },
            mod.captures,
            mod.scalars,
        )
        found = run_nodes(program, around, keep_axes=True)
        values = dict(zip(program.outputs, found, strict=True))
        for scatter in program.scatters:
            total = self.totals[scatter.capture]
            if total is None:
                continue
            shape = (*_free_extents(program, scatter), *ds.shape)
            index = [values[number] for number in scatter.index]
            scatter_add_(total, index, values[scatter.value], shape)
        d_score = values[program.d_score]
        return d_score.reshape(d_score.shape[-ds.dim() :]).to(ds.dtype).expand(ds.shape)


def _free_extents(program: ScoreDerivative, scatter: Scatter) -> tuple[int, ...]:
    """Return the leading extents of a scatter that runs over axes of the program."""
    lead = [1] * (max(scatter.axes) + 1 if scatter.axes else 0)
    for axis in scatter.axes:
        lead[-(axis + 1)] = program.axis_extent(axis)
    return tuple(lead)


def scatter_add_(
    total: Tensor, index: Sequence[Tensor], value: Tensor, shape: tuple[int, ...]
) -> None:
    """Add value to the indexed elements of total, for every position of `shape`, repeats included.

    Dimensions on which no index depends are summed first, so a bias per head costs one addition a
    head and tile. In place on a tensor whose old value no derivative needs.

    Shapes:
        index, value: broadcastable to `shape`.
    """
    rank = len(shape)
    if 0 in shape or total.numel() == 0:
        return
    if not index:
        total.add_(value.expand(shape).sum(dtype=total.dtype))
        return
    padded = [number.reshape((1,) * (rank - number.dim()) + number.shape) for number in index]
    kept = tuple(max(number.shape[axis] for number in padded) for axis in range(rank))
    summed = [axis for axis in range(rank) if kept[axis] == 1 and shape[axis] != 1]
    value = value.expand(shape)
    value = value.sum(summed, keepdim=True, dtype=total.dtype) if summed else value.to(total.dtype)
    inside = [
        number.clamp(-extent, extent - 1).expand(kept)
        for number, extent in zip(padded, total.shape, strict=True)
    ]
    if total.is_cuda:
        # index_put sorts on CUDA and so adds in a fixed order; index_add uses atomics there.
        total.index_put_(tuple(inside), value, accumulate=True)
        return
    # On a CPU it is the other way round.
    flat = torch.zeros((), dtype=torch.int64)
    for number, extent in zip(inside, total.shape, strict=True):
        flat = flat * extent + torch.where(number < 0, number + extent, number)
    total.view(-1).index_add_(0, flat.reshape(-1), value.reshape(-1))
