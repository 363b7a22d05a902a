"""Gather from a paged cache against a loop over rows, with garbage where nothing may be read."""

import pytest
import torch

from fovea.tiling.paged_kv import gather_rows, locate


def paged(page_size: int, lengths: list[int], dtype=torch.float32):
    """Return (cache, page_table, seqused, dense rows per sequence); unused places hold NaN."""
    generator = torch.Generator().manual_seed(0)
    max_pages = -(-max(lengths) // page_size) + 2
    needed = sum(-(-n // page_size) for n in lengths)
    cache = torch.full((needed + 3, page_size, 2, 8), float("nan"), dtype=dtype)
    order = torch.randperm(needed + 3, generator=generator)
    page_table = torch.full((len(lengths), max_pages), 2**31 - 1, dtype=torch.int32)
    page_table[:, -1] = -7
    dense = []
    taken = 0
    for b, n in enumerate(lengths):
        rows = torch.randn(n, 2, 8, generator=generator, dtype=dtype)
        for j in range(n):
            if j % page_size == 0:
                page_table[b, j // page_size] = order[taken]
                taken += 1
            cache[page_table[b, j // page_size], j % page_size] = rows[j]
        dense.append(rows)
    return cache, page_table, torch.tensor(lengths, dtype=torch.int32), dense


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("piece", [(0, 23), (5, 12), (17, 40), (7, 7)])
def test_gather_rows_equals_a_loop_and_is_zero_past_the_used_length(page_size, piece):
    lengths = [23, 0, 7, 16]
    cache, page_table, seqused, dense = paged(page_size, lengths)
    begin, end = piece
    found = gather_rows(cache, page_table, seqused, begin=begin, end=end)
    expected = torch.zeros(4, end - begin, 2, 8)
    for b, rows in enumerate(dense):
        for j in range(begin, min(end, lengths[b])):
            expected[b, j - begin] = rows[j]
    assert torch.equal(found, expected)


def test_gather_rows_gradient_reaches_used_rows_only():
    cache, page_table, seqused, _ = paged(4, [6, 3])
    cache = cache.nan_to_num().requires_grad_()
    gather_rows(cache, page_table, seqused, begin=0, end=8).sum().backward()
    assert int((cache.grad != 0).sum()) == (6 + 3) * 2 * 8


def test_gather_rows_from_no_pages_is_zero():
    found = gather_rows(
        torch.empty(0, 4, 2, 8),
        torch.empty(3, 0, dtype=torch.int32),
        torch.zeros(3),
        begin=0,
        end=5,
    )
    assert torch.equal(found, torch.zeros(3, 5, 2, 8))


def test_gather_rows_of_a_missing_page_raises_under_check(monkeypatch):
    cache, page_table, seqused, _ = paged(4, [6, 3])
    page_table[0, 1] = -1
    gather_rows(cache, page_table, seqused, begin=0, end=8)
    monkeypatch.setenv("FOVEA_CHECK", "1")
    with pytest.raises(ValueError, match=r"page_table\[0, 1\]=-1 .*allowed: 0 to 5"):
        gather_rows(cache, page_table, seqused, begin=0, end=8)


def test_gather_rows_longer_than_the_table_raises_under_check(monkeypatch):
    cache, page_table, seqused, _ = paged(4, [6, 3])
    seqused[1] = 999
    monkeypatch.setenv("FOVEA_CHECK", "1")
    with pytest.raises(ValueError, match=r"seqused_kv\[1\]=999 .*0 to 16"):
        gather_rows(cache, page_table, seqused, begin=0, end=8)


@pytest.mark.parametrize("row", [0, 1, 15, 16, 1 << 40])
def test_locate_splits_a_row(row):
    assert locate(row, 16) == divmod(row, 16)
