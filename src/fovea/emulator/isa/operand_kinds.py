"""What else than a register may be an operand: constants, names, special registers, `_`, `!p`.

Lives here: which kinds of operand agree with the type that an operand of a form has, and which
addresses with the state space of an instruction. Not here: that type, and the types of registers
(`operand_types.py`). Invariant: what is refused here ptxas refuses too, operands of which nothing
is known are taken; `tests/emulator/isa/operand_kinds.txt` records what ptxas takes.
Source: PTX ISA 4.5 (types of constants), 6.4 (operands), 7.1.1 (addresses), 10 (special registers).
"""

from collections.abc import Collection, Mapping

from fovea.emulator.errors import UnsupportedForm
from fovea.emulator.isa.instruction import Instruction
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import OPAQUE_REGISTERS

# A constant has a type of its own: an integer agrees with integers and bits of every size, a
# decimal is an `.f64` that narrows to `.f32`, `0f...` an `.f32`. None agrees with packed types.
_INTEGERS = frozenset(kind + bits for kind in "usb" for bits in ("8", "16", "32", "64"))
_TAKES_INTEGER = _INTEGERS | {"pred", "address", "b128"}
_TAKES_DECIMAL = frozenset(["f32", "f64", "b64"])
_TAKES_SINGLE = frozenset(["f32", "f64", "b32"])
_TAKES_SOME = _TAKES_INTEGER | _TAKES_DECIMAL | _TAKES_SINGLE

# By mnemonic: results that `_` may drop (elements of a vector may be dropped everywhere),
# predicates that may be negated, operands that may be a vector of one.
_DROPPED: Mapping[str, Collection[str]] = {
    "atom": "d", "elect": "d", "lop3": "d", "match": "dp", "mbarrier": ("state",), "setp": "pq",
    "shfl": "p",
}  # fmt: skip
_NEGATED: Mapping[str, Collection[str]] = {
    "and": "ab", "or": "ab", "xor": "ab", "not": "a", "mov": "a", "bar": "c", "barrier": "c",
    "lop3": "q", "selp": "c", "set": "c", "setp": "c", "vote": "a", "wgmma": ("scale-d",),
    "tcgen05": ("e1", "e2"),
}  # fmt: skip
_ONE: Mapping[str, Collection[str]] = {"ld": "d", "ldu": "d", "st": "b", "mov": "d"}
_NAMES = ("mov", "cvta", "mapa", "getctarank")

_WIDE = ("%clock64", "%globaltimer", "%current_graph_exec")
_COORDINATES = ("%tid", "%ntid", "%ctaid", "%nctaid")  # of 16 bits in old texts, still readable so
_VECTORS = (*_COORDINATES, "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid")


def check_operand_kind(ins: Instruction, name: str, wanted: str, operand: syntax.Operand) -> None:
    """Check a scalar operand that is no register; `wanted` is its type ("": unknown).

    Raises:
        PtxError: something else must stand there.
    """
    mnemonic = ins.entry.form.mnemonic
    if isinstance(operand, syntax.Immediate):
        if wanted:
            _check_constant(ins, name, wanted, operand)
    elif isinstance(operand, syntax.SpecialRegister):
        _check_special(ins, wanted, operand.name)
    elif isinstance(operand, syntax.Sink):
        if name not in _DROPPED.get(mnemonic, ()):
            raise ins.error(f"operand {name} is `_`: only results may be dropped, and not this one")
    elif isinstance(operand, syntax.Negated):
        if name not in _NEGATED.get(mnemonic, ()) or wanted not in ("", "pred"):
            raise ins.error(f"operand {name} may not be negated: it is no predicate that is read")
    elif isinstance(operand, syntax.Symbol):
        _check_name(ins, name, wanted, operand)


