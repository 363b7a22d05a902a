"""Every gather of a problem's mods at every position they are asked for, and nothing else.

Lives here: the check for backends whose kernels clamp an index and cannot report it. Not here: the
test itself (`mods/evaluate.py`), which the reference makes as it runs. Invariant: what raises here
raises on the reference, and the other way round.
"""

import torch

from fovea.mods.evaluate import evaluate, is_checked
from fovea.mods.out_of_range import may_lack_values
from fovea.problem import AttentionProblem
from fovea.reference.sequences import pieces
from fovea.reference.visibility import BlockStates, Visibility, positions_of

_ROWS, _TILE_N = 256, 256


@torch.no_grad()
def check_gathers(problem: AttentionProblem) -> None:
    """Evaluate the mods of a problem on all its tiles.

    Raises:
        GatherError: a gather leaves its tensor.
        ValueError: an integer is divided by 0.
    """
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    if not any(mod is not None and may_lack_values(mod.graph) for mod in mods):
        return
    blocks = BlockStates.of(problem)
    score_mod = problem.score_mod
    for piece in pieces(problem):
        visibility = Visibility.of(problem, piece, blocks)
        for begin in range(0, piece.seqlen_q, _ROWS):
            end = min(begin + _ROWS, piece.seqlen_q)
            for tile, hidden in visibility.tiles(begin, end, _TILE_N):
                if score_mod is None or not may_lack_values(score_mod.graph):
                    continue
                indices = positions_of(piece, tile)
                if not is_checked(indices.q_idx):
                    return
                score = torch.zeros((1, 1, 1, 1), device=problem.device)
                visible = torch.ones((), dtype=torch.bool, device=problem.device)
                if hidden is not None:
                    visible = ~hidden
                evaluate(
                    score_mod.graph,
                    indices,
                    score=score,
                    captures=score_mod.captures,
                    scalars=score_mod.scalars,
                    check=visible,
                    source=score_mod.source,
                )
