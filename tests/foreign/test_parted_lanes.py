"""CUDA C++ whose lanes part and meet again: tiles of a warp, locks, branches that synchronise.

Needs nvcc on the path (a CUDA toolkit; no GPU); skipped without.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator

SOURCE = Path(__file__).parent / "parted_lanes.cu"
SEEDS = 3
THREAD = np.arange(128)
LANE = THREAD % 32

if shutil.which("nvcc") is None:
    pytest.skip("nvcc is not on the path", allow_module_level=True)


def sums(same):
    """Return for each thread the sum of those of its warp for which `same` is equal."""
    equal = (same[:, None] == same[None, :]) & (THREAD[:, None] // 32 == THREAD[None, :] // 32)
    return (equal * THREAD[None, :]).sum(1)


WRITTEN = np.where(LANE < 10, THREAD, 2 * THREAD)
MEMBER = (THREAD % 3 - THREAD // 32 * 32 % 3) % 3  # the number of a lane's group among its warp's
EXPECTED = {
    "tiles": 8 * sums(THREAD // 8),
    "logical_warps": sums(THREAD // 8) * (THREAD % 8 == 0),
    "matched": sums(THREAD // 5),
    "labelled": np.where(MEMBER < 2, 11, 10) + 100 * (THREAD // 32 * 32 + MEMBER),
    "locked": np.full(128, 2 * THREAD.sum()),
    "branches": WRITTEN[THREAD ^ 31] + (LANE >= 10),
    "calls": np.where(LANE < 7, 107, np.where(LANE < 20, 220, 332)) + 32,
}


@pytest.fixture(scope="module", params=["sm_80", "sm_90a", "sm_100a"])
def module(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("nvcc") / "parted_lanes.ptx"
    command = ["nvcc", "-std=c++17", "-ptx", f"-arch={request.param}", SOURCE, "-o", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return emulator.load_ptx(path.read_text())


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_lanes_that_part_meet_as_on_a_gpu(module, name, seed):
    out = np.zeros(128, np.int32)
    options = emulator.Options(seed=seed, max_steps=400_000)
    assert module.launch(name, 1, 128, args=[out], options=options).warnings == ()
    np.testing.assert_array_equal(out, EXPECTED[name])
