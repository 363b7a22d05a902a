"""cvt: between integers, floats and halves; cvt.pack.

Lives here: conversions of 16 bits and more. Not here: tf32, fp8, fp6, fp4, exponents and stochastic
rounding (`narrow_conversion.py`). Source: PTX ISA 9.7.9.21-22.
Invariant: every conversion rounds once; NaN becomes 0 in integers (the least value's complement in
none: PTX says 0) and the canonical NaN in floats.
"""

from collections.abc import Callable

import numpy as np

from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Inline, Instruction
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import numpy_dtype, size_bytes

_INTEGERS = "u8 u16 u32 u64 s8 s16 s32 s64"
_FLOATS = "f16 bf16 f32 f64"
_TO_INTEGER = "rni rzi rmi rpi"
_ROUND_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _limits(ptx_type: str) -> tuple[int, int]:
    bits = 8 * size_bytes(ptx_type)
    if ptx_type[0] == "s":
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1


def _register_type(ins: Instruction, name: str, ptx_type: str) -> str:
    """Return the type as which an operand's register must be accessed for a narrower value."""
    operand = ins.operands[name]
    declared = size_bytes(operand.type) if isinstance(operand, syntax.Register) else 0
    if isinstance(operand, syntax.Register) and declared > size_bytes(ptx_type):
        return f"b{8 * declared}"
    if isinstance(operand, syntax.Register) and declared < size_bytes(ptx_type):
        raise ins.error(f"register {operand.name} is too narrow for .{ptx_type}")
    return ptx_type if ptx_type != "bf16" else "b16"


