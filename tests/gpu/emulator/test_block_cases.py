"""The block cases of the emulator on silicon: the same files, the same outputs."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "isa_cases"))

from block_table import read
from record_blocks import FOLDER, BlockDriver, files


@pytest.fixture(scope="module")
def driver():
    return BlockDriver()


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_silicon_gives_the_outputs_of_the_file(driver, path):
    case = read(path)
    np.testing.assert_array_equal(driver.run_block(case), case.expected)
