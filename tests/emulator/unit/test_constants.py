"""Constant expressions: values, signs and precedence as ptxas computes them."""

import numpy as np
import pytest

from fovea import emulator

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def variable(ptx_type: str, expression: str) -> np.ndarray:
    """Return the bytes of a variable that a constant expression initialises."""
    text = f"{HEAD}.global .{ptx_type} A = {expression}; .visible .entry k() {{ ret; }}"
    return emulator.load_ptx(text)._layout.global_arrays["A"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("-5 >> 1", -3),
        ("(.u64)-5 >> 60", 15),
        ("(.s64)0x8000000000000000 >> 63", -1),
        ("0x8000000000000000 >> 63", 1),
        ("1 << 63 >> 63", -1),
        ("-5U >> 60", 15),
        ("~5 >> 60", 15),
        ("(-1 & -1) >> 60", -1),
        ("-1 > 1", 0),
        ("-1 > 1U", 1),
        ("-7 / 2", -3),
        ("-7 / 2U", (1 << 63) - 4),
        ("-7 % 3", 0),
        ("7 % -3", 7),
        ("0xffffffffffffffff / 2", (1 << 63) - 1),
        ("-9223372036854775808 / -1", 0),
        ("(1 << 63) / -1", -(1 << 63)),
        ("0x7fffffffffffffff * 2", -2),
        ("9223372036854775807 + 1 > 0", 0),
        ("-1 == 0xffffffffffffffff", 1),
        ("!5 + !0", 1),
        ("!!5", 1),
        ("3 && 0 || 5", 1),
        ("1 | 2 == 2", 1),
        ("5 & 4 == 4", 1),
        ("2 < 1 < 1", 1),
        ("1 << 2 + 1", 8),
        ("0 ? 2 : 0 ? 3 : 4", 4),
        ("1 == 2 ? 3 : 4 + 5", 9),
        ("(0 ? -1 : 1U) - 2 >> 60", 15),
        ("(1 ? -1 : 1U) >> 60", -1),
        ("(1.5 < 2.5) - 2 >> 60", -1),
        ("WARP_SZ - 33 >> 1", -1),
        ("-WARP_SZ*(WARP_SZ+1)", -1056),
        ("0777 + 0b101U + 0x1F", 547),
    ],
)
def test_integer_expression_has_the_value_and_sign_of_ptxas(expression, value):
    assert variable("u64", expression).view(np.int64).tolist() == [value]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1.0/2.0 - 2.0*3.0", -5.5), ("0d3ff0000000000000 * 2.0", 2.0), ("1e308*1e10", float("inf"))],
)
def test_expression_of_decimals_is_a_double(expression, value):
    assert variable("f64", expression).view(np.float64).tolist() == [value]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("5 || 1 % 0", "division by zero"),
        ("1.0/0.0", "division by zero"),
        ("1 << 64", "shift by 64"),
        ("1.5 && 1", "&& takes two integers"),
        ("1 == 1.0", "== takes two integers"),
        ("1.5 % 1.0", "% takes two integers"),
        ("1 + 0f3f800000", "takes two integers"),
        ("-0f3f800000", "no sign"),
        ("!1.5", "! needs an integer"),
        ("~1.5", "~ needs an integer"),
        ("1.5 ? 1 : 2", "must be an integer"),
        ("1 ? 1.5 : 2", "choose between integers"),
        ("(.u32)5", "no cast to .u32"),
        ("(.u64)1.5", "a cast needs an integer"),
        ("18446744073709551616", "does not fit 64 bits"),
        ("08", "no number"),
    ],
)
def test_expression_without_a_value_is_an_error_with_its_line(expression, message):
    with pytest.raises(emulator.PtxError, match=message) as caught:
        variable("u64", f"\n{expression}")
    assert caught.value.line == 5


def test_expressions_stand_wherever_a_constant_does():
    body = """.reg .b64 %p; .reg .b32 %a, %b; .reg .pred %q; .shared .b32 s[8];
    ld.param.u64 %p, [o];
    mov.u32 %a, WARP_SZ-1; st.shared.b32 [s+4*(1 ? 2 : 3)], %a; ld.shared.b32 %b, [s+(12+~3)];
    setp.eq.u32 %q, %b, !0 ? WARP_SZ + -1 : 0;
    @!%q mov.u32 %b, 0; st.global.b32 [%p], %b;"""
    out = np.zeros(1, np.uint32)
    text = f"{HEAD}.visible .entry k(.param .u64 o) {{ {body} ret; }}"
    emulator.load_ptx(text).launch("k", 1, 1, args=[out])
    assert out[0] == 31
