"""From scaled products to final scores: softcap and score_mod of one tile.

Lives here: design rule 1 after `scale * q.k`. Not here: its derivative (`score_gradients.py`),
masks (`visibility.py`), the softmax. Invariant: `final` may be overwritten by its receiver; what
the derivative needs is kept apart from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.mods.evaluate import Positions, evaluate, is_checked
from fovea.mods.out_of_range import may_lack_values
from fovea.mods.trace import TracedMod
from fovea.problem import AttentionProblem
from fovea.reference.sequences import Piece
from fovea.reference.visibility import Tile, positions_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreTile:
    """Scores of one tile, and what the derivative needs of them.

    Shapes:
        all (batch, heads_q, M, N). final: natural units. tanh: of scale * q.k / softcap, None
        without a softcap. mod_input: what the score_mod was given, None without one.
    """

    final: Tensor
    tanh: Tensor | None
    mod_input: Tensor | None
    indices: Positions | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreChain:
    """Softcap and score_mod of one piece."""

    piece: Piece
    softcap: float | Tensor | None
    score_mod: TracedMod | None

    @classmethod
    def of(cls, problem: AttentionProblem, piece: Piece) -> "ScoreChain":
        """Return the chain of one piece of a problem."""
        return cls(piece=piece, softcap=problem.softcap, score_mod=problem.score_mod)

    def apply(self, raw: Tensor, tile: Tile, hidden: Tensor | None) -> ScoreTile:
        """Return the final scores of a tile from raw = scale * q.k, which is consumed.

        hidden pairs have some score as well; it is for the caller to drop it.

        Raises:
            GatherError: a visible pair gathers out of range, where that is checked.
        """
        tanh: Tensor | None = None
        score = raw
        if self.softcap is not None:
            tanh = torch.tanh(raw / self.softcap)
            score = tanh * self.softcap
        if self.score_mod is None:
            return ScoreTile(final=score, tanh=tanh, mod_input=None, indices=None)
        indices = positions_of(self.piece, tile)
        visible: Tensor | None = None
        if is_checked(indices.q_idx) and may_lack_values(self.score_mod.graph):
            visible = score.new_ones((), dtype=torch.bool) if hidden is None else ~hidden
        final = score_of(self.score_mod, score, indices, visible)
        return ScoreTile(final=final, tanh=tanh, mod_input=score, indices=indices)


def score_of(
    mod: TracedMod, score: Tensor, indices: Positions, visible: Tensor | None = None
) -> Tensor:
    """Return a score_mod's value on one tile as a new tensor of the shape and dtype of `score`.

    Args:
        visible: pairs where a gather out of range is an error; None = nowhere.
    """
    final = evaluate(
        mod.graph,
        indices,
        score=score,
        captures=mod.captures,
        scalars=mod.scalars,
        check=visible,
        source=mod.source,
    )
    # A mod may return its argument, a captured tensor's own memory, or one number for all pairs.
    expanded = final.to(score.dtype).expand(score.shape)
    return expanded.clone(memory_format=torch.contiguous_format)
