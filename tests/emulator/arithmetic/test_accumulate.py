"""The exact mode against an independent scalar model in rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fovea.emulator.arithmetic import accumulate
from fovea.emulator.arithmetic.accumulate import (
    accumulation,
    multiply_aligned,
    multiply_exact,
    multiply_fast,
    multiply_integer,
)
from fovea.emulator.arithmetic.formats import FORMATS, to_float32

STORAGE = {
    "bf16": np.uint16,
    "f16": np.uint16,
    "tf32": np.uint32,
    "e4m3": np.uint8,
    "e5m2": np.uint8,
}
K_EXTENT = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}


def exponent_of(x, name):
    if x == 0:
        return -126
    return max(math.frexp(x)[1] - 1, FORMATS[name].min_exponent)


def truncate(x, exponent):
    """Truncate a rational toward zero to a multiple of 2^exponent."""
    unit = Fraction(2) ** exponent
    return math.trunc(x / unit) * unit


def scalar_model(a, b, c, a_format, b_format, bits):
    """Return the exact sum of the aligned, truncated terms of one output element."""
    terms = [(Fraction(float(c)), exponent_of(float(c), "f32"))]
    for x, y in zip(a.tolist(), b.tolist()):
        terms.append(
            (Fraction(x) * Fraction(y), exponent_of(x, a_format) + exponent_of(y, b_format))
        )
    top = max(exponent for _, exponent in terms)
    return sum(truncate(value, top - bits) for value, _ in terms)


def round_toward_zero(value, fraction_bits):
    if value == 0:
        return 0.0
    exponent = max(math.frexp(float(abs(value)))[1] - 1, -126)
    while Fraction(2) ** exponent > abs(value) and exponent > -126:
        exponent -= 1
    return float(truncate(value, exponent - fraction_bits))


def random_operands(seed, name, rows, columns, spread):
    rng = np.random.default_rng(seed)
    shape = (rows + columns, K_EXTENT[name])
    raw = rng.integers(0, 1 << 8 * FORMATS[name].size_bytes, shape, dtype=np.uint64)
    if spread == "narrow":
        # Values near one: most terms align closely and truncation shows in the last bits.
        values = rng.standard_normal(shape).astype(np.float32)
        if name == "bf16":
            raw = values.view(np.uint32) >> 16
        elif name == "f16":
            raw = values.astype(np.float16).view(np.uint16)
        elif name == "tf32":
            raw = values.view(np.uint32)
        else:
            raw = raw & 0xBF
    values = to_float32(raw.astype(STORAGE[name]), name)
    values = np.where(np.isfinite(values), values, np.float32(1))
    return values[:rows], np.ascontiguousarray(values[rows:].T)


@pytest.mark.parametrize("spread", ["narrow", "wide"])
@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
def test_exact_product_matches_the_scalar_model(generation, name, spread):
    a, b = random_operands(3, name, 6, 5, spread)
    if name in ("bf16", "tf32") and spread == "wide":
        a, b = a * np.float32(2.0**-20), b * np.float32(2.0**-20)
        a, b = np.clip(a, -1e15, 1e15), np.clip(b, -1e15, 1e15)
        a, b = (to_float32((x.view(np.uint32) >> 16).astype(np.uint16), "bf16") for x in (a, b))
    c = np.random.default_rng(4).standard_normal((6, 5)).astype(np.float32)
    how = accumulation(generation, name, "f32")
    got = multiply_exact(a, b, c, a_format=name, b_format=name, how=how)
    assert how.alignment_bits == (13 if generation == "hopper" and name[0] == "e" else 25)
    kept = 13 if how.alignment_bits == 13 else 23
    for i in range(6):
        for j in range(5):
            total = scalar_model(a[i], b[:, j], c[i, j], name, name, how.alignment_bits)
            assert got[i, j] == np.float32(round_toward_zero(total, kept)), (i, j)


def test_exact_product_truncates_what_float32_would_keep():
    # 1 + 16 * 2^-27: each term is below the last kept bit (2^-25), so all are lost.
    a = np.full((1, 16), 2.0**-13, np.float32)
    b = np.full((16, 1), 2.0**-14, np.float32)
    c = np.ones((1, 1), np.float32)
    how = accumulation("hopper", "bf16", "f32")
    got = multiply_exact(a, b, c, a_format="bf16", b_format="bf16", how=how)
    assert got[0, 0] == 1
    terms = a * np.float32(4)  # 2^-25 each: kept, and their sum 2^-21 shows
    got = multiply_exact(terms, b, c, a_format="bf16", b_format="bf16", how=how)
    assert got[0, 0] == 1 + 2**-21


def test_exact_f16_result_rounds_to_nearest_even():
    a = np.zeros((1, 16), np.float32)
    a[0, 0] = 1
    b = np.zeros((16, 3), np.float32)
    b[0] = 2.0**-11, 1.5 * 2.0**-10, 2.0**-12
    c = np.ones((1, 3), np.float16)
    how = accumulation("hopper", "f16", "f16")
    got = multiply_exact(a, b, c, a_format="f16", b_format="f16", how=how)
    assert list(got[0]) == [1, np.float16(1 + 2**-9), 1]


def test_exact_product_of_infinities_and_nan_gives_the_canonical_nan():
    a = np.zeros((3, 16), np.float32)
    a[:, 0] = np.inf, np.nan, np.inf
    a[2, 1] = -np.inf
    b = np.ones((16, 1), np.float32)
    how = accumulation("hopper", "bf16", "f32")
    got = multiply_exact(a, b, None, a_format="bf16", b_format="bf16", how=how)
    assert got[0, 0] == np.inf
    assert [hex(x) for x in got[1:, 0].view(np.uint32)] == ["0x7fffffff"] * 2


def test_exact_result_that_overflows_is_infinite():
    a = np.full((1, 16), 2.0**127, np.float32)
    b = np.full((16, 1), 2.0, np.float32)
    how = accumulation("blackwell", "bf16", "f32")
    assert multiply_exact(a, b, None, a_format="bf16", b_format="bf16", how=how)[0, 0] == np.inf


def test_fast_product_is_close_to_the_exact_one():
    a, b = random_operands(5, "bf16", 64, 32, "narrow")
    c = np.random.default_rng(6).standard_normal((64, 32)).astype(np.float32)
    exact = multiply_exact(
        a, b, c, a_format="bf16", b_format="bf16", how=accumulation("hopper", "bf16", "f32")
    )
    scale = np.abs(a) @ np.abs(b) + np.abs(c)
    assert np.all(np.abs(multiply_fast(a, b, c) - exact) <= scale * 2.0**-21)


@pytest.mark.parametrize("with_c", [True, False])
@pytest.mark.parametrize("result", ["f32", "f16"])
@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
def test_float32_and_integer_sums_are_equal_in_every_bit(
    monkeypatch, generation, name, result, with_c
):
    a, b = random_operands(7, name, 70, 24, "narrow")
    a, b = a * np.float32(2.0**-3), b.copy()
    if name in ("e4m3", "e5m2"):
        a = a * np.float32(2.0**3)  # times a power of two, but still of the format
    a[5], b[:, 3], a[:, 2] = 0, 0, 0
    kind = np.float16 if result == "f16" else np.float32
    c = (np.random.default_rng(8).standard_normal((70, 24)) * 40).astype(kind)
    c[5] = 0
    how = accumulation(generation, name, result)
    arguments = {"a_format": name, "b_format": name, "how": how}
    quick = multiply_aligned(a, b, c if with_c else None, **arguments)
    assert quick is not None
    assert quick.dtype == kind
    monkeypatch.setattr(accumulate, "multiply_aligned", lambda *_, **__: None)
    slow = multiply_exact(a, b, c if with_c else None, **arguments)
    bits = np.uint16 if result == "f16" else np.uint32
    assert np.array_equal(quick.view(bits), slow.view(bits))


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (np.inf, 1, 0),
        (1, np.nan, 0),
        (1, 1, np.inf),
        (2.0**100, 2.0**26, 0),
        (2.0**-60, 2.0**-50, 0),
    ],
)
def test_aligned_product_leaves_what_float32_cannot_hold(a, b, c):
    rows, columns = np.full((1, 16), a, np.float32), np.full((16, 1), b, np.float32)
    how = accumulation("hopper", "bf16", "f32")
    start = np.full((1, 1), c, np.float32)
    formats = {"a_format": "bf16", "b_format": "bf16", "how": how}
    assert multiply_aligned(rows, columns, start, **formats) is None
    expected = a * b * 16 + c
    got = multiply_exact(rows, columns, start, **formats)[0, 0]
    wanted = np.inf if expected >= 2.0**128 else expected
    assert got == wanted or (np.isnan(got) and np.isnan(wanted))


def test_integer_product_wraps_or_saturates():
    a = np.full((1, 32), -128, np.int8)
    b = np.full((32, 1), -128, np.int8)
    c = np.array([[2**31 - 1]], np.int32)
    assert multiply_integer(a, b, c, saturates=True)[0, 0] == 2**31 - 1
    assert multiply_integer(a, b, c, saturates=False)[0, 0] == 2**31 - 1 + 32 * 128**2 - 2**32
