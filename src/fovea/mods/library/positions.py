"""Masks by position alone: causal, windows, prefixes, chunks, strides, sinks.

Lives here: masks that need indices and numbers, and at most one flag per token. Not here: packed
documents (`documents.py`), images (`images.py`). Invariant: the lengths are never needed, so one
traced graph serves every length.
"""

from typing import Any

from torch import Tensor

from fovea.errors import invalid
from fovea.mods.library.arguments import check_flags, check_integer, check_tensor
from fovea.mods.library.combine import MaskMod


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Return whether the key is not in the query's future; this is a mask_mod itself.

    Formula: visible(q, kv) = q >= kv.
    Shapes: any; for seqlen_q != seqlen_kv it is top-left aligned, the keyword causal= has both.
    Example: `fovea.attention(q, k, v, mask_mod=causal)`.
    Source: https://arxiv.org/abs/1706.03762.
    """
    return q_idx >= kv_idx


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """Return a mask of `left` keys before the query, itself, and `right` keys after it.

    Formula: visible(q, kv) = -right <= q - kv <= left.
    Shapes: any.
    Example: `sliding_window(1023)` shows 1024 keys, as Mistral's window of 1024 does.
    Source: https://arxiv.org/abs/2004.05150.
    """
    check_integer("left", left)
    check_integer("right", right)
    are_known = not (isinstance(left, Tensor) or isinstance(right, Tensor))
    if are_known and left + right < 0:
        allowed = "integers whose sum is at least 0"
        raise ValueError(invalid("left, right", (left, right), allowed, "no key lies between them"))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask_mod


def dilated(window: int, dilation: int) -> MaskMod:
    """Return a causal window in which every `dilation`-th key counts.

    Formula: visible(q, kv) = 0 <= q - kv <= window and (q - kv) % dilation == 0.
    Shapes: any.
    Example: `dilated(1024, 4)` shows 257 keys that reach 1024 back.
    Source: https://arxiv.org/abs/2004.05150, section 3.1.
    """
    check_integer("window", window, 0)
    check_integer("dilation", dilation, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance <= window) & (distance % dilation == 0)

    return mask_mod


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Return a causal mask whose first `prefix` keys every query sees.

    Formula: visible(q, kv) = kv < prefix[b] or q >= kv.
    Shapes: prefix an int, or (batch,) integers.
    Example: `prefix_lm(torch.tensor([100, 37]))`.
    Source: https://arxiv.org/abs/1910.10683, section 3.2.
    """
    if isinstance(prefix, Tensor):
        check_tensor("prefix", prefix, 0, 1, is_index=True)
    elif isinstance(prefix, list | tuple):
        allowed = "an integer of at least 0, or an integer tensor (batch,)"
        raise TypeError(invalid("prefix", repr(prefix), allowed, "pass torch.tensor(prefix)"))
    else:
        check_integer("prefix", prefix, 0)
    if isinstance(prefix, Tensor) and prefix.dim() == 1:
        lengths = prefix

        def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

        return by_batch

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < prefix) | (q_idx >= kv_idx)

    return mask_mod


def chunked(chunk: int, causal: bool = True) -> MaskMod:
    """Return a mask that stays inside chunks of equal length.

    Formula: visible(q, kv) = q // chunk == kv // chunk, and q >= kv if causal.
    Shapes: any.
    Example: `chunked(8192)` is Llama 4's local attention.
    Source: https://ai.meta.com/blog/llama-4-multimodal-intelligence.
    """
    check_integer("chunk", chunk, 1)
    if causal:

        def causal_chunks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx)

        return causal_chunks

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx // chunk == kv_idx // chunk

    return mask_mod


def llama4_chunked(chunk: int = 8192, left_padding: Tensor | None = None) -> MaskMod:
    """Return Llama 4's chunked mask, whose chunks start behind each sequence's left padding.

    Formula: p = left_padding[b]; visible = (q - p) // chunk == (kv - p) // chunk and kv >= p and
        q >= kv.
    Shapes: left_padding (batch,) integers.
    Example: `llama4_chunked(8192, padding)`.
    Source: https://github.com/huggingface/transformers, masking_utils.
    """
    check_integer("chunk", chunk, 1)
    if left_padding is None:
        return chunked(chunk)
    check_tensor("left_padding", left_padding, 1, is_index=True)
    padding = left_padding

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        start = padding[b]
        same = (q_idx - start) // chunk == (kv_idx - start) // chunk
        return same & (kv_idx >= start) & (q_idx >= kv_idx)

    return mask_mod


