"""Names of a call's keywords: those there are, and what other libraries call them.

Lives here: the error for a keyword that no call has. Not here: what a keyword's value may be
(`checks.py`). Invariant: a name of torch's or of flash-attn's is answered with fovea's.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from fovea.errors import invalid

REQUEST_NAMES = (
    *("causal", "window", "score_mod", "mask_mod", "block_mask", "softcap", "sink", "scale"),
    "deterministic",
)
VARLEN_NAMES = (
    *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    *("seqused_q", "seqused_kv", "page_table"),
)
CALL_NAMES = (*REQUEST_NAMES, "return_aux", "backend")

_LSE = "pass return_aux=fovea.AuxRequest(lse=True)"
# From scaled_dot_product_attention, flex_attention, flash-attn and transformers.
_PEERS = {
    "is_causal": 'pass causal="top_left", which is where torch aligns it (or causal=True, which '
    "lets the last query see the last key)",
    "attn_mask": "pass mask_mod=, a block_mask=, or score_mod=fovea.mods.dense_bias(bias)",
    "attention_mask": "pass mask_mod= or a block_mask=",
    "enable_gqa": "leave it out: fewer KV heads are taken as they are",
    "dropout_p": "leave it out: there is no dropout",
    "dropout": "leave it out: there is no dropout",
    "window_size": "pass window=(left, right), None for no limit in the place of -1",
    "sliding_window": "pass window=(sliding_window - 1, 0)",
    "softmax_scale": "pass scale=",
    "scaling": "pass scale=",
    "return_lse": _LSE,
    "return_softmax_lse": _LSE,
    "return_attn_probs": _LSE,
    "max_scores": "pass max_score=",
    "alibi_slopes": "pass score_mod=fovea.mods.alibi(slopes=...)",
    "learnable_sink": "pass sink=",
    "s_aux": "pass sink=",
    "logits_soft_cap": "pass softcap=",
    "kernel_options": "pass backend= or deterministic=, or call fovea.flex_attention",
    "cu_seqlens_k": "pass cu_seqlens_kv= to fovea.attention_varlen",
    "max_seqlen_k": "pass max_seqlen_kv= to fovea.attention_varlen",
    "seqused_k": "pass seqused_kv= to fovea.attention_varlen",
    "block_table": "pass page_table= to fovea.attention_varlen",
}


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError where a keyword is none of those known, naming what it is called here."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(_refusal(name, known))


def refuse_keywords(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError for keywords that a signature does not have."""
    raise TypeError(_refusal(next(iter(unknown)), tuple(known)))


def _refusal(name: str, known: tuple[str, ...]) -> str:
    remedy = _PEERS.get(name)
    if remedy is None and name in VARLEN_NAMES:
        remedy = "call fovea.attention_varlen"
    if remedy is None:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}=" if near else "correct its spelling"
    return invalid("keyword", repr(name), ", ".join(sorted(known)), remedy)
