"""What a launch is given of a block mask: ranges of keys, bits, or the lists themselves.

The launcher is a stand-in that keeps its arguments: nothing is computed here.
"""

import pytest
import torch
from launch_arguments import NAMES, tensors

import fovea
from fovea import mods
from fovea.tiling.exact_lists import bits_beside, ranges_beside


def masks_of_unequal_rows():
    """Return masks whose rows of blocks differ in work, the last with one list for two heads."""
    lengths = torch.tensor([3, 900, 40, 200, 640, 1, 512, 77])

    def of_all(b, h, i, j):
        return j < lengths[i // 128]

    def of_each(b, h, i, j):
        return j < lengths[(i // 128 + h) % 8]

    sizes = (1000, 1000, "cpu")
    return [
        fovea.create_block_mask(of_all, 1, 1, *sizes),
        fovea.create_block_mask(of_each, 1, 4, *sizes),
    ]


@pytest.mark.parametrize("mask", masks_of_unequal_rows(), ids=["one head", "four heads"])
def test_ranges_of_a_mask_go_along_in_place_of_its_lists(mask, launched):
    q, k, v = tensors(seqlen=1000)
    for _ in range(2):
        fovea.attention(q, k, v, block_mask=mask)
    rows, groups, order = launched[-1][NAMES.index("lists")]
    ranges = ranges_beside(mask.kv_num_blocks)
    assert rows is ranges.rows
    assert groups is ranges.groups
    assert order.numel() in {-(-1000 // (64 * size)) for size in (2, 3, 4)}
    mask.kv_num_blocks.add_(0)
    fovea.attention(q, k, v, block_mask=mask)
    assert launched[-1][NAMES.index("lists")][0] is mask.kv_num_blocks


@pytest.mark.parametrize("mask", masks_of_unequal_rows(), ids=["one head", "four heads"])
def test_query_tiles_of_lists_come_by_falling_work(mask, launched):
    mask.kv_num_blocks = mask.kv_num_blocks.clone()  # no longer known to be exact
    q, k, v = tensors(seqlen=1000)
    for _ in range(2):
        fovea.attention(q, k, v, block_mask=mask)
    order, has_order = launched[-1][NAMES.index("lists")][6:8]
    assert has_order == 1
    assert order.dtype == torch.int32
    work = (mask.kv_num_blocks + mask.full_kv_num_blocks).sum((0, 1))
    assert torch.equal(order.sort().values, torch.arange(8, dtype=torch.int32))
    assert bool((work[order.long()].diff() <= 0).all())


def test_ranges_of_this_call_are_launched(launched):
    q, k, v = tensors()

    def made(size):
        ids = torch.arange(256) // size
        return fovea.create_block_mask(mods.document(ids), None, None, 256, 256, "cpu")

    for mask in (made(50), made(70), made(70)):
        for _ in range(2):
            fovea.attention(q, k, v, block_mask=mask)
            given = launched[-1][NAMES.index("lists")]
            assert given[0] is ranges_beside(mask.kv_num_blocks).rows


def test_bits_of_this_call_are_launched(launched):
    q, k, v = tensors()
    for _ in range(2):
        mask = fovea.create_block_mask(
            mods.natten_2d(16, 16, 3, 5), None, None, 256, 256, "cpu", 32
        )
        for _ in range(2):
            fovea.attention(q, k, v, block_mask=mask)
            given = launched[-1][NAMES.index("lists")]
            bits = bits_beside(mask.kv_num_blocks)
            assert given[0] is bits.lists.kv_num_blocks
            assert given[4] is bits.words
            assert launched[-1][-1] is None


def test_lists_beside_a_mask_that_they_were_not_made_of_are_launched(launched):
    q, k, v = tensors()
    masks = [
        fovea.create_block_mask(mods.document(torch.arange(256) // 50), None, None, 256, 256, "cpu")
        for _ in range(2)
    ]
    windows = [
        fovea.create_block_mask(mods.sliding_window(left), None, None, 256, 256, "cpu")
        for left in (30, 90)
    ]
    for mask in (*masks, *windows):  # all are known now
        fovea.attention(q, k, v, block_mask=mask)
    masks[0].mask_mod = mods.document(torch.arange(256) // 70)
    windows[0].mask_mod = mods.sliding_window(90)
    for mask in (masks[0], windows[0]):
        for _ in range(2):
            fovea.attention(q, k, v, block_mask=mask)
            given = launched[-1][NAMES.index("lists")]
            assert given is not None
            assert given[0] is mask.kv_num_blocks
