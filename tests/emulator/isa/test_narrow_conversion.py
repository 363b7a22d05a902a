"""Conversions to ue8m0 at the ends of its range, and minima of three operands."""

import numpy as np
import pytest

from fovea import emulator

KERNEL = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
    .reg .b64 %i, %o, %w; .reg .b32 %t, %r, %s; .reg .b16 %h; .reg .f32 %a, %b, %c;
    ld.param.u64 %i, [in]; ld.param.u64 %o, [out]; mov.u32 %t, %tid.x;
    mul.wide.u32 %w, %t, 4; add.u64 %i, %i, %w; add.u64 %o, %o, %w;
    ld.global.f32 %a, [%i]; mov.f32 %b, 0f40A00000; mov.f32 %c, 0fC0000000;
    {body}
    st.global.b32 [%o], %r;
    ret;
}}
"""


def run(body: str, values: np.ndarray) -> np.ndarray:
    """Return `%r` of each lane, whose value is `%a`."""
    source, out = np.zeros(32, values.dtype), np.zeros(32, np.uint32)
    source[: len(values)] = values
    emulator.load_ptx(KERNEL.format(body=body)).launch("k", 1, 32, args=[source, out])
    return out[: len(values)]


# bits of a float32: codes by rz, rp, rz.satfinite, rp.satfinite as `cuda_fp8.hpp` computes them
CODES = {
    0x00000000: (0, 0, 0, 0),
    0x00000001: (0, 0, 0, 0),
    0x00400000: (0, 0, 0, 0),  # 2^-127
    0x00400001: (0, 1, 0, 1),
    0x00800000: (1, 1, 1, 1),
    0x80800001: (1, 2, 1, 2),
    0x3F800000: (127, 127, 127, 127),
    0x3FC00000: (127, 128, 127, 128),
    0x7F000000: (254, 254, 254, 254),
    0x7F000001: (254, 255, 254, 254),
    0x7F7FFFFF: (254, 255, 254, 254),
    0x7F800000: (255, 255, 254, 254),
    0xFF800000: (255, 255, 254, 254),
    0x7FC00000: (255, 255, 255, 255),
}


@pytest.mark.parametrize("form", range(4))
def test_conversion_to_ue8m0_is_that_of_the_header(form):
    name = ("rz", "rp", "rz.satfinite", "rp.satfinite")[form]
    values = np.array(list(CODES), np.uint32)
    expected = np.array([codes[form] for codes in CODES.values()])
    body = f"cvt.{name}.ue8m0x2.f32 %h, %a, %b; cvt.u32.u16 %r, %h;"
    five = 129 if "rz" in name else 130
    np.testing.assert_array_equal(run(body, values), expected << 8 | five)
    keep = (values & 0xFFFF) == 0
    body = f"mov.b32 %s, %a; cvt.{name}.ue8m0x2.bf16x2 %h, %s; cvt.u32.u16 %r, %h;"
    np.testing.assert_array_equal(run(body, values[keep]), expected[keep] << 8)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [("min.f32", [-7, -2, -2]), ("max.abs.f32", [7, 5, 5]), ("min.abs.f32", [2, 1, 2])],
)
def test_minimum_of_three_takes_magnitudes_with_abs(opcode, expected):
    values = np.array([-7, 1, 5], np.float32)
    got = run(f"{opcode} %a, %a, %b, %c; mov.b32 %r, %a;", values)
    assert got.view(np.float32).tolist() == expected
