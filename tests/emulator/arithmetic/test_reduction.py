from fractions import Fraction

import numpy as np
import pytest

from fovea.emulator.arithmetic.reduction import check_reduction, reduce_elements


def reduced(operation, element, old, new):
    result = reduce_elements(operation, element, old.view(np.uint8), new.view(np.uint8))
    return result.view(old.dtype)


def test_f32_add_flushes_subnormals():
    tiny = np.float32(2.0**-130)
    old = np.array([1, tiny, -tiny, 2.0**-126, 3], np.float32)
    new = np.array([2, tiny, 0, -1.5 * 2.0**-127, -3], np.float32)
    got = reduced("add", "f32", old, new)
    assert list(got) == [3, 0, 0, 2.0**-126, 0]


def bf16_value(code):
    return Fraction(float(np.array([int(code) << 16], np.uint32).view(np.float32)[0]))


def test_bf16_add_rounds_once_to_nearest_even():
    rng = np.random.default_rng(1)
    old, new = rng.integers(0, 1 << 16, (2, 4000)).astype(np.uint16)
    # Near exponents, where rounding matters, besides arbitrary ones.
    new[:2000] = (old[:2000] & 0x7F80) + rng.integers(-400, 400, 2000) & 0x7FFF
    exponents = [code >> 7 & 0xFF for code in (old, new)]
    keep = (np.maximum(*exponents) < 0xFD) & (np.maximum(*exponents) > 20)
    old, new = old[keep], new[keep]
    got = reduced("add", "bf16", old, new)
    for x, y, code in zip(old, new, got):
        exact = bf16_value(x) + bf16_value(y)
        error = abs(exact - bf16_value(code))
        magnitude = int(code) & 0x7FFF
        for near in (magnitude - 1, magnitude + 1):
            if near >= 0:
                other = abs(exact - bf16_value(int(code) & 0x8000 | near))
                assert error < other or (error == other and code % 2 == 0)


def test_f16_minimum_ignores_nan_and_add_rounds():
    old = np.array([1, np.nan, 2048], np.float16)
    new = np.array([0.5, 3, 1], np.float16)
    assert list(reduced("min", "f16", old, new)) == [0.5, 3, 1]
    assert reduced("add", "f16", old[2:], new[2:])[0] == 2048


def test_integer_operations_follow_the_manual():
    old = np.array([5, 7, 0, 0xFFFFFFFF], np.uint32)
    new = np.array([7, 7, 7, 2], np.uint32)
    assert list(reduced("inc", "u32", old, new)) == [6, 0, 1, 0]
    assert list(reduced("dec", "u32", old, new)) == [4, 6, 7, 2]
    assert list(reduced("add", "u32", old, new)) == [12, 14, 7, 1]
    assert list(reduced("xor", "b32", old, new)) == [2, 0, 7, 0xFFFFFFFD]
    signed = reduced("max", "s32", old.view(np.int32), new.view(np.int32))
    assert list(signed) == [7, 7, 7, 2]
    wide = reduced("and", "b64", old.view(np.uint64), new.view(np.uint64))
    assert wide.tolist() == (old.view(np.uint64) & new.view(np.uint64)).tolist()


@pytest.mark.parametrize(
    ("operation", "element"), [("min", "f32"), ("inc", "s32"), ("add", "s64"), ("and", "f16")]
)
def test_combinations_the_engine_lacks_are_refused(operation, element):
    with pytest.raises(ValueError, match=rf"\.{operation} does not take \.{element}"):
        check_reduction(operation, element)
