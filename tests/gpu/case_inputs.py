"""Tensors of the named calls that are no plain draw: layouts, and numbers that force a redo.

Lives here: functions from drawn q, k, v to those of a call. Not here: which call has which
(`cases.py`). Invariant: q, k and v keep their shapes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Transform = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

BF16 = torch.bfloat16


def _inside_nan(x: Tensor) -> Tensor:
    """Return a view of the same values in a buffer that is NaN elsewhere, with odd strides."""
    batch, rows, heads, dim = x.shape
    padded = -(-dim // 8) * 8 + 8
    buffer = x.new_full((batch + 1, rows + 9, heads + 1, padded), torch.nan)
    view = buffer[:batch, :rows, :heads, :dim]
    view.copy_(x)
    return view


def poisoned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _inside_nan(q), _inside_nan(k), _inside_nan(v)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory order (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return q, k, v


def expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V of one batch entry for all; one V row for all keys of a head."""
    return q, k[:1].expand_as(k), v[:1, :1].expand_as(v)


def unaligned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bases off by two bytes, and a last stride of 2."""

    def shifted(x: Tensor) -> Tensor:
        buffer = x.new_full((x.numel() + 1,), torch.nan)
        buffer[1:] = x.reshape(-1)
        return buffer[1:].view(x.shape)

    spread = torch.stack((v, torch.full_like(v, torch.nan)), dim=-1)[..., 0]
    return shifted(q), shifted(k), spread


def ramp(low: float, high: float) -> Transform:
    """Return scores that run from `low` to `high` (powers of two) along the keys of every row."""

    def transform(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        steps = torch.linspace(low, high, k.shape[1], device=k.device) * 0.6931471805599453
        unit = k.shape[-1] ** 0.5 / 8.0  # 8 * unit * steps / sqrt(head_dim) = steps
        q[..., 0] = 8.0
        k[..., 0] = (steps * unit).to(k.dtype)[:, None]
        return q, k, v

    return transform


def huge_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Single keys whose scores are hundreds of times the others', each seen by some rows."""
    k = k.clone()
    for position in (0, k.shape[1] // 2, k.shape[1] - 1):
        k[:, position] *= 60.0
    return q, k, v


def huge_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    limit = 2.0**120 if v.dtype == BF16 else 2.0**12
    v = v.clone()
    v[:, ::3] *= limit
    return q, k, v


def zeros(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), k, v
