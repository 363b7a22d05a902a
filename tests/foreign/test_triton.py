"""Kernels compiled by Triton: right against float64, silent under every schedule."""

from typing import Any

import numpy as np
import pytest
import torch
from triton_runs import CAPABILITIES, Compiled, aligned, compile_kernels, tensor_arguments

from fovea.emulator.machine.memory import GlobalMemory

SEEDS = 20
M, N, K = 208, 144, 112  # no multiples of a tile


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("triton"), "triton_kernels")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_vector_add_is_exact(compiled, capability):
    kernel = compiled("vector_add", capability)
    x, y = np.random.default_rng(0).standard_normal((2, 3008)).astype(np.float32)
    for seed in range(SEEDS):
        out = np.zeros_like(x)
        kernel.run((3,), [x, y, out, x.size], seed)
        np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_softmax_is_within_a_few_roundings(compiled, capability):
    kernel = compiled("softmax", capability)
    x = np.random.default_rng(0).standard_normal((4, 800)).astype(np.float32)
    wide = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    wide /= wide.sum(1, keepdims=True)
    for seed in range(SEEDS):
        out = np.zeros_like(x)
        kernel.run((4,), [x, out, x.shape[1], x.shape[1]], seed)
        # ex2.approx and its argument (up to 8 log2(e)), a sum of 800, a division: eps = 2^-23
        assert (np.abs(out - wide) <= wide * 24 * 2.0**-23).all()


def operand(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def storage(x: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array of integers: numpy knows neither bf16 nor fp8."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16).numpy()


def check(out: np.ndarray, a: torch.Tensor, b: torch.Tensor, rounding: float) -> None:
    """Compare with float64 in units of the terms' absolute sum; `rounding` is the output's."""
    x, y = a.double().numpy(), b.double().numpy()
    product, scale = x @ y, np.abs(x) @ np.abs(y)
    assert (np.abs(out - product) <= scale * 2.0**-20 + np.abs(product) * rounding).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["f16", "bf16", "fp8"])
def test_matmul_is_right_under_twenty_schedules(compiled, name, capability):
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]
    kernel = compiled(f"matmul_{name}", capability)
    generator = torch.Generator().manual_seed(0)
    a, b = operand(generator, dtype, M, K), operand(generator, dtype, K, N)
    outs = []
    for seed in range(SEEDS):
        out = np.zeros((M, N), np.float32)
        kernel.run((2, 2), [storage(a), storage(b), out, M, N, K], seed)
        outs.append(out)
    check(outs[0], a, b, 0.0)
    assert all(np.array_equal(outs[0], other) for other in outs)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["matmul_tma", "matmul_tma_8_warps"])
def test_matmul_with_tensor_maps_is_right_under_twenty_schedules(compiled, name, capability):
    kernel = compiled(name, capability)
    generator = torch.Generator().manual_seed(0)
    a, b = operand(generator, torch.float16, M, K), operand(generator, torch.float16, K, N)
    outs = []
    for seed in range(SEEDS):
        out = np.zeros((M, N), np.int16)
        memory = GlobalMemory()
        args: list[Any] = []
        for array, meta in zip((storage(a), storage(b), out), kernel.launch["tensor_maps"]):
            memory.register(array, "a tensor")
            args += tensor_arguments(array, meta)
        kernel.run((2, 2), [*args, M, N, K], seed, memory=memory)
        outs.append(out.view(np.float16).astype(np.float64))
    check(outs[0], a, b, 2.0**-11)
    assert all(np.array_equal(outs[0], other) for other in outs)


