"""Block cases of conversions that only Blackwell has: narrow formats, scales, stochastic rounding.

Lives here: the forms and their values, computed with exact fractions from the formats' definitions.
Not here: conversions that an H200 has (`case_forms.py`).
"""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
from block_accesses import thread_case
from block_table import BlockCase

SOURCE = "PTX ISA 9.7.9.21"
# exponent bits, fraction bits, largest finite value, NaN code (None: the largest value for it)
NARROW: dict[str, tuple[int, int, float, int | None]] = {
    "e4m3": (4, 3, 448.0, 0x7F), "e5m2": (5, 2, 57344.0, 0x7F), "e2m3": (2, 3, 7.5, None),
    "e3m2": (3, 2, 28.0, None), "e2m1": (2, 1, 6.0, None),
}  # fmt: skip
HALVES = {"f16": (5, 10, 65504.0, 0x7FFF), "bf16": (8, 7, float.fromhex("0x1.fep127"), 0x7FFF)}
VALUES = [
    0.0, -0.0, 1.0, -1.0, 1.0625, -1.1875, 2.5, 3.25, 0.3, -0.7, 5.1, -6.0, 6.5, 7.4, 29.0, -17.3,
    447.0, 448.1, -500.0, 1e5, -1e30, 1e-3, 2.0**-9, -(2.0**-10) * 1.5, 2.0**-17, 3e-5, 1e-8, 0.03,
    math.inf, -math.inf, math.nan, 100.3,
]  # fmt: skip


def decode(code: int, kind: str) -> float:
    """Return the value of a code of a narrow format."""
    exponent_bits, fraction_bits, largest, nan = NARROW[kind]
    width = 1 + exponent_bits + fraction_bits
    sign = -1.0 if code >> (width - 1) & 1 else 1.0
    exponent = code >> fraction_bits & (1 << exponent_bits) - 1
    fraction = code & (1 << fraction_bits) - 1
    bias = (1 << (exponent_bits - 1)) - 1
    value = math.ldexp(fraction + (exponent > 0) * (1 << fraction_bits),
                       max(exponent, 1) - bias - fraction_bits)  # fmt: skip
    if kind == "e4m3" and code & 0x7F == nan:
        return math.nan
    if value > largest:
        return math.nan if fraction else sign * math.inf
    return sign * value


def quantum(value: float, shape: tuple[int, int, float, int | None]) -> Fraction:
    """Return the distance of neighbours of a format around a value."""
    exponent_bits, fraction_bits, *_ = shape
    least = 2 - (1 << (exponent_bits - 1))
    exponent = math.frexp(value)[1] - 1 if value else least
    return Fraction(2) ** (max(exponent, least) - fraction_bits)


def nearest(value: float, shape: tuple[int, int, float, int | None]) -> Fraction:
    """Return a finite value rounded to nearest, ties to even."""
    step = quantum(value, shape)
    return round(Fraction(value) / step) * step


def carried(
    value: float, random: int, width: int, shape: tuple[int, int, float, int | None]
) -> Fraction:
    """Return |value| rounded up where the random bits carry over what is dropped."""
    step = quantum(value, shape)
    whole, rest = divmod(abs(Fraction(value)) / step, 1)
    return (whole + ((rest * 2**width).__floor__() + random >= 1 << width)) * step


def encode(magnitude: Fraction, is_negative: bool, kind: str) -> int:
    """Return the code of a magnitude that a narrow format holds."""
    exponent_bits, fraction_bits, largest, _ = NARROW[kind]
    sign = int(is_negative) << (exponent_bits + fraction_bits)
    if magnitude > largest:
        magnitude = Fraction(largest)
    for code in range(1 << (exponent_bits + fraction_bits)):
        if decode(code, kind) == magnitude:
            return sign | code
    raise AssertionError(f"{magnitude} is no value of {kind}")


def narrowed(value: float, kind: str, *, relu: bool, random: int | None = None) -> int:
    """Return the code of a float32 value, with `.satfinite`."""
    shape = NARROW[kind]
    if math.isnan(value):
        return encode(Fraction(shape[2]), False, kind) if shape[3] is None else shape[3]
    is_negative = math.copysign(1, value) < 0
    if relu and is_negative:
        return 0
    if math.isinf(value):
        return encode(Fraction(shape[2]), is_negative, kind)
    magnitude = abs(nearest(value, shape)) if random is None else carried(value, random, 16, shape)
    return encode(magnitude, is_negative, kind)