def check_vector_kind(
    ins: Instruction, name: str, wanted: str, declared: str, vector: syntax.Vector
) -> None:
    """Check a vector operand; `declared` is the type of its registers together ("": has none).

    Raises:
        PtxError: a vector of one where a scalar is needed; names; integers among floats.
    """
    mnemonic = ins.entry.form.mnemonic
    is_scalar = mnemonic not in _WITH_VECTORS and name not in _ONE.get(mnemonic, ())
    if len(vector.items) == 1 and is_scalar:
        raise ins.error(f"operand {name} must be a scalar, without braces")
    if all(isinstance(item, syntax.Sink) for item in vector.items):
        raise ins.error(f"operand {name} must have an element that is not `_`")
    is_fragment = mnemonic in ("mma", "wmma")
    for item in vector.items:
        if isinstance(item, _NO_ELEMENT) or (is_fragment and _is_special(item)):
            raise ins.error(f"operand {name} has an element that is no register, constant or `_`")
    element = declared or wanted
    if declared not in ("", "f32", "f64") or (not declared and mnemonic == "wgmma"):
        return
    for item in vector.items:
        if not isinstance(item, syntax.Immediate):
            continue
        if item.bits is None and isinstance(item.value, int):
            # the vector of integers alone is one of .s32, which no fragment of 32 bits takes
            is_refused = is_fragment and element == "b32"
            _check_constant(ins, name, "tf32" if is_refused else element, item)
        elif is_fragment and not declared and element in ("f16x2", "bf16x2", "tf32"):
            _check_constant(ins, name, element, item)


_NO_ELEMENT = syntax.Symbol | syntax.Negated | syntax.Vector
# whose operands may be vectors of one
_WITH_VECTORS = ("mma", "wmma", "wgmma", "ldmatrix", "stmatrix", "tcgen05", "cp", "prefetch",
                 "clusterlaunchcontrol", "tensormap")  # fmt: skip


def _is_special(operand: syntax.Operand) -> bool:
    return isinstance(operand, syntax.SpecialRegister)


def _check_constant(ins: Instruction, name: str, wanted: str, constant: syntax.Immediate) -> None:
    """Check that a constant agrees with the type of its operand."""
    value = constant.value
    if constant.bits_type == "f32":
        taken, what = _TAKES_SINGLE, f"the .f32 {value}"
    elif constant.bits is not None or isinstance(value, float):
        taken, what = _TAKES_DECIMAL, f"the float literal {value}"
    else:
        taken, what = _TAKES_INTEGER, f"the integer {value}"
    if wanted in taken:
        limits = _RANGES.get((ins.entry.form.mnemonic, name))
        if limits is not None and not limits[0] <= value <= limits[1]:
            raise ins.error(f"operand {name} is {value}; it must lie in {limits[0]}..{limits[1]}")
        return
    if wanted not in _TAKES_SOME:
        remedy = "move its bits into a register first"
    elif wanted in ("f32", "f64"):
        prefix = "0f" if wanted == "f32" else "0d"
        remedy = f"write {value}.0, or {prefix} and its bits in hexadecimal"
    else:
        remedy = "write its bits as an integer"
    raise ins.error(f"operand {name} is {what} where .{wanted} is needed: {remedy}")


# constants in ranges; of others the low bits count
_RANGES = {("bfe", "b"): (0, 255), ("bfe", "c"): (0, 255), ("bfi", "c"): (0, 255),
           ("bfi", "d"): (0, 255), ("bar", "a"): (0, 15), ("barrier", "a"): (0, 15)}  # fmt: skip


def _check_special(ins: Instruction, wanted: str, special: str) -> None:
    """Check that a special register is read by a mov of its size, or a cvt of integers."""
    mnemonic, *qualifiers = ins.opcode.split(".")
    first, _, component = special.partition(".")
    if first in OPAQUE_REGISTERS:
        raise UnsupportedForm(
            f"`{ins.text}`: the special register {first} is not implemented: what it holds is the "
            "driver's, or a performance counter",
            ins.line,
            ins.opcode,
        )
    if component not in ("x", "y", "z", "w") if first in _VECTORS else component:
        has = "a component x, y, z or w, such as .x" if first in _VECTORS else "no component"
        if component:
            raise ins.error(f"{special}: the special register {first} has {has}")
    if first in _VECTORS and not component and mnemonic == "mov" and "v4" in qualifiers:
        component = "x"
    if first in _VECTORS and not component:
        raise ins.error(f"{special} is a vector: name a component of it, such as {special}.x")
    if first == "%is_explicit_cluster":
        allowed: Collection[str] = ("pred",)
    elif first in _WIDE:
        allowed = ("b64", "u64", "s64")
    elif first == "%gridid":
        allowed = ("b64", "u64", "s64", "b32", "u32", "s32")
    elif first in _COORDINATES:
        allowed = ("b32", "u32", "s32", "b16", "u16", "s16")
    else:
        allowed = ("b32", "u32", "s32")
    if mnemonic == "mov" and wanted in allowed:
        return
    is_integral = all(name in _INTEGERS for name in qualifiers[-2:]) and "pack" not in qualifiers
    fits = first in _WIDE or first == "%gridid" or wanted[1:] != "64"
    if mnemonic == "cvt" and is_integral and fits and "pred" not in allowed:
        return
    types = ", ".join(f".{name}" for name in allowed)
    raise ins.error(
        f"the special register {special} may not stand here: move it into a register first "
        f"(mov of {types})"
    )


