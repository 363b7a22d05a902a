import numpy as np
import pytest

from fovea.emulator.layout import fragment


@pytest.mark.parametrize("columns", [8, 64, 256])
def test_accumulator_registers_follow_the_manual(columns):
    matrix = np.arange(64 * columns, dtype=np.uint32).reshape(64, columns)
    registers = fragment.accumulator_to_registers(matrix)
    assert registers.shape == (4, columns // 2, 32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(columns // 2):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + lane % 4 * 2 + i % 2
            assert registers[warp, i, lane] == matrix[row, column]
    assert np.array_equal(fragment.accumulator_from_registers(registers), matrix)


def test_packed_accumulator_registers_follow_the_manual():
    matrix = np.arange(64 * 24, dtype=np.uint16).reshape(64, 24)
    registers = fragment.packed_accumulator_to_registers(matrix)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(6):
            row = 16 * warp + lane // 4 + 8 * (i % 2)
            column = 8 * (i // 2) + lane % 4 * 2
            low, high = int(matrix[row, column]), int(matrix[row, column + 1])
            assert registers[warp, i, lane] == low | high << 16
    assert np.array_equal(fragment.packed_accumulator_from_registers(registers), matrix)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_operand_registers_follow_the_manual(dtype):
    size = np.dtype(dtype).itemsize
    matrix = np.arange(64 * 32 // size).astype(dtype).reshape(64, 32 // size)
    registers = fragment.operand_to_registers(matrix)
    raw = matrix.view(np.uint8)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(4):
            row = 16 * warp + lane // 4 + 8 * (i % 2)
            start = 16 * (i // 2) + lane % 4 * 4
            word = int.from_bytes(raw[row, start : start + 4].tobytes(), "little")
            assert registers[warp, i, lane] == word
    assert np.array_equal(fragment.operand_from_registers(registers, size), matrix)