def half_bits(value: float, kind: str) -> int:
    """Return the bits of a value that a half holds exactly, or of an infinity or NaN."""
    if math.isnan(value):
        return 0x7FFF
    if kind == "f16":
        return int(np.array(value, np.float16).view(np.uint16))
    return int(np.array(value, np.float32).view(np.uint32)) >> 16


def halved(value: float, kind: str, random: int, *, relu: bool, satfinite: bool) -> int:
    """Return the bits of a half rounded by random bits."""
    shape = HALVES[kind]
    if not math.isnan(value):
        if relu and math.copysign(1, value) < 0:
            value = 0.0
        sign = math.copysign(1.0, value)
        if math.isfinite(value):
            width = 13 if kind == "f16" else 16
            magnitude = carried(value, random & (1 << width) - 1, width, shape)
            value = sign * (math.inf if magnitude > shape[2] else float(magnitude))
        if satfinite and math.isinf(value):
            value = sign * shape[2]
    return half_bits(value, kind)


def inputs() -> np.ndarray:
    """Return [32, 4] words: three float32 values and random bits a thread."""
    rng = np.random.default_rng(23)
    data = np.zeros((32, 4), np.uint32)
    single = np.array(VALUES, np.float32)
    data[:, 0] = single.view(np.uint32)
    data[:, 1] = np.roll(single, 5).view(np.uint32)
    data[:, 2] = (np.roll(single, 11) * np.float32(0.75)).view(np.uint32)
    data[:, 3] = rng.integers(0, 1 << 32, 32, np.uint32)
    data[:8, 3] = [0, 0xFFFFFFFF, 0xFFFF0000, 0x0000FFFF, 0x80008000, 0x00010001, 1, 0x80000000]
    return data


def case(form: str, body: str, values: list[int], target: str = "sm_100a") -> BlockCase:
    """Return a case of one word a thread; r1 to r4 hold the thread's inputs, r5 is stored."""
    expected = np.zeros((32, 4), np.uint32)
    expected[:, 0] = np.array(values, np.uint64).astype(np.uint32)
    load = "    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%a];\n"
    text = f"{load}{body}    st.global.b32 [%b], %r5;\n"
    return thread_case(form, text, expected, SOURCE, inputs=inputs(), target=target,
                       group="conversion")  # fmt: skip


def stochastic() -> Iterator[BlockCase]:
    """cvt.rs to halves and to narrow formats."""
    data = inputs()
    floats = [[float(x) for x in row] for row in data[:, :3].view(np.float32)]
    random = [int(x) for x in data[:, 3]]
    for kind in HALVES:
        for relu, satfinite in ((False, False), (True, True)):
            form = f"cvt.rs{'.relu' * relu}{'.satfinite' * satfinite}.{kind}x2.f32"
            values = [
                halved(a, kind, bits >> 16, relu=relu, satfinite=satfinite) << 16
                | halved(b, kind, bits & 0xFFFF, relu=relu, satfinite=satfinite)
                for (a, b, _), bits in zip(floats, random, strict=True)
            ]
            yield case(form, f"    {form} %r5, %r1, %r2, %r4;\n", values)
    for kind in NARROW:
        for relu in (False, True):
            form = f"cvt.rs{'.relu' * relu}.satfinite.{kind}x4.f32"
            width = 4 if kind == "e2m1" else 8
            values: list[int] = []
            for (a, b, c), bits in zip(floats, random, strict=True):
                halves = (bits >> 16, bits & 0xFFFF)
                if kind == "e2m1":
                    octets = [bits >> 8 * n & 0xFF for n in range(4)]
                    halves = (octets[3] << 8 | octets[1], octets[2] << 8 | octets[0])
                fields = [int(f"{half:016b}"[::-1], 2) if turned else half
                          for half in halves for turned in (True, False)]  # fmt: skip
                packed = 0
                for value, field in zip((a, b, c, a), fields, strict=True):
                    packed = packed << width | narrowed(value, kind, relu=relu, random=field)
                values.append(packed)
            target = "%h" if kind == "e2m1" else "%r5"
            body = f"    {form} {target}, {{%r1, %r2, %r3, %r1}}, %r4;\n"
            body += "    cvt.u32.u16 %r5, %h;\n" if kind == "e2m1" else ""
            yield case(form, body, values)


