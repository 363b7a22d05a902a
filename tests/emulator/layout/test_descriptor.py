import numpy as np
import pytest

from fovea.emulator.layout.descriptor import (
    decode_tcgen05_descriptor,
    decode_wgmma_descriptor,
    operand_chunks,
)
from fovea.emulator.layout.tensor_map import make_tensor_map
from fovea.emulator.layout.tensor_tile import shared_chunks

LAYOUT_TYPES = {0: 0, 128: 1, 64: 2, 32: 3}


def wgmma_descriptor(start, leading, stride, width, base_offset=0):
    return (
        start >> 4
        | leading >> 4 << 16
        | stride >> 4 << 32
        | base_offset << 49
        | LAYOUT_TYPES[width] << 62
    )


def read(memory, descriptor, **shape):
    table, first = operand_chunks(decode_wgmma_descriptor(descriptor), **shape)
    raw = memory.view(np.uint8).reshape(-1, 16)[table + first]
    return raw.reshape(raw.shape[0], -1).view(memory.dtype)


def store_by_copy(memory, matrix, address, width):
    """Put a row-major matrix into memory as tensor copies with a box one swizzle wide do."""
    columns = width // 2
    for box in range(matrix.shape[1] // columns):
        tensor = make_tensor_map(
            0, "bf16", (columns, matrix.shape[0]), (columns * 2,), (columns, matrix.shape[0]),
            swizzle=width,
        )  # fmt: skip
        table, first = shared_chunks(tensor, address + box * matrix.shape[0] * width)
        part = np.ascontiguousarray(matrix[:, box * columns : (box + 1) * columns])
        memory.view(np.uint8).reshape(-1, 16)[table + first] = part.view(np.uint8).reshape(
            matrix.shape[0], -1, 16
        )


@pytest.mark.parametrize("width", [32, 64, 128])
def test_k_major_operand_of_a_copied_tile_reads_each_k_step(width):
    rows = 64
    matrix = np.arange(rows * width // 2, dtype=np.uint16).reshape(rows, width // 2)
    memory = np.zeros(64 * 1024, np.uint16)
    store_by_copy(memory, matrix, 2048, width)
    for step in range(width // 32):
        value = wgmma_descriptor(2048 + 32 * step, 16, 8 * width, width)
        got = read(memory, value, rows=rows, k_bytes=32, element_bytes=2, is_k_major=True)
        assert np.array_equal(got, matrix[:, 16 * step : 16 * step + 16])


@pytest.mark.parametrize("width", [32, 64, 128])
def test_mn_major_operand_of_copied_tiles_reads_each_k_step(width):
    k_extent, columns = 64, 128
    matrix = np.arange(k_extent * columns, dtype=np.uint16).reshape(k_extent, columns)
    memory = np.zeros(64 * 1024, np.uint16)
    store_by_copy(memory, matrix, 1024, width)
    for step in range(k_extent // 16):
        value = wgmma_descriptor(1024 + step * 16 * width, k_extent * width, 8 * width, width)
        got = read(memory, value, rows=columns, k_bytes=32, element_bytes=2, is_k_major=False)
        assert np.array_equal(got, matrix[16 * step : 16 * step + 16])


def test_k_major_operand_without_swizzle_uses_both_offsets():
    memory = np.arange(32 * 1024, dtype=np.uint16)
    value = wgmma_descriptor(256, 2048, 128, 0)
    got = read(memory, value, rows=64, k_bytes=32, element_bytes=2, is_k_major=True)
    for row, k in ((0, 0), (7, 7), (8, 0), (63, 15), (17, 9)):
        address = 256 + row % 8 * 16 + row // 8 * 128 + k // 8 * 2048 + k % 8 * 2
        assert got[row, k] == address // 2


def test_mn_major_operand_without_swizzle_uses_both_offsets():
    memory = np.arange(32 * 1024, dtype=np.uint16)
    value = wgmma_descriptor(256, 2048, 128, 0)
    got = read(memory, value, rows=64, k_bytes=32, element_bytes=2, is_k_major=False)
    for k, row in ((0, 0), (7, 7), (8, 0), (15, 63), (9, 17)):
        address = 256 + row // 8 * 128 + row % 8 * 2 + k // 8 * 2048 + k % 8 * 16
        assert got[k, row] == address // 2


@pytest.mark.parametrize("bit", [14, 31, 46, 52, 61])
def test_wgmma_descriptor_with_a_reserved_bit_is_refused(bit):
    with pytest.raises(ValueError, match="must be zero"):
        decode_wgmma_descriptor(1 << bit)


def test_tcgen05_descriptor_fields_are_decoded():
    value = 0x123 | 2 << 16 | 64 << 32 | 1 << 46 | 5 << 49 | 2 << 61
    got = decode_tcgen05_descriptor(value)
    assert (got.start, got.leading, got.stride, got.base_offset, got.swizzle) == (
        0x1230, 32, 1024, 5, 128,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"), [(2 << 46, "bits 46-47"), (1 << 46 | 3 << 61, "layout type 3")]
)
def test_tcgen05_descriptor_of_wrong_version_or_layout_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        decode_tcgen05_descriptor(value)
