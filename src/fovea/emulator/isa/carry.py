"""Extended-precision integer arithmetic: add.cc, addc, sub.cc, subc, mad.cc, madc.

Lives here: instructions that read or write the carry flag. Invariant: the flag is 32 lanes of the
warp; only these instructions touch it. A subtraction adds the complement of b and a carry of 1, so
its flag is set where nothing is borrowed, which an addc or madc after it sees (nvcc's division of
128-bit integers counts on that). Source: PTX ISA 9.7.2; the sense of the flag: an H200.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import UninitialisedRead
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import (
    ALL_LANES,
    Action,
    Array,
    Decoded,
    Instruction,
    LaneFunction,
    merge,
)
from fovea.emulator.ptx.types import LANES, numpy_dtype

_FLAG = "carry"
_TYPES = "u32 s32 u64 s64"


def _read_flag(ins: Instruction, w: Any) -> list[int]:
    flag = w.state.get(_FLAG)
    if flag is None:
        raise UninitialisedRead("the carry flag was never written", w.where(ins))
    return flag.tolist()


def _write_flag(w: Any, mask: Array, values: list[int]) -> None:
    flag = np.array(values, np.uint8)
    old = w.state.get(_FLAG, np.zeros(LANES, np.uint8))
    w.state[_FLAG] = flag if mask is ALL_LANES else merge(mask, flag, old)


def _extended(ins: Instruction, names: str, combine: LaneFunction, has_carry_in: bool) -> Action:
    """Return the action: `combine(values..., carry) -> (unbounded result)` of unsigned ints."""
    bits = int(ins["type"][1:])
    raw = f"u{bits}"
    reads = [ins.read(name, raw) for name in names.split()]
    write = ins.write("d", raw)
    sets_flag = ins.has("cc")
    full = (1 << bits) - 1
    apply: Callable[..., int] = combine

    def run(w: Any, mask: Array) -> None:
        carries = _read_flag(ins, w) if has_carry_in else [0] * LANES
        columns = [read(w).tolist() for read in reads]
        sums = [apply(*values, carry) for *values, carry in zip(*columns, carries)]
        write(w, mask, np.array([total & full for total in sums], numpy_dtype(raw)))
        if sets_flag:
            _write_flag(w, mask, [int(not 0 <= total <= full) for total in sums])

    return run


@instruction("add.cc.type d, a, b", "addc{.cc}.type d, a, b", source="PTX ISA 9.7.2.1-2",
             evidence="manual-only", type=_TYPES)  # fmt: skip
def add_carry(ins: Instruction) -> Decoded:
    """d = a + b (+ carry); `.cc` sets the carry."""
    return _extended(ins, "a b", lambda a, b, c: a + b + c, ins.opcode.startswith("addc"))


@instruction("sub.cc.type d, a, b", "subc{.cc}.type d, a, b", source="PTX ISA 9.7.2.3-4",
             evidence="manual-only", type=_TYPES)  # fmt: skip
def sub_borrow(ins: Instruction) -> Decoded:
    """d = a - b (- 1 where the carry is 0); `.cc` sets the carry where nothing is borrowed."""
    full = (1 << int(ins["type"][1:])) - 1
    has_carry_in = ins.opcode.startswith("subc")

    def combine(a: int, b: int, carry: int) -> int:
        return a + (full - b) + (carry if has_carry_in else 1)

    return _extended(ins, "a b", combine, has_carry_in)


@instruction(
    "mad.half.cc.type d, a, b, c",
    "madc.half{.cc}.type d, a, b, c",
    source="PTX ISA 9.7.2.5-6",
    evidence="manual-only",
    half="lo hi",
    type=_TYPES,
)
def mad_carry(ins: Instruction) -> Decoded:
    """d = half of a * b, plus c (+ carry); `.cc` sets the carry."""
    bits, is_high = int(ins["type"][1:]), ins["half"] == "hi"
    is_signed = ins["type"][0] == "s"
    full, sign = (1 << bits) - 1, 1 << (bits - 1)

    def signed(value: int) -> int:
        return value - (1 << bits) if is_signed and value & sign else value

    def combine(a: int, b: int, c: int, carry: int) -> int:
        product = signed(a) * signed(b)
        half = product >> bits if is_high else product
        return (half & full) + c + carry

    return _extended(ins, "a b c", combine, ins.opcode.startswith("madc"))
