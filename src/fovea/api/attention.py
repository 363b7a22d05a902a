"""fovea.attention and fovea.attention_varlen.

Lives here: the two signatures, autocast and nested tensors. Not here: checks (`problem/`), torch's
flex_attention signature (`flex.py`). Invariant: what a keyword means is said in docs/semantics.md
and is the same for every function and backend.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypedDict, Unpack, overload

import torch
from torch import Tensor

from fovea.api.nested import attention_jagged, is_jagged
from fovea.errors import invalid
from fovea.ops import attend, attend_again
from fovea.problem import (
    Request,
    Results,
    VarlenRequest,
    make_dense,
    make_varlen,
)
from fovea.problem.keywords import CALL_NAMES, VARLEN_NAMES, refuse_keywords

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # pyright: ignore
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _AuxFields(NamedTuple):
    lse: bool
    max_score: bool


class AuxRequest(_AuxFields):
    """Which results to return beside the output: pass it as `return_aux`."""

    __slots__ = ()

    def __new__(cls, lse: bool = False, max_score: bool = False, **unknown: Any) -> Self:
        """Return the request; another name raises TypeError, torch's `max_scores` too."""
        if unknown:
            refuse_keywords(unknown, ("lse", "max_score"))
        return super().__new__(cls, lse, max_score)


class Aux(NamedTuple):
    """Results beside the output; None where not asked for.

    Shapes:
        lse, max_score: (batch, heads_q, seqlen_q), or (heads_q, total_q) for packed sequences;
            fp32, fp64 for fp64 inputs.

    Units:
        lse: natural logarithm of the softmax denominator, sink included, -inf where a row sees
            nothing; differentiable. max_score: largest visible score after score_mod; carries no
            gradient.
    """

    lse: Tensor | None = None
    max_score: Tensor | None = None


