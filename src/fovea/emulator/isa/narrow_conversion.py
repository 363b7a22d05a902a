"""cvt of narrow formats: tf32, fp8, fp6, fp4, ue8m0, s2f6, and stochastic rounding.

Lives here: conversions to and from formats below 16 bits, tf32, and `.rs`. Not here: the others
(`conversion.py`), tables of the formats (`bits.py`). Invariant: every conversion rounds once; what
has no NaN gets its largest value for one.
Source: PTX ISA 9.7.9.21.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Action, Array, Inline, Instruction

# fp8 exists from sm_89 on, smaller formats, scales and fp8 to bf16 where an architecture is named
_FP8_TARGETS = "sm_89+"
_NARROW = "sm_100a,sm_100f,sm_101a,sm_103a,sm_103f,sm_110a,sm_120a"

# --- tf32, fp8 and smaller ------------------------------------------------------------------------


@instruction("cvt.rna{.satfinite}.tf32.f32 d, a", source="PTX ISA 9.7.9.21",
             evidence="manual-only")  # fmt: skip
@instruction("cvt.rnd{.relu}.tf32.f32 d, a", source="PTX ISA 9.7.9.21", evidence="manual-only",
             targets="sm_90+", rnd="rn rz")  # fmt: skip
@instruction("cvt.rnd.satfinite{.relu}.tf32.f32 d, a", "cvt.rnd.relu.satfinite.tf32.f32 d, a",
             source="PTX ISA 9.7.9.21", evidence="manual-only", targets="sm_100+",
             rnd="rn rz")  # fmt: skip
def cvt_tf32(ins: Instruction) -> Inline:
    """d = a rounded to tf32."""
    mode = ins["rnd"] or "rna"

    def function(a: Array) -> Array:
        if ins.has("relu"):
            a = np.where(np.isnan(a) | (a > 0), a, np.float32(0))
        result = fp.f32_to_tf32(a, mode)
        if ins.has("satfinite"):
            finite = np.uint32(0x7F7FE000)
            sign = result & np.uint32(0x80000000)
            result = np.where((result & 0x7FFFFFFF) == 0x7F800000, sign | finite, result)
        return result

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'f32')})", "b32")


_FP8 = "e4m3x2 e5m2x2"
_SMALL = "e2m1x2 e2m3x2 e3m2x2"


@instruction("cvt.rn.satfinite{.relu}.dtype.f32 d, a, b", source="PTX ISA 9.7.9.21",
             evidence="manual-only", targets=_FP8_TARGETS, dtype=_FP8)  # fmt: skip
@instruction("cvt.rn.satfinite{.relu}.dtype.f32 d, a, b", source="PTX ISA 9.7.9.21",
             evidence="manual-only", targets=_NARROW, dtype=_SMALL)  # fmt: skip
def cvt_to_small_pair(ins: Instruction) -> Inline:
    """d = (a in the high, b in the low element) of an 8-bit or smaller float format."""
    kind = ins["dtype"][:-2]
    narrow, relu = fp.SMALL_FLOATS[kind].narrow_saturating, ins.has("relu")
    bits = 4 if kind == "e2m1" else 8

    def function(a: Array, b: Array) -> Array:
        high = narrow(a, relu).astype(np.uint16) << bits
        return (high | narrow(b, relu)).astype(np.uint8 if bits == 4 else np.uint16)

    name = ins.program.bind(function, "cvt")
    sources = f"{ins.src('a', 'f32')}, {ins.src('b', 'f32')}"
    return ins.assign("d", f"{name}({sources})", "b8" if bits == 4 else "b16")


@instruction("cvt.rn.satfinite{.relu}.dtype.atype d, a", source="PTX ISA 9.7.9.21",
             evidence="manual-only", targets=_FP8_TARGETS, dtype=_FP8, atype="f16x2")  # fmt: skip
@instruction("cvt.rn.satfinite{.relu}.dtype.atype d, a", source="PTX ISA 9.7.9.21",
             evidence="manual-only", targets=_NARROW, dtype=_FP8, atype="bf16x2")  # fmt: skip
@instruction("cvt.rn.satfinite{.relu}.dtype.atype d, a", source="PTX ISA 9.7.9.21",
             evidence="manual-only", targets=_NARROW, dtype=_SMALL,
             atype="f16x2 bf16x2")  # fmt: skip
def cvt_half_pair_to_small(ins: Instruction) -> Inline:
    """d = two fp8, fp6 or fp4 values from two halves."""
    small, relu = fp.SMALL_FLOATS[ins["dtype"][:-2]], ins.has("relu")
    widen = fp.half_to_f32[ins["atype"][:-2]]
    is_fp4 = ins["dtype"] == "e2m1x2"

    def function(a: Array) -> Array:
        codes = small.narrow_saturating(widen(a.view(np.uint16)), relu)
        return codes[0::2] | codes[1::2] << np.uint8(4) if is_fp4 else codes.view(np.uint16)

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'b32')})", "b8" if is_fp4 else "b16")


@instruction("cvt.rn{.relu}.f16x2.atype d, a", source="PTX ISA 9.7.9.21", evidence="manual-only",
             targets=_FP8_TARGETS, atype=_FP8)  # fmt: skip
@instruction("cvt.rn{.relu}.f16x2.atype d, a", source="PTX ISA 9.7.9.21", evidence="manual-only",
             targets=_NARROW, atype="e2m3x2 e3m2x2")  # fmt: skip
def cvt_fp8_pair_to_half(ins: Instruction) -> Inline:
    """d = two f16 values from two fp8 or fp6 values, exactly."""
    small, relu = fp.SMALL_FLOATS[ins["atype"][:-2]], ins.has("relu")
    # 6-bit elements sit in the low bits of a byte
    mask = np.uint8(0xFF if ins["atype"] in _FP8 else 0x3F)

    def function(a: Array) -> Array:
        value = small.widen(a.view(np.uint8) & mask)
        if relu:
            value = np.where(np.isnan(value) | (value > 0), value, np.float32(0))
        return fp.f32_to_f16(value).view(np.uint32)

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'b16')})", "b32")


@instruction(
    "cvt.rn{.relu}.f16x2.e2m1x2 d, a",
    source="PTX ISA 9.7.9.21",
    targets=_NARROW,
    evidence="manual-only",
)
def cvt_fp4_pair_to_half(ins: Instruction) -> Inline:
    """d = two f16 values from the two e2m1 values of a byte, exactly."""
    relu = ins.has("relu")

    def function(a: Array) -> Array:
        codes = np.stack((a & 15, a >> 4), axis=1)
        value = fp.E2M1.widen(codes)
        if relu:
            value = np.where(value > 0, value, np.float32(0))
        return value.astype(np.float16).view(np.uint32).ravel()

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'b8')})", "b32")


_INFINITY, _SMALLEST = 0x7F800000, 0x00400000  # as float32; code 0 is 2^-127


def _exponent(ins: Instruction) -> Callable[[Array], Array]:
    """Return the function from float32 to the ue8m0 codes of magnitudes.

    Infinity and what is rounded up beyond 2^127 are 255, which is NaN, or with `.satfinite` 254.
    Source: the function that stands for these instructions in `cuda_fp8.hpp` of CUDA 13.0.
    """
    is_up, is_saturating = ins["rnd"] == "rp", ins.has("satfinite")

    def function(value: Array) -> Array:
        pattern = value.view(np.uint32) & np.uint32(0x7FFFFFFF)
        code = (pattern >> 23).astype(np.uint16)
        if is_up:
            is_between = (pattern & 0x7FFFFF != 0) & (pattern > _SMALLEST)
            code += is_between & (pattern < _INFINITY)
        if is_saturating:
            code[(code == 255) & (pattern <= _INFINITY)] = 254
        return code

    return function


@instruction("cvt.rnd{.satfinite}.ue8m0x2.f32 d, a, b", source="PTX ISA 9.7.9.21",
             targets=_NARROW,
             evidence="manual-only", rnd="rz rp")  # fmt: skip
def cvt_to_ue8m0(ins: Instruction) -> Inline:
    """d = exponents of |a| (high byte) and |b|."""
    exponent = _exponent(ins)

    def function(a: Array, b: Array) -> Array:
        return exponent(a) << np.uint16(8) | exponent(b)

    name = ins.program.bind_function(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'f32')}, {ins.src('b', 'f32')})", "b16")


@instruction("cvt.rnd{.satfinite}.ue8m0x2.bf16x2 d, a", source="PTX ISA 9.7.9.21",
             targets=_NARROW,
             evidence="manual-only", rnd="rz rp")  # fmt: skip
def cvt_bf16_to_ue8m0(ins: Instruction) -> Inline:
    """d = exponents of the magnitudes of two bf16 values."""
    exponent = _exponent(ins)

    def function(a: Array) -> Array:
        codes = exponent(fp.bf16_to_f32(a.view(np.uint16))).astype(np.uint8)
        return codes.view(np.uint16)

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'b32')})", "b16")


@instruction(
    "cvt.rn.bf16x2.ue8m0x2 d, a", source="PTX ISA 9.7.9.21", targets=_NARROW, evidence="manual-only"
)
def cvt_from_ue8m0(ins: Instruction) -> Inline:
    """d = two bf16 powers of two, exactly."""

    def function(a: Array) -> Array:
        exponent = a.view(np.uint8).astype(np.uint16)
        half = np.where(exponent == 0, np.uint16(0x40), exponent << np.uint16(7))
        return np.where(exponent == 255, np.uint16(0x7FFF), half).astype(np.uint16).view(np.uint32)

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'b16')})", "b32")


# --- to bf16, with and without a scale ------------------------------------------------------------

_LARGEST_BF16 = np.uint32(0x7F7F0000).view(np.float32)


def _codes(pair: Array, kind: str) -> Array:
    """Return [32, 2] codes of packed pairs, the low one first."""
    if kind == "e2m1":
        return np.stack((pair & 15, pair >> 4), axis=1)
    codes = pair.view(np.uint8).reshape(-1, 2)
    return codes & np.uint8(0x3F) if kind in ("e2m3", "e3m2") else codes


def _powers(scale: Array | None) -> Array:
    """Return [32, 2] powers of two of ue8m0x2 scales, the low one first (NaN for 255)."""
    if scale is None:
        return np.ones((1, 2), np.float32)
    codes = scale.view(np.uint8).reshape(-1, 2).astype(np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)


def _to_bf16_pair(ins: Instruction, values: Array) -> Array:
    """Return [32, 2] float values as bf16x2, with the qualifiers of the instruction."""
    if ins.has("relu"):
        values = np.where(np.isnan(values) | (values > 0), values, np.float32(0))
    if ins.has("satfinite"):
        values = np.where(np.isnan(values), values, np.clip(values, -_LARGEST_BF16, _LARGEST_BF16))
    return fp.f32_to_bf16(np.ascontiguousarray(values, np.float32).ravel()).view(np.uint32)


@instruction("cvt.rn{.relu}{.satfinite}.bf16x2.atype d, a",
             "cvt.rn{.satfinite}{.relu}.bf16x2.atype d, a",
             "cvt.rn{.relu}{.satfinite}.scaled::n2::ue8m0.bf16x2.atype d, a, scale-factor",
             "cvt.rn{.satfinite}{.relu}.scaled::n2::ue8m0.bf16x2.atype d, a, scale-factor",
             source="PTX ISA 9.7.9.21", targets=_NARROW,
             evidence="manual-only",
             atype=f"{_FP8} {_SMALL} s2f6x2")  # fmt: skip
def cvt_small_pair_to_bf16(ins: Instruction) -> Inline:
    """d = two bf16 values from two narrow ones, each times its own power of two."""
    kind = ins["atype"][:-2]

    def function(a: Array, scale: Array | None = None) -> Array:
        if kind == "s2f6":
            values = a.view(np.int8).reshape(-1, 2).astype(np.float32) / np.float32(64)
        else:
            values = fp.SMALL_FLOATS[kind].widen(_codes(a, kind))
        return _to_bf16_pair(ins, values * _powers(scale))

    name = ins.program.bind_function(function, "cvt")
    sources = [ins.src("a", "b8" if kind == "e2m1" else "b16")]
    if "scale-factor" in ins.operands:
        sources.append(ins.src("scale-factor", "b16"))
    return ins.assign("d", f"{name}({', '.join(sources)})", "b32")


def _to_s2f6(value: Array, power: Array, *, relu: bool) -> Array:
    """Return float32 over a power of two in units of 1/64, a signed byte each."""
    scaled = value.astype(np.float64) / power
    code = np.clip(np.rint(scaled * 64), 0 if relu else -128, 127)
    return np.where(np.isnan(scaled), 127, code).astype(np.int8).view(np.uint8)


@instruction("cvt.rn.satfinite{.relu}.s2f6x2.bf16x2 d, a",
             "cvt.rn.satfinite{.relu}.scaled::n2::ue8m0.s2f6x2.bf16x2 d, a, scale-factor",
             source="PTX ISA 9.7.9.21", targets=_NARROW,
             evidence="manual-only")  # fmt: skip
def cvt_bf16_to_s2f6(ins: Instruction) -> Inline:
    """d = two bf16 values as signed bytes in units of 1/64, each over its own power of two."""
    relu = ins.has("relu")

    def function(a: Array, scale: Array | None = None) -> Array:
        values = fp.bf16_to_f32(a.view(np.uint16)).reshape(-1, 2)
        codes = _to_s2f6(values, _powers(scale), relu=relu)
        return np.ascontiguousarray(codes).view(np.uint16).ravel()

    name = ins.program.bind_function(function, "cvt")
    sources = [ins.src("a", "b32")]
    if "scale-factor" in ins.operands:
        sources.append(ins.src("scale-factor", "b16"))
    return ins.assign("d", f"{name}({', '.join(sources)})", "b16")


@instruction("cvt.rn.satfinite{.relu}.s2f6x2.f32 d, a, b",
             "cvt.rn.satfinite{.relu}.scaled::n2::ue8m0.s2f6x2.f32 d, a, b, scale-factor",
             source="PTX ISA 9.7.9.21", targets=_NARROW,
             evidence="manual-only")  # fmt: skip
def cvt_to_s2f6(ins: Instruction) -> Inline:
    """d = (a, b) as signed bytes in units of 1/64, each over its own power of two."""
    relu = ins.has("relu")

    def function(a: Array, b: Array, scale: Array | None = None) -> Array:
        power = _powers(scale)
        high = _to_s2f6(a, power[:, 1], relu=relu).astype(np.uint16)
        return high << np.uint16(8) | _to_s2f6(b, power[:, 0], relu=relu)

    name = ins.program.bind_function(function, "cvt")
    sources = [ins.src("a", "f32"), ins.src("b", "f32")]
    if "scale-factor" in ins.operands:
        sources.append(ins.src("scale-factor", "b16"))
    return ins.assign("d", f"{name}({', '.join(sources)})", "b16")


# --- stochastic rounding --------------------------------------------------------------------------

_STOCHASTIC = "sm_100a,sm_103a"
_RANDOM_BITS = {"f16": 13}  # taken from the top of what is dropped; 16 for every other format
_FORMATS = {  # fraction bits, exponent of the smallest normal number
    "f16": (10, -14), "bf16": (7, -126), "e4m3": (3, -6), "e5m2": (2, -14), "e2m3": (3, 0),
    "e3m2": (2, -2), "e2m1": (1, 0),
}  # fmt: skip
_LARGEST_F16 = np.float32(65504.0)


def _rounded(value: Array, random: Array, kind: str) -> Array:
    """Return float32 rounded away from zero where adding `random` to what is dropped carries.

    The result is exact in float64; infinities and NaNs stay.
    """
    fraction_bits, least = _FORMATS[kind]
    width = _RANDOM_BITS.get(kind, 16)
    pattern = value.view(np.uint32).astype(np.int64)
    exponent = pattern >> 23 & 0xFF
    significand = (pattern & 0x7FFFFF) | (exponent > 0).astype(np.int64) << 23
    unbiased = np.maximum(exponent, 1) - 127
    # below 2^-17 of the unit in the last place not even the largest random number carries
    shift = np.minimum(23 - fraction_bits + np.maximum(0, least - unbiased), 23 + width + 2)
    total = significand + (random.astype(np.int64) << (shift - width)) >> shift
    magnitude = np.ldexp(total.astype(np.float64), np.maximum(unbiased, least) - fraction_bits)
    return np.where(np.isfinite(value), np.copysign(magnitude, value), value)


@instruction("cvt.rs{.relu}{.satfinite}.dtype.f32 d, a, b, rbits", source="PTX ISA 9.7.9.21",
             evidence="inferred", targets=_STOCHASTIC, dtype="f16x2 bf16x2")  # fmt: skip
def cvt_stochastic_half(ins: Instruction) -> Inline:
    """d = (a, b) as halves, rounded by the upper and the lower half of rbits.

    The manual's figures give f16 bits 28:16 and 12:0, bf16 bits 31:16 and 15:0.
    """
    kind = ins["dtype"][:-2]
    mask = np.uint32((1 << _RANDOM_BITS.get(kind, 16)) - 1)
    limit = _LARGEST_F16 if kind == "f16" else _LARGEST_BF16

    def one(value: Array, random: Array) -> Array:
        result = _rounded(value, random & mask, kind).astype(np.float32)
        if ins.has("relu"):
            result = np.where(np.isnan(result) | (result > 0), result, np.float32(0))
        if ins.has("satfinite"):
            result = np.where(np.isnan(result), result, np.clip(result, -limit, limit))
        return fp.f32_to_half[kind](result, "rn").astype(np.uint32)

    def function(a: Array, b: Array, random: Array) -> Array:
        return one(a, random >> np.uint32(16)) << np.uint32(16) | one(b, random)

    name = ins.program.bind_function(function, "cvt")
    sources = f"{ins.src('a', 'f32')}, {ins.src('b', 'f32')}, {ins.src('rbits', 'b32')}"
    return ins.assign("d", f"{name}({sources})", "b32")


def _reversed16(bits: Array) -> Array:
    """Return the low 16 bits in reverse order."""
    result = np.zeros_like(bits)
    for position in range(16):
        result |= (bits >> np.uint32(position) & np.uint32(1)) << np.uint32(15 - position)
    return result


def _random_fields(random: Array, *, is_fp4: bool) -> list[Array]:
    """Return the 16 random bits of each of four elements.

    Two elements share 16 bits, the first reads them in reverse. For fp8 and fp6 these are the
    halves of the word, for fp4 bytes 3 and 1, and bytes 2 and 0.
    """
    byte, half = np.uint32(0xFF), np.uint32(0xFFFF)
    if is_fp4:
        first = random >> np.uint32(16) & np.uint32(0xFF00) | random >> np.uint32(8) & byte
        second = random >> np.uint32(8) & np.uint32(0xFF00) | random & byte
    else:
        first, second = random >> np.uint32(16), random & half
    return [_reversed16(first), first, _reversed16(second), second]


@instruction("cvt.rs{.relu}.satfinite.dtype.f32 d, abef, rbits", source="PTX ISA 9.7.9.21",
             evidence="inferred", targets=_STOCHASTIC,
             dtype="e4m3x4 e5m2x4 e2m3x4 e3m2x4 e2m1x4")  # fmt: skip
def cvt_stochastic_small(ins: Instruction) -> Action:
    """d = four float32 values, the first in the highest element, rounded by rbits.

    The manual has the places of the random bits in figures only; that two elements share 16 bits,
    one of them in reverse, is what others measured on a B200.
    """
    kind, relu = ins["dtype"][:-2], ins.has("relu")
    small, is_fp4 = fp.SMALL_FLOATS[kind], kind == "e2m1"
    if len(ins.items("abef")) != 4:
        raise ins.error(f"{len(ins.items('abef'))} values to convert; this form has 4")
    read, read_random = ins.read_vector("abef", "f32"), ins.read("rbits", "b32")
    write = ins.write("d", "b16" if is_fp4 else "b32")
    width = 4 if is_fp4 else 8

    def run(warp: Any, mask: Array) -> None:
        fields = _random_fields(read_random(warp), is_fp4=is_fp4)
        packed = np.zeros(32, np.uint32)
        for value, field in zip(read(warp), fields, strict=True):
            code = small.narrow_saturating(_rounded(value, field, kind), relu)
            packed = packed << np.uint32(width) | code
        write(warp, mask, packed.astype(np.uint16) if is_fp4 else packed)

    return run
