"""BlockLists against torch's BlockMask, and its refusal of masks that do not fit."""

import types

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fovea.tiling.block_lists import BlockLists


def windowed(b, h, q, kv):
    return (q >= kv + b - h) & (q - kv < 100)


def torch_mask(batch=2, heads=3, seqlen_q=200, seqlen_kv=300, block=(16, 32)) -> BlockMask:
    return create_block_mask(
        windowed, batch, heads, seqlen_q, seqlen_kv, device="cpu", BLOCK_SIZE=block
    )


def kv_only(mask: BlockMask, **changes) -> BlockMask:
    """Return `mask` through the constructor, with fields changed."""
    fields = {
        "seq_lengths": mask.seq_lengths,
        "kv_num_blocks": mask.kv_num_blocks,
        "kv_indices": mask.kv_indices,
        "full_kv_num_blocks": mask.full_kv_num_blocks,
        "full_kv_indices": mask.full_kv_indices,
        "q_num_blocks": None,
        "q_indices": None,
        "full_q_num_blocks": None,
        "full_q_indices": None,
        "BLOCK_SIZE": mask.BLOCK_SIZE,
        "mask_mod": mask.mask_mod,
    }
    return BlockMask(**(fields | changes))


def test_lists_of_a_torch_mask_keep_its_tensors_and_sizes():
    mask = torch_mask()
    lists = BlockLists.from_torch(mask, batch=2, heads=3, seqlen_q=200, seqlen_kv=300)
    assert (lists.batch, lists.heads, lists.blocks_q, lists.blocks_kv) == (2, 3, 13, 10)
    assert lists.kv_indices.data_ptr() == mask.kv_indices.data_ptr()
    assert torch.equal(lists.visible_blocks(), mask.to_dense().bool())
    lists.check_contents()


def test_states_equal_the_mask_summed_over_blocks():
    lists = BlockLists.from_torch(torch_mask())
    b = torch.arange(2)[:, None, None, None]
    h = torch.arange(3)[:, None, None]
    dense = windowed(b, h, torch.arange(200)[:, None], torch.arange(300))
    dense = torch.nn.functional.pad(dense, (0, 20, 0, 8))
    seen = dense.view(2, 3, 13, 16, 10, 32).sum((3, 5))
    assert torch.equal(lists.states(), ((seen > 0).long() + (seen == 512)).to(torch.int8))
    assert torch.equal(lists.full_blocks(), seen == 512)


def test_lists_from_states_equal_torch_bit_for_bit_behind_the_counts_too():
    mask = torch_mask()
    lists = BlockLists.from_torch(mask)
    again = BlockLists.from_states(
        lists.states(), seqlen_q=200, seqlen_kv=300, block_q=16, block_kv=32
    )
    for mine, theirs in zip(again.tensors(), lists.tensors(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous()


@pytest.mark.parametrize("states", ["empty", "full", "partial"])
def test_lists_from_uniform_states_list_all_or_nothing(states):
    value = {"empty": 0, "partial": 1, "full": 2}[states]
    lists = BlockLists.from_states(
        torch.full((1, 1, 3, 5), value, dtype=torch.int8),
        seqlen_q=12, seqlen_kv=20, block_q=4, block_kv=4,
    )  # fmt: skip
    assert lists.kv_num_blocks.tolist() == [[[5 * (value == 1)] * 3]]
    assert lists.full_kv_num_blocks.tolist() == [[[5 * (value == 2)] * 3]]
    assert lists.q_num_blocks.tolist() == [[[3 * (value == 1)] * 5]]
    assert lists.full_q_num_blocks.tolist() == [[[3 * (value == 2)] * 5]]
    assert lists.kv_indices.tolist() == [[[[0, 1, 2, 3, 4]] * 3]]


def test_a_block_in_both_lists_is_full():
    mask = kv_only(torch_mask())
    everything = torch.arange(10, dtype=torch.int32).expand(2, 3, 13, 10).contiguous()
    both = kv_only(
        mask,
        full_kv_num_blocks=torch.full((2, 3, 13), 10, dtype=torch.int32),
        full_kv_indices=everything,
    )
    assert bool(BlockLists.from_torch(both).full_blocks().all())


def test_narrow_lists_without_full_blocks_are_taken():
    narrow = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[4, 9], [0, 3]]]], dtype=torch.int32),
        BLOCK_SIZE=(8, 8),
        seq_lengths=(16, 40),
        compute_q_blocks=False,
    )
    lists = BlockLists.from_torch(narrow)
    assert lists.states()[0, 0].tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 1, 0]]
    # entry 9 lies behind its row's count, so it means nothing
    lists.check_contents()


