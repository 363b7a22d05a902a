"""CPU tensors that pose as a GPU's, and a launcher that keeps what it is given."""

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # where `benchmarks` lies


sys.path.insert(0, str(Path(__file__).parent))  # modules that tests here share


@pytest.fixture
def launched():
    """A list of the arguments of every launch."""
    from benchmarks.bench_overhead import posing_gpu

    found = []
    with posing_gpu(lambda *arguments: found.append(arguments)):
        yield found
