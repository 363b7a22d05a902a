"""The block cases recorded on silicon, once more: the same files, the same outputs.

Others are left to `scripts/isa_cases/record_blocks.py`, which runs each apart: one that silicon
refuses would take the context from all that follow.
"""

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


RECORDED = [path for path in files() if read(path).evidence.startswith("silicon")]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(FOLDER)))
def test_silicon_gives_the_outputs_of_the_file(driver, path):
    case = read(path)
    np.testing.assert_array_equal(driver.run_block(case), case.expected)