def test_lookup_gives_the_state_at_each_position():
    lists = BlockLists.from_torch(torch_mask())
    q, kv = torch.arange(40, 75)[:, None], torch.arange(20, 80)
    is_listed, is_full = lists.lookup(lists.states(), q, kv)
    assert is_listed.shape == (2, 3, 35, 60)
    states = lists.states()
    for i in (40, 48, 74):
        for j in (20, 31, 32, 79):
            state = states[:, :, i // 16, j // 32]
            assert torch.equal(is_listed[:, :, i - 40, j - 20], state > 0)
            assert torch.equal(is_full[:, :, i - 40, j - 20], state == 2)


def test_with_transposed_rebuilds_the_q_lists_of_torch():
    whole = torch_mask()
    lists = BlockLists.from_torch(kv_only(whole))
    assert not lists.has_transposed
    rebuilt = lists.with_transposed()
    assert torch.equal(rebuilt.q_num_blocks, whole.q_num_blocks)
    assert torch.equal(rebuilt.q_indices, whole.q_indices)
    assert torch.equal(rebuilt.full_q_num_blocks, whole.full_q_num_blocks)
    assert torch.equal(rebuilt.full_q_indices, whole.full_q_indices)
    assert rebuilt.with_transposed() is rebuilt


def test_mask_without_fields_of_newer_torch_versions_is_taken():
    mask = torch_mask()
    names = [
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
        "seq_lengths",
        "BLOCK_SIZE",
        "mask_mod",
    ]
    older = types.SimpleNamespace(**{name: getattr(mask, name) for name in names})
    assert torch.equal(BlockLists.from_torch(older).states(), BlockLists.from_torch(mask).states())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"batch": 4}, r"block_mask.shape \(batch\)=2 .*1 or 4.*B=4 or 1"),
        ({"heads": 6}, r"block_mask.shape \(heads\)=3 .*1 or 6.*H=6 or 1"),
        ({"seqlen_q": 201}, r"seq_lengths=\(200, 300\).*\(201, 300\)"),
        ({"seqlen_kv": 299}, r"seq_lengths=\(200, 300\).*\(200, 299\)"),
    ],
)
def test_mask_that_does_not_fit_the_call_raises(call, message):
    with pytest.raises(ValueError, match=message):
        BlockLists.from_torch(torch_mask(), **call)


def test_mask_of_one_batch_and_head_fits_any_call():
    lists = BlockLists.from_torch(torch_mask(batch=1, heads=1), batch=7, heads=5)
    assert (lists.batch, lists.heads) == (1, 1)


def test_sliced_mask_with_its_old_lengths_raises_and_with_new_ones_is_taken():
    sliced = torch_mask()[:, :, 3:4]
    with pytest.raises(ValueError, match=r"set block_mask\.seq_lengths"):
        BlockLists.from_torch(sliced)
    sliced.seq_lengths = (16, 300)
    assert BlockLists.from_torch(sliced).blocks_q == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_num_blocks": torch.zeros(2, 3, 12, dtype=torch.int32)}, "kv_num_blocks.shape"),
        ({"full_kv_num_blocks": torch.zeros(2, 1, 13, dtype=torch.int32)}, "full_kv_num_blocks"),
        ({"BLOCK_SIZE": (0, 32)}, "BLOCK_SIZE"),
        ({"seq_lengths": (400, 300)}, "kv_indices.shape"),
    ],
)
def test_mask_that_does_not_fit_itself_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        BlockLists.from_torch(kv_only(torch_mask(), **changes))


@pytest.mark.parametrize("wrong", [None, torch.ones(4, 4, dtype=torch.bool), "causal"])
def test_anything_but_a_block_mask_raises_a_type_error(wrong):
    with pytest.raises(TypeError, match="create_block_mask"):
        BlockLists.from_torch(wrong)


def test_float_lists_raise_a_type_error():
    mask = torch_mask()
    with pytest.raises(TypeError, match=r"kv_indices=torch\.float32"):
        BlockLists.from_torch(kv_only(mask, kv_indices=mask.kv_indices.float()))


def test_contents_out_of_range_raise_when_checked():
    mask = torch_mask()
    too_many = mask.kv_num_blocks.clone()
    too_many[0, 0, 0] = 11
    with pytest.raises(ValueError, match=r"kv_num_blocks=values from \d+ to 11"):
        BlockLists.from_torch(kv_only(mask, kv_num_blocks=too_many)).check_contents()
    wrong_index = mask.kv_indices.clone()
    wrong_index[1, 2, 5, 0] = 10
    with pytest.raises(ValueError, match=r"kv_indices\[1, 2, 5, 0\]=10 .*0 to 9"):
        BlockLists.from_torch(kv_only(mask, kv_indices=wrong_index)).check_contents()


def test_contents_are_read_only_under_check(monkeypatch):
    mask = torch_mask()
    wrong = kv_only(mask, kv_num_blocks=mask.kv_num_blocks - 20)
    BlockLists.from_torch(wrong)
    monkeypatch.setenv("FOVEA_CHECK", "1")
    with pytest.raises(ValueError, match="kv_num_blocks=values from -"):
        BlockLists.from_torch(wrong)


def test_block_listed_twice_raises_when_checked(monkeypatch):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
    mask.kv_num_blocks.fill_(2)
    mask.kv_indices.zero_()
    monkeypatch.setenv("FOVEA_CHECK", "1")
    with pytest.raises(ValueError, match=r"kv_indices\[0, 0, 0\].*block 0 more than once"):
        BlockLists.from_torch(mask)


def test_contents_of_meta_lists_are_not_read_under_check(monkeypatch):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
    monkeypatch.setenv("FOVEA_CHECK", "1")
    assert BlockLists.from_torch(mask.to("meta")).device.type == "meta"
