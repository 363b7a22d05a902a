"""Kernels that were not written here; `scripts/test_foreign` installs what they need.

Everything in this folder has the marker `foreign`. Nothing here imports a foreign package when it
is collected: the default run collects these files too.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what lies in this folder, so that no file here can forget to."""
    if item.path.is_relative_to(HERE):
        item.add_marker(pytest.mark.foreign)
