"""Bits of partial blocks against every position of the mask."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import fovea
from fovea import mods
from fovea.mods.trace import trace_mask_mod
from fovea.problem.block_masks import known_lists
from fovea.tiling import mask_bits
from fovea.tiling.exact_lists import Exactness, exactness
from fovea.tiling.listed_mask import look
from fovea.tiling.mask_bits import BLOCK, MaskBits


def _sinks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 4) | ((q_idx - kv_idx <= 40) & (q_idx >= kv_idx))


def _by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx + kv_idx * 3 + b) % (h + 2) == 0) & (kv_idx < 300)


MASKS = {"sinks": _sinks, "image": mods.natten_2d(18, 20, 5, 7), "by head": _by_head}


def _exact(
    mask: Any,
    batch: int | None,
    heads: int | None,
    lengths: tuple[int, int],
    size: Any,
    *,
    by_torch: bool = False,
) -> Exactness:
    create = torch_block_mask if by_torch else fovea.create_block_mask
    block_mask = create(mask, batch, heads, *lengths, "cpu", size)
    lists = known_lists(block_mask)
    if by_torch:
        look(lists, trace_mask_mod(mask))
    exact = exactness(lists)
    assert exact is not None
    return exact


def _bits(
    mask: Any, batch: int | None, heads: int | None, lengths: tuple[int, int], size: Any
) -> MaskBits | None:
    exact = _exact(mask, batch, heads, lengths, size)
    assert exact.ranges is None
    return exact.bits


def _shown(bits: MaskBits, lengths: tuple[int, int]) -> torch.Tensor:
    """Return what lists and bits show, position by position."""
    lists = bits.lists
    batch, heads, rows = lists.kv_num_blocks.shape
    columns = -(-lengths[1] // BLOCK)
    shown = torch.zeros(batch, heads, rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    key = torch.arange(BLOCK)
    word, bit = key // 2 % 4, key // 8 * 2 + key % 2
    for b, h, row in torch.cartesian_prod(*map(torch.arange, (batch, heads, rows))).tolist():
        place = slice(row * BLOCK, (row + 1) * BLOCK)
        for entry in range(int(lists.kv_num_blocks[b, h, row])):
            column = int(lists.kv_indices[b, h, row, entry]) * BLOCK
            words = bits.words[int(bits.starts[b, h, row]) + entry]
            shown[b, h, place, column : column + BLOCK] = (words[:, word] >> bit & 1) != 0
        if lists.full_kv_num_blocks is None or lists.full_kv_indices is None:
            continue
        for entry in range(int(lists.full_kv_num_blocks[b, h, row])):
            column = int(lists.full_kv_indices[b, h, row, entry]) * BLOCK
            shown[b, h, place, column : column + BLOCK] = True
    return shown[:, :, : lengths[0], : lengths[1]]


@pytest.mark.parametrize("block_size", [128, (64, 32), (100, 7), 256])
@pytest.mark.parametrize("name", MASKS)
def test_bits_show_what_the_mask_shows(name: str, block_size: Any) -> None:
    lengths = (360, 360) if name == "image" else (333, 270)
    batch, heads = (2, 3) if name == "by head" else (None, None)
    bits = _bits(MASKS[name], batch, heads, lengths, block_size)
    assert bits is not None
    shown = _shown(bits, lengths)
    axes = (*shown.shape[:2], *lengths)
    b, h, q, kv = (
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(axes)
    )
    assert torch.equal(shown, MASKS[name](b, h, q, kv).expand(axes))


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("block_size", [(64, 128), (128, 32)])
def test_ranges_of_small_blocks_have_bits_beside_them(block_size: Any, by_torch: bool) -> None:
    ids = torch.arange(300) // 77
    mask = lambda b, h, q, kv: ids[q] == ids[kv]  # noqa: E731
    exact = _exact(mask, None, None, (300, 300), block_size, by_torch=by_torch)
    assert exact.ranges is not None
    assert exact.bits is not None
    assert torch.equal(_shown(exact.bits, (300, 300))[0, 0], ids[:, None] == ids)


def test_ranges_of_whole_blocks_have_none() -> None:
    exact = _exact(mods.document(torch.arange(300) // 77), None, None, (300, 300), (256, 128))
    assert exact.ranges is not None
    assert exact.bits is None


def test_a_mask_without_partial_blocks_has_a_word_to_point_at() -> None:
    # Two ranges of whole blocks in each row.
    mask = lambda b, h, q, kv: (kv < 128) | (kv >= 256)  # noqa: E731
    bits = _bits(mask, None, None, (128, 384), 128)
    assert bits is not None
    assert bits.words.shape == (1, BLOCK, 4)


def test_many_bits_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_bits, "_MOST_BYTES", 128 * 16)
    assert _bits(_sinks, None, None, (333, 270), 128) is None
