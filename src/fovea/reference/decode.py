"""Split-KV attention: parts of the keys apart, then merged. The specification of decode kernels.

Lives here: the merge of partial results, and the forward that is made of it. Not here: how many
parts (`tiling/split_kv.py`), the online softmax inside one part (`tiled_forward.py`). Invariant:
the merge is exact arithmetic away from the unsplit result, for every number of parts, parts that
see nothing included.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fovea.plan.numerics import REFERENCE_TILE_N
from fovea.problem import AttentionProblem, ForwardResult
from fovea.reference.numerics import exp_relative, finite_reference, log_sum
from fovea.reference.sequences import pieces
from fovea.reference.tiled_forward import PieceForward, RowState, empty_result, finished
from fovea.reference.visibility import BlockStates
from fovea.tiling.split_kv import split_range


class Partial(NamedTuple):
    """Normalised results over some of the keys.

    Shapes:
        out: (parts, ..., head_dim_v); lse: (parts, ...), natural, -inf where a part saw nothing.
    """

    out: Tensor
    lse: Tensor


def combine(parts: Partial) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over the union of the parts' keys, dtype of lse.

    A part that saw nothing weighs exactly 0, whatever its out holds (never 0 * x).

    Shapes:
        out (..., head_dim_v), lse (...).
    """
    is_empty = parts.lse == -torch.inf
    reference = finite_reference(parts.lse.amax(dim=0))
    weight = exp_relative(parts.lse, reference)
    total = weight.sum(dim=0)
    out = parts.out.to(parts.lse.dtype).masked_fill(is_empty.unsqueeze(-1), 0.0)
    merged = (out * weight.unsqueeze(-1)).sum(dim=0) / total.unsqueeze(-1)
    is_dead = total == 0
    return (
        merged.masked_fill(is_dead.unsqueeze(-1), 0.0),
        log_sum(reference, total).masked_fill(is_dead, -torch.inf),
    )


@torch.no_grad()
def split_forward(
    problem: AttentionProblem, *, num_splits: int, tile_n: int = REFERENCE_TILE_N
) -> ForwardResult:
    """Return the forward of a problem whose keys are cut into parts of whole tiles.

    The sink joins once, after the merge's parts are known: it belongs to no key.
    """
    result = empty_result(problem)
    blocks = BlockStates.of(problem)
    for piece in pieces(problem):
        run = PieceForward.of(problem, piece, blocks, tile_n=tile_n)
        for begin, end in run.chunks():
            states = [
                run.rows(begin, end, run.rule, _part(piece.seqlen_kv, tile_n, split, num_splits))
                for split in range(num_splits)
            ]
            run.store(result, begin, end, *_merged(states, run.sink()))
    return result


def _part(seqlen_kv: int, tile_n: int, split: int, num_splits: int) -> range:
    begin, end = split_range(split, num_splits, first=0, end=-(-seqlen_kv // tile_n))
    return range(int(begin), int(end))


def _merged(states: list[RowState], sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, maximum) of rows whose parts ended in `states`, axes as in RowState."""
    partial = [finished(state, None) for state in states]
    out = torch.stack([part_out for part_out, _ in partial])
    lse = torch.stack([part_lse for _, part_lse in partial]).squeeze(-1)
    maximum = torch.stack([state.maximum for state in states]).amax(dim=0)
    if sink is not None:
        # One more part: the sink's logit, with an output of 0.
        out = torch.cat([out, torch.zeros_like(out[:1])])
        lse = torch.cat([lse, sink.squeeze(-1).expand_as(lse[:1])])
    merged_out, merged_lse = combine(Partial(out=out, lse=lse))
    return merged_out, merged_lse.unsqueeze(-1), maximum
