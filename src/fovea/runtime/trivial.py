"""Problems that need no kernel: no query, or no key.

Lives here: their results. Invariant: a launch always has at least one query row and one key, since
the copy engine takes no empty tensor.
"""

import torch
from torch import Tensor

from fovea.problem import AttentionProblem, ForwardResult


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
    return ForwardResult(problem.empty_out().zero_(), lse, max_score)
