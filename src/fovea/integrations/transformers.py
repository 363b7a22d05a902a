"""fovea behind Hugging Face transformers: an attention function and its mask function, registered.

Lives here: transformers' calling conventions in terms of `fovea.attention`. Invariant: both
functions are registered together, since transformers drops every mask of an implementation that has
only the first; and an argument that would change the result is used or raises.

    fovea.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fovea")
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fovea.api import attention, attention_varlen
from fovea.errors import FoveaWarning, UnsupportedError, invalid

NAME = "fovea"
# Called with collected keywords, of which a type checker cannot tell whether return_aux is one.
_attention, _attention_varlen = cast(Any, attention), cast(Any, attention_varlen)
type_of_mod = Callable[..., Any]


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` run fovea; transformers is imported here.

    Raises:
        ValueError: a name that transformers would take for one of its own implementations.
    """
    for taken in ("flash", "sdpa", "flex_attention", "eager", "/"):
        if taken in name:
            raise ValueError(
                invalid("name", repr(name), f"a name without {taken!r}", f"use {NAME!r}")
            )
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "fovea.integrations.transformers needs the package 'transformers', which is not "
            "installed; pip install transformers.",
            name="transformers",
        ) from error

    module: Any = transformers
    module.AttentionInterface.register(name, attention_forward)
    module.AttentionMaskInterface.register(name, attention_mask)


class Mask(BlockMask):
    """What transformers hands from the mask function to every layer's attention.

    A BlockMask, since `generate` with a static cache prepares masks and hands them to the model,
    which takes a 4-D tensor or a BlockMask for a finished one. It has one block, as large as the
    call, and a complete `mask_mod`: wherever torch makes a plain BlockMask of it, that says the
    same.

    Attributes:
        is_causal: nothing right of the bottom-right diagonal is visible, so it need not be looked
            at; `mask_mod` may hide more.
        is_plain: with `is_causal`, `mask_mod` hides no more than that.
    """

    is_causal: bool
    is_plain: bool

    def __init__(
        self, *of_torch: Any, is_causal: bool = False, is_plain: bool = False, **keywords: Any
    ) -> None:
        super().__init__(*of_torch, **keywords)
        self.is_causal, self.is_plain = is_causal, is_plain

    @property
    def ndim(self) -> int:
        """4: GPT-2 and others ask a mask for it, of which a BlockMask has none."""
        return 4


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, *positional: Any, **options: Any
) -> Mask:
    """Return the mask of a call, as transformers' mask functions do.

    Args:
        batch_size, q_length, kv_length: extents of the call.
        *positional: refused; transformers passes keywords.
        **options: q_offset and kv_offset (positions of the first query and key, numbers or 0-d
            tensors), mask_function (b, h, q, kv) on absolute positions, attention_mask (a 2-D
            padding mask), device, allow_is_causal_skip, and others that change nothing here.
    """
    del batch_size
    assert not positional
    device = torch.device(options.get("device") or "cpu")
    q_offset = _offset(options.get("q_offset", 0), device)
    kv_offset = _offset(options.get("kv_offset", 0), device)
    padding: Tensor | None = options.get("attention_mask")
    function: type_of_mod | None = options.get("mask_function")
    is_aligned = (
        isinstance(q_offset, int)
        and isinstance(kv_offset, int)
        and q_offset - kv_offset == kv_length - q_length
    )
    # With this flag transformers promises a causal mask, perhaps a windowed one, and nothing else.
    is_causal = is_aligned and bool(options.get("allow_is_causal_skip", function is None))
    is_plain = is_causal and padding is None
    if function is None or _is_plain_causal(function):
        function = _causal
    else:
        is_plain = False
    if padding is not None:
        missing = kv_length + (kv_offset if isinstance(kv_offset, int) else 0) - padding.shape[-1]
        padding = torch.nn.functional.pad(padding.bool(), (0, max(missing, 0)))
    one = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    return Mask(
        seq_lengths=(q_length, kv_length),
        kv_num_blocks=one,
        kv_indices=first,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=one,
        q_indices=first,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(q_length, kv_length),
        mask_mod=_at_offsets(function, q_offset, kv_offset, padding),
        is_causal=is_causal,
        is_plain=is_plain,
    )


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (out, None), as transformers' attention functions do.

    Args:
        module: the attention layer; its `is_causal` counts where no mask is given.
        query, key, value: (batch, heads, seqlen, head_dim).
        attention_mask: what `attention_mask` returned, None, a 4-D bool or additive mask, or a
            BlockMask.
        scaling: of the scores.
        dropout: must be 0.
        **options: is_causal, softcap, s_aux (sinks), position_bias, sliding_window,
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, output_attentions; others
            change nothing here.

    Shapes:
        out: (batch, seqlen_q, heads, head_dim_v), contiguous.

    Raises:
        UnsupportedError: dropout.
    """
    if dropout:
        raise UnsupportedError(
            f"dropout={dropout} is not supported by fovea (allowed: 0.0); set "
            "attention_dropout=0.0 in the configuration, or train with attn_implementation='eager'."
        )
    if options.get("output_attentions"):
        _warn_of_weights()
    keywords: dict[str, Any] = {
        "scale": scaling,
        "softcap": options.get("softcap"),
        "sink": options.get("s_aux"),
    }
    biases = [options["position_bias"]] if options.get("position_bias") is not None else []
    is_packed = attention_mask is None and options.get("cu_seq_lens_q") is not None
    if attention_mask is None:
        keywords |= _causal_keywords(module, query, options, is_packed=is_packed)
    elif isinstance(attention_mask, Mask):
        mask_mod = None if attention_mask.is_plain else attention_mask.mask_mod
        keywords |= {"causal": attention_mask.is_causal, "mask_mod": mask_mod}
    elif not isinstance(attention_mask, Tensor):
        keywords["block_mask"] = attention_mask
    elif attention_mask.dtype == torch.bool:
        keywords["mask_mod"] = _visible(attention_mask)
    else:
        biases.append(attention_mask)
    if biases:
        keywords["score_mod"] = _biased([_checked_bias(bias) for bias in biases])
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out: Tensor
    if is_packed:
        packed: Tensor = _attention_varlen(
            q.squeeze(0),
            k.squeeze(0),
            v.squeeze(0),
            options["cu_seq_lens_q"],
            options["cu_seq_lens_k"],
            int(options["max_length_q"]),
            int(options["max_length_k"]),
            **keywords,
        )
        out = packed.unsqueeze(0)
    else:
        out = _attention(q, k, v, **keywords)
    return out.contiguous(), None


def _causal_keywords(
    module: Any, query: Tensor, options: dict[str, Any], *, is_packed: bool
) -> dict[str, Any]:
    """Return what no mask means: causal where the layer is, from the top left as torch has it."""
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal or query.shape[2] <= 1:
        return {}
    window = options.get("sliding_window")
    return {
        "causal": "bottom_right" if is_packed else "top_left",
        # transformers counts the query itself, fovea the keys left of it.
        "window": None if window is None else (window - 1, 0),
    }


def _at_offsets(
    function: type_of_mod, q_offset: Any, kv_offset: Any, padding: Tensor | None
) -> type_of_mod:
    """Return a mask_mod on the call's own indices, with the padding mask."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx, kv_idx = q_idx + q_offset, kv_idx + kv_offset
        visible = function(b, h, q_idx, kv_idx)
        return visible if padding is None else visible & padding[b, kv_idx]

    return mask_mod


