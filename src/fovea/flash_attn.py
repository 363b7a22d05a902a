"""Drop-in replacements for the functions of the flash-attn package, version 2.

Lives here: their signatures and their own meanings (a window of -1 is unlimited, softcap 0 is off,
`return_attn_probs` returns the log-sum-exp, a KV cache is updated in place). Not here: attention
itself. Invariant: an argument works as documented there, or raises; none is ignored except
`num_splits`, which only tunes.
"""

from typing import Any, cast

import torch
from torch import Tensor

from fovea.api import AuxRequest, attention, attention_varlen
from fovea.errors import UnsupportedError, invalid
from fovea.mods.evaluate import is_checked
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
        _check_arguments(q=(q, axes), k=(k, axes))
        _check_slopes(alibi_slopes, q.shape[0], q.shape[2])
        score_mod = _alibi(alibi_slopes, k.shape[1] - q.shape[1])
    out, aux = attention(
        q,
        k,
        v,
        causal=causal,
        window=_window(window_size),
        softcap=softcap or None,
        scale=softmax_scale,
        score_mod=score_mod,
        sink=learnable_sink,
        deterministic=deterministic or None,
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
    bounds = "batch + 1"
    _check_arguments(
        q=(q, "total_q, heads, head_dim"),
        cu_seqlens_q=(cu_seqlens_q, bounds),
        cu_seqlens_k=(cu_seqlens_k, bounds),
    )
    lengths_kv = cu_seqlens_k.diff()
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
        softcap=softcap or None,
        scale=softmax_scale,
        score_mod=score_mod,
        sink=learnable_sink,
        deterministic=deterministic or None,
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
        k, v: (batch, seqlen_new, heads_k, head_dim), written behind cache_seqlens.
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
    _check_cached(q, (k_cache, v_cache), (k, v), block_table, cache_batch_idx)
    batch, seqlen_q, heads = q.shape[:3]
    page_size = k_cache.shape[1]
    table = _page_table(k_cache, block_table, cache_batch_idx, batch)
    seqlens = _cache_seqlens(cache_seqlens, table, page_size)
    if k is not None and v is not None:
        _check_append(k_cache, k, table, seqlens)
        _append(k_cache, k, table, seqlens)
        _append(v_cache, v, table, seqlens)
        seqlens = seqlens + k.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    score_mod = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, batch, heads)
        score_mod = _alibi(alibi_slopes, seqlens - seqlen_q)
    out, aux = attention_varlen(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        starts,
        None,
        seqlen_q,
        table.shape[1] * page_size,
        seqused_kv=seqlens,
        page_table=table,
        causal=causal,
        window=_window(window_size),
        softcap=softcap or None,
        scale=softmax_scale,
        score_mod=score_mod,
        return_aux=AuxRequest(lse=return_softmax_lse),
    )
    out = out.view(batch, seqlen_q, *out.shape[1:])
    if aux.lse is None:
        return out
    return out, aux.lse.view(heads, batch, seqlen_q).transpose(0, 1)


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


def _check_arguments(**arguments: tuple[Any, str]) -> None:
    """Raise unless each argument that is not None is a tensor with the axes named beside it."""
    for name, (value, axes) in arguments.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                invalid(name, type(value).__name__, f"a tensor ({axes})", "pass a tensor")
            )
        if value.dim() != axes.count(",") + 1:
            raise ValueError(
                invalid(f"{name}.shape", tuple(value.shape), f"({axes})", "add or flatten axes")
            )


