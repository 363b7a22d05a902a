"""Shared test set-up: seeds, one torch thread, hypothesis profile, and where GPU tests go.

Directories are named by what their tests need. Makers of inputs, oracles and error budgets live in
`fovea.testing`, not here.
"""

import random
from collections.abc import Sequence

import hypothesis
import pytest
import torch

# Two workers share two cores; more threads per worker only get in each other's way.
torch.set_num_threads(1)

# derandomize: the same examples in every run, so that a failure is a fact about the code.
hypothesis.settings.register_profile("fovea", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fovea")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


def _is_in_gpu_directory(item: pytest.Item, config: pytest.Config) -> bool:
    return item.path.is_relative_to(config.rootpath / "tests" / "gpu")


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what lies in tests/gpu, so that no file there can forget to."""
    if _is_in_gpu_directory(item, item.config):
        item.add_marker(pytest.mark.gpu)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect GPU tests where there is no CUDA device: they can say nothing there."""
    gpu_items: Sequence[pytest.Item] = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=gpu_items)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