def _visible(mask: Tensor) -> type_of_mod:
    batch, heads, rows, _ = mask.shape

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (b if batch > 1 else 0, h if heads > 1 else 0, q_idx if rows > 1 else 0)
        return mask[(*place, kv_idx)]

    return mask_mod


def _biased(biases: list[Tensor]) -> type_of_mod:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for bias in biases:
            batch, heads, rows, _ = bias.shape
            place = (b if batch > 1 else 0, h if heads > 1 else 0, q_idx if rows > 1 else 0)
            score = score + bias[(*place, kv_idx)]
        return score

    return score_mod


def _checked_bias(bias: Tensor) -> Tensor:
    if bias.dim() != 4:
        raise ValueError(
            invalid(
                "shape of a mask or position_bias",
                tuple(bias.shape),
                "(batch or 1, heads or 1, q_length or 1, kv_length)",
                "add the missing axes",
            )
        )
    return bias


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


def _is_plain_causal(function: type_of_mod) -> bool:
    """Return whether a mask function is transformers' causal one, without importing it."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    return (module, name) == ("transformers.masking_utils", "causal_mask_function")


def _offset(offset: int | Tensor, device: torch.device) -> int | Tensor:
    """Return an offset; a tensor, as static caches have it, is never read on the host.

    It is copied: every layer of a static cache adds to its own in place before it attends.
    """
    return offset.to(device, copy=True) if isinstance(offset, Tensor) else int(offset)


_has_warned = False


def _warn_of_weights() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "output_attentions=True: fovea never forms the attention weights and returns None in "
            "their place; use attn_implementation='eager' to get them. Shown once.",
            FoveaWarning,
            stacklevel=3,
        )