# --- addresses ------------------------------------------------------------------------------------


def _check_name(ins: Instruction, name: str, wanted: str, symbol: syntax.Symbol) -> None:
    """Check a variable's name where a value is needed."""
    mnemonic, *qualifiers = ins.opcode.split(".")
    is_plain = symbol.offset and not symbol.is_element
    is_integer = is_plain and wanted in _TAKES_INTEGER | {""}  # ptxas takes it for a constant
    if (mnemonic not in _NAMES and not is_integer) or (mnemonic == "cvta" and "to" in qualifiers):
        raise ins.error(
            f"operand {name} is the name {_written(symbol)}: move its address into a register first"
        )
    if mnemonic == "mov" and wanted not in _INTEGERS:
        raise ins.error(f"the address {_written(symbol)} is an integer where .{wanted} is needed")
    own = _space_of(ins, symbol)
    if mnemonic == "cvta" and own:
        spaces = _spaces(qualifiers)
        if spaces and own not in (spaces[0], _BY_CALLS.get(spaces[0])):
            raise ins.error(f"{_written(symbol)} is a .{own} variable, not a .{spaces[0]} one")
    elif mnemonic in ("mapa", "getctarank") and own not in ("", "shared"):
        raise ins.error(f"{_written(symbol)} is a .{own} variable, not a .shared one")


_SPACES = ("global", "shared", "local", "const", "param")
# parameters of calls, and of the functions called, live in local memory
_BY_CALLS = {"param": "local"}
# operands in the state space that the opcode names first, second
_FIRST = {"ld": "a", "ldu": "a", "st": "a", "atom": "a", "red": "a", "ldmatrix": "p",
          "stmatrix": "p", "mbarrier": "addr", "prefetch": "a", "applypriority": "a",
          "discard": "a", "wmma": "p", "cp": ("d", "dst")}  # fmt: skip
_SECOND = {"cp": ("a", "src")}


def _spaces(qualifiers: Collection[str]) -> list[str]:
    heads = [name.partition("::")[0] for name in qualifiers]
    return [head for head in heads if head in _SPACES]


def _written(symbol: syntax.Symbol) -> str:
    """Return the name as the text has it, without its scope."""
    return symbol.name.rpartition(":")[2]


def _space_of(ins: Instruction, symbol: syntax.Symbol) -> str:
    return ins.program.variables.get(symbol.name, ("", 0))[0]


def check_state_space(ins: Instruction, name: str, memory: syntax.Memory) -> None:
    """Check that the variable or constant of an address lies in the instruction's state space.

    Raises:
        PtxError: it lies in another one.
    """
    mnemonic, *qualifiers = ins.opcode.split(".")
    base = memory.base
    if isinstance(base, syntax.Immediate) and not isinstance(base.value, int):
        raise ins.error("an address must be an integer")
    if mnemonic in ("tcgen05", "fence") or "tensormap" in qualifiers:
        return
    spaces = _spaces(qualifiers)
    if isinstance(base, syntax.Immediate):
        if spaces[:1] != ["local"]:
            raise ins.error("a constant may be an address of .local alone: put it in a register")
        return
    own = _space_of(ins, base) if isinstance(base, syntax.Symbol) else ""
    if not own or not isinstance(base, syntax.Symbol):
        return
    if name == "mbar":
        wanted: Collection[str] = ("shared",)
    elif name in _SECOND.get(mnemonic, ()) and len(spaces) > 1:
        wanted = (spaces[1],)
    elif name not in _FIRST.get(mnemonic, ()):
        return
    elif not spaces:
        wanted = ("shared",) if mnemonic == "mbarrier" else ("global", "shared", "local")
    else:
        wanted = (spaces[0], _BY_CALLS.get(spaces[0], ""))
        if mnemonic == "st" and spaces[0] == "param":
            wanted = ("local",)
    if own not in wanted:
        allowed = " or ".join(f".{space}" for space in wanted if space)
        raise ins.error(
            f"{_written(base)} is {_a_variable(own)}, the address must be of {allowed}; name the "
            "variable's space in the opcode"
        )


def _a_variable(space: str) -> str:
    return "a parameter of the kernel" if space == "param" else f"a .{space} variable"
