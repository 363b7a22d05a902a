"""Random problems: every feature of a call drawn together with every other.

Lives here: the draw. Not here: what is expected of a result (`budget.py`). Invariant: the same
seed and limits give the same problem, so a failure is named by its seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.problem import AttentionProblem
from fovea.testing.inputs import Shape, normal
from fovea.testing.masks import block_mask_of, random_states
from fovea.testing.problems import dense_problem, varlen_problem

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be drawn; a backend under test narrows it to what it takes."""

    dtypes: tuple[torch.dtype, ...] = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    head_dims: tuple[int, ...] = (1, 8, 16, 24, 33)
    lengths: tuple[int, ...] = (0, 1, 7, 16, 17, 33, 50)
    has_varlen: bool = True
    has_gradients: bool = True


ANY = Limits()


def random_problem(seed: int, limits: Limits = ANY) -> AttentionProblem:
    """Return the problem of a seed."""
    draw = random.Random(seed)
    heads_kv = draw.choice((1, 2, 3))
    shape = Shape(
        batch=draw.choice((1, 2, 3)),
        seqlen_q=draw.choice(limits.lengths),
        seqlen_kv=draw.choice(limits.lengths),
        heads_q=heads_kv * draw.choice((1, 2, 3)),
        heads_kv=heads_kv,
        head_dim=draw.choice(limits.head_dims),
        head_dim_v=draw.choice(limits.head_dims),
    )
    dtype = draw.choice(limits.dtypes)
    if limits.has_varlen and draw.random() < 0.3:
        return _random_varlen(draw, shape, dtype, limits)
    options = _random_options(draw, shape, dtype, limits)
    return dense_problem(shape, dtype=dtype, seed=seed, **options)


def _random_varlen(
    draw: random.Random, shape: Shape, dtype: torch.dtype, limits: Limits
) -> AttentionProblem:
    lengths_q = [draw.choice(limits.lengths) for _ in range(shape.batch)]
    lengths_kv = [draw.choice(limits.lengths) for _ in range(shape.batch)]
    longest = Shape(
        batch=shape.batch,
        seqlen_q=max(lengths_q),
        seqlen_kv=max(lengths_kv),
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
    )
    options = _random_options(draw, longest, dtype, limits)
    for name, lengths in (("seqused_q", lengths_q), ("seqused_kv", lengths_kv)):
        if draw.random() < 0.5:
            used = [draw.randint(0, length) for length in lengths]
            options[name] = torch.tensor(used, dtype=torch.int32)
    return varlen_problem(lengths_q, lengths_kv, longest, dtype=dtype, **options)


def _random_options(
    draw: random.Random, shape: Shape, dtype: torch.dtype, limits: Limits
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "causal": draw.choice((False, False, True, "top_left")),
        "window": draw.choice((None, None, (5, 3), (None, 4), (9, None), (0, 0))),
        "softcap": draw.choice((None, None, 1.5, 20.0)),
        "scale": draw.choice((None, None, 0.0, -0.4, 0.7)),
    }
    if draw.random() < 0.3:
        options["sink"] = normal((shape.heads_q,), seed=draw.randint(0, 99)) * 3
    if draw.random() < 0.4:
        options["score_mod"] = _random_score_mod(draw, shape, dtype, limits)
    if draw.random() < 0.4:
        options["mask_mod"] = draw.choice(_MASKS)
    if draw.random() < 0.3 and shape.q[1] > 0 and shape.k[1] > 0:
        options["block_mask"] = _random_block_mask(draw, shape)
    return options


_MASKS: Sequence[MaskMod] = (
    lambda b, h, q, k: (q + 2 * k + h) % 3 != 0,
    lambda b, h, q, k: (q // 8 == k // 8) | (k < b),
    lambda b, h, q, k: q % 5 != 1,
    lambda b, h, q, k: k < 0,
)


def _random_score_mod(
    draw: random.Random, shape: Shape, dtype: torch.dtype, limits: Limits
) -> ScoreMod:
    """Return a score_mod; what it captures requires grad in half of the draws."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    needs = limits.has_gradients and draw.random() < 0.5
    slopes = normal((shape.heads_q,), seed=1, dtype=wide).requires_grad_(needs)
    table = normal((shape.q[1] + shape.k[1] + 1,), seed=2, dtype=wide).requires_grad_(needs)
    middle = shape.q[1]
    mods: tuple[ScoreMod, ...] = (
        lambda s, b, h, q, k: s + 0.25 * slopes[h] * (k - q),
        lambda s, b, h, q, k: s * 0.5 + table[k - q + middle],
        lambda s, b, h, q, k: torch.where((q + k) % 4 == 1, -float("inf"), s * slopes[h]),
        lambda s, b, h, q, k: torch.tanh(s) * table[k] + table[-1 - q],
        lambda s, b, h, q, k: table[k] * 1.0 + b,
    )
    return draw.choice(mods)


def _random_block_mask(draw: random.Random, shape: Shape) -> Any:
    block_q, block_kv = draw.choice((4, 16, 64)), draw.choice((4, 16, 64))
    states = random_states(
        draw.choice((1, shape.batch)),
        draw.choice((1, shape.heads_q)),
        -(-shape.q[1] // block_q),
        -(-shape.k[1] // block_kv),
        seed=draw.randint(0, 99),
    )
    return block_mask_of(
        states,
        seqlen_q=shape.q[1],
        seqlen_kv=shape.k[1],
        block_q=block_q,
        block_kv=block_kv,
        mask_mod=draw.choice(_MASKS),
    )
