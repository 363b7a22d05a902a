"""Range queries against slices, for tables with and without chunks."""

import pytest
import torch

from fovea.tiling import range_extrema
from fovea.tiling.range_extrema import RangeExtrema


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 100])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_extrema_of_every_range_equal_those_of_the_slice(count, dtype):
    values = torch.randint(-50, 50, (count,)).to(dtype)
    first, last = (torch.arange(count)[:, None], torch.arange(count))
    first, last = torch.broadcast_tensors(first, last)
    keep = first <= last
    low, high = RangeExtrema(values).query(first[keep], last[keep])
    pieces = [values[i : j + 1] for i in range(count) for j in range(i, count)]
    assert low.tolist() == [p.min().item() for p in pieces]
    assert high.tolist() == [p.max().item() for p in pieces]


@pytest.mark.parametrize("count", [65, 100, 1000])
def test_extrema_with_chunks_enclose_the_slice_and_are_exact_when_aligned(count, monkeypatch):
    monkeypatch.setattr(range_extrema, "_MOST_CHUNKS", 16)
    values = torch.randint(-1000, 1000, (count,))
    table = RangeExtrema(values)
    chunk = 1 << (-(-count // 16) - 1).bit_length()
    first = torch.randint(0, count, (500,))
    last = (first + torch.randint(0, count, (500,))).clamp(max=count - 1)
    first[:100] = first[:100] // chunk * chunk
    last[:100] = (first[:100] + 3 * chunk - 1).clamp(max=count - 1)
    last[100:150] = first[100:150]
    low, high = table.query(first, last)
    for i in range(500):
        piece = values[first[i] : last[i] + 1]
        assert low[i] <= piece.min()
        assert high[i] >= piece.max()
        if i < 150:
            assert (low[i], high[i]) == (piece.min(), piece.max())


def test_table_of_a_million_elements_stays_small():
    table = RangeExtrema(torch.arange(1 << 20))
    assert table._lows.numel() == 17 * (1 << 16)
    low, high = table.query(torch.tensor([128 * 77]), torch.tensor([128 * 99 - 1]))
    assert (low.item(), high.item()) == (128 * 77, 128 * 99 - 1)
