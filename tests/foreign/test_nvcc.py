"""Kernels compiled by nvcc: the device library, cooperative groups, barriers, wmma, clusters.

Needs nvcc on the path (a CUDA toolkit; no GPU); skipped without.
"""

import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator

SOURCE = Path(__file__).parent / "cuda_kernels.cu"
ARCHS = ("sm_80", "sm_90a", "sm_100a")
SEEDS = 5

if shutil.which("nvcc") is None:
    pytest.skip("nvcc is not on the path", allow_module_level=True)


@pytest.fixture(scope="module", params=ARCHS)
def module(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("nvcc") / "kernels.ptx"
    command = ["nvcc", "-std=c++17", "-ptx", f"-arch={request.param}", SOURCE, "-o", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return emulator.load_ptx(path.read_text())


def seeds(module, name, grid, block, args, options=emulator.Options):
    """Launch under every seed; yield after each, so that outputs can be looked at and reset."""
    for seed in range(SEEDS):
        yield module.launch(name, grid, block, args=args, options=options(seed=seed))


def aligned(shape, dtype):
    """Return zeros at a multiple of 128 bytes, as vectors and asynchronous copies need."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + size].view(dtype).reshape(shape)


def test_functions_of_the_device_library_are_within_their_bounds(module):
    x = np.random.default_rng(0).standard_normal(100)
    wide, narrow = np.zeros(100), np.zeros(100, np.float32)
    expected = np.sin(x) + np.exp(x) + np.log(abs(x) + 1) + (abs(x) + 0.5) ** 1.7
    expected += np.fmod(x, 0.7) + x / 3.7 + np.cbrt(x)
    f = x.astype(np.float32).astype(np.float64)
    single = np.sin(f) + np.exp(f) + np.log(abs(f) + 1) + np.tanh(f) + 1 / np.sqrt(f * f + 1)
    single += np.fmod(f, 0.5)
    for _ in seeds(module, "functions", 4, 32, [x, wide, narrow, 100]):
        # a few units in the last place of each function, CUDA programming guide
        assert (abs(wide - expected) <= 16 * 2.0**-52 * (1 + np.exp(abs(x)) * 4)).all()
        assert (abs(narrow - single) <= 16 * 2.0**-23 * (1 + np.exp(abs(f)) * 4)).all()


def test_device_functions_are_called_and_print(module):
    x, out = (
        np.random.default_rng(0).integers(-3, 4, 32).astype(np.float32),
        np.zeros(32, np.float32),
    )
    table = (1.0, -2.0, 0.5, 4.0)

    def polynomial(value, degree):
        result = 1.0
        for i in range(degree):
            result = result * value + table[i % 4]
        return result

    expected = [polynomial(v, t % 5) + (polynomial(v, 2) if t % 3 == 0 else 0)
                for t, v in enumerate(x.tolist())]  # fmt: skip
    for result in seeds(module, "calls", 1, 32, [x, out]):
        assert out.tolist() == expected
        assert result.printed[0].startswith("thread 0 of calls: ")


def test_sum_by_cooperative_groups_is_right(module):
    x, out = (
        np.random.default_rng(0).integers(-9, 9, 1000).astype(np.float32),
        np.zeros(1, np.float32),
    )
    for _ in seeds(module, "total", 3, 128, [x, out, 1000]):
        assert out[0] == 3 * x.sum()
        out[:] = 0


def test_copies_awaited_through_a_cuda_barrier_are_right_and_silent(module):
    x, out = aligned((3, 64, 4), np.float32), aligned((3, 64, 4), np.float32)
    x[:] = np.random.default_rng(0).standard_normal(x.shape)
    for _ in seeds(module, "staged", 1, 64, [x, out, 3]):
        np.testing.assert_array_equal(out, x[:, ::-1, ::-1])


def test_threads_that_spin_for_a_lock_all_get_it(module):
    lock, count = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for _ in seeds(
        module, "counted", 2, 64, [lock, count], partial(emulator.Options, max_steps=10**6)
    ):
        assert count[0] == 128
        count[:] = 0


def test_bytes_of_a_register_are_told_apart(module):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << 32, 32, np.uint32) for _ in range(2))
    x, y = (v.view(np.uint8).reshape(32, 4).astype(np.int64) for v in (a, b))
    apart = abs(x - y)
    packed = apart.astype(np.uint8).view(np.uint32).ravel()
    expected = packed ^ apart.sum(1).astype(np.uint32) ^ ((x * y).sum(1) + 3).astype(np.uint32)
    out = np.zeros(32, np.uint32)
    for _ in seeds(module, "bytes", 1, 32, [a, b, out]):
        np.testing.assert_array_equal(out, expected)


def test_conversion_to_fp8_is_the_nearest_code(module):
    x, codes = np.linspace(-20, 20, 32, dtype=np.float32), np.zeros(32, np.uint8)
    step = 2.0 ** (np.floor(np.log2(np.maximum(abs(x), 2.0**-6))) - 3)
    nearest = np.rint(x / step) * step
    for _ in seeds(module, "narrow", 1, 32, [x, codes]):
        exponent, fraction = (codes >> 3 & 15).astype(int), codes & 7
        value = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
        np.testing.assert_array_equal(np.where(codes & 128, -value, value), nearest)


def test_product_by_wmma_is_exact(module):
    rng = np.random.default_rng(0)
    a, b, c = (
        aligned((16, 32), np.float16),
        aligned((16, 32), np.float16),
        aligned((16, 16), np.float32),
    )
    a[:], b[:] = rng.integers(-4, 5, a.shape), rng.integers(-4, 5, b.shape)
    for _ in seeds(module, "product", 1, 32, [a, b, c]):
        np.testing.assert_array_equal(c, 2 * a.astype(np.float64) @ b.astype(np.float64).T)


def test_shared_memory_of_another_cta_is_read_between_cluster_barriers(module):
    if module.target == "sm_80":
        pytest.skip("sm_80 has no clusters")
    out = np.zeros((2, 64), np.int32)
    for _ in seeds(module, "exchanged", 2, 64, [out]):
        assert out.tolist() == [[10 * (63 - t) + 1 - rank for t in range(64)] for rank in range(2)]
