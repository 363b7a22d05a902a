"""Bitwise logic, shifts and permutes.

Source: PTX ISA 9.7.8 (logic and shift) and 9.7.9.7 (prmt). Invariant: shift amounts clamp at the
register width, as the manual says, where numpy would leave them undefined.
"""

from collections.abc import Callable

import numpy as np

from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Inline, Instruction
from fovea.emulator.ptx import syntax

_TYPES = "pred b16 b32 b64"
_OPERATORS = {"and": "&", "or": "|", "xor": "^"}


@instruction("and.type d, a, b", "or.type d, a, b", "xor.type d, a, b",
             source="PTX ISA 9.7.8.1-3", evidence="manual-only", type=_TYPES)  # fmt: skip
def bitwise(ins: Instruction) -> Inline:
    """d = a op b, bit by bit."""
    t = ins["type"]
    operator = _OPERATORS[ins.opcode.split(".")[0]]
    return ins.assign("d", f"{ins.src('a', t)} {operator} {ins.src('b', t)}", t)


@instruction("not.type d, a", source="PTX ISA 9.7.8.4", evidence="manual-only", type=_TYPES)
def not_(ins: Instruction) -> Inline:
    """d = ~a."""
    t = ins["type"]
    return ins.assign("d", f"~{ins.src('a', t)}", t)


@instruction("cnot.type d, a", source="PTX ISA 9.7.8.5", evidence="manual-only",
             type="b16 b32 b64")  # fmt: skip