def streaming(window: int, sinks: int = 4) -> MaskMod:
    """Return StreamingLLM's mask: the first `sinks` keys and the last `window` ones.

    Formula: visible(q, kv) = q >= kv and (kv < sinks or q - kv < window).
    Shapes: any.
    Example: `streaming(2044, sinks=4)`.
    Source: https://arxiv.org/abs/2309.17453.
    """
    check_integer("window", window, 0)
    check_integer("sinks", sinks, 0)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < window))

    return mask_mod


def gpt_oss(window: int = 128) -> MaskMod:
    """Return the mask of GPT-OSS's local layers; its learned sink is the argument sink=.

    Formula: visible(q, kv) = 0 <= q - kv < window.
    Shapes: any.
    Example: `fovea.attention(q, k, v, mask_mod=gpt_oss(128), sink=sinks)`.
    Source: https://arxiv.org/abs/2508.10925.
    """
    check_integer("window", window, 0)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return mask_mod


def global_tokens(is_global: Tensor) -> MaskMod:
    """Return a mask in which marked tokens see, and are seen by, all.

    Formula: visible(q, kv) = is_global[q] or is_global[kv].
    Shapes: is_global (seqlen,) bool.
    Example: `or_masks(sliding_window(256, 256), global_tokens(flags))`.
    Source: https://arxiv.org/abs/2004.05150, section 3.1.
    """
    check_flags("is_global", is_global, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return is_global[q_idx] | is_global[kv_idx]

    return mask_mod


def global_sliding_window(window: int, is_global: Tensor) -> MaskMod:
    """Return Longformer's mask: a two-sided window, and global tokens.

    Formula: visible(q, kv) = |q - kv| <= window or is_global[q] or is_global[kv].
    Shapes: is_global (seqlen,) bool.
    Example: `global_sliding_window(256, flags)`.
    Source: https://arxiv.org/abs/2004.05150.
    """
    check_integer("window", window, 0)
    check_flags("is_global", is_global, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx).abs() <= window
        return near | is_global[q_idx] | is_global[kv_idx]

    return mask_mod


def checkerboard(size: int = 1) -> MaskMod:
    """Return a mask of squares, as a test picture: every second one is hidden.

    Formula: visible(q, kv) = (q // size + kv // size) is even.
    Shapes: any.
    Example: `checkerboard(64)`.
    Source: attention-gym's notebook (https://github.com/meta-pytorch/attention-gym).
    """
    check_integer("size", size, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // size + kv_idx // size) % 2 == 0

    return mask_mod


def strided(stride: int) -> MaskMod:
    """Return a causal mask of the last `stride` keys and every `stride`-th key before them.

    Formula: visible(q, kv) = q >= kv and (q - kv < stride or kv % stride == stride - 1).
    Shapes: any.
    Example: `strided(128)`.
    Source: Sparse Transformer, https://arxiv.org/abs/1904.10509, section 4.3 (fixed pattern).
    """
    check_integer("stride", stride, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        local = q_idx - kv_idx < stride
        return (q_idx >= kv_idx) & (local | (kv_idx % stride == stride - 1))

    return mask_mod


def block_diffusion(length: int, block: int) -> MaskMod:
    """Return the training mask of block diffusion over [noised tokens, clean tokens].

    Formula: with n = index < length and c = (index % length) // block: a query sees its own block
        of its own half; noised queries see clean blocks before theirs; clean queries see clean
        blocks up to theirs.
    Shapes: seqlen_q = seqlen_kv = 2 * length.
    Example: `block_diffusion(1024, 16)`.
    Source: https://arxiv.org/abs/2503.09573, section 3.1.
    """
    check_integer("length", length, 1)
    check_integer("block", block, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_noised, kv_noised = q_idx < length, kv_idx < length
        q_block, kv_block = (q_idx % length) // block, (kv_idx % length) // block
        own_block = (q_noised == kv_noised) & (q_block == kv_block)
        earlier_clean = q_noised & ~kv_noised & (kv_block < q_block)
        clean_history = ~q_noised & ~kv_noised & (kv_block <= q_block)
        return own_block | earlier_clean | clean_history

    return mask_mod