def run_with_maps(kernel: Compiled, tensors: list[torch.Tensor], grid: int, scalars, seed: int):
    """Launch a kernel whose tensors travel as tensor maps."""
    memory, args = GlobalMemory(), []
    for tensor, meta in zip(tensors, kernel.launch["tensor_maps"], strict=True):
        memory.register(storage(tensor), "a tensor")
        args += tensor_arguments(storage(tensor), meta)
    kernel.run((grid,), [*args, *scalars], seed, memory=memory)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("persistent", 90),
        ("persistent_specialized", 90),
        ("persistent", 100),
        ("persistent_specialized", 100),
    ],
)
def test_persistent_matmul_is_right_under_schedules(compiled, name, capability):
    kernel = compiled(name, capability)
    generator = torch.Generator().manual_seed(0)
    a, b = operand(generator, torch.float16, 384, 192), operand(generator, torch.float16, 192, 256)
    for seed in range(5):
        out = torch.zeros(384, 256, dtype=torch.float16)
        run_with_maps(kernel, [a, b, out], 2, (384, 256, 192), seed)
        check(out.double().numpy(), a, b, 2.0**-11)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("attention", 90),
        ("attention", 100),
        ("attention_specialized", 100),
    ],
)
def test_attention_is_right_under_schedules(compiled, name, capability):
    kernel = compiled(name, capability)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (operand(generator, torch.float16, 256, 64) for _ in range(3))
    weights = torch.softmax(q.double() @ k.double().T / 8, -1)
    expected, terms = weights @ v.double(), weights @ v.double().abs()
    outs = []
    for seed in range(5):
        out = torch.zeros(256, 64, dtype=torch.float16)
        run_with_maps(kernel, [q, k, v, out], 2, (256, 0.125 * 1.4426950408889634), seed)
        outs.append(out)
    # P and the output are rounded to 11 bits
    assert ((outs[0].double() - expected).abs() <= 2.0**-10 * terms).all()
    assert all(torch.equal(outs[0], other) for other in outs)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_layer_norm_is_within_a_few_roundings(compiled, capability):
    kernel = compiled("layer_norm", capability)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 800)), rng.standard_normal(800)
    expected = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight
    for seed in range(5):
        out = np.zeros((3, 800), np.float32)
        arrays = [x.astype(np.float32), out, weight.astype(np.float32)]
        kernel.run((3,), [*arrays, 800, 1e-5], seed)
        assert np.abs(out - expected).max() <= 2.0**-19


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sort_is_exact(compiled, capability):
    x = np.random.default_rng(0).integers(-9999, 9999, 512).astype(np.int32)
    for seed in range(5):
        out = np.zeros_like(x)
        compiled("sort", capability).run((1,), [x, out], seed)
        np.testing.assert_array_equal(out, np.sort(x))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_scan_and_histogram_are_exact(compiled, capability):
    x = np.random.default_rng(0).integers(0, 99, 1008).astype(np.int32)
    for seed in range(5):
        sums, histogram = np.zeros_like(x), np.zeros(16, np.int32)
        compiled("scan_and_histogram", capability).run((1,), [x, sums, histogram, 1008], seed)
        np.testing.assert_array_equal(sums, np.cumsum(x))
        np.testing.assert_array_equal(histogram, np.bincount(x % 16, minlength=16))


# --- kernels that were not there when the emulator was written ------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_parts_of_k_added_by_atomics_are_right_under_schedules(compiled, capability):
    m, n, k = 80, 96, 112
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n)))
    wide = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) * k * 2.0**-23
    for seed in range(5):
        out = np.zeros((m, n), np.float32)
        compiled("split_k", capability).run((2, 2, 3), [a, b, out, m, n, k], seed)
        assert (np.abs(out - wide) <= bound).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sums_under_a_lock_are_silent_and_right(compiled, capability):
    x = np.random.default_rng(0).integers(-99, 99, (6, 200)).astype(np.float32)
    for seed in range(5):
        sums, locks = np.zeros((2, 200), np.float32), np.zeros(4, np.int32)
        compiled("locked_sum", capability).run((6,), [x, sums, locks, 200], seed)
        np.testing.assert_array_equal(sums, [x[0::2].sum(0), x[1::2].sum(0)])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_scaled_product_is_right_under_schedules(compiled, name, capability):
    rng, k = np.random.default_rng(0), 256
    operands, values = [], []
    for _ in range(2):
        if name == "e4m3":
            codes = operand(torch.Generator().manual_seed(1), torch.float8_e4m3fn, 128, k)
            codes, value = codes.view(torch.uint8).numpy(), codes.double().numpy()
        else:
            codes = rng.integers(0, 256, (128, k // 2)).astype(np.uint8)
            table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            both = np.stack((codes & 15, codes >> 4), -1).reshape(128, k)
            value = np.where(both & 8, -1, 1) * table[both & 7]
        scales = rng.integers(124, 130, (128, k // 32)).astype(np.uint8)
        operands += [codes, scales]
        values.append(value * np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=1))
    wide = values[0] @ values[1].T
    # without block-scaled units (sm_90a) Triton multiplies scaled values in bf16
    rounding = 2.0**-7 if capability == 90 else k * 2.0**-23
    for seed in range(3):
        out = np.zeros((128, 128), np.float32)
        compiled(f"scaled_{name}", capability).run((1,), [*operands, out, k], seed)
        assert (np.abs(out - wide) <= np.abs(values[0]) @ np.abs(values[1]).T * rounding).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_matmul_with_maps_made_on_the_device_is_right(compiled, capability):
    m, n, k = 256, 128, 192
    rng = np.random.default_rng(0)
    a, b = aligned((m, k), np.float16), aligned((n, k), np.float16)
    a[:], b[:] = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    wide = a.astype(np.float64) @ b.astype(np.float64).T
    for seed in range(3):
        out = aligned((m, n), np.float16)
        compiled("device_maps", capability).run((3,), [a, b, out, m, n, k], seed)
        assert (np.abs(out - wide) <= np.abs(wide) * 2.0**-11 + 1e-3).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_product_with_half_sums_is_within_their_rounding(compiled, capability):
    rng, k = np.random.default_rng(0), 64
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((64, k), (k, 32)))
    wide = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) * k * 2.0**-11
    for seed in range(5):
        out = np.zeros((64, 32), np.float16)
        compiled("half_sums", capability).run((1,), [a, b, out, k], seed)
        assert (np.abs(out - wide) <= bound).all()
