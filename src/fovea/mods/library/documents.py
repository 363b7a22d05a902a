"""Masks of packed sequences: documents, shared prefixes, modality spans, trees, images beside text.

Lives here: masks that look their tokens up in captured integer tensors. Not here: masks by position
(`positions.py`). Invariant: every table is made when the mask is made, on the device of its input;
the mask itself only gathers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fovea.errors import invalid
from fovea.mods.library.arguments import (
    check_flags,
    check_integer,
    check_mod,
    check_offsets,
    check_tensor,
)
from fovea.mods.library.combine import MaskMod


def document_ids(offsets: Tensor) -> Tensor:
    """Return the document number of every token, int32, from cumulative lengths.

    Shapes: offsets (documents + 1,) starting at 0 -> (offsets[-1],).
    """
    check_offsets("offsets", offsets)
    lengths = offsets[1:] - offsets[:-1]
    numbers = torch.arange(lengths.shape[0], device=offsets.device, dtype=torch.int32)
    return torch.repeat_interleave(numbers, lengths)


def offsets_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return the cumulative lengths, int32, from 0 on.

    Shapes: documents lengths -> (documents + 1,).
    """
    if isinstance(lengths, Tensor):
        check_tensor("lengths", lengths, 1, is_index=True)
    else:
        for place, length in enumerate(lengths):
            check_integer(f"lengths[{place}]", length, 0)
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def document(ids: Tensor, causal: bool = True) -> MaskMod:
    """Return a mask inside documents, causal by default, given each token's document number.

    Formula: visible(q, kv) = ids[b, q] == ids[b, kv], and q >= kv if causal.
    Shapes: ids (seqlen,) or (batch, seqlen) integers.
    Example: `document(torch.tensor([0, 0, 0, 1, 1]))`.
    Source: packing as in https://arxiv.org/abs/2107.02027.
    """
    check_tensor("ids", ids, 1, 2, is_index=True)
    per_batch = ids.dim() == 2

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_id = ids[b, q_idx] if per_batch else ids[q_idx]
        kv_id = ids[b, kv_idx] if per_batch else ids[kv_idx]
        same = q_id == kv_id
        return same & (q_idx >= kv_idx) if causal else same

    return mask_mod


def document_mask(mask: MaskMod, offsets: Tensor) -> MaskMod:
    """Return `mask` inside each document, with indices that count from the document's start.

    Formula: d = document of q; visible = (document of kv == d) and mask(q - offsets[d], kv -
        offsets[d]).
    Shapes: offsets (documents + 1,) integers starting at 0.
    Example: `document_mask(prefix_lm(10), offsets_of([100, 50, 362]))`.
    Source: attention-gym, masks/document_mask (https://github.com/meta-pytorch/attention-gym).
    """
    check_mod("mask", mask)
    check_offsets("offsets", offsets)
    ids = document_ids(offsets)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_id, kv_id = ids[q_idx], ids[kv_idx]
        inside = mask(b, h, q_idx - offsets[q_id], kv_idx - offsets[kv_id])
        return (q_id == kv_id) & inside

    return mask_mod


def packed_causal(offsets: Tensor) -> MaskMod:
    """Return the causal document mask as one interval of keys per query.

    Formula: visible(q, kv) = start(q) <= kv <= q, start(q) being where q's document begins.
    Shapes: offsets (documents + 1,) integers starting at 0.
    Example: `packed_causal(offsets_of([100, 50, 362]))`.
    Source: attention-gym, masks/document_mask (https://github.com/meta-pytorch/attention-gym).
    """
    check_offsets("offsets", offsets)
    starts = offsets[document_ids(offsets)]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= starts[q_idx]) & (q_idx >= kv_idx)

    return mask_mod


def shared_prefix(offsets: Tensor, prefix_of: Tensor) -> MaskMod:
    """Return a mask of continuations that share prompts, each prompt stored once.

    Formula: a query sees its own document up to itself, and all of the document prefix_of[d].
    Shapes: offsets (documents + 1,); prefix_of (documents,), a prompt being its own prefix.
    Example: `shared_prefix(offsets_of([64, 20, 30]), torch.tensor([0, 0, 0]))`.
    Source: Hydragen, https://arxiv.org/abs/2402.05099.
    """
    check_offsets("offsets", offsets)
    check_tensor("prefix_of", prefix_of, 1, is_index=True)
    if prefix_of.shape[0] != offsets.shape[0] - 1:
        got, allowed = (
            tuple(prefix_of.shape),
            f"({offsets.shape[0] - 1},), the documents of offsets",
        )
        raise ValueError(invalid("prefix_of.shape", got, allowed, "give each document a prefix"))
    ids = document_ids(offsets)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = ids[q_idx]
        prompt = prefix_of[own]
        own_history = (kv_idx >= offsets[own]) & (kv_idx <= q_idx)
        in_prompt = (kv_idx >= offsets[prompt]) & (kv_idx < offsets[prompt + 1])
        return own_history | ((own != prompt) & in_prompt)

    return mask_mod


