"""The table of known BlockMasks: used while nothing changed, and never longer."""

import gc

import pytest
import torch

import fovea
from fovea.problem import block_masks
from fovea.problem.block_masks import known_lists


def make():
    return fovea.create_block_mask(
        lambda b, h, i, j: i >= j, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16
    )


def test_unchanged_mask_gives_the_same_lists():
    block_mask = make()
    assert known_lists(block_mask) is known_lists(block_mask)


@pytest.mark.parametrize("name", ["kv_num_blocks", "full_kv_indices", "q_indices"])
def test_mask_with_another_tensor_is_validated_anew(name):
    block_mask = make()
    first = known_lists(block_mask)
    setattr(block_mask, name, getattr(block_mask, name).clone())
    second = known_lists(block_mask)
    assert second is not first
    assert getattr(second, name) is getattr(block_mask, name)


def test_mask_that_becomes_wrong_raises():
    block_mask = make()
    known_lists(block_mask)
    block_mask.seq_lengths = (640, 64)
    with pytest.raises(ValueError, match="seq_lengths"):
        known_lists(block_mask)


def test_contents_that_change_in_place_are_seen():
    block_mask = make()
    lists = known_lists(block_mask)
    block_mask.kv_num_blocks.zero_()
    assert torch.equal(known_lists(block_mask).kv_num_blocks, torch.zeros_like(lists.kv_num_blocks))


def test_look_alike_without_weak_references_is_validated_every_time():
    names = (*block_masks._FIELDS, "seq_lengths", "BLOCK_SIZE", "mask_mod")

    class LookAlike:
        __slots__ = names

    block_mask, other = make(), LookAlike()
    for name in names:
        setattr(other, name, getattr(block_mask, name))
    first = known_lists(other)
    assert known_lists(other) is not first
    assert first.kv_indices is block_mask.kv_indices


def test_entry_goes_with_its_mask():
    block_mask = make()
    known_lists(block_mask)
    key = id(block_mask)
    assert key in block_masks._entries
    del block_mask
    gc.collect()
    assert key not in block_masks._entries


@pytest.mark.parametrize(("name", "value"), [("BLOCK_SIZE", 16), ("seq_lengths", (20,))])
def test_field_that_is_no_pair_is_named(name, value):
    block_mask = fovea.create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70, "cpu")
    setattr(block_mask, name, value)
    with pytest.raises(TypeError, match=f"block_mask.{name}="):
        known_lists(block_mask)
