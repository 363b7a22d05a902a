"""Sums into captured tensors: of any rank, and in a fixed order to the second derivative."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.mods.evaluate import gather
from fovea.mods.pull_back import scatter_add_


def test_scatter_add_takes_values_with_more_axes_of_extent_one() -> None:
    value = torch.arange(24.0, dtype=torch.float64).reshape(1, 1, 2, 3, 4)
    total = torch.zeros((), dtype=torch.float64)
    scatter_add_(total, [], value, (2, 3, 4))
    assert total == value.sum()
    row = torch.zeros(3, dtype=torch.float64)
    scatter_add_(row, [torch.arange(3).reshape(1, 1, 1, 3, 1)], value, (2, 3, 4))
    assert torch.equal(row, value.sum(dim=(0, 1, 2, 4)))


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_gather_has_a_derivative_of_the_same_bits_in_every_run() -> None:
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(-3, 3, (400, 500), generator=generator)
    weight = torch.randn(400, 500, generator=generator)
    table = torch.randn(3, generator=generator).requires_grad_()

    def run() -> Tensor:
        return torch.autograd.grad((gather(table, [index]) * weight).sum(), table)[0]

    first = run()
    assert all(torch.equal(first, run()) for _ in range(8))
    exact = torch.stack([weight.double()[index % 3 == i].sum() for i in range(3)])
    torch.testing.assert_close(first.double(), exact, rtol=2e-7, atol=0)


def test_gather_equals_indexing_and_wraps() -> None:
    table = torch.arange(12.0).reshape(3, 4).requires_grad_()
    rows, columns = torch.tensor([[-3], [-1], [2]]), torch.tensor([[0, -4, 3]])
    assert torch.equal(gather(table, [rows, columns]), table[rows, columns])
