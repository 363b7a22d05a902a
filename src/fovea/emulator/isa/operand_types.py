"""Whether the registers of an instruction have types that it takes.

Lives here: what type each operand of a form has, and which declared types agree with it. Not here:
how a register is read (`instruction.py`). Invariant: what is refused here ptxas refuses too;
`tests/emulator/isa/operand_types.txt` records which types ptxas takes for every operand.
Source: PTX ISA 9.2 (operand type checking), 9.4.1 (operand size exceeding instruction-type size).
"""

from collections.abc import Iterator

from fovea.emulator.errors import OperandTypeError
from fovea.emulator.isa.instruction import Instruction
from fovea.emulator.isa.operand_kinds import (
    check_operand_kind,
    check_state_space,
    check_vector_kind,
)
from fovea.emulator.ptx import syntax

_INTEGERS = frozenset(kind + bits for kind in "us" for bits in ("8", "16", "32", "64"))
_BITS = frozenset(["b8", "b16", "b32", "b64", "b128"])
_FLOATS = frozenset(["f16", "f32", "f64"])
# held by registers of bits alone; ptxas takes old `f16x2` registers for the packed ones too
_PACKED = {"f16x2": 4, "s16x2": 4, "u16x2": 4}
_FORMATS = {"bf16": 2, "bf16x2": 4, "tf32": 4, "f32x2": 8, "e2m1x2": 1, "ue8m0x2": 2,
            "e2m1x4": 2} | {f"{f}x{n}": n for f in ("e4m3", "e5m2", "e2m3", "e3m2")
                            for n in (2, 4)}  # fmt: skip
_TYPES = (_INTEGERS | _BITS | _FLOATS | _PACKED.keys() | _FORMATS.keys()
          | {"pred", "s2f6x2", "s2", "s4", "u2", "u4", "e4m3", "e5m2"})  # fmt: skip

# operands that have one type in every instruction; "address" is any integer of 32 or 64 bits
_NAMED = {
    "cache-policy": "u64", "ctaMask": "u16", "byteMask": "u16", "membermask": "u32",
    "waitComplete": "pred", "state": "u64", "count": "u32", "tx": "u32", "phaseParity": "u32",
    "hint": "u32", "policy": "u64", "access-property": "u64", "fraction": "f32", "total": "u32",
    "size": "u32", "src-size": "u32", "index": "u32", "p": "pred", "q": "pred", "e1": "pred",
    "e2": "pred", "e3": "pred", "scale-d": "pred", "a-desc": "u64", "b-desc": "u64",
    "s-desc": "u64", "idesc": "u32", "zero-column-mask-desc": "u64", "taddr": "u32",
    "nCols": "u32", "sp-meta": "b32", "stride": "u32", "rbits": "bits32", "scale-factor": "bits16",
    "response": "b128", "tensorCoords": "u32", "t": "u32", "redval": "b32", "abef": "f32",
    "mask": "b32", "base": "b32", "offset": "b32",
}  # fmt: skip

# of a mnemonic: an operand's type, or which of the types of the opcode it is
_OWN: dict[str, dict[str, str]] = {
    "add": {"d": "0", "a": "-1", "b": "-1", "c": "0"},
    "sub": {"d": "0", "a": "-1", "b": "-1", "c": "0"},
    "fma": {"d": "0", "a": "-1", "b": "-1", "c": "0"},
    "cvt": {"d": "0", "a": "-1", "b": "-1", "c": "b32"},
    "set": {"d": "0", "a": "-1", "b": "-1", "c": "pred"},
    "setp": {"c": "pred"},
    "selp": {"c": "pred"},
    "slct": {"d": "0", "a": "0", "b": "0", "c": "-1"},
    "shl": {"b": "u32"},
    "shr": {"b": "u32"},
    "shf": {"c": "u32"},
    "bfe": {"b": "u32", "c": "u32"},
    "bfi": {"f": "0", "c": "u32", "d": "u32"},
    "bfind": {"d": "u32"},
    "bmsk": {"d": "u32", "a": "u32", "b": "u32"},
    "clz": {"d": "u32"},
    "popc": {"d": "u32"},
    "szext": {"b": "u32"},
    "match": {"d": "u32"},
    "mapa": {"b": "u32"},
    "getctarank": {"d": "u32"},
    "isspacep": {"a": "address"},
    "elect": {"d": "u32"},
    "vote": {"a": "pred"},
    "bar": {"a": "u32", "b": "u32", "c": "pred", "d": "u32"},
    "barrier": {"a": "u32", "b": "u32", "c": "pred", "d": "u32"},
    "dp2a": {"d": "u32", "a": "u32", "b": "u32", "c": "u32"},
    "dp4a": {"d": "u32", "a": "u32", "b": "u32", "c": "u32"},
    "clusterlaunchcontrol": {"d": "b32"},
    "tensormap": {"new_val": "-1"},
    "st.bulk": {"size": "address"},
    "ldmatrix": {"r": "b32"},
    "stmatrix": {"r": "b32"},
    "movmatrix": {"d": "b32", "a": "b32"},
    "mma": {"e": "b32"},
    "tcgen05": {"r": "b32"},
}
_VIDEO = {"d": "u32", "a": "u32", "b": "u32", "c": "u32"}
_FRAGMENTS = frozenset(["mma", "wgmma", "wmma"])
# registers may be wider than what these move, and their vectors hold any kind of bits
_MEMORY = ("ld", "ldu", "st")


