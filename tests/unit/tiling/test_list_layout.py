"""Lists of random state matrices against a stable sort, for both ways of laying a row out."""

import pytest
import torch

from fovea.tiling import list_layout
from fovea.tiling.list_layout import lists_of, mark


def random_states(rows: int, columns: int, run: int) -> torch.Tensor:
    """Return states in runs of about `run` columns: long ones are copied, short ones scattered."""
    cells = torch.randint(0, 3, (2, 3, rows, -(-columns // run)), dtype=torch.int8)
    return cells.repeat_interleave(run, -1)[..., :columns].roll(1, -1).contiguous()


def by_sorting(states: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    is_listed = (states == wanted).to(torch.int8)
    order = torch.argsort(is_listed, dim=-1, descending=True, stable=True)
    return is_listed.sum(-1, dtype=torch.int32), order.to(torch.int32)


@pytest.mark.parametrize("run", [1, 7, 90])
@pytest.mark.parametrize("size", [(1, 1), (5, 300), (300, 5), (129, 257)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("small_matrix", [0, 1 << 20])
def test_lists_equal_a_stable_sort(run, size, is_transposed, small_matrix, monkeypatch):
    monkeypatch.setattr(list_layout, "_STEP_CPU", 1000)
    monkeypatch.setattr(list_layout, "_DENSE_ROWS", 64)
    monkeypatch.setattr(list_layout, "_SMALL_MATRIX", small_matrix)
    monkeypatch.setattr(list_layout, "_LONG_ROW", 1)
    states = random_states(*size, run)
    if is_transposed:
        states = states.transpose(-1, -2)
    for wanted in (1, 2):
        counts, indices = lists_of(states, wanted)
        expected_counts, expected_indices = by_sorting(states, wanted)
        assert torch.equal(counts, expected_counts)
        assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("size", [(0, 4), (4, 0)])
def test_lists_of_no_blocks_are_empty(size):
    counts, indices = lists_of(torch.zeros(1, 2, *size, dtype=torch.int8), 1)
    assert indices.shape == (1, 2, *size)
    assert counts.tolist() == [[[0] * size[0]] * 2]


def test_marks_of_lists_give_the_states_back():
    states = random_states(60, 50, 3)
    found = torch.zeros_like(states)
    for value in (1, 2):
        mark(found, *lists_of(states, value), value)
    assert torch.equal(found, states)


def test_mark_reads_nothing_behind_the_count():
    found = torch.zeros(1, 1, 2, 4, dtype=torch.int8)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, -99, 7], [0, 3, 1 << 30]]]], dtype=torch.int32)
    mark(found, counts, indices, 1)
    assert found.tolist() == [[[[0, 0, 1, 0], [1, 0, 0, 1]]]]


@pytest.mark.parametrize("size", [(5, 0), (0, 5), (0, 0)])
def test_matrix_without_rows_or_columns_has_empty_lists(size):
    states = torch.zeros(2, 3, *size, dtype=torch.int8)
    counts, indices = lists_of(states, 1)
    assert indices.shape == states.shape
    assert torch.equal(counts, torch.zeros(2, 3, size[0], dtype=torch.int32))
    mark(states, counts, indices, 1)
