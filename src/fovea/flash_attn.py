"""Drop-in replacements for the functions of the flash-attn package, version 2.

Lives here: their signatures and their own meanings (a window of -1 is unlimited, softcap 0 is off,
`return_attn_probs` returns the log-sum-exp, a KV cache is updated in place). Not here: attention
itself. Invariant: an argument works as documented there, or raises; none is ignored except
`num_splits`, which only tunes.
"""

import operator
from typing import Any, cast

import torch
from torch import Tensor

from fovea.api import AuxRequest, attention, attention_varlen
from fovea.api.attention import autocast
from fovea.errors import UnsupportedError, invalid
from fovea.mods.evaluate import is_checked
from fovea.ops import attend
from fovea.problem import AttentionProblem, Request, VarlenRequest, make_varlen
from fovea.problem.checks import check_device, check_layout, is_unreadable
from fovea.problem.kv_cache import KvCache, check_argument
from fovea.tiling.paged_kv import check_pages

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

type_of_window = tuple[int | None, int | None] | None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: type_of_window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Return attention of (batch, seqlen, heads, head_dim) tensors, called as flash-attn's
    function.

    Args:
        q, k, v: the inputs; heads of q are a multiple of those of k and v.
        dropout_p: must be 0.
        softmax_scale: default 1/sqrt(head_dim).
        causal: bottom-right aligned.
        window_size: (left, right); -1 or None is unlimited.
        softcap: 0 is off.
        alibi_slopes: (heads,) or (batch, heads); adds -slope * |query + seqlen_k - seqlen_q - key|.
        deterministic: True asks for a deterministic backward; False follows
            torch.use_deterministic_algorithms.
        return_attn_probs: return (out, softmax_lse, None), as flash-attn does without dropout.
        learnable_sink: (heads,), one more logit in each softmax denominator.

    Raises:
        UnsupportedError: dropout.
    """
    _check_dropout(dropout_p)
    score_mod = None
    if alibi_slopes is not None:
        axes = "batch, seqlen, heads, head_dim"
        check_argument("q", q, axes)
        check_argument("k", k, axes)
        _check_slopes(alibi_slopes, q.shape[0], q.shape[2])
        score_mod = _alibi(alibi_slopes, k.shape[1] - q.shape[1])
    out, aux = attention(
        q,
        k,
        v,
        causal=causal,
        window=_window(window_size),
        softcap=_softcap(softcap),
        scale=softmax_scale,
        score_mod=score_mod,
        sink=learnable_sink,
        deterministic=_deterministic(deterministic),
        return_aux=AuxRequest(lse=return_attn_probs),
    )
    return (out, aux.lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: type_of_window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Return attention of packed (total, heads, head_dim) sequences, called as flash-attn's
    function.

    Args:
        q, k, v: the sequences; with a block_table, k and v are (pages, page_size, heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where each sequence begins.
        max_seqlen_q, max_seqlen_k: lengths of the longest.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, learnable_sink: as `flash_attn_func` takes them; softmax_lse is
            (heads, total_q).
        block_table: (batch, max_pages) int32, the pages of each sequence.

    Raises:
        UnsupportedError: dropout, or gradients with a block_table.
    """
    _check_dropout(dropout_p)
    check_argument("q", q, "total_q, heads, head_dim")
    _check_bounds(q, cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        check_argument("block_table", block_table, "batch, max_pages", (torch.int32,))
    lengths_kv = cu_seqlens_k.diff()
    if block_table is not None:
        _check_table(k, block_table, lengths_kv)
    score_mod = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1])
        score_mod = _alibi(alibi_slopes, lengths_kv - cu_seqlens_q.diff())
    out, aux = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k if block_table is None else None,
        max_seqlen_q,
        max_seqlen_k,
        seqused_kv=None if block_table is None else lengths_kv,
        page_table=block_table,
        causal=causal,
        window=_window(window_size),
        softcap=_softcap(softcap),
        scale=softmax_scale,
        score_mod=score_mod,
        sink=learnable_sink,
        deterministic=_deterministic(deterministic),
        return_aux=AuxRequest(lse=return_attn_probs),
    )
    return (out, aux.lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: type_of_window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Return attention of new queries to a KV cache, after appending k and v to it in place.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, heads_k, head_dim), or paged
            (pages, page_size, heads_k, head_dim) with a block_table.
        k, v: (batch, seqlen_new, heads_k, head_dim) in the dtype of the caches, written behind
            cache_seqlens; an error leaves the caches as they were.
        rotary_cos, rotary_sin, rotary_interleaved, cache_leftpad: must be None.
        cache_seqlens: used length of each cache row, (batch,) int32 or one number; default all.
        cache_batch_idx: (batch,), the cache row of each query row.
        block_table: (batch, max_pages) int32.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as `flash_attn_func` takes them.
        num_splits: tunes flash-attn's kernels; nothing here depends on it.
        return_softmax_lse: return (out, lse) with lse (batch, heads, seqlen_q).

    Raises:
        UnsupportedError: rotary embeddings, left padding, or required gradients.
    """
    del num_splits, rotary_interleaved
    _check_cache_options(rotary_cos, rotary_sin, cache_leftpad)
    cache = KvCache(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    cache.check()
    batch, seqlen_q, heads = q.shape[:3]
    table = cache.pages(block_table, cache_batch_idx)
    used = cache.lengths(cache_seqlens, table)
    name = "cache_batch_idx" if block_table is None else "block_table"
    cache.check_contents(table, used, name=name)
    seqlens = used if k is None else used + k.shape[1]
    score_mod = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, batch, heads)
        score_mod = _alibi(alibi_slopes, seqlens - seqlen_q)
    request = Request(
        causal,
        _window(window_size),
        score_mod,
        softcap=_softcap(softcap),
        scale=softmax_scale,
        wants_lse=bool(return_softmax_lse),
    )
    problem = _cache_problem(cache, table, seqlens, request)
    if k is not None:
        # All that can be wrong has raised by now: an error leaves the caches as they were.
        cache.append(table, used)
        if problem.k is not k_cache or problem.v is not v_cache:  # autocast made copies, too early
            problem = _cache_problem(cache, table, seqlens, request)
    out, lse, _ = attend(problem, None)
    out = out.view(batch, seqlen_q, *out.shape[1:])
    if not return_softmax_lse:
        return out
    return out, cast(Tensor, lse).view(heads, batch, seqlen_q).transpose(0, 1)


def _cache_problem(
    cache: KvCache, table: Tensor, seqlens: Tensor, request: Request
) -> AttentionProblem:
    """Return the checked call of the queries on the first `seqlens` rows of each sequence."""
    batch, seqlen_q = cache.q.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=cache.q.device) * seqlen_q
    longest = table.shape[1] * cache.k_cache.shape[1]
    where = VarlenRequest(starts, None, seqlen_q, longest, seqused_kv=seqlens, page_table=table)
    tensors = autocast(cache.q.flatten(0, 1), cache.k_cache, cache.v_cache)
    return make_varlen(*tensors, where, request)


def _alibi(slopes: Tensor, offset: int | Tensor) -> Any:
    """Return ALiBi's score_mod; `offset` is seqlen_k - seqlen_q, one number or one a sequence."""
    if isinstance(offset, Tensor):
        lengths = offset

        def by_sequence(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
            return score - slope * (q_idx + lengths[b] - kv_idx).abs()

        return by_sequence

    def shared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
        return score - slope * (q_idx + offset - kv_idx).abs()

    return shared


def _check_bounds(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise unless both bounds are there and fit each other; no content is read."""
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_argument(name, bounds, "batch + 1", (torch.int32,))
        check_device(name, bounds, q)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        allowed = f"{tuple(cu_seqlens_q.shape)}, as cu_seqlens_q"
        got, remedy = tuple(cu_seqlens_k.shape), "give every sequence one entry"
        raise ValueError(invalid("cu_seqlens_k.shape", got, allowed, remedy))


def _check_table(k: Tensor, block_table: Tensor, lengths_kv: Tensor) -> None:
    """Raise unless the pages hold the sequences, by the names that arguments have here.

    What is wrong with the layouts is left to the checks of the call.
    """
    if torch.compiler.is_compiling() or k.dim() != 4 or len(block_table) != len(lengths_kv):
        return
    if is_checked(lengths_kv) and is_checked(block_table):
        pages, page_size = k.shape[:2]
        names = {"table_name": "block_table", "lengths_name": "cu_seqlens_k.diff()"}
        check_pages(block_table, lengths_kv, pages=pages, page_size=page_size, **names)


def _check_slopes(slopes: Tensor, batch: int, heads: int) -> None:
    if not isinstance(slopes, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        got = type(cast(Any, slopes)).__name__
        raise TypeError(invalid("alibi_slopes", got, "a tensor (heads,)", "pass a tensor"))
    check_layout("alibi_slopes", slopes)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            invalid(
                "alibi_slopes.shape",
                tuple(slopes.shape),
                f"({heads},) or ({batch}, {heads})",
                "give one slope a head",
            )
        )


def _check_dropout(dropout_p: float) -> None:
    if _is_zero(dropout_p):
        return
    if not isinstance(dropout_p, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(invalid("dropout_p", repr(dropout_p), "0.0", "pass a number"))
    raise UnsupportedError(
        f"dropout_p={dropout_p} is not supported (allowed: 0.0); pass 0.0 in evaluation, or "
        "use torch.nn.functional.scaled_dot_product_attention for training with dropout."
    )


def _softcap(softcap: Any) -> Any:
    """Return a softcap with None where flash-attn has 0."""
    if isinstance(softcap, int | float) and softcap < 0:
        raise ValueError(invalid("softcap", softcap, "0 or a positive number", "pass 0 for none"))
    return None if _is_zero(softcap) else softcap


def _deterministic(deterministic: Any) -> Any:
    """Return what torch's setting decides where flash-attn has False."""
    return None if deterministic is False else deterministic


def _is_zero(value: Any) -> bool:
    """Return whether a value is the number 0, without waiting for a device."""
    if isinstance(value, int | float):
        return value == 0
    if isinstance(value, Tensor):
        is_number = value.layout is torch.strided and value.dim() == 0
        return is_number and not is_unreadable(value) and bool(value == 0)
    return hasattr(value, "__float__") and getattr(value, "shape", None) == () and value == 0


def _check_cache_options(*options: Tensor | None) -> None:
    names = ("rotary_cos", "rotary_sin", "cache_leftpad")
    remedies = ("rotate q and k before the call",) * 2 + ("shift the rows of the cache",)
    for name, option, remedy in zip(names, options, remedies, strict=True):
        if option is not None:
            raise UnsupportedError(f"{name} is not supported (allowed: None); {remedy}.")


def _window(window_size: type_of_window) -> type_of_window:
    """Return a window with None where flash-attn has -1."""
    if window_size is None:
        return None
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:  # pyright: ignore
        remedy = "pass (-1, -1) for an unlimited window"
        raise TypeError(invalid("window_size", repr(window_size), "a pair (left, right)", remedy))
    left, right = window_size
    return _extent(left), _extent(right)


def _extent(side: Any) -> Any:
    """Return one side of a window; what is no integer is left to the checks of the call."""
    if not isinstance(side, int):
        try:
            side = operator.index(side)  # such as NumPy's
        except TypeError:
            return side
    if side < -1:
        remedy = "pass -1 for an unlimited side"
        raise ValueError(invalid("window_size", side, "-1 or more on each side", remedy))
    return None if side == -1 else side
