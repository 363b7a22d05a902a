"""Attention of one dense call spelled out on matrices, mods called as plain Python.

Lives here: a second, independent yardstick beside the oracle: it knows no problem, graph, tile or
block list, only a matrix of what is visible. Not here: anything that a user would call. Invariant:
differentiable, and correct for rows that see nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SpelledOut(NamedTuple):
    """Results, laid out as those of `fovea.attention`."""

    out: Tensor
    lse: Tensor
    max_score: Tensor


def spelled_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    score: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> SpelledOut:
    """Return attention in the dtype of the inputs; pass float64.

    Shapes:
        q, k, v: as `fovea.attention`; visible: broadcastable to (batch, heads_q, M, N).

    Args:
        q, k, v: the inputs.
        visible: pairs to keep; None = all.
        score: a score_mod, called once on tensors that broadcast.
        scale, softcap, sink: as `fovea.attention`.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if score is not None:
        b, h, q_idx, kv_idx = positions(*s.shape)
        s = score(s, b, h, q_idx, kv_idx).expand(s.shape)
    seen = s.detach() != -torch.inf
    if visible is not None:
        seen = seen & visible
    # A column of -inf gives rows without keys a maximum; the sink is a column whose value is 0.
    logits = torch.where(seen, s, -torch.inf)
    max_score = torch.nn.functional.pad(logits.detach(), (0, 1), value=-torch.inf).amax(dim=-1)
    if sink is not None:
        column = sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    is_dead = (logits.detach() == -torch.inf).all(dim=-1, keepdim=True)
    safe = torch.where(is_dead, 0.0, logits)
    p = torch.where(is_dead, 0.0, safe.softmax(dim=-1))[..., : s.shape[-1]]
    lse = torch.where(is_dead.squeeze(-1), -torch.inf, safe.logsumexp(dim=-1))
    return SpelledOut(out=torch.einsum("bhmn,bnhd->bmhd", p, v), lse=lse, max_score=max_score)


def positions(
    batch: int, heads: int, seqlen_q: int, seqlen_kv: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b, h, q_idx, kv_idx that broadcast to (batch, heads, M, N)."""
    return (
        torch.arange(batch).view(-1, 1, 1, 1),
        torch.arange(heads).view(1, -1, 1, 1),
        torch.arange(seqlen_q).view(1, 1, -1, 1),
        torch.arange(seqlen_kv).view(1, 1, 1, -1),
    )


def band(
    seqlen_q: int,
    seqlen_kv: int,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
) -> Tensor:
    """Return (M, N) bool: what causal and window leave visible, from their definition."""
    diagonal = torch.arange(seqlen_q).view(-1, 1)
    if causal != "top_left":
        diagonal = diagonal + seqlen_kv - seqlen_q
    kv_idx = torch.arange(seqlen_kv)
    left, right = window or (None, None)
    visible = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if causal:
        visible &= kv_idx <= diagonal
    if left is not None:
        visible &= kv_idx >= diagonal - left
    if right is not None:
        visible &= kv_idx <= diagonal + right
    return visible
