"""CUDA C++ with PTX of its own: rings of copies, sums across a cluster, roles of warps.

Needs nvcc on the path (a CUDA toolkit; no GPU); skipped without.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea import emulator

SOURCE = Path(__file__).parent / "more_cuda_kernels.cu"
SEEDS = 20

if shutil.which("nvcc") is None:
    pytest.skip("nvcc is not on the path", allow_module_level=True)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder, modules = tmp_path_factory.mktemp("nvcc"), {}

    def load(arch):
        if arch not in modules:
            path = folder / f"{arch}.ptx"
            command = ["nvcc", "-std=c++17", "-ptx", f"-arch={arch}", SOURCE, "-o", path]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            assert done.returncode == 0, done.stderr
            modules[arch] = emulator.load_ptx(path.read_text())
        return modules[arch]

    return load


def run(module, name, grid, block, args, seed):
    options = emulator.Options(seed=seed)
    assert module.launch(name, grid, block, args=args, options=options).warnings == ()


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a"])
def test_fp8_products_from_a_ring_of_copies_are_right(load, arch):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(n, 160, generator=generator).to(torch.float8_e4m3fn) for n in (16, 8)
    )  # five steps: the ring of three comes round
    expected = (a.double() @ b.double().T).numpy()
    scale = (a.double().abs() @ b.double().abs().T).numpy()
    for seed in range(SEEDS):
        out = np.zeros((16, 8), np.float32)
        args = [a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy(), out, 160]
        run(load(arch), "ring", 1, 32, args, seed)
        assert (np.abs(out - expected) <= scale * 2.0**-13).all()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_sums_of_a_cluster_in_the_memory_of_its_first_cta_are_exact(load, arch):
    x = np.random.default_rng(0).integers(-99, 99, (4, 64)).astype(np.int32)
    for seed in range(SEEDS):
        out = np.zeros(64, np.int32)
        run(load(arch), "cluster_sums", 4, 64, [x, out], seed)
        np.testing.assert_array_equal(out, x.sum(0))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_tiles_added_by_the_copy_engine_are_exact(load, arch):
    x = np.random.default_rng(0).integers(-99, 99, (3, 128)).astype(np.float32)
    for seed in range(SEEDS):
        out = np.zeros(128, np.float32)
        run(load(arch), "bulk_sums", 3, 128, [x, out], seed)
        np.testing.assert_array_equal(out, 2 * x.sum(0))


def test_warpgroups_with_roles_and_registers_of_their_own_are_right(load):
    rng, steps = np.random.default_rng(0), 5
    a, b = (rng.integers(-4, 5, (steps, n, 16)).astype(np.float16) for n in (128, 8))

    def cores(x):
        """Return operands as wgmma reads them: cores of 8 rows of 8 elements, K first."""
        return x.reshape(steps, -1, 8, 2, 8).transpose(0, 1, 3, 2, 4).copy()

    expected = np.einsum("smk,snk->mn", a.astype(np.float64), b.astype(np.float64))
    for seed in range(SEEDS):
        out = np.zeros((128, 8), np.float32)
        run(load("sm_90a"), "specialised", 1, 384, [cores(a), cores(b), out, steps], seed)
        np.testing.assert_array_equal(out, expected)
