"""Masks by tables of selected tiles: top-k lists, block maps, and the layout of video tiles.

Lives here: video sparse attention and its metadata. Not here: BlockMask (`fovea.create_block_mask`
makes one from any of these). Invariant: a table holds tile numbers, a token's tile is its index
divided by the tile's size.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.errors import invalid
from fovea.mods.library.arguments import check_integer, check_tensor
from fovea.mods.library.combine import MaskMod


def selected_tiles(top_k: Tensor, tile: int, sizes: Tensor | None = None) -> MaskMod:
    """Return a mask of the KV tiles that each query tile selected.

    Formula: visible(q, kv) = any over n of top_k[b, h, q // tile, n] == kv // tile, and kv % tile <
        sizes[kv // tile] where tiles are padded.
    Shapes: top_k (batch, heads, query tiles, k) integers; sizes (KV tiles,) integers.
    Example: `selected_tiles(scores.topk(8).indices, 64)`.
    Source: video sparse attention, https://arxiv.org/abs/2505.13389.
    """
    check_tensor("top_k", top_k, 4, is_index=True)
    check_integer("tile", tile, 1)
    if sizes is None:

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (top_k[b, h, q_idx // tile] == kv_idx // tile).any(-1)

        return mask_mod
    check_tensor("sizes", sizes, 1, is_index=True)
    lengths = sizes

    def padded_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kv_tile = kv_idx // tile
        selected = (top_k[b, h, q_idx // tile] == kv_tile).any(-1)
        return selected & (kv_idx % tile < lengths[kv_tile])

    return padded_mask_mod


def block_map(visible: Tensor, tile: int, sizes: Tensor | None = None) -> MaskMod:
    """Return a mask from a bool table of tile pairs.

    Formula: visible(q, kv) = visible[b, h, q // tile, kv // tile], and kv % tile < sizes[kv //
        tile] where tiles are padded.
    Shapes: visible (batch, heads, query tiles, KV tiles) bool; sizes (KV tiles,) integers.
    Example: `block_map(torch.rand(1, 8, 16, 16) < 0.3, 64)`.
    Source: video sparse attention, https://arxiv.org/abs/2505.13389.
    """
    check_tensor("visible", visible, 4)
    check_integer("tile", tile, 1)
    table = visible.bool()
    if sizes is None:

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return table[b, h, q_idx // tile, kv_idx // tile]

        return mask_mod
    check_tensor("sizes", sizes, 1, is_index=True)
    lengths = sizes

    def padded_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kv_tile = kv_idx // tile
        return table[b, h, q_idx // tile, kv_tile] & (kv_idx % tile < lengths[kv_tile])

    return padded_mask_mod


def tile_padding(sizes: Tensor, tile: int) -> MaskMod:
    """Return a mask that hides the padding at the end of each tile.

    Formula: visible(q, kv) = kv % tile < sizes[kv // tile].
    Shapes: sizes (KV tiles,) integers.
    Example: `tile_padding(tiles.sizes, tiles.tokens)`.
    Source: video sparse attention, https://arxiv.org/abs/2505.13389.
    """
    check_tensor("sizes", sizes, 1, is_index=True)
    check_integer("tile", tile, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx % tile < sizes[kv_idx // tile]

    return mask_mod


def top_k_tokens(indices: Tensor) -> MaskMod:
    """Return a mask of the single keys that each query selected.

    Formula: visible(q, kv) = any over n of indices[b, q, n] == kv.
    Shapes: indices (batch, seqlen_q, k) integers; -1 fills unused places.
    Example: `top_k_tokens(index_scores.topk(64).indices)`.
    Source: DeepSeek sparse attention, https://arxiv.org/abs/2512.02556.
    """
    check_tensor("indices", indices, 3, is_index=True)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (indices[b, q_idx] == kv_idx).any(-1)

    return mask_mod


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoTiles:
    """A video cut into tiles of equal size, those at the border padded.

    `order` lists the row-major token of every place that is no padding, in tiled order; `places`
    lists these places; `sizes` holds the tokens of each tile.
    """

    shape: tuple[int, int, int]
    tile: tuple[int, int, int]
    tokens: int
    order: Tensor
    places: Tensor
    sizes: Tensor

    def tiled(self, x: Tensor) -> Tensor:
        """Return tokens in tiled order with zeros in the padding.

        Shapes: (..., time * height * width, channels) -> (..., tiles * tokens, channels).
        """
        length = self.sizes.shape[0] * self.tokens
        padded = x.new_zeros((*x.shape[:-2], length, x.shape[-1]))
        return padded.index_copy(-2, self.places, x.index_select(-2, self.order))

    def untiled(self, x: Tensor) -> Tensor:
        """Return tokens in row-major order, the padding dropped.

        Shapes: (..., tiles * tokens, channels) -> (..., time * height * width, channels).
        """
        packed = x.index_select(-2, self.places)
        return torch.empty_like(packed).index_copy(-2, self.order, packed)


def video_tiles(
    shape: tuple[int, int, int], tile: tuple[int, int, int] = (4, 4, 4), device: Any = None
) -> VideoTiles:
    """Return the layout of a video of (time, height, width) cut into tiles.

    Raises:
        ValueError: an extent is not positive.
    """
    if min(*shape, *tile) <= 0:
        raise ValueError(invalid("shape, tile", (shape, tile), "positive extents", "correct them"))
    counts = tuple(-(-extent // size) for extent, size in zip(shape, tile))
    whole = tuple(count * size for count, size in zip(counts, tile))
    numbers = torch.full(whole, -1, device=device)
    inside = torch.arange(math.prod(shape), device=device).reshape(shape)
    numbers[: shape[0], : shape[1], : shape[2]] = inside
    split = numbers.reshape(counts[0], tile[0], counts[1], tile[1], counts[2], tile[2])
    rows = split.permute(0, 2, 4, 1, 3, 5).reshape(-1, math.prod(tile))
    # The padding of a tile goes behind its tokens, so that one size per tile describes it.
    packed = rows.gather(1, (rows < 0).to(torch.int8).argsort(dim=1, stable=True)).flatten()
    places = torch.nonzero(packed >= 0).flatten()
    return VideoTiles(
        shape=shape,
        tile=tile,
        tokens=math.prod(tile),
        order=packed[places],
        places=places,
        sizes=(rows >= 0).sum(1),
    )


def pooled_tile_scores(
    q: Tensor, k: Tensor, tile: int, q_sizes: Tensor | None = None, kv_sizes: Tensor | None = None
) -> Tensor:
    """Return scaled products of mean queries and mean keys of tiles, from which top-k is chosen.

    Formula: mean over tile i of q times mean over tile j of k / sqrt(head_dim).
    Shapes: q, k (batch, heads, tiles * tile, head_dim) -> (batch, heads, q tiles, kv tiles).
    Source: video sparse attention, https://arxiv.org/abs/2505.13389, section 2.
    """
    mean_q = pooled_tiles(q, tile, q_sizes)
    mean_k = pooled_tiles(k, tile, kv_sizes)
    return mean_q @ mean_k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def pooled_tiles(x: Tensor, tile: int, sizes: Tensor | None = None) -> Tensor:
    """Return the mean over the tokens of each tile, padding (zeros) not counted.

    Shapes: (..., tiles * tile, head_dim) -> (..., tiles, head_dim).
    """
    total = x.reshape(*x.shape[:-2], -1, tile, x.shape[-1]).float().sum(-2)
    count = tile if sizes is None else sizes[:, None]
    return (total / count).to(x.dtype)


def top_k_with_self(scores: Tensor, k: int) -> Tensor:
    """Return the k best KV tiles of each query tile, its own tile always among them, sorted.

    Shapes: scores (batch, heads, tiles, tiles) -> (batch, heads, tiles, k).
    """
    eye = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(eye, float("inf")).topk(k).indices.sort(-1).values