def check_operand_types(ins: Instruction) -> None:
    """Compare the declared types of an instruction's registers with what its operands take.

    Raises:
        OperandTypeError: a register does not fit.
        PtxError: something else that is no register does not fit (`operand_kinds.py`).
    """
    mnemonic, *qualifiers = ins.opcode.split(".")
    if mnemonic in ("bra", "call", "ret", "exit"):
        return
    types = [name for name in qualifiers if name in _TYPES]
    for name, operand in ins.operands.items():
        if isinstance(operand, syntax.Memory):
            check_state_space(ins, name, operand)
            wanted = _address_type(mnemonic, qualifiers, name)
            if isinstance(operand.base, syntax.Register):
                _check(ins, name, wanted, (operand.base,))
            continue
        wanted = operand_type(mnemonic, qualifiers, types, name)
        if mnemonic == "wgmma" and name == "a" and not isinstance(operand, syntax.Vector):
            wanted = "u64"  # a descriptor
        if isinstance(operand, syntax.Negated):
            _check(ins, name, "pred", (operand.item,))
        if isinstance(operand, syntax.Register | syntax.Vector):
            if wanted:
                _check_registers(ins, name, wanted, operand)
        else:
            check_operand_kind(ins, name, wanted, operand)


def _check_registers(ins: Instruction, name: str, wanted: str, operand: syntax.Operand) -> None:
    """Check a register or the registers of a vector."""
    if isinstance(operand, syntax.Register):
        if name == "src-size" and operand.type == "pred":
            wanted = "pred"  # ignore-src
        _check(ins, name, wanted, (operand,))
    elif isinstance(operand, syntax.Vector):
        registers = tuple(item for item in operand.items if isinstance(item, syntax.Register))
        mnemonic = ins.opcode.partition(".")[0]
        if mnemonic == "mov" and not ins.has("vec"):
            wanted = f"b{8 * _size(wanted) // len(operand.items)}"
        elif name == "e1":
            wanted = "u32"  # the mask of disabled output lanes, where no input-d predicate stands
        elif mnemonic in (*_MEMORY, "atom", "red") and wanted in _FLOATS:
            wanted = f"b{8 * _size(wanted)}"
        if registers:
            _check(ins, name, wanted, registers)
        declared = _joined({register.type for register in registers}) if registers else ""
        check_vector_kind(ins, name, wanted, declared, operand)


def operand_type(mnemonic: str, qualifiers: list[str], types: list[str], name: str) -> str:
    """Return the type an operand of an instruction has ("" if nothing is known of it).

    `types` are those of `qualifiers`. "address" is an integer of 32 or 64 bits; "bits32" and
    "bits16" are registers of bits alone.
    """
    own = _VIDEO if mnemonic[0] == "v" and mnemonic != "vote" else _OWN.get(mnemonic, {})
    if mnemonic == "st" and qualifiers[0] == "bulk":
        own = _OWN["st.bulk"]
    rule = own.get(name) or _NAMED.get(name) or ("0" if name in ("d", "a", "b", "c") else "")
    if mnemonic in _FRAGMENTS and name in "abcdr":
        if mnemonic == "mma" and qualifiers[0].startswith("sp"):
            return "b32"  # ptxas looks at their sizes alone
        return _fragment_type(mnemonic, types, name)
    if rule in ("0", "-1"):
        rule = types[int(rule)] if types else ""
    if mnemonic == "redux" and rule == "b32":
        return "u32"
    if "wide" in qualifiers and (name == "d" or (mnemonic == "mad" and name == "c")):
        rule = f"{rule[0]}{2 * int(rule[1:])}"
    if rule == "bf16x2" and name == "a" and "e2m1x2" in types:
        return "b32"
    if rule == "s2f6x2":
        return "b16" if name == "d" else "bits16"
    if mnemonic == "cvt" and "pack" in qualifiers and name != "c":
        rule = "u32"
    return rule


