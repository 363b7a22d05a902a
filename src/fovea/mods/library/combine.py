"""Masks and scores made of others: and, or, not, shifted indices, a batch folded into the sequence.

Lives here: combinators of user mods. Not here: masks by themselves (`positions.py` and others).
Invariant: a combinator calls each mod once and adds nothing that a mod could observe.
"""

from collections.abc import Callable
from typing import Any

from fovea.mods.library.arguments import check_integer, check_mod

MaskMod = Callable[..., Any]
ScoreMod = Callable[..., Any]


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Return the mask that is visible where every one of `mask_mods` is.

    Formula: visible(q, kv) = m1(q, kv) & m2(q, kv) & ...; without masks, everything is visible.
    Shapes: any.
    Example: `and_masks(causal, document(ids))`.
    Source: same meaning as torch.nn.attention.flex_attention.and_masks.
    """
    for place, mask in enumerate(mask_mods):
        check_mod(f"mask_mods[{place}]", mask)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible: Any = True
        for mask in mask_mods:
            visible = mask(b, h, q_idx, kv_idx) & visible
        return visible

    return mask_mod


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Return the mask that is visible where any of `mask_mods` is.

    Formula: visible(q, kv) = m1(q, kv) | m2(q, kv) | ...; without masks, nothing is visible.
    Shapes: any.
    Example: `or_masks(sliding_window(128), global_tokens(is_global))`.
    Source: same meaning as torch.nn.attention.flex_attention.or_masks.
    """
    for place, mask in enumerate(mask_mods):
        check_mod(f"mask_mods[{place}]", mask)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible: Any = False
        for mask in mask_mods:
            visible = mask(b, h, q_idx, kv_idx) | visible
        return visible

    return mask_mod


def not_mask(mask: MaskMod) -> MaskMod:
    """Return the mask that is visible where `mask` is not.

    Formula: visible(q, kv) = ~mask(q, kv).
    Shapes: any.
    Example: `not_mask(causal)` sees the strict future.
    Source: Boolean algebra.
    """
    check_mod("mask", mask)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (mask(b, h, q_idx, kv_idx) & True) == False  # noqa: E712 - holds for bools and tensors

    return mask_mod


def shifted(mod: Callable[..., Any], q_offset: Any = 0, kv_offset: Any = 0) -> MaskMod:
    """Return a mask that sees its indices moved, as decoding with a cache needs.

    Formula: visible(q, kv) = mod(q + q_offset, kv + kv_offset).
    Shapes: offsets are ints or 0-d integer tensors (read on the device, never synchronised).
    Example: `shifted(causal, q_offset=cache_length)`.
    Source: transformers' add_offsets_to_mask_function has the same meaning.
    """
    check_mod("mod", mod)
    check_integer("q_offset", q_offset)
    check_integer("kv_offset", kv_offset)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mod(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return mask_mod


def batched(mask: MaskMod, length: int) -> MaskMod:
    """Return a mask for sequences of equal length laid end to end in one.

    Formula: visible(q, kv) = (q // length == kv // length) & mask(q % length, kv % length).
    Shapes: seqlen_q = seqlen_kv = batch * length.
    Example: `batched(causal, 512)`.
    Source: attention-gym, masks/batchify (https://github.com/meta-pytorch/attention-gym).
    """
    check_mod("mask", mask)
    check_integer("length", length, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = q_idx // length == kv_idx // length
        return same & mask(b, h, q_idx % length, kv_idx % length)

    return mask_mod


def masked_score(score_mod: ScoreMod, mask: MaskMod) -> ScoreMod:
    """Return a score_mod that also hides what `mask` does not show.

    Formula: score' = score_mod(score) where mask, else -inf.
    Shapes: any.
    Example: `masked_score(alibi(8), causal)`; a separate mask_mod lets whole blocks be skipped.
    Source: FlexAttention, https://pytorch.org/blog/flexattention.
    """
    import torch

    check_mod("score_mod", score_mod, "score")
    check_mod("mask", mask)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = mask(b, h, q_idx, kv_idx)
        return torch.where(visible, score_mod(score, b, h, q_idx, kv_idx), -float("inf"))

    return mod