def from_halves() -> Iterator[BlockCase]:
    """cvt from pairs of halves to narrow formats and exponents."""
    rows = [[float(x) for x in row] for row in inputs()[:, :2].view(np.float32)]
    for half in ("f16", "bf16"):
        pack = f"    cvt.rn.{half}x2.f32 %r6, %r1, %r2;\n"
        shape = HALVES[half]

        def widened(value: float, shape: tuple[int, int, float, int | None] = shape) -> float:
            """Return what the half of a value holds."""
            if not math.isfinite(value):
                return value
            rounded = nearest(value, shape)
            sign = math.copysign(1.0, value)
            return sign * (math.inf if abs(rounded) > shape[2] else abs(float(rounded)))

        for kind in NARROW:
            for relu in (False, True):
                width = 4 if kind == "e2m1" else 8
                form = f"cvt.rn.satfinite{'.relu' * relu}.{kind}x2.{half}x2"
                values = [
                    narrowed(widened(a), kind, relu=relu) << width
                    | narrowed(widened(b), kind, relu=relu)
                    for a, b in rows
                ]
                if kind in ("e4m3", "e5m2") and half == "f16":
                    continue  # an H200 has it
                yield case(form, pack + _store_narrow(form, kind, "%r6"), values, "sm_100f")
    for mode in ("rz", "rp"):
        form = f"cvt.{mode}.satfinite.ue8m0x2.bf16x2"
        values = [
            exponent(_bf16(a), up=mode == "rp") << 8 | exponent(_bf16(b), up=mode == "rp")
            for a, b in rows
        ]
        body = "    cvt.rn.bf16x2.f32 %r6, %r1, %r2;\n"
        yield case(form, f"{body}    {form} %h, %r6;\n    cvt.u32.u16 %r5, %h;\n", values)


def _store_narrow(form: str, kind: str, source: str) -> str:
    """Convert into a byte or a half register, and widen that for the store."""
    if kind != "e2m1":
        return f"    {form} %h, {source};\n    cvt.u32.u16 %r5, %h;\n"
    return f"    {{ .reg .b8 %o; {form} %o, {source}; cvt.u32.u8 %r5, %o; }}\n"


def _bf16(value: float) -> float:
    if not math.isfinite(value):
        return value
    return math.copysign(float(nearest(value, HALVES["bf16"])), value)


def exponent(value: float, *, up: bool) -> int:
    """Return the ue8m0 code of a magnitude: a power of two below or above it."""
    if math.isnan(value):
        return 255
    if math.isinf(value):
        return 254
    if value == 0:
        return 0
    fraction, power = math.frexp(abs(value))
    return min(max(power - 1 + 127 + (up and fraction != 0.5), 0), 254)


