"""Arithmetic of f16, bf16 and their packed pairs.

Lives here: instructions. Not here: rounding (`bits.py`). Invariant: one rounding per operation:
sums and products are formed in float32 or float64 exactly enough that narrowing them once is the
right result (a 24-bit product or sum of 11-bit values narrows without double rounding; fma goes
through float64 rounded to odd).
Source: PTX ISA 9.7.4.
"""

from collections.abc import Callable

import numpy as np

from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.floating import mufu
from fovea.emulator.isa.instruction import Array, Inline, Instruction, LaneFunction

_TYPES = "f16 bf16 f16x2 bf16x2"
_F16 = "f16 f16x2"
_BF16 = "bf16 bf16x2"


def _element(ptx_type: str) -> str:
    return ptx_type.removesuffix("x2")


def _flush_half(bits: Array, half: str) -> Array:
    """Return f16 subnormals replaced by zeros of their sign."""
    exponent = np.uint16(0x7C00 if half == "f16" else 0x7F80)
    return np.where(bits & exponent, bits, bits & np.uint16(0x8000))


def _lift(ins: Instruction, function: LaneFunction, operands: str) -> Inline:
    """Return Inline for a function of raw 16-bit arrays, applied to both halves of a pair."""
    t = ins["type"]
    half = _element(t)
    has_ftz, has_sat, has_relu = ins.has("ftz"), ins.has("sat"), ins.has("relu")

    def wrapped(*values: Array) -> Array:
        halves = [value.view(np.uint16) for value in values]
        if has_ftz:
            halves = [_flush_half(value, half) for value in halves]
        result = function(*halves)
        if has_sat or has_relu:
            wide = fp.half_to_f32[half](result)
            if has_sat:
                wide = fp.saturate(wide)
            else:
                wide = np.where(np.isnan(wide) | (wide > 0), wide, np.float32(0))
            result = fp.f32_to_half[half](wide)
        if has_ftz:
            result = _flush_half(result, half)
        return result.view(values[0].dtype)

    name = ins.program.bind(wrapped, "half")
    register = "b32" if t.endswith("x2") else "b16"
    sources = ", ".join(ins.src(operand, register) for operand in operands.split())
    return ins.assign("d", f"{name}({sources})", register)


def _through_f32(half: str, operation: Callable[..., Array]) -> Callable[..., Array]:
    widen, narrow = fp.half_to_f32[half], fp.f32_to_half[half]
    return lambda *halves: narrow(operation(*(widen(value) for value in halves)))


_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@instruction("add{.rnd}{.ftz}{.sat}.type d, a, b", "sub{.rnd}{.ftz}{.sat}.type d, a, b",
             "mul{.rnd}{.ftz}{.sat}.type d, a, b", source="PTX ISA 9.7.4.1-3",
             evidence="manual-only", rnd="rn", type=_F16)  # fmt: skip
@instruction("add{.rnd}.type d, a, b", "sub{.rnd}.type d, a, b", "mul{.rnd}.type d, a, b",
             source="PTX ISA 9.7.4.1-3", targets="sm_90+",
             evidence="manual-only", rnd="rn", type=_BF16)  # fmt: skip
def add_sub_mul_half(ins: Instruction) -> Inline:
    """d = a op b."""
    operation = _OPERATIONS[ins.opcode.split(".")[0]]
    half = _element(ins["type"])
    if half == "bf16" and not ins.opcode.startswith("mul"):
        # the exact sum of two bf16 may need more than 24 bits: round to odd on the way
        return _lift(ins, _bf16_sum(ins.opcode.startswith("sub")), "a b")
    return _lift(ins, _through_f32(half, operation), "a b")


def _bf16_sum(is_difference: bool) -> Callable[[Array, Array], Array]:
    def function(a: Array, b: Array) -> Array:
        x = fp.bf16_to_f32(a).astype(np.float64)
        y = fp.bf16_to_f32(b).astype(np.float64)
        return fp.f32_to_bf16(odd_f32(*fp.two_sum(x, -y if is_difference else y)))

    return function


def odd_f32(total: Array, error: Array) -> Array:
    """Return float64 `total + error` rounded to odd in float32."""
    down = fp.round_pair(total, error, "rz")
    inexact = ((down.astype(np.float64) != total) | (error != 0)) & np.isfinite(total)
    return (down.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)


def _fma(half: str) -> Callable[[Array, Array, Array], Array]:
    widen, narrow = fp.half_to_f32[half], fp.f32_to_half[half]

    def function(a: Array, b: Array, c: Array) -> Array:
        product = widen(a).astype(np.float64) * widen(b)
        return narrow(odd_f32(*fp.two_sum(product, widen(c).astype(np.float64))))

    return function


@instruction("fma.rnd{.ftz}{.sat}.type d, a, b, c", "fma.rnd{.ftz}.relu.type d, a, b, c",
             source="PTX ISA 9.7.4.4", evidence="manual-only", rnd="rn", type=_F16)  # fmt: skip
@instruction("fma.rnd{.relu}.type d, a, b, c", source="PTX ISA 9.7.4.4", evidence="manual-only",
             rnd="rn", type=_BF16)  # fmt: skip
def fma_half(ins: Instruction) -> Inline:
    """d = a * b + c, rounded once."""
    return _lift(ins, _fma(_element(ins["type"])), "a b c")


@instruction("neg{.ftz}.type d, a", "abs{.ftz}.type d, a", source="PTX ISA 9.7.4.5-6",
             evidence="manual-only", type=_F16)  # fmt: skip