def _convert(
    ins: Instruction, function: Callable[[Array], Array], dtype: str, stype: str
) -> Inline:
    """Return Inline for `d = function(a)`, with registers wider than the types."""
    read, write = _register_type(ins, "a", stype), _register_type(ins, "d", dtype)
    source = numpy_dtype(stype)
    raw_source = np.dtype(f"u{source.itemsize}")
    target, stored = numpy_dtype(dtype), numpy_dtype(write)
    raw_target = np.dtype(("i" if dtype[0] == "s" else "u") + str(target.itemsize))
    wide = np.dtype(raw_target.kind + str(stored.itemsize))
    narrows_source = numpy_dtype(read).itemsize != source.itemsize
    widens_target = stored.itemsize != target.itemsize

    def body(a: Array) -> Array:
        result = function(a.astype(raw_source).view(source) if narrows_source else a)
        return result.view(raw_target).astype(wide).view(stored) if widens_target else result

    name = ins.program.bind(body, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', read)})", write)


# --- integer to integer, integer to float -------------------------------------------------------


@instruction("cvt{.sat}.dtype.atype d, a", source="PTX ISA 9.7.9.21", evidence="manual-only",
             dtype=_INTEGERS, atype=_INTEGERS)  # fmt: skip
def cvt_integer(ins: Instruction) -> Inline:
    """d = a, truncated or extended; `.sat` clamps."""
    dtype, atype = ins["dtype"], ins["atype"]
    target = numpy_dtype(dtype)
    if ins.has("sat"):
        low, high = _limits(dtype)
        source_low, source_high = _limits(atype)
        low, high = max(low, source_low), min(high, source_high)
        return _convert(ins, lambda a: np.clip(a, low, high).astype(target), dtype, atype)
    return _convert(ins, lambda a: a.astype(target), dtype, atype)


def _integer_to_f32(a: Array, mode: str) -> Array:
    """Return integers rounded once to float32."""
    if a.dtype.itemsize < 8:
        return fp.round_pair(a.astype(np.float64), np.zeros(a.shape), mode)
    values = [fp_round_integer(int(value), mode) for value in a.tolist()]
    return np.array(values, np.float64).astype(np.float32)


def fp_round_integer(value: int, mode: str, digits: int = 24) -> float:
    """Return an integer rounded to `digits` significant bits (exact as a float64)."""
    magnitude = abs(value)
    drop = magnitude.bit_length() - digits
    if drop <= 0:
        return float(value)
    kept, rest = magnitude >> drop, magnitude & ((1 << drop) - 1)
    half = 1 << (drop - 1)
    if mode == "rn":
        kept += rest > half or (rest == half and kept & 1)
    elif (mode == "rp" and value > 0) or (mode == "rm" and value < 0):
        kept += rest > 0
    return float((kept << drop) * (1 if value >= 0 else -1))


def _integer_to_f64(a: Array, mode: str) -> Array:
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    return np.array([fp_round_integer(int(value), mode, 53) for value in a.tolist()])


@instruction("cvt.rnd{.sat}.dtype.atype d, a", source="PTX ISA 9.7.9.21", evidence="manual-only",
             rnd="rn rz rm rp", dtype=_FLOATS, atype=_INTEGERS)  # fmt: skip
def cvt_integer_to_float(ins: Instruction) -> Inline:
    """d = a rounded to a float."""
    dtype, mode = ins["dtype"], ins["rnd"]

    def function(a: Array) -> Array:
        if dtype == "f64":
            result = _integer_to_f64(a, mode)
        elif dtype == "f32":
            result = _integer_to_f32(a, mode)
        else:
            # round to odd in float32 first, so that the second rounding is the only one
            wide = np.array([_odd(int(value)) for value in a.tolist()], np.float32)
            return fp.f32_to_half[dtype](wide, mode).view(numpy_dtype(dtype))
        return fp.saturate(result) if ins.has("sat") else result

    return _convert(ins, function, dtype, ins["atype"])


def _odd(value: int) -> float:
    magnitude = abs(value)
    drop = magnitude.bit_length() - 24
    if drop > 0:
        kept = magnitude >> drop
        kept |= (magnitude & ((1 << drop) - 1)) != 0
        magnitude = kept << drop
    return float(magnitude if value >= 0 else -magnitude)


# --- float to integer, float to integral float ----------------------------------------------------


def _widen(stype: str) -> Callable[[Array], Array]:
    if stype in ("f16", "bf16"):
        convert = fp.half_to_f32[stype]
        return lambda a: convert(a.view(np.uint16)).astype(np.float64)
    return lambda a: a.astype(np.float64)


@instruction("cvt.rnd{.ftz}{.sat}.dtype.atype d, a", source="PTX ISA 9.7.9.21",
             evidence="manual-only", rnd=_TO_INTEGER, dtype=_INTEGERS, atype=_FLOATS)  # fmt: skip
def cvt_float_to_integer(ins: Instruction) -> Inline:
    """d = a rounded to an integer and clamped; NaN gives 0 (64 bits from f32/f64: 2^63)."""
    dtype, atype = ins["dtype"], ins["atype"]
    low, high = _limits(dtype)
    widen, rounding = _widen(atype), _ROUND_INTEGER[ins["rnd"]]
    target = numpy_dtype(dtype)
    has_ftz = ins.has("ftz")
    # sm_90 returns the sign pattern 0x8000... for NaN to 64-bit integers, and for f64 to 32 bits
    nan = 1 << 63 if size_bytes(dtype) == 8 else 1 << 31 if (
        atype == "f64" and size_bytes(dtype) == 4) else 0  # fmt: skip
    nan_value = np.array(nan, np.uint64).astype(f"u{target.itemsize}").view(target)

    def function(a: Array) -> Array:
        if has_ftz:
            a = fp.flush_f32(a)
        wide = rounding(widen(a))
        if size_bytes(dtype) == 8:
            clamped = [
                0 if value != value else int(min(max(value, float(low)), float(high)))
                for value in wide.tolist()
            ]
            result = np.array([min(value, high) for value in clamped], target)
        else:
            result = np.clip(np.where(np.isnan(wide), 0, wide), low, high).astype(target)
        return np.where(np.isnan(wide), nan_value, result)

    return _convert(ins, function, dtype, atype)


@instruction("cvt.rnd{.ftz}{.sat}.type.type d, a", "cvt.rnd{.ftz}{.sat}.dtype.atype d, a",
             source="PTX ISA 9.7.9.21", evidence="manual-only", rnd=_TO_INTEGER,
             dtype="f16 bf16 f32 f64", atype="f16 bf16 f32 f64", type="")  # fmt: skip
def cvt_to_integral_float(ins: Instruction) -> Inline:
    """d = a rounded to an integral value."""
    dtype, atype = ins["dtype"], ins["atype"]
    if dtype != atype:
        raise ins.error("rounding to an integral value keeps the type")
    rounding = _ROUND_INTEGER[ins["rnd"]]
    has_ftz, has_sat = ins.has("ftz"), ins.has("sat")

    def function(a: Array) -> Array:
        if dtype == "bf16":
            whole = rounding(fp.bf16_to_f32(a.view(np.uint16)))  # exact: it drops fraction bits
            return fp.f32_to_bf16(fp.saturate(whole) if has_sat else whole).view(a.dtype)
        if has_ftz:
            a = fp.flush_f32(a)
        result = rounding(a)
        result = fp.saturate(result) if has_sat else result
        if dtype == "f16":
            return np.where(np.isnan(result), np.float16(np.nan), result)
        if not np.isnan(result).any():
            return result
        return fp.canonical_f32(result) if dtype == "f32" else fp.nan_f64(result, a)

    return _convert(ins, function, dtype, atype)


# --- float to float -------------------------------------------------------------------------------


def _f64_to_f32(a: Array, mode: str) -> Array:
    return fp.nan_f64_to_f32(a, fp.round_pair(a, np.zeros_like(a), mode))


def _f64_to_odd_f32(a: Array) -> Array:
    """Return float64 rounded to odd in float32: a second rounding then is the only one."""
    down = fp.round_pair(a, np.zeros_like(a), "rz")
    inexact = (down.astype(np.float64) != a) & np.isfinite(a)
    return (down.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)


@instruction("cvt{.rnd}{.ftz}{.sat}.dtype.atype d, a", source="PTX ISA 9.7.9.21",
             evidence="manual-only", rnd="rn rz rm rp", dtype=_FLOATS, atype=_FLOATS)  # fmt: skip
@instruction("cvt.rnd.relu.dtype.atype d, a", "cvt.rnd{.relu}.satfinite.dtype.atype d, a",
             source="PTX ISA 9.7.9.21", evidence="manual-only", rnd="rn rz", dtype="f16 bf16",
             atype="f32")  # fmt: skip
def cvt_float(ins: Instruction) -> Inline:
    """d = a in another float format."""
    dtype, atype, mode = ins["dtype"], ins["atype"], ins["rnd"] or "rn"
    has_ftz, has_sat = ins.has("ftz"), ins.has("sat")

    def function(a: Array) -> Array:
        if atype in ("f16", "bf16"):
            value = fp.half_to_f32[atype](a.view(np.uint16))
        else:
            value = fp.flush_f32(a) if has_ftz and atype == "f32" else a
        if has_sat:
            value = fp.saturate(value)
        if dtype in ("f16", "bf16"):
            if atype == "f64":
                half = fp.f32_to_half[dtype](_f64_to_odd_f32(value), mode)
                half = fp.nan_f64_to_f16(value, half) if dtype == "f16" else half
                return half.view(numpy_dtype(dtype))
            value = _clamp(ins, value, dtype)
            return fp.f32_to_half[dtype](value, mode).view(numpy_dtype(dtype))
        if dtype == "f32":
            if atype == "f64":
                value = _f64_to_f32(value, mode)
                return fp.flush_f32(value) if has_ftz else value
            if atype == "bf16" or not np.isnan(value).any():
                return value
            return fp.canonical_f32(value)
        return (
            fp.nan_f32_to_f64(value, value.astype(np.float64))
            if atype == "f32"
            else (value.astype(np.float64))
        )

    return _convert(ins, function, dtype, atype)


_LARGEST = {"f16": np.float32(65504.0), "bf16": np.uint32(0x7F7F0000).view(np.float32)}


def _clamp(ins: Instruction, value: Array, half: str) -> Array:
    """Apply `.relu` and `.satfinite` before a value is narrowed to a half."""
    if ins.has("relu"):
        value = np.where(value > 0, value, np.where(np.isnan(value), value, np.float32(0)))
    if ins.has("satfinite"):
        limit = _LARGEST[half]
        value = np.where(np.isnan(value), value, np.clip(value, -limit, limit))
    return value


@instruction("cvt.rnd{.relu}{.satfinite}.dtype.f32 d, a, b", source="PTX ISA 9.7.9.21",
             evidence="manual-only", rnd="rn rz", dtype="f16x2 bf16x2")  # fmt: skip
def cvt_packed_half(ins: Instruction) -> Inline:
    """d = (a in the high half, b in the low half)."""
    half, mode = ins["dtype"][:-2], ins["rnd"]
    narrow = fp.f32_to_half[half]
    shift = np.uint32(16)

    def function(a: Array, b: Array) -> Array:
        high = narrow(_clamp(ins, a, half), mode)
        low = narrow(_clamp(ins, b, half), mode)
        return high.astype(np.uint32) << shift | low

    is_plain = half == "bf16" and mode == "rn" and not ins.has("relu")
    if is_plain and not ins.has("satfinite"):
        name = ins.program.bind(fp.pack_bf16x2, "cvt")
    else:
        name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 'f32')}, {ins.src('b', 'f32')})", "b32")


