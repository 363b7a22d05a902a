"""SIMD video instructions: two halves or four bytes of a register at once.

Lives here: vadd2/4, vsub2/4, vavrg2/4, vabsdiff2/4, vmin2/4, vmax2/4 and vset2/4 as compilers
write them, without selectors and masks, and with `.add`. Not here: the scalar ones (vadd, vmad,
...), which no compiler for sm_80 and later emits. Invariant: each element is exact before it is
clamped or cut.
Source: PTX ISA 9.7.18.3-4.
"""

from collections.abc import Callable

import numpy as np

from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Inline, Instruction

_NAMES = ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax")
_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vavrg": lambda a, b: a + b + (a + b >= 0) >> 1,  # rounded away from zero at a half
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
_FORMS = tuple(f"{name}{count}.dtype.atype.btype{{.sat}} d, a, b, c" for name in _NAMES
               for count in (2, 4))  # fmt: skip
_SUMS = tuple(f"{name}{count}.dtype.atype.btype.add d, a, b, c" for name in _NAMES
              for count in (2, 4))  # fmt: skip
_TYPES = "u32 s32"


def _elements(register: Array, count: int, is_signed: bool) -> Array:
    """Return [32, count] elements as wide integers, the lowest first."""
    narrow = np.dtype(("i" if is_signed else "u") + str(4 // count))
    return register.view(narrow).reshape(-1, count).astype(np.int64)


def _combined(
    ins: Instruction, operation: Callable[[Array, Array], Array], count: int, *, clamps: bool
) -> Inline:
    """Return `d = the elements of operation(a, b)`, or their sum and c with `.add`."""
    signs = [ins[name] == "s32" for name in ("atype", "btype")]
    bits = 32 // count
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if ins["dtype"] == "s32" else (
        0, (1 << bits) - 1)  # fmt: skip

    def function(a: Array, b: Array, c: Array) -> Array:
        found = operation(_elements(a, count, signs[0]), _elements(b, count, signs[1]))
        if ins.has("add"):
            return (found.sum(axis=1) + c).astype(np.uint32)
        found = np.clip(found, low, high) if clamps else found
        return found.astype(f"u{4 // count}").reshape(-1).view(np.uint32)

    name = ins.program.bind_function(function, "f")
    sources = ", ".join(ins.src(operand, "b32") for operand in "abc")
    return ins.assign("d", f"{name}({sources})", "b32")


@instruction(*_FORMS, *_SUMS, source="PTX ISA 9.7.18.3-4", evidence="manual-only",
             dtype=_TYPES, atype=_TYPES, btype=_TYPES)  # fmt: skip
def video_arithmetic(ins: Instruction) -> Inline:
    """d = the elements of a op b, clamped (`.sat`) or cut; with `.add` d = their sum + c."""
    mnemonic = ins.entry.form.mnemonic
    operation, count = _OPERATIONS[mnemonic[:-1]], int(mnemonic[-1])
    return _combined(ins, operation, count, clamps=ins.has("sat"))


@instruction("vset2.atype.btype.cmp{.add} d, a, b, c", "vset4.atype.btype.cmp{.add} d, a, b, c",
             source="PTX ISA 9.7.18.3-4", evidence="manual-only", atype=_TYPES, btype=_TYPES,
             cmp=" ".join(_COMPARE))  # fmt: skip
def video_comparison(ins: Instruction) -> Inline:
    """d = 1 in the elements where a cmp b holds; with `.add` d = their number + c."""
    compare, count = _COMPARE[ins["cmp"]], int(ins.entry.form.mnemonic[-1])
    return _combined(ins, lambda a, b: compare(a, b).astype(np.int64), count, clamps=False)
