"""Comparison and selection.

Source: PTX ISA 9.7.6 (setp, set, selp, slct) and 9.7.7 (half comparisons). Invariant: ordered
comparisons are false and unordered ones true where an operand is NaN.
"""

from collections.abc import Callable

import numpy as np

from fovea.emulator.isa import instruction
from fovea.emulator.isa.bits import flush_f32, half_to_f32
from fovea.emulator.isa.instruction import Array, Inline, Instruction

Compare = Callable[[Array, Array], Array]

_ORDERED: dict[str, Compare] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_EQUAL, _SIGNED = "eq ne", "eq ne lt le gt ge"  # of bits, of signed integers
_INTEGER = f"{_SIGNED} lo ls hi hs"
_FLOAT = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"
_BIT_TYPES, _SIGNED_TYPES, _UNSIGNED_TYPES = "b16 b32 b64", "s16 s32 s64", "u16 u32 u64"
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


def float_compare(name: str) -> Compare:
    """Return the comparison of floats called `name`, with the manual's treatment of NaN."""
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name.endswith("u") and name != "equ" and name != "neu":
        ordered = _ORDERED[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    if name == "equ":
        return lambda a, b: np.equal(a, b) | np.isnan(a) | np.isnan(b)
    if name == "neu":
        return np.not_equal  # IEEE != is already true for NaN
    if name == "ne":
        return lambda a, b: np.not_equal(a, b) & ~(np.isnan(a) | np.isnan(b))
    return _ORDERED[name]


def _comparison(ins: Instruction, ptx_type: str) -> str:
    """Return an expression of the comparison of operands a and b."""
    bind = ins.program.bind
    name = ins["CmpOp"]
    a, b = ins.src("a", ptx_type), ins.src("b", ptx_type)
    if ptx_type in ("f16", "bf16"):
        convert = bind(half_to_f32[ptx_type], "f")
        a, b = f"{convert}({a})", f"{convert}({b})"
        return f"{bind(float_compare(name), 'cmp')}({a}, {b})"
    if ptx_type[0] == "f":
        if ins.has("ftz"):
            flush = bind(flush_f32, "f")
            a, b = f"{flush}({a})", f"{flush}({b})"
        return f"{bind(float_compare(name), 'cmp')}({a}, {b})"
    return f"{bind(_ORDERED[name], 'cmp')}({a}, {b})"


@instruction("setp.CmpOp.type p|q, a, b", "setp.CmpOp.BoolOp.type p|q, a, b, c",
             source="PTX ISA 9.7.6.2", evidence="manual-only", CmpOp=_INTEGER,
             BoolOp="and or xor", type=_UNSIGNED_TYPES)  # fmt: skip
@instruction("setp.CmpOp.type p|q, a, b", "setp.CmpOp.BoolOp.type p|q, a, b, c",
             source="PTX ISA 9.7.6.2", evidence="manual-only", CmpOp=_SIGNED,
             BoolOp="and or xor", type=_SIGNED_TYPES)  # fmt: skip
@instruction("setp.CmpOp.type p|q, a, b", "setp.CmpOp.BoolOp.type p|q, a, b, c",
             source="PTX ISA 9.7.6.2", evidence="manual-only", CmpOp=_EQUAL,
             BoolOp="and or xor", type=_BIT_TYPES)  # fmt: skip
@instruction("setp.CmpOp{.ftz}.type p|q, a, b", "setp.CmpOp.BoolOp{.ftz}.type p|q, a, b, c",
             source="PTX ISA 9.7.6.2", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", type="f32 f16")  # fmt: skip
@instruction("setp.CmpOp.type p|q, a, b", "setp.CmpOp.BoolOp.type p|q, a, b, c",
             source="PTX ISA 9.7.6.2", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", type="f64 bf16")  # fmt: skip
def setp(ins: Instruction) -> Inline:
    """p = (a cmp b) op c; q = !(a cmp b) op c."""
    comparison = _comparison(ins, ins["type"])
    if "q" in ins.operands and ins["type"] in ("f16", "bf16"):
        raise ins.error("a comparison of halves has one result")
    if not ins["BoolOp"]:
        if "q" not in ins.operands:
            return ins.assign("p", comparison, "pred")
        results = ins.result("p", "v", "pred") + ins.result("q", "~v", "pred")
        return Inline(results, (f"v = {comparison}",))
    operator = _BOOLEAN[ins["BoolOp"]]
    c = ins.src("c", "pred")
    results = ins.result("p", f"v {operator} c", "pred")
    results += ins.result("q", f"~v {operator} c", "pred")
    return Inline(results, (f"v = {comparison}", f"c = {c}"))


@instruction("setp.CmpOp{.ftz}.f16x2 p|q, a, b", "setp.CmpOp.bf16x2 p|q, a, b",
             source="PTX ISA 9.7.7.2", evidence="manual-only", CmpOp=_FLOAT)  # fmt: skip
def setp_packed(ins: Instruction) -> Inline:
    """p, q = comparisons of the low and the high halves."""
    convert = half_to_f32["bf16" if "bf16x2" in ins.opcode else "f16"]
    compare = float_compare(ins["CmpOp"])

    def function(a: Array, b: Array) -> Array:
        x = convert(a.view(np.uint16)).reshape(-1, 2)
        y = convert(b.view(np.uint16)).reshape(-1, 2)
        return np.ascontiguousarray(compare(x, y).T)

    name = ins.program.bind(function, "f")
    setup = f"v = {name}({ins.src('a', 'b32')}, {ins.src('b', 'b32')})"
    return Inline(ins.result("p", "v[0]", "pred") + ins.result("q", "v[1]", "pred"), (setup,))


@instruction("set.CmpOp.dtype.stype d, a, b", "set.CmpOp.BoolOp.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_INTEGER,
             BoolOp="and or xor", dtype="u32 s32 f32", stype=_UNSIGNED_TYPES)  # fmt: skip
@instruction("set.CmpOp.dtype.stype d, a, b", "set.CmpOp.BoolOp.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_SIGNED,
             BoolOp="and or xor", dtype="u32 s32 f32", stype=_SIGNED_TYPES)  # fmt: skip
@instruction("set.CmpOp.dtype.stype d, a, b", "set.CmpOp.BoolOp.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_EQUAL,
             BoolOp="and or xor", dtype="u32 s32 f32", stype=_BIT_TYPES)  # fmt: skip
@instruction("set.CmpOp{.ftz}.dtype.stype d, a, b",
             "set.CmpOp.BoolOp{.ftz}.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", dtype="u32 s32 f32", stype="f32")  # fmt: skip
@instruction("set.CmpOp.dtype.stype d, a, b", "set.CmpOp.BoolOp.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", dtype="u32 s32 f32", stype="f64")  # fmt: skip
@instruction("set.CmpOp{.ftz}.dtype.stype d, a, b",
             "set.CmpOp.BoolOp{.ftz}.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", dtype="u32 s32", stype="f16")  # fmt: skip
@instruction("set.CmpOp.dtype.stype d, a, b", "set.CmpOp.BoolOp.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.6.1", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", dtype="u32 s32", stype="bf16")  # fmt: skip
def set_(ins: Instruction) -> Inline:
    """d = all ones (or 1.0) where (a cmp b) op c, else 0."""
    expression = _comparison(ins, ins["stype"])
    if ins["BoolOp"]:
        expression = f"({expression}) {_BOOLEAN[ins['BoolOp']]} {ins.src('c', 'pred')}"
    if ins["dtype"] == "f32":
        name = ins.program.bind_function(lambda v: v.astype(np.float32), "f")
        return ins.assign("d", f"{name}({expression})", "f32")
    name = ins.program.bind_function(lambda v: -v.astype(np.int32), "f")
    return ins.assign("d", f"{name}({expression})", "s32")


_ONE = {"f16": 0x3C00, "bf16": 0x3F80}  # 1.0
_SCALARS = f"{_BIT_TYPES} {_SIGNED_TYPES} {_UNSIGNED_TYPES} f32 f64 f16 bf16"


@instruction("set.CmpOp{.ftz}.dtype.stype d, a, b",
             "set.CmpOp.BoolOp{.ftz}.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.7.1", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", dtype="f16 bf16 u16 s16", stype=_SCALARS)  # fmt: skip
def set_half(ins: Instruction) -> Inline:
    """d = 1.0 (or all ones) in 16 bits where (a cmp b) op c, else 0."""
    stype, code = ins["stype"], _ONE.get(ins["dtype"], 0xFFFF)
    if stype[0] in "bus" and stype != "bf16" and ins["CmpOp"] not in _INTEGER.split():
        raise ins.error(f".{ins['CmpOp']} compares floats, not .{stype}")
    expression = _comparison(ins, stype)
    if ins["BoolOp"]:
        expression = f"({expression}) {_BOOLEAN[ins['BoolOp']]} {ins.src('c', 'pred')}"
    name = ins.program.bind_function(lambda v: v.astype(np.uint16) * np.uint16(code), "f")
    return ins.assign("d", f"{name}({expression})", "b16")


@instruction("set.CmpOp{.ftz}.dtype.stype d, a, b",
             "set.CmpOp.BoolOp{.ftz}.dtype.stype d, a, b, c",
             source="PTX ISA 9.7.7.1", evidence="manual-only", CmpOp=_FLOAT,
             BoolOp="and or xor", dtype="f16x2 bf16x2 u32 s32", stype="f16x2 bf16x2")  # fmt: skip
def set_packed(ins: Instruction) -> Inline:
    """Both halves of d = 1.0 (or all ones) where (a cmp b) op c, else 0."""
    convert = half_to_f32[ins["stype"][:-2]]
    compare, code = float_compare(ins["CmpOp"]), _ONE.get(ins["dtype"][:-2], 0xFFFF)
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(ins["BoolOp"])

    def function(a: Array, b: Array, c: Array | None = None) -> Array:
        found = compare(convert(a.view(np.uint16)), convert(b.view(np.uint16)))
        if c is not None and combine is not None:
            found = combine(found, np.repeat(c, 2))
        return (found.astype(np.uint16) * np.uint16(code)).view(np.uint32)

    sources = [ins.src("a", "b32"), ins.src("b", "b32")]
    sources += [ins.src("c", "pred")] if ins["BoolOp"] else []
    name = ins.program.bind_function(function, "f")
    return ins.assign("d", f"{name}({', '.join(sources)})", "b32")


_SELECT_TYPES = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"


@instruction("selp.type d, a, b, c", source="PTX ISA 9.7.6.3", evidence="manual-only",
             type=_SELECT_TYPES)  # fmt: skip
def selp(ins: Instruction) -> Inline:
    """d = c ? a : b."""
    t = ins["type"]
    sources = f"{ins.src('c', 'pred')}, {ins.src('a', t)}, {ins.src('b', t)}"
    return ins.assign("d", f"np.where({sources})", t)


@instruction("slct.dtype.s32 d, a, b, c", source="PTX ISA 9.7.6.4", evidence="manual-only",
             dtype=_SELECT_TYPES)  # fmt: skip
@instruction("slct{.ftz}.dtype.f32 d, a, b, c", source="PTX ISA 9.7.6.4", evidence="manual-only",
             dtype=_SELECT_TYPES)  # fmt: skip
def slct(ins: Instruction) -> Inline:
    """d = c >= 0 ? a : b (NaN chooses b)."""
    t = ins["dtype"]
    c = ins.src("c", "f32" if ins.opcode.endswith("f32") else "s32")
    if ins.has("ftz"):
        c = f"{ins.program.bind(flush_f32, 'f')}({c})"
    return ins.assign("d", f"np.where({c} >= 0, {ins.src('a', t)}, {ins.src('b', t)})", t)
