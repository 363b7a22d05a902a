"""The same attention call, computed by torch.

Lives here: torch's scaled-dot-product attention and flex_attention on tensors in fovea's layout.
Invariant: a peer computes exactly what the fovea call computes, or there is no such peer (`None`),
never something near it.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mod = Callable[..., Any]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False
) -> Callable[[], Tensor] | None:
    """Return a call of torch's scaled_dot_product_attention, or None where its causal differs.

    torch aligns `is_causal` with the upper left corner, fovea's True with the lower right one: the
    same for square problems only.
    """
    if causal and causal != "top_left" and q.shape[1] != k.shape[1]:
        return None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]

    def call() -> Tensor:
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=bool(causal), enable_gqa=grouped
        )
        return out.transpose(1, 2)

    return call


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    compiled: bool,
) -> Callable[[], Tensor]:
    """Return a call of torch's flex_attention; uncompiled it is dense, in memory and in work."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    keywords = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    # torch declares only a partial type for the options of compile.
    function: Mod = cast(Any, torch).compile(flex_attention) if compiled else flex_attention

    def call() -> Tensor:
        return function(q, k, v, **keywords).transpose(1, 2)

    def call_quietly() -> Tensor:
        with warnings.catch_warnings():
            # It warns that it runs uncompiled; whoever asked for that says so beside the figure.
            warnings.filterwarnings("ignore", message="flex_attention called without torch.com")
            return call()

    return call if compiled else call_quietly