def _check_cached(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    """Raise unless the tensors of a call on caches fit each other; no content is read."""
    cache_axes = "batch or pages, seqlen or page_size, heads_k, head_dim"
    new_axes = "batch, seqlen_new, heads_k, head_dim"
    _check_arguments(
        q=(q, "batch, seqlen_q, heads, head_dim"),
        k_cache=(caches[0], cache_axes),
        v_cache=(caches[1], cache_axes),
        k=(new[0], new_axes),
        v=(new[1], new_axes),
        block_table=(block_table, "batch, max_pages"),
        cache_batch_idx=(cache_batch_idx, "batch"),
    )
    k, v = new
    if k is None and v is None:
        return
    if k is None or v is None:
        name, remedy = "k" if k is None else "v", "pass both k and v or neither"
        raise ValueError(invalid(name, None, "a tensor like the other", remedy))
    for name, rows, cache in (("k", k, caches[0]), ("v", v, caches[1])):
        wanted = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(rows.shape) != wanted:
            allowed = f"{wanted}: batch of q, seqlen of k, heads and head_dim of its cache"
            raise ValueError(invalid(f"{name}.shape", tuple(rows.shape), allowed, "match them"))


def _check_slopes(slopes: Tensor, batch: int, heads: int) -> None:
    if not isinstance(slopes, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        got = type(cast(Any, slopes)).__name__
        raise TypeError(invalid("alibi_slopes", got, "a tensor (heads,)", "pass a tensor"))
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
    if dropout_p:
        raise UnsupportedError(
            f"dropout_p={dropout_p} is not supported (allowed: 0.0); pass 0.0 in evaluation, or "
            "use torch.nn.functional.scaled_dot_product_attention for training with dropout."
        )


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
    return (None if left == -1 else left, None if right == -1 else right)


def _page_table(
    cache: Tensor, block_table: Tensor | None, rows: Tensor | None, batch: int
) -> Tensor:
    """Return the page table of a cache; one without pages has one page a row."""
    if block_table is not None:
        if rows is not None:
            raise ValueError(
                invalid(
                    "cache_batch_idx",
                    "given with block_table",
                    "None with a block_table",
                    "index the block_table instead",
                )
            )
        return block_table
    if rows is None:
        if cache.shape[0] < batch:
            raise ValueError(
                invalid(
                    "batch of k_cache", cache.shape[0], f"at least {batch}", "enlarge the cache"
                )
            )
        rows = torch.arange(batch, device=cache.device)
    return rows.to(torch.int32).unsqueeze(1)


def _cache_seqlens(seqlens: int | Tensor | None, table: Tensor, page_size: int) -> Tensor:
    if isinstance(seqlens, Tensor):
        if seqlens.is_floating_point() or tuple(seqlens.shape) != (table.shape[0],):
            got = f"{tuple(seqlens.shape)} {seqlens.dtype}"
            allowed = f"({table.shape[0]},) of an integer dtype, or one int"
            raise ValueError(invalid("cache_seqlens", got, allowed, "give one length a row"))
        return seqlens.to(torch.int32)
    if seqlens is not None and (isinstance(seqlens, bool) or not hasattr(seqlens, "__index__")):
        allowed = "None, an int, or an integer tensor (batch,)"
        raise TypeError(invalid("cache_seqlens", repr(seqlens), allowed, "pass an int"))
    length = table.shape[1] * page_size if seqlens is None else seqlens
    return torch.full((table.shape[0],), length, dtype=torch.int32, device=table.device)


def _check_append(cache: Tensor, new: Tensor, table: Tensor, seqlens: Tensor) -> None:
    """Raise ValueError where rows have no place, before any is written.

    Where contents are looked at: on a CPU always, elsewhere under FOVEA_CHECK=1.
    """
    if not torch.compiler.is_compiling() and is_checked(seqlens):
        for lengths in (seqlens, seqlens + new.shape[1]):
            check_pages(table, lengths, pages=cache.shape[0], page_size=cache.shape[1])


def _append(cache: Tensor, new: Tensor, table: Tensor, seqlens: Tensor) -> None:
    """Write (batch, seqlen_new, heads, dim) rows behind the used rows of a paged cache."""
    page_size = cache.shape[1]
    row = seqlens.long().unsqueeze(1) + torch.arange(new.shape[1], device=cache.device)
    page = table.long().gather(1, row // page_size)
    with torch.no_grad():
        cache[page, row % page_size] = new.to(cache.dtype)
