"""As which numpy dtype each register is stored.

PTX registers are bags of bits; storing a register the way most instructions read it saves a
`.view` per operand. Lives here: that choice. Invariant: it never changes results.
"""

from collections import Counter

import numpy as np

from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import REGISTER_TYPES, numpy_dtype, size_bytes

_FLOATS = {4: "f32", 8: "f64"}
_NEUTRAL = {"mov", "ld", "st", "shfl", "selp"}


def registers_of(operand: syntax.Operand) -> list[syntax.Register]:
    """Return the registers an operand names."""
    if isinstance(operand, syntax.Register):
        return [operand]
    if isinstance(operand, syntax.Vector):
        return [register for item in operand.items for register in registers_of(item)]
    if isinstance(operand, syntax.Pair):
        return registers_of(operand.first) + registers_of(operand.second)
    if isinstance(operand, syntax.Negated):
        return [operand.item]
    if isinstance(operand, syntax.Memory):
        found = registers_of(operand.base)
        for item in operand.rest:
            found += registers_of(item)
        return found
    return []


class _Classes:
    """Registers connected by `mov` share a vote (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, uid: str) -> str:
        parent = self._parent.setdefault(uid, uid)
        while parent != uid:
            uid, parent = parent, self._parent[parent]
        return uid

    def join(self, a: str, b: str) -> None:
        self._parent[self.find(a)] = self.find(b)


def stored_dtypes(
    body: list[syntax.Statement | syntax.LabelMark],
) -> dict[str, tuple[str, np.dtype]]:
    """Return (declared type, dtype it is stored as) of every register used, in order of use."""
    types: dict[str, str] = {}
    votes: Counter[str] = Counter()
    classes = _Classes()
    for item in body:
        if isinstance(item, syntax.LabelMark):
            continue
        if item.guard is not None:
            types[item.guard.register.uid] = "pred"
        mnemonic, *qualifiers = item.opcode.split(".")
        named = [q for q in qualifiers if q in REGISTER_TYPES or q in ("f16x2", "bf16x2")]
        for position, operand in enumerate(item.operands):
            is_address = isinstance(operand, syntax.Memory)
            for register in registers_of(operand):
                types[register.uid] = register.type
                if is_address or not named or mnemonic in _NEUTRAL:
                    continue
                name = named[min(position, len(named) - 1)] if mnemonic == "cvt" else named[0]
                if size_bytes(register.type) == size_bytes(name):
                    votes[classes.find(register.uid)] += 1 if name in ("f32", "f64") else -1
        if mnemonic == "mov" and len(item.operands) == 2:
            target, source = item.operands
            if isinstance(target, syntax.Register) and isinstance(source, syntax.Register):
                a, b = classes.find(target.uid), classes.find(source.uid)
                if a != b:
                    total = votes.pop(a, 0) + votes.pop(b, 0)
                    classes.join(a, b)
                    votes[b] = total
    stored: dict[str, tuple[str, np.dtype]] = {}
    for uid, ptx_type in types.items():
        width = size_bytes(ptx_type)
        if ptx_type == "pred":
            dtype = numpy_dtype("pred")
        elif width == 16:
            dtype = numpy_dtype("b128")
        elif width in _FLOATS and (
            ptx_type == _FLOATS[width] or votes.get(classes.find(uid), 0) > 0
        ):
            dtype = numpy_dtype(_FLOATS[width])
        else:
            dtype = np.dtype(f"u{width}")
        stored[uid] = (ptx_type, dtype)
    return stored
