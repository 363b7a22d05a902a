import pytest
import torch

from fovea.reference.packing import pack_keys, pack_rows, rows_per_step, unpack_keys, unpack_rows


def test_pack_rows_makes_scores_a_view_by_query_head():
    batch, rows, heads_kv, group, keys = 2, 5, 3, 4, 7
    q = torch.randn(batch, rows, heads_kv * group, 6)
    k = torch.randn(batch, keys, heads_kv, 6)
    scores = torch.bmm(pack_rows(q, heads_kv), pack_keys(k).transpose(1, 2))
    expected = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(group, dim=2))
    torch.testing.assert_close(scores.view(batch, heads_kv * group, rows, keys), expected)


def test_unpack_rows_reverses_pack_rows():
    x = torch.randn(2, 5, 6, 3)
    assert torch.equal(unpack_rows(pack_rows(x, 2), 2, 2, 3), x)


def test_unpack_keys_reverses_pack_keys():
    x = torch.randn(2, 5, 6, 3)
    assert torch.equal(unpack_keys(pack_keys(x), 2), x)


def test_pack_keys_of_one_sequence_copies_nothing():
    x = torch.randn(1, 5, 6, 3)
    assert pack_keys(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("num_heads", [1, 8, 512])
@pytest.mark.parametrize("seqlen_q", [1, 15, 63, 4096, 1_000_000])
def test_rows_per_step_is_a_legal_chunk_of_bounded_size(num_heads, seqlen_q, is_cuda):
    rows = rows_per_step(num_heads, seqlen_q, 128, is_cuda=is_cuda)
    assert 1 <= rows <= seqlen_q
    # A score tile is bounded whatever the length; 64 rows is the least that a step takes.
    assert rows <= max((1 << (24 if is_cuda else 18)) // (num_heads * 128), 64)
