"""Score mods: position biases, soft caps, tables that learn, low-rank position terms, activations.

Lives here: functions of one score and its indices. Not here: masks. Invariant: tensors given to a
factory are captured as they are, so those that require grad get their gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fovea.errors import invalid
from fovea.mods.library.arguments import (
    check_flags,
    check_integer,
    check_number,
    check_tensor,
)
from fovea.mods.library.combine import ScoreMod
from fovea.mods.values import made_for


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes: 2^(-8 (h + 1) / heads) for powers of two, interleaved otherwise.

    Shapes: -> (heads,) fp32.
    """
    check_integer("heads", heads, 1)
    base = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / base) for i in range(base)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / base) for i in range(heads - base)]
    return torch.tensor(slopes)


def alibi(heads: int | None = None, slopes: Tensor | None = None) -> ScoreMod:
    """Return ALiBi: a penalty proportional to the distance, its slope falling with the head.

    Formula: score + m_h (kv - q), m_h = slopes[h], or 2^(-8 (h + 1) / heads).
    Shapes: slopes (heads,), learnable if it requires grad.
    Example: `alibi(heads=16)`.
    Source: https://arxiv.org/abs/2108.12409.
    """
    if slopes is not None:
        check_tensor("slopes", slopes, 1)
        if heads is not None and heads != slopes.shape[0]:
            allowed = f"None, or {slopes.shape[0]}, the heads of slopes"
            raise ValueError(invalid("heads", heads, allowed, "pass one of both"))
        table = slopes

        def with_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + table[h] * (kv_idx - q_idx)

        return with_table
    if heads is None:
        raise ValueError("alibi needs heads or slopes; pass the number of query heads")
    check_integer("heads", heads, 1)
    rate = 8.0 / heads

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        head = made_for(h, heads)
        return score + torch.exp2(-((head + 1) * rate)) * (kv_idx - q_idx)

    return mod


def softcap(cap: float) -> ScoreMod:
    """Return a soft bound on the score.

    Formula: cap * tanh(score / cap).
    Shapes: none.
    Example: `softcap(30.0)`; the keyword softcap= applies it before a score_mod.
    Source: Gemma 2, https://arxiv.org/abs/2408.00118.
    """
    check_number("cap", cap, 0)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return mod


def gemma2(cap: float = 50.0, window: int | None = None) -> ScoreMod:
    """Return Gemma 2's attention: capped scores, causal, and local in every second layer.

    Formula: cap * tanh(score / cap) where 0 <= q - kv (< window), else -inf.
    Shapes: none.
    Example: `gemma2(50.0, window=4096)`; masks apart let whole blocks be skipped.
    Source: https://arxiv.org/abs/2408.00118.
    """
    check_number("cap", cap, 0)
    if window is None:

        def global_layer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.where(q_idx >= kv_idx, cap * torch.tanh(score / cap), -float("inf"))

        return global_layer
    check_integer("window", window, 1)
    width = window

    def local_layer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = (q_idx >= kv_idx) & (q_idx - kv_idx < width)
        return torch.where(visible, cap * torch.tanh(score / cap), -float("inf"))

    return local_layer