@instruction("neg.type d, a", "abs.type d, a", source="PTX ISA 9.7.4.5-6",
             evidence="manual-only", type=_BF16)  # fmt: skip
def neg_abs_half(ins: Instruction) -> Inline:
    """d = -a or |a|; a NaN becomes the canonical one."""
    infinity = np.uint16(0x7C00 if _element(ins["type"]) == "f16" else 0x7F80)
    is_neg = ins.opcode.startswith("neg")

    def function(a: Array) -> Array:
        magnitude = a & np.uint16(0x7FFF)
        changed = a ^ np.uint16(0x8000) if is_neg else magnitude
        return np.where(magnitude > infinity, fp.CANONICAL_HALF, changed)

    return _lift(ins, function, "a")


@instruction("min{.ftz}{.NaN}{.xorsign.abs}.type d, a, b",
             "max{.ftz}{.NaN}{.xorsign.abs}.type d, a, b",
             source="PTX ISA 9.7.4.7-8", evidence="manual-only", type=_F16)  # fmt: skip
@instruction("min{.NaN}{.xorsign.abs}.type d, a, b", "max{.NaN}{.xorsign.abs}.type d, a, b",
             source="PTX ISA 9.7.4.7-8", evidence="manual-only", type=_BF16)  # fmt: skip
def minimum_maximum_half(ins: Instruction) -> Inline:
    """d = min or max; -0 < +0, NaN only if both are (or, with `.NaN`, if one is)."""
    half = _element(ins["type"])
    is_max, keeps_nan = ins.opcode.startswith("max"), ins.has("NaN")
    widen = fp.half_to_f32[half]
    has_xorsign = ins.has("xorsign")

    def pair(a: Array, b: Array) -> Array:
        sign = (a ^ b) & np.uint16(0x8000)
        if has_xorsign:
            a, b = a & np.uint16(0x7FFF), b & np.uint16(0x7FFF)
        x, y = widen(a), widen(b)
        first_wins = (x > y) if is_max else (x < y)
        both_zero = (x == 0) & (y == 0)
        result = np.where(first_wins, a, b)
        result = np.where(both_zero, a & b if is_max else a | b, result)
        result = np.where(np.isnan(y), a, np.where(np.isnan(x), b, result))
        nan = np.isnan(x) | np.isnan(y) if keeps_nan else np.isnan(x) & np.isnan(y)
        if has_xorsign:
            result = (result & np.uint16(0x7FFF)) | sign
        return np.where(nan, fp.CANONICAL_HALF, result)

    return _lift(ins, pair, "a b")


@instruction("ex2.approx.type d, a", "tanh.approx.type d, a", source="PTX ISA 9.7.4.9-10",
             evidence="inferred", kind="mufu", type=_F16)  # fmt: skip
@instruction("ex2.approx.ftz.type d, a", "tanh.approx.type d, a", source="PTX ISA 9.7.4.9-10",
             targets="sm_90+",
             evidence="inferred", kind="mufu", type=_BF16)  # fmt: skip
def special_function_half(ins: Instruction) -> Inline:
    """d = 2^a or tanh(a), the float64 result narrowed."""
    half = _element(ins["type"])
    return _lift(ins, _through_f32(half, mufu(ins.opcode.split(".")[0])), "a")


@instruction("add{.rnd}{.sat}.f32.atype d, a, c", "sub{.rnd}{.sat}.f32.atype d, a, c",
             source="PTX ISA 9.7.5.1-2", evidence="manual-only", rnd="rn rz rm rp",
             atype="f16 bf16", targets="sm_100,sm_100a,sm_100f,sm_103,sm_103a,sm_103f,sm_110a,"
             "sm_120,sm_120a")  # fmt: skip
def add_mixed(ins: Instruction) -> Inline:
    """d = a (a half) +- c in float32, rounded once."""
    widen, mode = fp.half_to_f32[ins["atype"]], ins["rnd"] or "rn"
    sign = np.float32(-1 if ins.opcode.startswith("sub") else 1)

    def function(a: Array, c: Array) -> Array:
        result = fp.add_f32_mode(widen(a), sign * c, mode)
        return fp.saturate(result) if ins.has("sat") else result

    name = ins.program.bind(function, "half")
    return ins.assign("d", f"{name}({ins.src('a', 'b16')}, {ins.src('c', 'f32')})", "f32")


@instruction(
    "fma.rnd{.sat}.f32.atype d, a, b, c",
    source="PTX ISA 9.7.5.3",
    evidence="manual-only",
    rnd="rn rz rm rp",
    atype="f16 bf16",
    targets="sm_100,sm_100a,sm_100f,sm_103,sm_103a,sm_103f,sm_110a,sm_120,sm_120a",
)
def fma_mixed(ins: Instruction) -> Inline:
    """d = a * b (halves) + c in float32, rounded once."""
    widen, mode = fp.half_to_f32[ins["atype"]], ins["rnd"]

    def function(a: Array, b: Array, c: Array) -> Array:
        result = fp.fma_f32_mode(widen(a), widen(b), c, mode)
        return fp.saturate(result) if ins.has("sat") else result

    name = ins.program.bind(function, "half")
    sources = f"{ins.src('a', 'b16')}, {ins.src('b', 'b16')}, {ins.src('c', 'f32')}"
    return ins.assign("d", f"{name}({sources})", "f32")
