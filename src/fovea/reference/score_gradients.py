"""Gradients through softcap and score_mod of one tile, and of the tensors a score_mod captured.

Lives here: the derivative of `scores.py`, and sums over tiles. Not here: the derivative programs
(`mods/derivative.py`) and what they mean (`mods/pull_back.py`). Invariants: a hidden pair
contributes exactly 0 to every gradient, whatever value its derivative has there; every sum has a
fixed order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.mods.derivative import derivative
from fovea.mods.graph import ScoreDerivative
from fovea.mods.pull_back import pull_back_
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
        inputs = indices.inputs() | {"score": mod_input, "grad": ds}
        return pull_back_(program, inputs, self.totals, mod.captures, mod.scalars)