def causal_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Return the score, -inf in the query's future; this is a score_mod itself.

    Formula: score where q >= kv, else -inf.
    Shapes: none.
    Example: `fovea.attention(q, k, v, score_mod=causal_score)`.
    Source: https://pytorch.org/blog/flexattention.
    """
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def relative_position() -> ScoreMod:
    """Return the plainest bias: the distance itself.

    Formula: score + (q - kv).
    Shapes: none.
    Example: `relative_position()`.
    Source: https://pytorch.org/blog/flexattention.
    """

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (q_idx - kv_idx)

    return mod


def relative_bias(table: Tensor, max_distance: int) -> ScoreMod:
    """Return a learned bias per head and clipped distance.

    Formula: score + table[h, clip(q - kv, -max_distance, max_distance) + max_distance].
    Shapes: table (heads, 2 * max_distance + 1).
    Example: `relative_bias(nn.Parameter(torch.zeros(8, 257)), 128)`.
    Source: https://arxiv.org/abs/1803.02155.
    """
    check_tensor("table", table, 2)
    check_integer("max_distance", max_distance, 0)
    if not isinstance(max_distance, Tensor) and table.shape[1] != 2 * max_distance + 1:
        allowed = f"(heads, {2 * max_distance + 1}), one for each distance up to max_distance"
        remedy = "make the table as long, or change max_distance"
        raise ValueError(invalid("table.shape", tuple(table.shape), allowed, remedy))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - kv_idx).clamp(-max_distance, max_distance)
        return score + table[h, distance + max_distance]

    return mod


def t5_bias(table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> ScoreMod:
    """Return T5's bias: exact for near keys, logarithmic buckets for far ones.

    Formula: score + table[bucket(kv - q), h]; half of the buckets of a direction hold single
        distances, the rest grow logarithmically up to max_distance.
    Shapes: table (buckets, heads), T5's own layout.
    Example: `t5_bias(model.relative_attention_bias.weight)`.
    Source: https://arxiv.org/abs/1910.10683, section 2.1.
    """
    check_tensor("table", table, 2)
    least = 4 if bidirectional else 2
    if table.shape[0] < least or (bidirectional and table.shape[0] % 2):
        kind = f"{'an even number' if bidirectional else 'a number'} of at least {least}"
        allowed = f"(buckets, heads), buckets {kind}"
        remedy = "pass table.T if its heads come first"
        raise ValueError(invalid("table.shape", tuple(table.shape), allowed, remedy))
    check_integer("max_distance", max_distance, table.shape[0] // least + 1)
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    reach, wide = math.log(max_distance / exact), buckets - exact

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if bidirectional:
            first = torch.where(kv_idx > q_idx, buckets, 0)
            distance = (kv_idx - q_idx).abs()
        else:
            first = 0
            distance = (q_idx - kv_idx).clamp(min=0)
        # clamp: the logarithm of a distance below `exact` is not used, but must exist
        far = exact + (torch.log(distance.clamp(min=exact) / exact) / reach * wide).long()
        bucket = torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
        return score + table[bucket + first, h]

    return mod


def head_bias(bias: Tensor) -> ScoreMod:
    """Return a bias per head.

    Formula: score + bias[h].
    Shapes: bias (heads,).
    Example: `head_bias(nn.Parameter(torch.zeros(8)))`.
    Source: attention-gym, benchmarks (https://github.com/meta-pytorch/attention-gym).
    """
    check_tensor("bias", bias, 1)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h]

    return mod


def dense_bias(bias: Tensor) -> ScoreMod:
    """Return a bias given for every pair, with extents of 1 where it is shared.

    Formula: score + bias[b, h, q, kv].
    Shapes: bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_kv or 1).
    Example: `dense_bias(nn.Parameter(torch.zeros(1, 8, 512, 512)))`.
    Source: additive attention bias, as attn_mask in torch's scaled_dot_product_attention.
    """
    check_tensor("bias", bias, 4)
    wide_b, wide_h, wide_q, wide_kv = (int(extent > 1) for extent in bias.shape)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[b * wide_b, h * wide_h, q_idx * wide_q, kv_idx * wide_kv]

    return mod


def pair_bias(bias: Tensor, residues: Tensor | None = None) -> ScoreMod:
    """Return Evoformer's pair bias, shared by the rows of a batch, with padding hidden.

    Formula: score + bias[b // rows, h, q, kv], -inf where residues[b, kv] is False.
    Shapes: bias (proteins, heads, seqlen_q, seqlen_kv); residues (batch, seqlen_kv) bool, batch =
        proteins * rows.
    Example: `pair_bias(bias, mask)`; gradients for the bias are summed over rows.
    Source: AlphaFold 2, https://www.nature.com/articles/s41586-021-03819-2, algorithm 7.
    """
    check_tensor("bias", bias, 4)
    if residues is None:

        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[b, h, q_idx, kv_idx]

        return mod
    check_flags("residues", residues, 2)
    if bias.shape[0] == 0 or residues.shape[0] % bias.shape[0]:
        allowed = f"a multiple of {bias.shape[0]}, the proteins of bias"
        remedy = "give each protein as many rows"
        raise ValueError(invalid("residues.shape[0]", residues.shape[0], allowed, remedy))
    mask, rows = residues, residues.shape[0] // bias.shape[0]

    def masked_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(
            mask[b, kv_idx], score + bias[b // rows, h, q_idx, kv_idx], -float("inf")
        )

    return masked_mod


def sandwich(heads: int, max_length: int, width: int = 128, device: Any = None) -> ScoreMod:
    """Return Sandwich: the products of sinusoidal position embeddings, compressed per head.

    Formula: score + heads / (8 (h + 1)) * sum over i of cos((q - kv) / 10000^(2 i / width)).
    Shapes: lengths up to max_length.
    Example: `sandwich(heads=12, max_length=2048)`.
    Source: https://arxiv.org/abs/2212.10356.
    """
    check_integer("heads", heads, 1)
    check_integer("max_length", max_length, 1)
    check_integer("width", width, 1)
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    distances = torch.arange(max_length, device=device, dtype=torch.float64)
    table = torch.cos(distances[:, None] * rates).sum(1).float()
    compression = (heads / (8.0 * torch.arange(1, heads + 1, device=device))).float()

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[(q_idx - kv_idx).abs()] * compression[h]

    return mod


def graphormer_spatial(table: Tensor, distances: Tensor) -> ScoreMod:
    """Return Graphormer's spatial encoding: a learned number per head and path length.

    Formula: score + table[h, distances[b, q, kv]].
    Shapes: table (heads, lengths); distances (batch, nodes, nodes) integers.
    Example: `graphormer_spatial(nn.Parameter(torch.zeros(8, 12)), distances)`.
    Source: https://arxiv.org/abs/2106.05234, section 3.1.2.
    """
    check_tensor("table", table, 2)
    check_tensor("distances", distances, 3, is_index=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, distances[b, q_idx, kv_idx]]

    return mod


def graphormer_edges(table: Tensor, edges: Tensor, lengths: Tensor) -> ScoreMod:
    """Return Graphormer's edge encoding: the mean of learned numbers along the shortest path.

    Formula: score + (1 / max(L, 1)) * sum over n < L of table[h, n, edges[b, q, kv, n]] with L =
        lengths[b, q, kv].
    Shapes: table (heads, hops, edge types); edges (batch, nodes, nodes, hops) and lengths (batch,
        nodes, nodes) integers.
    Example: `graphormer_edges(nn.Parameter(torch.zeros(8, 5, 4)), edges, lengths)`.
    Source: https://arxiv.org/abs/2106.05234, section 3.1.3.
    """
    check_tensor("table", table, 3)
    check_tensor("edges", edges, 4, is_index=True)
    check_tensor("lengths", lengths, 3, is_index=True)
    hops = edges.shape[-1]

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        length = lengths[b, q_idx, kv_idx]
        total = torch.zeros_like(score)
        for n in range(hops):
            step = table[h, n, edges[b, q_idx, kv_idx, n]]
            total = total + torch.where(length > n, step, 0.0)
        return score + total / length.clamp(min=1)

    return mod


def mla_rope(q_rope: Tensor, k_rope: Tensor, scale: float = 1.0) -> ScoreMod:
    """Return multi-head latent attention's position term: a product of separate rotary parts.

    Formula: score + scale * sum over d of q_rope[b, h, q, d] * k_rope[b, h // group, kv, d].
    Shapes: q_rope (batch, heads, seqlen_q, d), k_rope (batch, heads_k, seqlen_kv, d), group = heads
        / heads_k.
    Example: `mla_rope(q_rope, k_rope, scale=192**-0.5)`.
    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.3.
    """
    check_tensor("q_rope", q_rope, 4)
    check_tensor("k_rope", k_rope, 4)
    heads, heads_k = q_rope.shape[1], k_rope.shape[1]
    if heads_k == 0 or heads % heads_k:
        allowed = f"a divisor of {heads}, the heads of q_rope"
        raise ValueError(invalid("heads of k_rope", heads_k, allowed, "expand or slice k_rope"))
    if q_rope.shape[3] != k_rope.shape[3]:
        allowed = f"{q_rope.shape[3]}, that of q_rope"
        raise ValueError(invalid("head_dim of k_rope", k_rope.shape[3], allowed, "match them"))
    group = q_rope.shape[1] // k_rope.shape[1]

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + scale * torch.dot(q_rope[b, h, q_idx], k_rope[b, h // group, kv_idx])

    return mod


def activation(function: Callable[[Any], Any] = torch.relu, offset: float = 1.0) -> ScoreMod:
    """Return a score_mod with which softmax computes another activation; see `undo_softmax`.

    Formula: log(function(score) + offset), so that exp of it is the activation plus the offset.
    Shapes: function is a pointwise torch function that stays above -offset.
    Example: `activation(torch.nn.functional.gelu)`.
    Source: attention-gym, mods/activation (https://github.com/meta-pytorch/attention-gym).
    """
    if not callable(function):
        allowed = "a pointwise function, such as torch.relu"
        raise TypeError(invalid("function", repr(function), allowed, "pass the function itself"))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.log(function(score) + offset)

    return mod


def undo_softmax(out: Tensor, lse: Tensor, v_sum: Tensor, offset: float = 1.0) -> Tensor:
    """Return sum over kv of function(score) * v from an attention with `activation`.

    Formula: out * exp(lse) - offset * v_sum; the gradient flows through lse.
    Shapes: out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q), v_sum (batch, 1,
        heads, head_dim) or what broadcasts.
    """
    return out * lse.exp().transpose(1, 2).unsqueeze(-1) - offset * v_sum


def temperature(scale: Tensor) -> ScoreMod:
    """Return a learned factor, one for all heads (0-d) or one per head.

    Formula: score * scale, or score * scale[h].
    Shapes: scale () or (heads,).
    Example: `temperature(nn.Parameter(torch.ones(())))`.
    Source: Swin V2, https://arxiv.org/abs/2111.09883, section 3.3.
    """
    check_tensor("scale", scale, 0, 1)
    if scale.dim() == 0:

        def shared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * scale

        return shared

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale[h]

    return mod
