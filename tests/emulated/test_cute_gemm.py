"""A CuTe-DSL matrix product through its exported launcher, with both of its interfaces."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cutlass")
pytest.importorskip("llvmlite")

from fovea import emulator
from fovea.emulator import DeadlockError, Options, RaceError, UninitialisedRead
from fovea.emulator.host_arguments import CTensor, device_array

SCRIPT = Path(__file__).with_name("cute_gemm.py")
TILE_N = 128


def export(folder, b_major, interface):
    subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), b_major, interface],
        check=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUTE_DSL_ARCH": "sm_90a"},
    )
    return b_major, interface, folder


@pytest.fixture(scope="module")
def k_major(tmp_path_factory):
    return export(tmp_path_factory.mktemp("k_ffi"), "k", "ffi")


# V of the attention kernels is "mn" too, so that export may wait for the slow tests.
_MN = pytest.param("mn-ffi", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["k-ffi", _MN, "k-c"])
def exported(request, tmp_path_factory, k_major):
    if request.param == "k-ffi":
        return k_major
    return export(tmp_path_factory.mktemp("gemm"), *request.param.split("-"))


def to_bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(raw):
    return (raw.astype(np.uint32) << 16).view(np.float32)


def run(exported, ptx=None, *, m=100, k=96, **options):
    """Multiply random matrices; sizes need not be multiples of the tile."""
    b_major, interface, folder = exported
    ptx = ptx or (folder / "gemm.ptx").read_text()
    header = (folder / "gemm.h").read_text() if interface == "c" else None
    launcher = emulator.load_launcher((folder / "gemm.o").read_bytes(), ptx, header=header)
    rng = np.random.default_rng(0)
    a, b = to_bf16(rng.standard_normal((m, k))), to_bf16(rng.standard_normal((TILE_N, k)))
    c = np.zeros((m, TILE_N), np.uint16)
    stored = b if b_major == "k" else np.asfortranarray(b)
    arrays = [device_array(array, dtype="bfloat16") for array in (a, stored, c)]
    if interface == "c":
        # The header keeps the dynamic sizes of each tensor, and A's and B's row strides.
        sizes = [((m, k), (k,)), ((k,), (k,)), ((m,), ())]
        arguments = [
            CTensor(array=array, dynamic_shapes=shapes, dynamic_strides=strides)
            for array, (shapes, strides) in zip(arrays, sizes)
        ]
        launcher(*arguments, options=Options(**options))
    else:
        launcher(*arrays, options=Options(**options))
    x, y = from_bf16(a), from_bf16(b)
    return from_bf16(c), x @ y.T, np.abs(x) @ np.abs(y).T


@pytest.mark.parametrize("seed", range(3))
def test_product_of_ragged_matrices_matches_numpy(exported, seed):
    got, expected, scale = run(exported, seed=seed)
    assert np.all(np.abs(got - expected) <= np.abs(expected) * 2.0**-8 + scale * 2.0**-20)


def without(ptx, pattern, replacement="//"):
    changed, count = re.subn(rf"^.*{pattern}.*$", replacement, ptx, flags=re.MULTILINE)
    assert count
    return changed


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (r"wgmma\.fence", RaceError),
        (r"wgmma\.commit_group", RaceError),
        (r"wgmma\.wait_group", RaceError),
        (r"fence\.proxy\.async", RaceError),
        (r"mbarrier\.arrive\.expect_tx", DeadlockError),
        (r"mbarrier\.try_wait", (RaceError, UninitialisedRead)),
    ],
)
def test_removed_synchronisation_is_reported(k_major, pattern, kinds):
    ptx = (k_major[2] / "gemm.ptx").read_text()
    # A wait becomes one that succeeds at once.
    replacement = "setp.eq.u32 P1, 0, 0;" if "try_wait" in pattern else "//"
    with pytest.raises(kinds):
        run(k_major, without(ptx, pattern, replacement))
