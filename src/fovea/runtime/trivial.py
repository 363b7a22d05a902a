"""Problems that need no kernel: no query, or no key.

Lives here: their results. Invariant: a launch always has at least one query row and one key, since
the copy engine takes no empty tensor.
"""

import torch
from torch import Tensor

from fovea.problem import AttentionProblem, ForwardResult, Varlen


def is_trivial(problem: AttentionProblem) -> bool:
    """Return whether a problem has no queries or no keys."""
    has_queries = problem.q.numel() > 0
    has_keys = problem.k.shape[-3] > 0 and problem.k.numel() > 0
    return not (has_queries and has_keys and problem.head_dim_v > 0)


def trivial_forward(problem: AttentionProblem) -> ForwardResult | None:
    """Return the result of a problem without queries or without keys, None for any other."""
    if not is_trivial(problem):
        return None
    lse = torch.full(problem.lse_shape, -float("inf"), dtype=torch.float32, device=problem.device)
    max_score: Tensor | None = lse.clone() if problem.wants_max_score else None
    if problem.sink is not None:
        lse.copy_(problem.sink.detach().float()[:, None].expand_as(lse))
        if problem.varlen is not None:
            lse.masked_fill_(_idle_rows(problem.varlen, lse.shape[-1]), -float("inf"))
    return ForwardResult(problem.empty_out().zero_(), lse, max_score)


def _idle_rows(varlen: Varlen, total: int) -> Tensor:
    """Return (total,) bool: rows that no sequence uses. Nothing waits for the device."""
    starts = varlen.cu_seqlens_q
    row = torch.arange(total, dtype=torch.int32, device=starts.device)
    if starts.shape[0] == 1:
        return torch.ones_like(row, dtype=torch.bool)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    is_behind = sequence == starts.shape[0] - 1
    sequence = sequence.clamp(max=starts.shape[0] - 2)
    used = starts.diff() if varlen.seqused_q is None else varlen.seqused_q
    return is_behind | (row - starts[sequence] >= used[sequence])
