"""Block cases of double precision: quotients and roots in the directed modes.

Lives here: the values, from exact integers. Not here: what `case_forms.py` records on an H200.
"""

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from block_accesses import thread_case
from block_table import BlockCase

MODES = ("rz", "rm", "rp")


def rounded(exact: Fraction, mode: str) -> float:
    """Return a positive or negative fraction in double precision (in the normal range)."""
    exponent = math.floor(math.log2(abs(exact)))
    exponent += (abs(exact) >= Fraction(2) ** (exponent + 1)) - (
        abs(exact) < Fraction(2) ** exponent
    )
    unit = Fraction(2) ** (exponent - 52)
    function = {"rm": math.floor, "rp": math.ceil, "rz": math.trunc}[mode]
    return float(function(exact / unit) * unit)


def rounded_root(value: float, mode: str) -> float:
    """Return a square root: an integer root of the value, scaled until it has 53 bits."""
    exact = Fraction(value)
    scale = 0
    while exact * 4**scale < 2**104:
        scale += 1
    while exact * Fraction(4) ** scale >= 2**106:
        scale -= 1
    scaled = exact * Fraction(4) ** scale
    root = math.isqrt(math.floor(scaled))
    is_exact = Fraction(root) ** 2 == scaled
    return float((root + (mode == "rp" and not is_exact)) / Fraction(2) ** scale)


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    rng = np.random.default_rng(31)
    data = rng.standard_normal((32, 2)) * 2.0 ** rng.integers(-40, 40, (32, 2))
    data[:6] = [[1, 3], [-1, 3], [4, 2], [2, -7], [1e300, 3e-5], [2.25, 1.5]]
    load = "    ld.global.v2.b64 {%w1, %w2}, [%a];\n"
    for mode in MODES:
        for form, operands, values in (
            (f"div.{mode}.f64", "%w1, %w2",
             [rounded(Fraction(a) / Fraction(b), mode) for a, b in data.tolist()]),
            (f"rcp.{mode}.f64", "%w2", [rounded(1 / Fraction(b), mode) for _, b in data.tolist()]),
            (f"sqrt.{mode}.f64", "%w3",
             [rounded_root(abs(a), mode) for a, _ in data.tolist()]),
        ):  # fmt: skip
            body = f"{load}    abs.f64 %w3, %w1;\n    {form} %w4, {operands};\n"
            body += "    st.global.b64 [%b], %w4;\n"
            expected = np.zeros((32, 2))
            expected[:, 0] = values
            yield thread_case(form, body, expected.view(np.uint32), "PTX ISA 9.7.3",
                              inputs=data.view(np.uint32), group="double")  # fmt: skip