# what holds elements of a matrix: `f16x2` registers, or those of bits alone
_HELD_IN = {"f16": "f16x2", "bf16": "bf16x2", "tf32": "tf32", "f32": "f32", "s32": "u32",
            "f64": "b64"}  # fmt: skip


def _fragment_type(mnemonic: str, types: list[str], name: str) -> str:
    """Return the type of the registers that hold a part of a matrix."""
    if mnemonic == "wmma" and len(types) == 2:  # of d and c; a and b are f16
        types = [types[0], "f16", "f16", types[1]]
    element = types[{"d": 0, "a": 1, "b": 2, "c": 3, "r": 0}[name]]
    takes_half = (mnemonic == "wgmma" and name == "a") or (mnemonic == "wmma" and name in "ab")
    if takes_half and element not in ("s8", "u8", "f64"):
        return "f16x2"  # of bf16 and tf32 too
    narrow = "u32" if mnemonic == "wmma" else "b32"
    return _HELD_IN.get(element, narrow)


def _address_type(mnemonic: str, qualifiers: list[str], name: str) -> str:
    if mnemonic == "tcgen05" and qualifiers[0] == "mma":
        return "bits32"  # all that ptxas takes for an address of tensor memory in a product
    return "u32" if name == "taddr" else "address"


def _may_be_wide(opcode: str) -> bool:
    """Return whether the scalar registers of an instruction may be wider than its type."""
    mnemonic, *qualifiers = opcode.split(".")
    if mnemonic == "cvt":
        return not any(name in _FORMATS or name == "s2f6x2" for name in qualifiers)
    return mnemonic in _MEMORY and qualifiers[0] not in ("async", "bulk")


# --- agreement ------------------------------------------------------------------------------------


def _size(ptx_type: str) -> int:
    if ptx_type in _FORMATS:
        return _FORMATS[ptx_type]
    if ptx_type in _PACKED:
        return _PACKED[ptx_type]
    return max(int("".join(filter(str.isdigit, ptx_type))) // 8, 1)


def agrees(declared: str, wanted: str, is_wide: bool = False) -> bool:
    """Return whether a register of a declared type may stand where `wanted` is.

    Bits agree with all types of their size, signed and unsigned integers with each other, floats
    with their own kind; `is_wide` lets a register be wider.
    """
    if "pred" in (declared, wanted):
        return declared == wanted
    if wanted == "address":
        return declared in ("b32", "u32", "s32", "b64", "u64", "s64")
    size, needed = _size(declared), _size(wanted)
    if size != needed and not (is_wide and size > needed and wanted not in _FORMATS):
        return False
    if declared in _BITS or declared == wanted:
        return True
    if wanted in _BITS:
        return True
    if declared == "f16x2":
        return wanted in _INTEGERS or wanted in _PACKED
    return declared in _INTEGERS and wanted in _INTEGERS


def _allowed(wanted: str, is_wide: bool) -> Iterator[str]:
    order = ("pred", "b8", "u8", "s8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32",
             "b64", "u64", "s64", "f64", "b128")  # fmt: skip
    return (f".{name}" for name in order if agrees(name, wanted, is_wide))


def _joined(types: set[str]) -> str:
    """Return the type that the elements of a vector have together ("" if they differ)."""
    if len(types) == 1:
        return types.pop()
    if len({_size(name) if name != "pred" else 0 for name in types}) > 1:
        return ""
    exact = types - _BITS
    if len(exact) == 1 or exact <= _INTEGERS:
        return f"b{8 * _size(next(iter(exact)))}" if types & _BITS else exact.pop()
    return ""


def _check(
    ins: Instruction, name: str, wanted: str, registers: tuple[syntax.Register, ...]
) -> None:
    is_wide = name in ("a", "b", "c", "d") and _may_be_wide(ins.opcode)
    declared = _joined({register.type for register in registers})
    if declared and agrees(declared, wanted, is_wide):
        return
    wrong = next((r for r in registers if not agrees(r.type, wanted, is_wide)), registers[0])
    raise OperandTypeError(
        ins.text,
        line=ins.line,
        form=ins.entry.form.notation,
        operand=name,
        register=wrong.name,
        declared=wrong.type,
        allowed=tuple(_allowed(wanted, is_wide)),
        is_mixed=not declared,
    )