def to_bf16() -> Iterator[BlockCase]:
    """cvt from narrow formats to bf16x2, with and without scales."""
    rng = np.random.default_rng(29)
    data = np.zeros((32, 4), np.uint32)
    data[:, 0] = rng.integers(0, 1 << 16, 32)
    data[:6, 0] = [0x7F7F, 0xFCFF, 0x7C80, 0x0000, 0x8080, 0x7BFB]
    data[:, 1] = rng.integers(100, 150, 32) << 8 | rng.integers(100, 150, 32)
    data[:4, 1] = [0xFF7F, 0x00FE, 0xFE00, 0x7F7F]
    load = "    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%a];\n"
    for kind in (*NARROW, "s2f6"):
        for relu, satfinite, scaled in ((0, 0, 0), (1, 0, 1), (0, 1, 1)):
            form = f"cvt.rn{'.relu' * relu}{'.satfinite' * satfinite}"
            form += f"{'.scaled::n2::ue8m0' * scaled}.bf16x2.{kind}x2"
            width = 4 if kind == "e2m1" else 8

            def one(code: int, scale: int, kind: str = kind, has: tuple[int, ...] = (
                relu, satfinite, scaled)) -> int:  # fmt: skip
                value = (code - 256 * (code > 127)) / 64 if kind == "s2f6" else decode(
                    code & (0x3F if kind in ("e2m3", "e3m2") else 0xFF), kind)  # fmt: skip
                if has[2]:
                    value *= math.nan if scale == 255 else 2.0 ** (scale - 127)
                if math.isnan(value):
                    return 0x7FFF
                if has[0] and math.copysign(1, value) < 0:
                    value = 0.0
                sign = math.copysign(1.0, value)
                if math.isfinite(value):
                    value = sign * abs(float(nearest(value, HALVES["bf16"])))
                if abs(value) > HALVES["bf16"][2]:
                    value = sign * (HALVES["bf16"][2] if has[1] else math.inf)
                return half_bits(value, "bf16")

            values = [
                one(int(pair) >> width & (1 << width) - 1, int(scale) >> 8) << 16
                | one(int(pair) & (1 << width) - 1, int(scale) & 0xFF)
                for pair, scale in data[:, :2]
            ]
            factor = ", %mask" if scaled else ""
            body = f"{load}    cvt.u16.u32 %h, %r1;\n    cvt.u16.u32 %mask, %r2;\n"
            if kind == "e2m1":
                body += f"    {{ .reg .b8 %o; cvt.u8.u16 %o, %h; {form} %r5, %o{factor}; }}\n"
            else:
                body += f"    {form} %r5, %h{factor};\n"
            expected = np.zeros((32, 4), np.uint32)
            expected[:, 0] = values
            yield thread_case(form, f"{body}    st.global.b32 [%b], %r5;\n", expected, SOURCE,
                              inputs=data, target="sm_100a", group="conversion")  # fmt: skip


def others() -> Iterator[BlockCase]:
    """Fixed point, integral bf16, packs of small integers."""
    rows = [[float(x) for x in row] for row in inputs()[:, :2].view(np.float32)]

    def fixed(value: float, relu: bool) -> int:
        if math.isnan(value):
            return 127
        scaled = max(-1000.0, min(1000.0, value * 64))
        return min(max(round(Fraction(scaled)), 0 if relu else -128), 127) % 256

    for relu in (False, True):
        form = f"cvt.rn.satfinite{'.relu' * relu}.s2f6x2.f32"
        values = [fixed(a, relu) << 8 | fixed(b, relu) for a, b in rows]
        yield case(form, f"    {form} %h, %r1, %r2;\n    cvt.u32.u16 %r5, %h;\n", values)
    rounding: dict[str, Callable[[float], int]] = {
        "rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil,
    }  # fmt: skip
    for mode, function in rounding.items():
        form = f"cvt.{mode}.bf16.bf16"
        values = []
        for a, _ in rows:
            value = _bf16(a)
            whole = float(function(value)) if math.isfinite(value) else value
            values.append(half_bits(math.copysign(whole, value), "bf16"))
        body = f"    cvt.rn.bf16.f32 %h, %r1;\n    {form} %h, %h;\n    cvt.u32.u16 %r5, %h;\n"
        yield case(form, body, values, "sm_90a")
    data = inputs().view(np.int32).astype(np.int64)
    data[:, :2] %= 23
    data[:, :2] -= 11
    for kind in ("u4", "s4", "u2", "s2"):
        bits = int(kind[1:])
        low, high = (
            (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        form = f"cvt.pack.sat.{kind}.s32.b32"
        pack = [
            ((int(c) << 2 * bits) | (int(np.clip(a, low, high)) % 2**bits) << bits
             | int(np.clip(b, low, high)) % 2**bits) & 0xFFFFFFFF
            for a, b, c in data[:, :3]
        ]  # fmt: skip
        expected = np.zeros((32, 4), np.uint32)
        expected[:, 0] = pack
        load = "    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%a];\n"
        body = f"{load}    {form} %r5, %r1, %r2, %r3;\n    st.global.b32 [%b], %r5;\n"
        whole = data.astype(np.int32).view(np.uint32)
        yield thread_case(form, body, expected, "PTX ISA 9.7.9.22", inputs=whole,
                          group="conversion")  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (stochastic, from_halves, to_bf16, others):
        yield from cases()
