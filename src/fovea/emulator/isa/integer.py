"""Integer arithmetic and bit manipulation.

Lives here: pure functions of registers. Not here: comparisons (`predicate.py`), conversions
(`conversion.py`). Invariant: wrap-around instructions are computed on the unsigned type.
Source: PTX ISA 9.7.1 and 9.7.8.
"""

import numpy as np

from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Inline, Instruction, LaneFunction

_INT16_TO_64 = "u16 s16 u32 s32 u64 s64"


def _unsigned(ptx_type: str) -> str:
    return "u" + ptx_type[1:]


def _bits(ptx_type: str) -> int:
    return int(ptx_type[1:])


def _call(ins: Instruction, function: LaneFunction, operands: str, read: str, write: str) -> Inline:
    """Return Inline that calls a function of 32-lane operands, all read as one type."""
    name = ins.program.bind(function, "f")
    arguments = ", ".join(ins.src(operand, read) for operand in operands.split())
    return ins.assign("d", f"{name}({arguments})", write)


# --- add, sub, mul, mad -------------------------------------------------------------------------


@instruction("add.type d, a, b", source="PTX ISA 9.7.1.1", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def add(ins: Instruction) -> Inline:
    """d = a + b, wrapping."""
    t = _unsigned(ins["type"])
    return ins.assign("d", f"{ins.src('a', t)} + {ins.src('b', t)}", t)


@instruction("sub.type d, a, b", source="PTX ISA 9.7.1.2", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def sub(ins: Instruction) -> Inline:
    """d = a - b, wrapping."""
    t = _unsigned(ins["type"])
    return ins.assign("d", f"{ins.src('a', t)} - {ins.src('b', t)}", t)


def _saturate_s32(wide: Array) -> Array:
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


@instruction("add.sat.s32 d, a, b", source="PTX ISA 9.7.1.1", evidence="manual-only")
def add_sat(ins: Instruction) -> Inline:
    """d = clamp(a + b)."""
    return _call(ins, lambda a, b: _saturate_s32(a.astype(np.int64) + b), "a b", "s32", "s32")


@instruction("sub.sat.s32 d, a, b", source="PTX ISA 9.7.1.2", evidence="manual-only")
def sub_sat(ins: Instruction) -> Inline:
    """d = clamp(a - b)."""
    return _call(ins, lambda a, b: _saturate_s32(a.astype(np.int64) - b), "a b", "s32", "s32")


@instruction("add.type d, a, b", source="PTX ISA 9.7.1.1", evidence="manual-only",
             targets="sm_90+", type="u16x2 s16x2")  # fmt: skip
def add_16x2(ins: Instruction) -> Inline:
    """Both halves of d = a + b, wrapping."""

    def function(a: Array, b: Array) -> Array:
        return (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32)

    return _call(ins, function, "a b", "b32", "b32")


@instruction("mul.lo.type d, a, b", source="PTX ISA 9.7.1.3", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def mul_lo(ins: Instruction) -> Inline:
    """d = low half of a * b."""
    t = _unsigned(ins["type"])
    return ins.assign("d", f"{ins.src('a', t)} * {ins.src('b', t)}", t)


_NEXT = {"u16": np.uint32, "s16": np.int32, "u32": np.uint64, "s32": np.int64}


def _wide_product(a: Array, b: Array, ptx_type: str) -> Array:
    return a.astype(_NEXT[ptx_type]) * b


def _high_product(a: Array, b: Array, ptx_type: str) -> Array:
    if ptx_type not in ("u64", "s64"):
        bits = _bits(ptx_type)
        return (_wide_product(a, b, ptx_type) >> bits).astype(a.dtype)
    product = [int(x) * int(y) >> 64 for x, y in zip(a.tolist(), b.tolist())]
    wrapped = [value & 0xFFFFFFFFFFFFFFFF for value in product]
    return np.array(wrapped, np.uint64).view(a.dtype)


@instruction("mul.wide.type d, a, b", source="PTX ISA 9.7.1.3", evidence="manual-only",
             type="u16 s16 u32 s32")  # fmt: skip
def mul_wide(ins: Instruction) -> Inline:
    """d = a * b in twice the width."""
    t = ins["type"]
    wide = t[0] + str(2 * _bits(t))
    return _call(ins, lambda a, b: _wide_product(a, b, t), "a b", t, wide)


@instruction("mul.hi.type d, a, b", source="PTX ISA 9.7.1.3", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def mul_hi(ins: Instruction) -> Inline:
    """d = high half of a * b."""
    t = ins["type"]
    return _call(ins, lambda a, b: _high_product(a, b, t), "a b", t, t)


@instruction("mad.lo.type d, a, b, c", source="PTX ISA 9.7.1.4", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def mad_lo(ins: Instruction) -> Inline:
    """d = low half of a * b, plus c, wrapping."""
    t = _unsigned(ins["type"])
    return ins.assign("d", f"{ins.src('a', t)} * {ins.src('b', t)} + {ins.src('c', t)}", t)


@instruction("mad.wide.type d, a, b, c", source="PTX ISA 9.7.1.4", evidence="manual-only",
             type="u16 s16 u32 s32")  # fmt: skip
def mad_wide(ins: Instruction) -> Inline:
    """d = a * b + c in twice the width."""
    t = ins["type"]
    wide = t[0] + str(2 * _bits(t))
    name = ins.program.bind_function(lambda a, b, c: _wide_product(a, b, t) + c, "f")
    sources = f"{ins.src('a', t)}, {ins.src('b', t)}, {ins.src('c', wide)}"
    return ins.assign("d", f"{name}({sources})", wide)


@instruction("mad.hi.type d, a, b, c", source="PTX ISA 9.7.1.4", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def mad_hi(ins: Instruction) -> Inline:
    """d = high half of a * b, plus c, wrapping."""
    t = ins["type"]
    return _call(ins, lambda a, b, c: _high_product(a, b, t) + c, "a b c", t, t)


@instruction("mad.hi.sat.s32 d, a, b, c", source="PTX ISA 9.7.1.4", evidence="manual-only")
def mad_hi_sat(ins: Instruction) -> Inline:
    """d = clamp(high half of a * b, plus c)."""

    def function(a: Array, b: Array, c: Array) -> Array:
        return _saturate_s32(_high_product(a, b, "s32").astype(np.int64) + c)

    return _call(ins, function, "a b c", "s32", "s32")


def _signed_24(value: Array) -> Array:
    return (value.astype(np.int64) << 40) >> 40


def _product_24(a: Array, b: Array, is_signed: bool, is_high: bool) -> Array:
    if is_signed:
        product = _signed_24(a) * _signed_24(b)
    else:
        product = (a.astype(np.int64) & 0xFFFFFF) * (b.astype(np.int64) & 0xFFFFFF)
    return ((product >> 16 if is_high else product) & 0xFFFFFFFF).astype(np.uint32)


@instruction("mul24.half.type d, a, b", source="PTX ISA 9.7.1.5", evidence="manual-only",
             half="lo hi", type="u32 s32")  # fmt: skip
def mul24(ins: Instruction) -> Inline:
    """d = bits of the 48-bit product of the low 24 bits."""
    signed, high = ins["type"] == "s32", ins["half"] == "hi"
    return _call(ins, lambda a, b: _product_24(a, b, signed, high), "a b", "u32", "u32")


@instruction("mad24.half.type d, a, b, c", source="PTX ISA 9.7.1.6", evidence="manual-only",
             half="lo hi", type="u32 s32")  # fmt: skip
def mad24(ins: Instruction) -> Inline:
    """d = mul24 plus c, wrapping."""
    signed, high = ins["type"] == "s32", ins["half"] == "hi"
    return _call(ins, lambda a, b, c: _product_24(a, b, signed, high) + c, "a b c", "u32", "u32")


# --- division, sign, min and max ----------------------------------------------------------------


def _divide(a: Array, b: Array) -> Array:
    """C division (towards zero); all ones where b is 0, as silicon gives."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // safe
    else:
        with np.errstate(over="ignore"):
            quotient = np.abs(a).view(f"u{a.itemsize}") // np.abs(safe).view(f"u{a.itemsize}")
        quotient = quotient.view(a.dtype)
        quotient = np.where((a < 0) != (safe < 0), -quotient, quotient)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


@instruction("div.type d, a, b", source="PTX ISA 9.7.1.8", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def div(ins: Instruction) -> Inline:
    """d = a / b towards zero."""
    t = ins["type"]
    return _call(ins, _divide, "a b", t, t)


@instruction("rem.type d, a, b", source="PTX ISA 9.7.1.9", evidence="silicon-sm90",
             type=_INT16_TO_64)  # fmt: skip
def rem(ins: Instruction) -> Inline:
    """d = a - b * (a / b); all ones where b is 0, as silicon gives."""
    t = ins["type"]

    def function(a: Array, b: Array) -> Array:
        return np.where(b == 0, np.array(-1).astype(a.dtype), a - b * _divide(a, b))

    return _call(ins, function, "a b", t, t)


@instruction("abs.type d, a", source="PTX ISA 9.7.1.10", evidence="manual-only",
             type="s16 s32 s64")  # fmt: skip
def abs_(ins: Instruction) -> Inline:
    """d = |a| (the least value stays)."""
    t = ins["type"]
    return _call(ins, np.abs, "a", t, t)


@instruction("neg.type d, a", source="PTX ISA 9.7.1.11", evidence="manual-only",
             type="s16 s32 s64")  # fmt: skip
def neg(ins: Instruction) -> Inline:
    """d = -a, wrapping."""
    t = ins["type"]
    return _call(ins, np.negative, "a", t, t)


@instruction("min.type d, a, b", "max.type d, a, b", source="PTX ISA 9.7.1.12-13",
             evidence="manual-only", type=_INT16_TO_64)  # fmt: skip
@instruction("min.relu.type d, a, b", "max.relu.type d, a, b", source="PTX ISA 9.7.1.12-13",
             evidence="manual-only", type="s32")  # fmt: skip
def minimum_maximum(ins: Instruction) -> Inline:
    """d = min or max of a and b; `.relu` clamps at 0."""
    t = ins["type"]
    choose = np.minimum if ins.opcode.startswith("min") else np.maximum
    if ins.has("relu"):
        return _call(ins, lambda a, b: np.maximum(choose(a, b), 0), "a b", t, t)
    return _call(ins, choose, "a b", t, t)


@instruction("min.type d, a, b", "max.type d, a, b", "min.relu.s16x2 d, a, b",
             "max.relu.s16x2 d, a, b", source="PTX ISA 9.7.1.12-13", evidence="manual-only",
             targets="sm_90+", type="u16x2 s16x2")  # fmt: skip
def minimum_maximum_16x2(ins: Instruction) -> Inline:
    """Both halves of d = min or max."""
    choose = np.minimum if ins.opcode.startswith("min") else np.maximum
    dtype = np.dtype(np.int16 if ins.opcode.endswith(".s16x2") else np.uint16)
    relu = ins.has("relu")

    def function(a: Array, b: Array) -> Array:
        chosen = choose(a.view(dtype), b.view(dtype))
        return (np.maximum(chosen, 0) if relu else chosen).view(np.uint32)

    return _call(ins, function, "a b", "b32", "b32")


@instruction("sad.type d, a, b, c", source="PTX ISA 9.7.1.7", evidence="manual-only",
             type=_INT16_TO_64)  # fmt: skip
def sad(ins: Instruction) -> Inline:
    """d = c + |a - b|."""
    t = ins["type"]

    def function(a: Array, b: Array, c: Array) -> Array:
        return c + np.where(a < b, b - a, a - b)

    return _call(ins, function, "a b c", t, t)


# --- bits ---------------------------------------------------------------------------------------


def _popcount(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.itemsize
    return np.array([bits - value.bit_length() for value in a.tolist()], np.uint32)


@instruction("popc.type d, a", source="PTX ISA 9.7.1.14", evidence="manual-only", type="b32 b64")
def popc(ins: Instruction) -> Inline:
    """d = number of ones."""
    return _call(ins, _popcount, "a", ins["type"], "u32")


@instruction("clz.type d, a", source="PTX ISA 9.7.1.15", evidence="manual-only", type="b32 b64")
def clz(ins: Instruction) -> Inline:
    """d = number of leading zeros."""
    return _call(ins, _leading_zeros, "a", ins["type"], "u32")


def _find_leading(a: Array, is_shift: bool) -> Array:
    bits = 8 * a.itemsize
    values = a.tolist()
    if a.dtype.kind == "i":
        values = [value if value >= 0 else ~value for value in values]
    found = [value.bit_length() - 1 for value in values]
    if is_shift:
        found = [bits - 1 - place if place >= 0 else -1 for place in found]
    return np.array(found, np.int64).astype(np.uint32)


@instruction("bfind{.shiftamt}.type d, a", source="PTX ISA 9.7.1.16", evidence="manual-only",
             type="u32 s32 u64 s64")  # fmt: skip
def bfind(ins: Instruction) -> Inline:
    """d = place of the most significant bit that differs from the sign; -1 if none."""
    shift = ins.has("shiftamt")
    return _call(ins, lambda a: _find_leading(a, shift), "a", ins["type"], "u32")


def _reverse(a: Array) -> Array:
    bits = 8 * a.itemsize
    reversed_ = [int(f"{value:0{bits}b}"[::-1], 2) for value in a.tolist()]
    return np.array(reversed_, a.dtype)


@instruction("brev.type d, a", source="PTX ISA 9.7.1.18", evidence="manual-only", type="b32 b64")
def brev(ins: Instruction) -> Inline:
    """d = bits of a in reverse."""
    t = ins["type"]
    return _call(ins, _reverse, "a", t, t)


def _extract(a: Array, position: Array, length: Array) -> Array:
    bits = 8 * a.itemsize
    is_signed = a.dtype.kind == "i"
    result: list[int] = []
    for value, start, size in zip(a.tolist(), position.tolist(), length.tolist()):
        start, size = start & 0xFF, size & 0xFF
        pattern = value & ((1 << bits) - 1)
        field = (pattern >> start) & ((1 << size) - 1) if start < bits else 0
        if is_signed and size:
            sign = (pattern >> min(start + size - 1, bits - 1)) & 1
            have = max(min(size, bits - start), 0)
            if sign:
                field |= ((1 << bits) - 1) & ~((1 << have) - 1)
        result.append(field & ((1 << bits) - 1))
    return np.array(result, np.dtype(f"u{a.itemsize}")).view(a.dtype)


@instruction("bfe.type d, a, b, c", source="PTX ISA 9.7.1.19", evidence="manual-only",
             type="u32 s32 u64 s64")  # fmt: skip
def bfe(ins: Instruction) -> Inline:
    """d = the field of a at bit b, c bits long, extended."""
    t = ins["type"]
    name = ins.program.bind(_extract, "f")
    sources = f"{ins.src('a', t)}, {ins.src('b', 'u32')}, {ins.src('c', 'u32')}"
    return ins.assign("d", f"{name}({sources})", t)


def _insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    full = (1 << 8 * a.itemsize) - 1
    result: list[int] = []
    for field, base, start, size in zip(a.tolist(), b.tolist(), position.tolist(), length.tolist()):
        mask = (((1 << (size & 0xFF)) - 1) << (start & 0xFF)) & full
        result.append((base & ~mask) | ((field << (start & 0xFF)) & mask))
    return np.array(result, a.dtype)


@instruction("bfi.type f, a, b, c, d", source="PTX ISA 9.7.1.20", evidence="manual-only",
             type="b32 b64")  # fmt: skip
def bfi(ins: Instruction) -> Inline:
    """f = b with the low d bits of a put at bit c."""
    t = ins["type"]
    name = ins.program.bind(_insert, "f")
    sources = ", ".join(
        (ins.src("a", t), ins.src("b", t), ins.src("c", "u32"), ins.src("d", "u32"))
    )
    return ins.assign("f", f"{name}({sources})", t)


def _mask_bits(a: Array, b: Array, is_clamp: bool) -> Array:
    result: list[int] = []
    for start, size in zip(a.tolist(), b.tolist()):
        if not is_clamp:
            start, size = start & 31, size & 31
        result.append(0 if start >= 32 else (((1 << min(size, 32)) - 1) << start) & 0xFFFFFFFF)
    return np.array(result, np.uint32)


@instruction("bmsk.mode.b32 d, a, b", source="PTX ISA 9.7.1.21", evidence="manual-only",
             mode="clamp wrap")  # fmt: skip
def bmsk(ins: Instruction) -> Inline:
    """d = b ones starting at bit a."""
    clamp = ins["mode"] == "clamp"
    return _call(ins, lambda a, b: _mask_bits(a, b, clamp), "a b", "u32", "u32")


def _find_nth(mask: Array, base: Array, offset: Array) -> Array:
    result: list[int] = []
    lanes: list[tuple[int, int, int]] = list(zip(mask.tolist(), base.tolist(), offset.tolist()))
    for bits, start, count in lanes:
        places = [p for p in range(32) if bits >> p & 1]
        if count == 0:
            found = start if bits >> (start & 31) & 1 else -1
        elif count > 0:
            later = [p for p in places if p >= start]
            found = later[count - 1] if len(later) >= count else -1
        else:
            earlier = [p for p in reversed(places) if p <= start]
            found = earlier[-count - 1] if len(earlier) >= -count else -1
        result.append(found & 0xFFFFFFFF)
    return np.array(result, np.uint32)


@instruction("fns.b32 d, mask, base, offset", source="PTX ISA 9.7.1.17", evidence="manual-only")
def fns(ins: Instruction) -> Inline:
    """d = place of the n-th set bit from a base."""
    name = ins.program.bind(_find_nth, "f")
    sources = f"{ins.src('mask', 'u32')}, {ins.src('base', 'u32')}, {ins.src('offset', 's32')}"
    return ins.assign("d", f"{name}({sources})", "u32")


@instruction("szext.mode.type d, a, b", source="PTX ISA 9.7.1.22", evidence="manual-only",
             mode="clamp wrap", type="u32 s32")  # fmt: skip
def szext(ins: Instruction) -> Inline:
    """d = the low b bits of a, extended."""
    wrap, signed = ins["mode"] == "wrap", ins["type"] == "s32"

    def function(a: Array, b: Array) -> Array:
        count = (b & 31 if wrap else np.minimum(b, 32)).astype(np.int64)
        kept = a.astype(np.int64) & ((1 << count) - 1)
        if signed:
            kept = np.where(count > 0, (kept << (64 - count)) >> (64 - count), 0)
        return (kept & 0xFFFFFFFF).astype(np.uint32)

    return _call(ins, function, "a b", "u32", "u32")


# --- dot products -------------------------------------------------------------------------------


@instruction("dp4a.atype.btype d, a, b, c", source="PTX ISA 9.7.1.23", evidence="manual-only",
             atype="u32 s32", btype="u32 s32")  # fmt: skip
def dp4a(ins: Instruction) -> Inline:
    """d = c + dot of four bytes."""
    kinds = [np.int8 if ins[name] == "s32" else np.uint8 for name in ("atype", "btype")]

    def function(a: Array, b: Array, c: Array) -> Array:
        x = a.view(kinds[0]).astype(np.int64).reshape(-1, 4)
        y = b.view(kinds[1]).astype(np.int64).reshape(-1, 4)
        return (((x * y).sum(axis=1) + c) & 0xFFFFFFFF).astype(np.uint32)

    return _call(ins, function, "a b c", "u32", "u32")


@instruction("dp2a.half.atype.btype d, a, b, c", source="PTX ISA 9.7.1.24",
             evidence="manual-only", half="lo hi", atype="u32 s32", btype="u32 s32")  # fmt: skip
def dp2a(ins: Instruction) -> Inline:
    """d = c + dot of two 16-bit values of a and two bytes of b."""
    wide = np.int16 if ins["atype"] == "s32" else np.uint16
    narrow = np.int8 if ins["btype"] == "s32" else np.uint8
    start = 0 if ins["half"] == "lo" else 2

    def function(a: Array, b: Array, c: Array) -> Array:
        x = a.view(wide).astype(np.int64).reshape(-1, 2)
        y = b.view(narrow).astype(np.int64).reshape(-1, 4)[:, start : start + 2]
        return (((x * y).sum(axis=1) + c) & 0xFFFFFFFF).astype(np.uint32)

    return _call(ins, function, "a b c", "u32", "u32")