# --- packed integers ---------------------------------------------------------------------------


@instruction("cvt.pack.sat.dtype.s32 d, a, b", source="PTX ISA 9.7.9.22", evidence="manual-only",
             dtype="u16 s16")  # fmt: skip
def cvt_pack(ins: Instruction) -> Inline:
    """d = (a clamped in the high half, b clamped in the low half)."""
    low, high = _limits(ins["dtype"])

    def function(a: Array, b: Array) -> Array:
        upper = (np.clip(a, low, high).astype(np.int64) & 0xFFFF) << 16
        return (upper | np.clip(b, low, high).astype(np.int64) & 0xFFFF).astype(np.uint32)

    name = ins.program.bind(function, "cvt")
    return ins.assign("d", f"{name}({ins.src('a', 's32')}, {ins.src('b', 's32')})", "b32")


@instruction("cvt.pack.sat.dtype.s32.b32 d, a, b, c", source="PTX ISA 9.7.9.22",
             evidence="manual-only", dtype="u8 s8 u4 s4 u2 s2")  # fmt: skip
def cvt_pack_small(ins: Instruction) -> Inline:
    """d = c shifted up by two elements, with a and b clamped in the lowest ones."""
    bits = int(ins["dtype"][1:])
    is_signed = ins["dtype"][0] == "s"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    ones = (1 << bits) - 1

    def function(a: Array, b: Array, c: Array) -> Array:
        upper = (np.clip(a, low, high).astype(np.int64) & ones) << bits
        pair = upper | np.clip(b, low, high).astype(np.int64) & ones
        return ((c.astype(np.int64) << 2 * bits | pair) & 0xFFFFFFFF).astype(np.uint32)

    name = ins.program.bind(function, "cvt")
    sources = f"{ins.src('a', 's32')}, {ins.src('b', 's32')}, {ins.src('c', 'u32')}"
    return ins.assign("d", f"{name}({sources})", "b32")