def transfusion(span: Tensor) -> MaskMod:
    """Return a causal mask in which the tokens of one image see each other both ways.

    Formula: visible(q, kv) = q >= kv or (span[b, q] == span[b, kv] >= 0).
    Shapes: span (seqlen,) or (batch, seqlen) integers: the number of the image a token belongs to,
        -1 for text.
    Example: `transfusion(torch.tensor([-1, -1, 0, 0, 0, -1, 1, 1]))`.
    Source: https://arxiv.org/abs/2408.11039, section 3.1.
    """
    check_tensor("span", span, 1, 2, is_index=True)
    per_batch = span.dim() == 2

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_span = span[b, q_idx] if per_batch else span[q_idx]
        kv_span = span[b, kv_idx] if per_batch else span[kv_idx]
        return (q_idx >= kv_idx) | ((q_span == kv_span) & (q_span >= 0))

    return mask_mod


def vision_cross_attention(intervals: Tensor, tokens_per_image: int) -> MaskMod:
    """Return Flamingo's mask between text queries and image keys.

    Formula: i = kv // tokens_per_image; visible = intervals[i, 0] <= q < intervals[i, 1].
    Shapes: intervals (images, 2): the text positions that see each image; seqlen_kv = images *
        tokens_per_image.
    Example: `vision_cross_attention(torch.tensor([[0, 7], [1, 7], [7, 12]]), 3)`.
    Source: https://arxiv.org/abs/2204.14198.
    """
    check_tensor("intervals", intervals, 2, is_index=True)
    if intervals.shape[1] != 2:
        got = tuple(intervals.shape)
        raise ValueError(invalid("intervals.shape", got, "(images, 2)", "give starts and ends"))
    check_integer("tokens_per_image", tokens_per_image, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        interval = intervals[kv_idx // tokens_per_image]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask_mod


def tree_ancestors(parents: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return for every pair of tree nodes whether the second lies on the first's path to the root.

    Shapes: parents, each before its children, the root's entry ignored -> (nodes, nodes) bool.
    """
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node in range(1, len(parents)):
        if not 0 <= parents[node] < node:
            allowed = f"0 to {node - 1}, a node before it"
            remedy = "list each node after its parent"
            raise ValueError(invalid(f"parents[{node}]", parents[node], allowed, remedy))
        ancestors[node] |= ancestors[parents[node]]
    return ancestors.to(device)


def tree(prefix: int, ancestors: Tensor) -> MaskMod:
    """Return the mask of tree-shaped drafts: all of the prefix, then one's own ancestors.

    Formula: visible(q, kv) = kv < prefix or ancestors[q, kv - prefix].
    Shapes: ancestors (nodes, nodes) bool; seqlen_q = nodes, seqlen_kv = prefix + nodes.
    Example: `tree(512, tree_ancestors([-1, 0, 1, 1, 3]))`.
    Source: SpecInfer, https://arxiv.org/abs/2305.09781.
    """
    check_integer("prefix", prefix, 0)
    check_flags("ancestors", ancestors, 2)
    if ancestors.shape[0] != ancestors.shape[1]:
        got = tuple(ancestors.shape)
        raise ValueError(invalid("ancestors.shape", got, "(nodes, nodes)", "use tree_ancestors"))
    nodes = ancestors.shape[0]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        node = kv_idx - prefix
        is_node = (node >= 0) & (node < nodes)
        return (node < 0) | (is_node & ancestors[q_idx, node.clamp(0, nodes - 1)])

    return mask_mod


def draft_blocks(prefix: int, block: int) -> MaskMod:
    """Return the training mask of a draft head: the prefix, and one's own block up to oneself.

    Formula: k = kv - prefix; visible = k < 0 or (q // block == k // block and k % block <= q %
        block).
    Shapes: seqlen_q = blocks * block, seqlen_kv = prefix + blocks * block.
    Example: `draft_blocks(512, 8)`.
    Source: JetSpec, https://arxiv.org/abs/2606.18394.
    """
    check_integer("prefix", prefix, 0)
    check_integer("block", block, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        token = kv_idx - prefix
        same = (token >= 0) & (q_idx // block == token // block)
        return (token < 0) | (same & (token % block <= q_idx % block))

    return mask_mod
