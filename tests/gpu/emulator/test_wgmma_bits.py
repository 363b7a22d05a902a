"""The exact mode of wgmma against silicon, bit for bit, on the emulator's own test kernels."""

import numpy as np
import pytest
import torch
from driver_api import Driver
from test_wgmma import BAR_AT, FORMATS, kernel, launch, place

from fovea.emulator.arithmetic.formats import to_float32

COLUMNS, STEPS = 64, 2
SPREADS = ("normal", "wide", "subnormal", "cancelling")


@pytest.fixture(scope="module")
def driver():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return Driver()


def operand(rng, rows, name, spread):
    """Finite values; the spread decides how far the exponents of a dot product lie apart."""
    size, k = FORMATS[name]
    shape = (rows, k * STEPS)
    if size == 1:
        top = {"normal": 0x48, "wide": 0x78, "subnormal": 0x10, "cancelling": 0x40}[spread]
        codes = rng.integers(0, top, shape).astype(np.uint8)
        return codes | rng.integers(0, 2, shape).astype(np.uint8) << np.uint8(7)
    values = rng.standard_normal(shape)
    if spread == "wide":
        values = values * 2.0 ** rng.integers(-12, 12, shape)
    if spread == "subnormal":
        values = values * (2.0**-16 if name == "f16" else 2.0**-64)
    if spread == "cancelling":
        values[:, 1::2] = -values[:, 0::2] * (1 + 2.0**-6)
    single = values.astype(np.float32)
    if name == "f16":
        return single.astype(np.float16).view(np.uint16)
    raw = single.view(np.uint32)
    return raw if size == 4 else (raw >> 16).astype(np.uint16)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_exact_mode_equals_silicon(driver, name, d_type, spread):
    if d_type == "f16" and name in ("bf16", "tf32"):
        pytest.skip("accumulates in f32 only")
    rng = np.random.default_rng(sum(map(ord, name + d_type + spread)))
    a, b = operand(rng, 64, name, spread), operand(rng, COLUMNS, name, spread)
    assert np.isfinite(to_float32(a, name)).all()
    width = 32 * STEPS
    count = COLUMNS // 2 if d_type == "f32" else COLUMNS // 4
    initial = rng.standard_normal((COLUMNS // 2, 128)).astype(np.float32)
    initial = initial if d_type == "f32" else initial.astype(np.float16).view(np.uint32)
    initial = np.ascontiguousarray(initial.reshape(-1)[: count * 128].reshape(count, 128))
    tail = "1, 1, 0, 0" if FORMATS[name][0] == 2 else "1, 1"
    text = kernel(
        COLUMNS, types=f"{d_type}.{name}.{name}", k=FORMATS[name][1], width=width, steps=STEPS,
        scale_d="%yes", tail=tail,
    )  # fmt: skip
    a_bytes, b_bytes = place(a, width), place(b, width)
    emulated = initial.view(np.uint32).copy()
    launch(text, emulated, a_bytes, b_bytes, exact_mma=True)

    device = torch.from_numpy(initial.view(np.int32).copy()).cuda()
    inputs = [torch.from_numpy(x).cuda() for x in (a_bytes, b_bytes, np.zeros(2048, np.uint8))]
    sizes = [len(a_bytes), len(b_bytes)]
    driver.run(text, "k", 1, 128, [device, *inputs, *sizes], BAR_AT + 64)
    silicon = device.cpu().numpy().view(np.uint32)
    different = int((silicon != emulated).sum())
    assert different == 0, f"{different} of {silicon.size} words differ"