class Options(TypedDict, total=False):
    """Keywords of `attention` and `attention_varlen` beside `return_aux`."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: Any
    softcap: float | Tensor | None
    sink: Tensor | None
    scale: float | Tensor | None
    deterministic: bool | None
    backend: str | None


class VarlenOptions(Options, total=False):
    """Keywords of `attention_varlen` beside `return_aux`."""

    seqused_q: Tensor | None
    seqused_kv: Tensor | None
    page_table: Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_aux: None = None, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_aux: AuxRequest, **options: Unpack[Options]
) -> tuple[Tensor, Aux]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | Tensor | None = None,
    deterministic: bool | None = None,
    return_aux: AuxRequest | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Return softmax(mods(scale * q k^T)) v, exactly.

    Args:
        q, k, v: the inputs; nested tensors of jagged layout are computed as packed sequences.
        causal: False, True or "bottom_right" (the last query sees the last key), or "top_left".
        window: (left, right), the keys visible on each side of the diagonal; None is unlimited.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, as torch's flex_attention takes it.
        mask_mod: (b, h, q_idx, kv_idx) -> bool, True where a key is visible.
        block_mask: a BlockMask of torch, or from `fovea.create_block_mask`.
        softcap: scores become softcap * tanh(score / softcap) before the score_mod.
        sink: one learnable logit a query head, added to the softmax denominator.
        scale: default 1/sqrt(head_dim).
        deterministic: bit-reproducible or an error; None follows
            torch.use_deterministic_algorithms.
        return_aux: also return an `Aux`.
        backend: None chooses; "reference", "cuda", "emulator:sm90", "emulator:sm100" or
            "emulator:sm103" runs exactly that or raises.

    Returns:
        out, or (out, aux) with `return_aux`.

    Shapes:
        q: (batch, seqlen_q, heads_q, head_dim); k: (batch, seqlen_kv, heads_kv, head_dim);
        v: (batch, seqlen_kv, heads_kv, head_dim_v); out: (batch, seqlen_q, heads_q, head_dim_v) in
        the stride order of q. heads_q is a multiple of heads_kv.

    Raises:
        TypeError, ValueError: wrong input.
        UnsupportedError: right input that the named backend lacks.
    """
    if unknown:
        refuse_keywords(unknown, CALL_NAMES)
    wants_lse, wants_max_score = (False, False) if return_aux is None else _wanted(return_aux)
    options = (
        causal,
        window,
        score_mod,
        mask_mod,
        block_mask,
        softcap,
        sink,
        scale,
        deterministic,
        wants_lse,
        wants_max_score,
    )
    passed = (q, k, v, options, backend)
    # Under torch.compile nothing is looked up: a graph is made once.
    result = None if torch.compiler.is_compiling() else attend_again(passed)
    if result is None:
        if is_jagged(q, k, v):
            result = attention_jagged(q, k, v, Request(*options), backend)
        else:
            problem = make_dense(*autocast(q, k, v), Request(*options))
            result = attend(problem, backend, passed)
    return result[0] if return_aux is None else (result[0], _aux(result, return_aux))


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    return_aux: None = None,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    return_aux: AuxRequest,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Aux]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | Tensor | None = None,
    deterministic: bool | None = None,
    return_aux: AuxRequest | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Return the attention of each sequence of a packed batch to itself; keywords as `attention`.

    In mods `b` is the sequence, and indices count from its start. A `block_mask` has B = 1 or the
    number of sequences, and lengths max_seqlen_q, max_seqlen_kv.

    Args:
        q, k, v: the sequences one after the other.
        cu_seqlens_q, cu_seqlens_kv: where each begins, and where the last ends.
        max_seqlen_q, max_seqlen_kv: lengths of the longest, or anything larger.
        seqused_q, seqused_kv: how many rows of each segment are used; default all.
        page_table: physical page of each logical page; then k and v are paged caches,
            cu_seqlens_kv is None, seqused_kv is required, and no gradient may be.

    Returns:
        out, or (out, aux) with `return_aux`. Rows of out that belong to no used position are 0.

    Shapes:
        q: (total_q, heads_q, head_dim); k, v: (total_kv, heads_kv, head_dim or head_dim_v), or
        (pages, page_size, heads_kv, ...); cu_seqlens_*: (batch + 1,) int32; seqused_*: (batch,)
        int32; page_table: (batch, max_pages) int32; out: (total_q, heads_q, head_dim_v).

    Raises:
        TypeError, ValueError: wrong input; on a GPU, contents under FOVEA_CHECK=1 only.
        UnsupportedError: right input that the named backend lacks.
    """
    if unknown:
        refuse_keywords(unknown, (*CALL_NAMES, *VARLEN_NAMES))
    wants_lse, wants_max_score = _wanted(return_aux)
    request = Request(
        causal,
        window,
        score_mod,
        mask_mod,
        block_mask,
        softcap,
        sink,
        scale,
        deterministic,
        wants_lse,
        wants_max_score,
    )
    where = VarlenRequest(
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        seqused_q,
        seqused_kv,
        page_table,
    )
    q, k, v = autocast(q, k, v)
    result = attend(make_varlen(q, k, v, where, request), backend)
    return result[0] if return_aux is None else (result[0], _aux(result, return_aux))


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the autocast dtype where autocast is on; sinks and captures stay."""
    if not torch.compiler.is_compiling() and not _is_any_autocast_enabled():
        return q, k, v
    if not isinstance(q, Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):  # pyright: ignore
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # float64 is left alone, as torch's own autocast leaves it.
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:  # pyright: ignore
        return tensor.to(dtype)
    return tensor


def _wanted(return_aux: object) -> tuple[bool, bool]:
    if return_aux is None:
        return False, False
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(
            invalid(
                "return_aux",
                type(return_aux).__name__,
                "None or fovea.AuxRequest(lse=..., max_score=...)",
                "torch's AuxRequest goes to fovea.flex_attention",
            )
        )
    return bool(return_aux.lse), bool(return_aux.max_score)


def _aux(result: Results, request: AuxRequest) -> Aux:
    _, lse, max_score = result
    return Aux(
        lse=lse if request.lse else None,
        max_score=max_score if request.max_score else None,
    )
