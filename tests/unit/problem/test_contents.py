"""What is found inside tensors: on a CPU always."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fovea


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def packed(**changes):
    arguments = {
        "q": torch.randn(7, 4, 8),
        "k": torch.randn(9, 2, 8),
        "v": torch.randn(9, 2, 8),
        "cu_seqlens_q": index(0, 3, 7),
        "cu_seqlens_kv": index(0, 4, 9),
        "max_seqlen_q": 4,
        "max_seqlen_kv": 5,
    }
    return arguments | changes


def paged(**changes):
    arguments = packed(cu_seqlens_kv=None, max_seqlen_kv=8)
    arguments["k"] = torch.randn(5, 4, 2, 8)
    arguments["v"] = torch.randn(5, 4, 2, 8)
    arguments["seqused_kv"] = index(5, 3)
    arguments["page_table"] = index(1, 3, 0, -7).view(2, 2)
    return arguments | changes


WRONG = {
    "does not start at 0": (packed(cu_seqlens_q=index(1, 3, 7)), r"cu_seqlens_q\[0\]=1"),
    "decreases": (packed(cu_seqlens_kv=index(0, 6, 4)), r"cu_seqlens_kv\[1:3\]=\[6, 4\]"),
    "ends behind the rows": (packed(cu_seqlens_q=index(0, 3, 8)), r"cu_seqlens_q\[-1\]=8"),
    "max_seqlen_q": (packed(max_seqlen_q=3), "max_seqlen_q=3 .*at least 4"),
    "max_seqlen_kv": (packed(max_seqlen_kv=4), "max_seqlen_kv=4 .*at least 5"),
    "seqused_q too long": (packed(seqused_q=index(4, 1)), r"seqused_q\[0\]=4"),
    "seqused_kv negative": (packed(seqused_kv=index(1, -1)), r"seqused_kv\[1\]=-1"),
    "page missing": (paged(page_table=index(1, 5, 0, 0).view(2, 2)), r"page_table\[0, 1\]=5"),
    "page negative": (paged(page_table=index(-1, 1, 0, 0).view(2, 2)), r"page_table\[0, 0\]=-1"),
    "more rows than pages": (paged(seqused_kv=index(9, 3)), r"seqused_kv\[0\]=9"),
    "paged max_seqlen_kv": (paged(max_seqlen_kv=4), "max_seqlen_kv=4 .*at least 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_contents_wrong_raise_value_error(name):
    arguments, text = WRONG[name]
    with pytest.raises(ValueError, match=text) as error:
        fovea.attention_varlen(**arguments)
    assert "allowed: " in str(error.value)


@pytest.mark.parametrize("make", [packed, paged])
def test_contents_right_give_the_result_of_each_sequence(make):
    arguments = make()
    out = fovea.attention_varlen(**arguments)
    k, v = arguments["k"], arguments["v"]
    # The first sequence: rows 0 to 3 of q; 4 packed keys, or 5 in pages 1 and 3.
    keys = (lambda x: x[:4]) if make is packed else (lambda x: torch.cat((x[1], x[3]))[:5])
    alone = fovea.attention(arguments["q"][None, :3], keys(k)[None], keys(v)[None])
    torch.testing.assert_close(out[:3], alone[0])


def test_contents_of_fake_tensors_are_not_read():
    with FakeTensorMode():
        out = fovea.attention_varlen(
            torch.empty(7, 4, 8),
            torch.empty(9, 2, 8),
            torch.empty(9, 2, 8),
            torch.empty(3, dtype=torch.int32),
            torch.empty(3, dtype=torch.int32),
            4,
            5,
        )
    assert out.shape == (7, 4, 8)


def test_contents_are_checked_where_only_seqused_reaches_the_maximum():
    """A max_seqlen may be below a segment's length as long as the used rows fit."""
    fovea.attention_varlen(**packed(max_seqlen_q=2, seqused_q=index(2, 2)))


def test_empty_batch_passes():
    out = fovea.attention_varlen(
        **packed(cu_seqlens_q=index(0), cu_seqlens_kv=index(0), max_seqlen_q=0, max_seqlen_kv=0)
    )
    assert torch.equal(out, torch.zeros(7, 4, 8))


def test_block_list_entry_out_of_range_raises():
    block_mask = fovea.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 256, device="cpu")
    block_mask.kv_indices[0, 0, 1, 0] = 7
    q = torch.randn(1, 256, 2, 8)
    with pytest.raises(ValueError, match=r"block_mask\.kv_indices\[0, 0, 1, 0\]=7"):
        fovea.attention(q, q, q, block_mask=block_mask)
