import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fovea.emulator.arithmetic.formats import FORMATS, to_float32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)],
)
def test_all_bytes_of_fp8_match_torch(name, dtype):
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(dtype).float().numpy()
    assert np.array_equal(to_float32(codes, name), expected, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_all_16_bit_values_match_torch(name, dtype):
    codes = np.arange(65536).astype(np.uint16)
    expected = torch.from_numpy(codes.view(np.int16)).view(dtype).float().numpy()
    assert np.array_equal(to_float32(codes, name), expected, equal_nan=True)


def test_tf32_ignores_the_low_bits():
    one = np.float32(1).view(np.uint32)
    assert to_float32(np.array([one | 0x1FFF]), "tf32")[0] == 1
    assert to_float32(np.array([one | 0x2000]), "tf32")[0] == 1 + 2**-10


def test_e2m1_has_the_eight_magnitudes():
    got = to_float32(np.arange(16, dtype=np.uint8), "e2m1")
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert list(got) == magnitudes + [-x for x in magnitudes]


def test_min_exponent_is_that_of_the_smallest_normal():
    assert {name: form.min_exponent for name, form in FORMATS.items()} == {
        "f32": -126, "tf32": -126, "bf16": -126, "f16": -14, "e5m2": -14, "e4m3": -6,
        "e3m2": -2, "e2m3": 0, "e2m1": 0,
    }  # fmt: skip
