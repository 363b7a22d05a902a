"""What `fovea.explain` says of masks that are bands."""

import pytest
import torch

import fovea
from fovea import mods
from fovea.arch import SM90, SM100

LENGTH = 100


def _explain(**options):
    q = torch.zeros(1, LENGTH, 2, 64, dtype=torch.bfloat16)
    return fovea.explain(q, q, q, **options)


@pytest.mark.parametrize(
    "mask",
    [mods.causal, mods.sliding_window(7, 2), mods.sliding_window(9, -3)],
    ids=["causal", "both_sides", "past_alone"],
)
def test_a_band_is_named_and_counted(mask):
    zero = torch.zeros((), dtype=torch.int64)
    position = torch.arange(LENGTH)
    count = int(mask(zero, zero, position[:, None], position).sum())
    block_mask = fovea.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu")
    for options in ({"mask_mod": mask}, {"block_mask": block_mask}):
        found = _explain(**options)
        assert found.limits is not None
        assert found.visible_pairs == 2 * count
        assert "<= kv_idx - q_idx <=" in str(found)


def test_other_masks_are_no_limits():
    found = _explain(mask_mod=mods.prefix_lm(5))
    assert found.limits is None
    assert "kv_idx - q_idx" not in str(found)


def test_lists_of_another_origin_have_their_variant_too():
    block_mask = fovea.create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cpu")
    kernel = next(each for each in _explain(block_mask=block_mask).kernels if each.arch is SM90)
    assert any("block lists that changed since they were made" in text for text in kernel.variants)
    assert len(kernel.variants) > len(
        next(each for each in _explain(causal=True).kernels if each.arch is SM90).variants
    )


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (mods.causal, ("block lists that changed", "a block mask that torch made of one range")),
        (mods.document(torch.arange(LENGTH) // 5), ("block lists that changed", "kept as bits")),
        (mods.natten_2d(2, LENGTH // 2, 1, 3), ("block lists that changed", "kept as bits")),
        (mods.natten_2d(4, LENGTH // 4, 3, 3), ("block lists that changed", "one range of keys")),
    ],
)
def test_every_origin_of_a_block_mask_has_its_variants(mask, words):
    block_mask = fovea.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu")
    kernel = next(each for each in _explain(block_mask=block_mask).kernels if each.arch is SM90)
    for word in words:
        assert any(word in text for text in kernel.variants)
    assert any("torch made" in text for text in kernel.variants) == (mask is mods.causal)


@pytest.mark.parametrize("block_size", [128, 256])
def test_a_mask_that_may_be_bits_has_their_kernel_on_blackwell(block_size):
    def variants(mask):
        lists = fovea.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", block_size)
        kernels = _explain(block_mask=lists).kernels
        return next(each for each in kernels if each.arch is SM100).variants

    # Lists of one range a row are read there; bits are of 128 x 128 blocks.
    found = variants(mods.document(torch.arange(LENGTH) // 5))
    texts = [text for text in found if "kept as bits" in text]
    assert not any("one range of keys" in text for text in found)
    by_bits = variants(mods.natten_2d(4, LENGTH // 4, 3, 3))
    assert by_bits[0].split(":")[0] in [text.split(":")[0] for text in texts]
    assert all("_m128n128" in text for text in (*texts, by_bits[0]))


def test_a_soft_cap_has_one_kernel_for_all_numbers():
    kernel = next(
        each for each in _explain(score_mod=mods.softcap(20.0)).kernels if each.arch is SM90
    )
    expected = next(each for each in _explain(softcap=3.0).kernels if each.arch is SM90)
    assert kernel.variants == expected.variants
