"""The driver's tensor maps decode to what they were made from, and equal the encoder's bytes."""

import random

import pytest
from driver_api import Driver

from fovea.emulator.layout.tensor_map import (
    decode_tensor_map,
    encode_tensor_map,
    make_tensor_map,
)

# Name in this library -> number in the driver API.
DRIVER_TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8,
    "bf16": 9, "f32.ftz": 10, "tf32": 11, "tf32.ftz": 12,
}  # fmt: skip
SWIZZLES = (0, 32, 64, 128)
# Bit 21 of word 2 marks large tensors; drivers disagree on small ones, and copies ignore it.
LARGE_BIT = 1 << 21
# Bit 1 is part of the map's tag: CuTe-DSL writes tag 2, driver 580.159 tag 0 (seen on an H200,
# 2026-11-29, in every map tried). Kernels run with either.
TAG_BIT = 1 << 1


@pytest.fixture(scope="module")
def driver():
    return Driver()


def random_map(rng, element, swizzle, fills_nan):
    size = {"8": 1, "6": 2, "2": 4, "4": 8}[element.split(".")[0][-1]]
    rank = rng.randint(1, 5)
    sizes = tuple(rng.randint(1, 1 << 12) for _ in range(rank))
    strides = tuple(16 * rng.randint(1, 1 << 16) for _ in range(rank - 1))
    inner = rng.choice([n for n in (16, 32, 64, 128, 256) if n <= (swizzle or 256)]) // size
    box = (max(inner, 1), *(rng.randint(1, 8) for _ in range(rank - 1)))
    steps = (1, *(rng.randint(1, 8) for _ in range(rank - 1)))
    address = 0x7F0000000000 + 64 * rng.randint(0, 1 << 30)
    return make_tensor_map(
        address, element, sizes, strides, box,
        swizzle=swizzle, element_strides=steps, fills_nan=fills_nan,
    )  # fmt: skip


def words(data):
    flags = int.from_bytes(data[8:12], "little") & ~(LARGE_BIT | TAG_BIT)
    return data[:8] + flags.to_bytes(4, "little") + data[12:60]


@pytest.mark.parametrize("element", list(DRIVER_TYPES))
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_driver_and_encoder_agree(driver, element, swizzle):
    rng = random.Random(f"{element} {swizzle}")
    for _ in range(20):
        is_float = element[0] in "fbt"
        tensor = random_map(rng, element, swizzle, is_float and rng.random() < 0.5)
        data = driver.encode_tiled(
            DRIVER_TYPES[element],
            tensor.address,
            tensor.sizes,
            tensor.strides[1:],
            tensor.box,
            tensor.element_strides,
            (0, SWIZZLES.index(swizzle), tensor.l2_promotion, int(tensor.fills_nan)),
        )
        assert words(data).hex() == words(encode_tensor_map(tensor)).hex()
        assert decode_tensor_map(data).box == tensor.box
