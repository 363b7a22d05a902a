import numpy as np
import pytest

from fovea.emulator.layout.swizzle import swizzle, swizzle_32_byte_atoms


@pytest.mark.parametrize("width", [32, 64, 128])
def test_swizzle_of_an_atom_permutes_chunks_by_row(width):
    rows_per_period = 128 // width
    for row in range(8 * rows_per_period):
        for chunk in range(width // 16):
            address = 4096 + row * width + chunk * 16
            # The row that counts is the 128-byte line, so narrow swizzles change every 2 or 4 rows.
            line = row // rows_per_period % (width // 16)
            assert swizzle(address, width) == 4096 + row * width + (chunk ^ line) * 16


@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_swizzle_applied_twice_returns_the_address(width):
    addresses = np.arange(0, 8192, 4, dtype=np.int64)
    once = swizzle(addresses, width)
    assert np.array_equal(swizzle(once, width), addresses)
    assert np.array_equal(once // 1024, addresses // 1024)
    assert np.array_equal(once == addresses, addresses >= 0) == (width == 0)


def test_swizzle_with_phase_shift_starts_the_pattern_at_the_shifted_row():
    shifted = 3 * 128
    offsets = np.arange(0, 1024, 16, dtype=np.int64)
    got = swizzle(offsets + shifted, 128, phase_shift=3) - shifted
    assert np.array_equal(got, swizzle(offsets, 128))


def test_swizzle_32_byte_atoms_moves_pairs_of_chunks():
    addresses = np.arange(0, 1024, 16, dtype=np.int64)
    rows, pairs, half = addresses // 128, addresses % 128 // 32, addresses % 32
    expected = rows * 128 + (pairs ^ (rows % 4)) * 32 + half
    assert np.array_equal(swizzle_32_byte_atoms(addresses), expected)