def cnot(ins: Instruction) -> Inline:
    """d = (a == 0)."""
    t = ins["type"]
    name = ins.program.bind_function(lambda a: (a == 0).astype(a.dtype), "f")
    return ins.assign("d", f"{name}({ins.src('a', t)})", t)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Return the bitwise function of three values with truth table `table`."""
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            result |= term
    return result


@instruction("lop3.b32 d, a, b, c, immLut", source="PTX ISA 9.7.8.6", evidence="manual-only")
def lop3_b32(ins: Instruction) -> Inline:
    """d = the function of a, b, c with truth table immLut."""
    table = _table(ins)
    name = ins.program.bind_function(lambda a, b, c: lop3(a, b, c, table), "lop")
    sources = ", ".join(ins.src(operand, "b32") for operand in "abc")
    return ins.assign("d", f"{name}({sources})", "b32")


@instruction("lop3.BoolOp.b32 d|p, a, b, c, immLut, q", source="PTX ISA 9.7.8.6",
             evidence="manual-only", BoolOp="or and")  # fmt: skip
def lop3_bool(ins: Instruction) -> Inline:
    """As lop3; p = (d != 0) op q."""
    table = _table(ins)
    name = ins.program.bind_function(lambda a, b, c: lop3(a, b, c, table), "lop")
    sources = ", ".join(ins.src(operand, "b32") for operand in "abc")
    setup = f"v = {name}({sources})"
    operator = "|" if ins["BoolOp"] == "or" else "&"
    results = ins.result("d", "v", "b32")
    results += ins.result("p", f"(v != 0) {operator} {ins.src('q', 'pred')}", "pred")
    return Inline(results, (setup,))


def _table(ins: Instruction) -> int:
    return ins.immediate("immLut") & 0xFF  # ptxas drops the other bits


# --- shifts -------------------------------------------------------------------------------------


def shift_left(a: Array, b: Array) -> Array:
    """Return a << b; 0 from the width on."""
    bits = 8 * a.itemsize
    return np.where(b < bits, a << (b & (bits - 1)).astype(a.dtype), a.dtype.type(0))


def shift_right(a: Array, b: Array) -> Array:
    """Return a >> b; sign or 0 from the width on."""
    bits = 8 * a.itemsize
    return (
        a >> np.minimum(b, bits - 1).astype(a.dtype)
        if a.dtype.kind == "i"
        else np.where(b < bits, a >> (b & (bits - 1)).astype(a.dtype), a.dtype.type(0))
    )


def _constant_shift(ins: Instruction, bits: int) -> int | None:
    operand = ins.operands["b"]
    if isinstance(operand, syntax.Immediate) and isinstance(operand.value, int):
        return min(operand.value & 0xFFFFFFFF, bits)
    return None


@instruction("shl.type d, a, b", source="PTX ISA 9.7.8.8", evidence="manual-only",
             type="b16 b32 b64")  # fmt: skip
def shl(ins: Instruction) -> Inline:
    """d = a << b."""
    t = ins["type"]
    bits = int(t[1:])
    constant = _constant_shift(ins, bits)
    if constant is not None and constant < bits:
        amount = ins.program.constant(constant, t)
        return ins.assign("d", f"{ins.src('a', t)} << {amount}", t)
    name = ins.program.bind(shift_left, "f")
    return ins.assign("d", f"{name}({ins.src('a', t)}, {ins.src('b', 'u32')})", t)


@instruction("shr.type d, a, b", source="PTX ISA 9.7.8.9", evidence="manual-only",
             type="b16 b32 b64 u16 u32 u64 s16 s32 s64")  # fmt: skip
def shr(ins: Instruction) -> Inline:
    """d = a >> b, arithmetic for signed types."""
    t = ins["type"]
    bits = int(t[1:])
    constant = _constant_shift(ins, bits)
    if constant is not None and constant < bits:
        amount = ins.program.constant(constant, t)
        return ins.assign("d", f"{ins.src('a', t)} >> {amount}", t)
    name = ins.program.bind(shift_right, "f")
    return ins.assign("d", f"{name}({ins.src('a', t)}, {ins.src('b', 'u32')})", t)


@instruction("shf.dir.mode.b32 d, a, b, c", source="PTX ISA 9.7.8.7", evidence="manual-only",
             dir="l r", mode="clamp wrap")  # fmt: skip
def shf(ins: Instruction) -> Inline:
    """d = 32 bits of the pair b:a shifted by c."""
    wrap, left = ins["mode"] == "wrap", ins["dir"] == "l"

    def function(a: Array, b: Array, c: Array) -> Array:
        count = (c & 31 if wrap else np.minimum(c, 32)).astype(np.uint64)
        pair = b.astype(np.uint64) << np.uint64(32) | a
        if left:
            return ((pair << count) >> np.uint64(32)).astype(np.uint32)
        return (pair >> count).astype(np.uint32)

    name = ins.program.bind(function, "f")
    sources = ", ".join(ins.src(operand, "u32") for operand in "abc")
    return ins.assign("d", f"{name}({sources})", "u32")


# --- bytes --------------------------------------------------------------------------------------


def _permute(a: Array, b: Array, selector: Array) -> Array:
    pool = np.concatenate((a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)), 1)
    fields = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    chosen = np.take_along_axis(pool, (fields & 7).astype(np.intp), axis=1)
    signs = (chosen.view(np.int8) >> 7).view(np.uint8)
    return np.where(fields & 8, signs, chosen).astype(np.uint8).view(np.uint32).ravel()


_PRMT_MODES: dict[str, Callable[[int], list[int]]] = {
    "f4e": lambda s: [s, s + 1, s + 2, s + 3],
    "b4e": lambda s: [s, s - 1, s - 2, s - 3],
    "rc8": lambda s: [s, s, s, s],
    "ecl": lambda s: [max(i, s) for i in range(4)],
    "ecr": lambda s: [min(i, s) for i in range(4)],
    "rc16": lambda s: [2 * (s & 1), 2 * (s & 1) + 1] * 2,
}


@instruction("prmt.b32{.mode} d, a, b, c", source="PTX ISA 9.7.9.7", evidence="manual-only",
             mode="f4e b4e rc8 ecl ecr rc16")  # fmt: skip
def prmt(ins: Instruction) -> Inline:
    """d = four bytes picked from a and b."""
    mode = ins["mode"]
    if not mode:
        function = _permute
    else:
        table = np.array(
            [sum((p & 7) << 4 * i for i, p in enumerate(_PRMT_MODES[mode](s))) for s in range(4)],
            np.uint32,
        )

        def function(a: Array, b: Array, selector: Array) -> Array:
            return _permute(a, b, table[selector & 3])

    name = ins.program.bind(function, "f")
    sources = ", ".join(ins.src(operand, "u32") for operand in "abc")
    return ins.assign("d", f"{name}({sources})", "u32")
