"""One decoded instruction, and the accessors its decoder builds its action from.

A decoder (see `isa/registry.py`) gets an `Instruction` once per static instruction and returns
either `Inline` (Python expressions pasted into the compiled block) or an action
`run(warp, mask) -> Wait | None` called each time a warp gets there.
Lives here: operand access. Not here: control flow and block compilation (`machine/blocks.py`).
Invariant: 32 lanes always; `mask is ALL_LANES` exactly when every lane takes part. Arrays read
from registers are never written to: a write stores a new array.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.errors import PtxError
from fovea.emulator.isa.forms import Entry, Modifiers
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES, is_signed, numpy_dtype, size_bytes

Array = NDArray[Any]
# what a decoder may return as the action of an instruction: `run(warp, mask)`
Action = Callable[[Any, Array], Any]
# functions of 32-lane operands, by their number
LaneFunction = (
    Callable[[Any], Any]
    | Callable[[Any, Any], Any]
    | Callable[[Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any], Any]
)
Read = Callable[[Any], Array]
Write = Callable[[Any, Array, Array], None]

ALL_LANES = np.ones(LANES, np.bool_)
ALL_LANES.setflags(write=False)
ALL_BYTES = ALL_LANES.tobytes()
NO_BYTES = bytes(LANES)


def merge(mask: Array, new: Array, old: Any) -> Array:
    """Return `new` in the lanes of `mask` and `old` elsewhere (junk where old is unreadable)."""
    if old.__class__ is not np.ndarray:
        old = junk(new.dtype)
    return np.where(mask, new, old)


_JUNK: dict[np.dtype, Array] = {}


def junk(dtype: np.dtype) -> Array:
    """Return what a lane holds that a conditional write has left out: a tell-tale pattern.

    Compilers read such lanes (and drop the result), so it is no fault.
    """
    found = _JUNK.get(dtype)
    if found is None:
        if dtype.kind == "b":
            found = np.zeros(LANES, np.bool_)
        else:
            found = np.frombuffer(b"\xa5" * dtype.itemsize * LANES, dtype)
        _JUNK[dtype] = found
    return found


def broadcast(value: int | float, ptx_type: str) -> Array:
    """Return 32 lanes of a constant, wrapped to the width of `ptx_type`."""
    dtype = numpy_dtype(ptx_type)
    if dtype.kind == "u":
        value = int(value) & ((1 << (8 * dtype.itemsize)) - 1)
    elif dtype.kind == "i":
        bits = 8 * dtype.itemsize
        value = ((int(value) + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))
    with np.errstate(over="ignore"):  # 1e40 is infinity as .f32, for ptxas too
        lanes = np.full(LANES, value, dtype)
    lanes.setflags(write=False)
    return lanes


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a register lives: index in `Warp.registers`, PTX type, dtype it is stored as."""

    index: int
    type: str
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Inline:
    """Source pasted into a block: `setup` lines, then `slot = expression` for each result."""

    results: tuple[tuple[int, str], ...]
    setup: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Jump:
    """What decoders of control instructions return: the block compiler writes the branch."""

    kind: str


Decoded = Inline | Jump | Action


@dataclass(slots=True, kw_only=True)
class Program:
    """What decoders share within one kernel: registers, variables, names bound for blocks."""

    kernel: str
    target: str
    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])
    # name -> (state space, offset or address)
    variables: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    bound: dict[str, Any] = field(default_factory=dict[str, Any])
    constants: dict[tuple[Any, str], str] = field(default_factory=dict[tuple[Any, str], str])
    # registers that wgmma writes, and where `mov` takes what it reads: accumulators may be copied
    # while in flight
    accumulators: set[int] = field(default_factory=set[int])
    moves: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    # registers (by uid) whose values reach a guard, a branch, an address or memory
    decisive: frozenset[str] = frozenset()
    _copies: tuple[int, ...] | None = None

    @property
    def accumulator_copies(self) -> tuple[int, ...]:
        """The registers that some chain of `mov` may fill with an accumulator (ask at run time)."""
        if self._copies is None:
            reached: set[int] = set()
            waiting = list(self.accumulators)
            while waiting:
                new = self.moves.get(waiting.pop(), set[int]()) - reached
                reached |= new
                waiting += new
            self._copies = tuple(sorted(reached))
        return self._copies

    def bind(self, value: Any, hint: str = "f") -> str:
        """Return a name under which compiled blocks see `value`."""
        key = (id(value), hint)
        if key not in self.constants:
            name = f"{hint}{len(self.bound)}"
            self.bound[name] = value
            self.constants[key] = name
        return self.constants[key]

    def bind_function(self, function: LaneFunction, hint: str = "f") -> str:
        """Return a name under which compiled blocks see a function of lanes."""
        return self.bind(function, hint)

    def constant(self, value: int | float, ptx_type: str) -> str:
        """Return a name of 32 lanes of a constant."""
        key = (repr(value), ptx_type)
        if key not in self.constants:
            name = f"k{len(self.bound)}"
            self.bound[name] = broadcast(value, ptx_type)
            self.constants[key] = name
        return self.constants[key]


class Instruction:
    """One static instruction with bound qualifiers and operands."""

    __slots__ = ("entry", "guard", "index", "line", "mods", "opcode", "operands", "program", "text",
                 "used_bytes")  # fmt: skip

    def __init__(
        self,
        statement: syntax.Statement,
        program: Program,
        found: tuple[Entry, Modifiers, tuple[str, ...], str],
        index: int,
    ):
        self.entry, self.mods, names, self.opcode = found
        self.program = program
        self.line = statement.line
        self.text = statement.text
        self.guard = statement.guard
        self.used_bytes = statement.used_bytes
        self.index = index
        self.operands = _bind_operands(names, statement)

    # --- what the decoder asks at decode time -----------------------------------------------

    def __getitem__(self, name: str) -> str:
        """Return the value of a named qualifier ("" if it is optional and absent)."""
        return str(self.mods.get(name, ""))

    def has(self, name: str) -> bool:
        """Return whether a qualifier or an optional operand is present."""
        return bool(self.mods.get(name)) or name in self.operands

    def error(self, message: str) -> PtxError:
        """Return (to raise) an error at this instruction's line."""
        return PtxError(f"`{self.text}`: {message}", self.line)

    def immediate(self, name: str) -> int:
        """Return a constant integer operand."""
        operand = self.operands[name]
        if not isinstance(operand, syntax.Immediate) or not isinstance(operand.value, int):
            raise self.error(f"operand {name} must be an integer constant")
        return operand.value

    def natural(self, name: str) -> int:
        """Return a constant integer operand that must not be negative."""
        value = self.immediate(name)
        if value < 0:
            raise self.error(f"operand {name} is {value}; it must not be negative")
        return value

    def items(self, name: str) -> tuple[syntax.Operand, ...]:
        """Return the elements of a vector operand; a scalar counts as a vector of one."""
        operand = self.operands[name]
        return operand.items if isinstance(operand, syntax.Vector) else (operand,)

    def slot(self, operand: syntax.Register) -> Slot:
        """Return where a register lives."""
        return self.program.slots[operand.uid]

    def type_of(self, name: str) -> str:
        """Return the declared PTX type of a register operand ("" for anything else)."""
        operand = self.operands[name]
        if isinstance(operand, syntax.Memory):
            operand = operand.base
        return operand.type if isinstance(operand, syntax.Register) else ""

    # --- run-time accessors ---------------------------------------------------------------

    def read(self, name: str, ptx_type: str) -> Read:
        """Return `read(warp) -> 32 lanes` of a scalar operand as `ptx_type`."""
        return self.read_operand(self.operands[name], ptx_type)

    def read_vector(self, name: str, ptx_type: str) -> Callable[[Any], list[Array]]:
        """Return `read(warp) -> list of 32-lane arrays` of a vector operand."""
        reads = [self.read_operand(item, ptx_type) for item in self.items(name)]
        return lambda w: [read(w) for read in reads]

    def read_operand(self, operand: syntax.Operand, ptx_type: str) -> Read:
        """Return an accessor of one operand of the tree (register, constant, special, symbol)."""
        operand = _single(operand)
        if isinstance(operand, syntax.Register):
            return self._read_register(operand, ptx_type)
        if isinstance(operand, syntax.Immediate):
            lanes = broadcast(_immediate_value(operand, ptx_type), ptx_type)
            return lambda w: lanes
        if isinstance(operand, syntax.SpecialRegister):
            name, dtype = operand.name, numpy_dtype(ptx_type)
            return lambda w: w.special(name).astype(dtype)
        if isinstance(operand, syntax.Symbol):
            symbol, offset = operand.name, operand.offset
            space, base = self.variable(symbol)
            dtype = numpy_dtype(ptx_type)
            if space == "shared":
                return lambda w: np.full(LANES, w.cta.shared_base + base + offset, dtype)
            lanes = np.full(LANES, base + offset, dtype)
            return lambda w: lanes
        if isinstance(operand, syntax.Negated):
            index = self.slot(operand.item).index
            return lambda w: ~w.registers[index]
        raise self.error(f"operand {operand} cannot be read as .{ptx_type}")

    def _read_register(self, operand: syntax.Register, ptx_type: str) -> Read:
        slot, dtype = self.slot(operand), numpy_dtype(ptx_type)
        index = slot.index
        if slot.dtype == dtype:
            return lambda w: w.registers[index]
        if slot.dtype.itemsize == dtype.itemsize:
            return lambda w: w.registers[index].view(dtype)
        if slot.dtype.itemsize > dtype.itemsize and slot.dtype.kind in "uif":
            unsigned, bits = np.dtype(f"u{dtype.itemsize}"), np.dtype(f"u{slot.dtype.itemsize}")
            return lambda w: w.registers[index].view(bits).astype(unsigned).view(dtype)
        raise self.error(
            f"register {operand.name} is .{slot.type}; the instruction reads .{ptx_type}"
        )

    def write(self, name: str, ptx_type: str) -> Write:
        """Return `write(warp, mask, lanes)` of a scalar destination; lanes have `ptx_type`."""
        return self.write_operand(self.operands[name], ptx_type)

    def write_vector(
        self, name: str, ptx_type: str
    ) -> Callable[[Any, Array, Iterable[Array]], None]:
        """Return `write(warp, mask, sequence of 32-lane arrays)` of a vector destination."""
        writes = [self.write_operand(item, ptx_type) for item in self.items(name)]

        def write_all(w: Any, mask: Array, values: Iterable[Array]) -> None:
            for write, value in zip(writes, values, strict=True):
                write(w, mask, value)

        return write_all

    def write_operand(self, operand: syntax.Operand, ptx_type: str) -> Write:
        """Return a writer of one destination operand; narrower values are extended."""
        operand = _single(operand)
        if isinstance(operand, syntax.Sink):
            return lambda w, mask, value: None
        if not isinstance(operand, syntax.Register):
            raise self.error(f"operand {operand} is not a register")
        slot, dtype = self.slot(operand), numpy_dtype(ptx_type)
        index, stored = slot.index, slot.dtype
        if stored.itemsize < dtype.itemsize:
            raise self.error(
                f"register {operand.name} is .{slot.type}; the instruction writes .{ptx_type}"
            )
        if stored.itemsize > dtype.itemsize:
            wide = np.dtype(("i" if is_signed(ptx_type) else "u") + str(stored.itemsize))

            def write_wide(w: Any, mask: Array, value: Array) -> None:
                value = value.view(dtype).astype(wide).view(stored)
                registers = w.registers
                registers[index] = (
                    value if mask is ALL_LANES else merge(mask, value, registers[index])
                )

            return write_wide

        def write(w: Any, mask: Array, value: Array) -> None:
            if value.dtype != stored:
                value = value.view(stored)
            registers = w.registers
            registers[index] = value if mask is ALL_LANES else merge(mask, value, registers[index])

        return write

    def uniform(self, name: str, ptx_type: str) -> Callable[[Any, Array], int]:
        """Return `read(warp, mask) -> int`: the value of the first active lane."""
        read = self.read(name, ptx_type)
        return lambda w, mask: int(read(w)[0 if mask is ALL_LANES else int(mask.argmax())])

    def address(self, name: str) -> Read:
        """Return `read(warp) -> uint64 lanes`: the address of a memory operand, offset added."""
        operand = self.operands[name]
        if not isinstance(operand, syntax.Memory):
            raise self.error(f"operand {name} must be an address in brackets")
        base = operand.base
        if isinstance(base, syntax.Register):
            ptx_type = "u64" if size_bytes(self.slot(base).type) == 8 else "u32"
        else:
            ptx_type = "u64"
        read = self.read_operand(base, ptx_type)
        if ptx_type == "u64" and not operand.offset:
            return read
        offset = broadcast(operand.offset, "u64")
        return lambda w: read(w).astype(np.uint64) + offset

    def variable(self, name: str) -> tuple[str, int]:
        """Return (state space, address) of a variable."""
        if name not in self.program.variables:
            written = name.rpartition(":")[2]
            raise self.error(
                f"{written} is no variable (addresses of functions are not implemented)"
            )
        return self.program.variables[name]

    # --- inline source --------------------------------------------------------------------

    def src(self, name: str, ptx_type: str) -> str:
        """Return a Python expression of a source operand, for `Inline`."""
        return self.src_operand(self.operands[name], ptx_type)

    def src_operand(self, operand: syntax.Operand, ptx_type: str) -> str:
        """Return a Python expression of one operand of the tree."""
        if isinstance(operand, syntax.Register):
            slot, dtype = self.slot(operand), numpy_dtype(ptx_type)
            if slot.dtype == dtype:
                return f"R[{slot.index}]"
            if slot.dtype.itemsize == dtype.itemsize:
                return f"R[{slot.index}].view({self.program.bind(dtype, 'dt')})"
        elif isinstance(operand, syntax.Immediate):
            return self.program.constant(_immediate_value(operand, ptx_type), ptx_type)
        elif isinstance(operand, syntax.Negated):
            return f"(~R[{self.slot(operand.item).index}])"
        return f"{self.program.bind(self.read_operand(operand, ptx_type), 'rd')}(w)"

    def assign(self, name: str, expression: str, ptx_type: str, *setup: str) -> Inline:
        """Return `Inline` that stores an expression of `ptx_type` in a destination."""
        return Inline(self.result(name, expression, ptx_type), setup)

    def result(self, name: str, expression: str, ptx_type: str) -> tuple[tuple[int, str], ...]:
        """Return the (slot, expression) pairs of one destination: none for a sink."""
        operand = self.operands.get(name)
        if operand is None or isinstance(operand, syntax.Sink):
            return ()
        if not isinstance(operand, syntax.Register):
            raise self.error(f"operand {name} is not a register")
        slot, dtype = self.slot(operand), numpy_dtype(ptx_type)
        if slot.dtype.itemsize != dtype.itemsize or (slot.type == "pred") != (ptx_type == "pred"):
            raise self.error(
                f"register {operand.name} is .{slot.type}; the instruction writes .{ptx_type}"
            )
        if slot.dtype != dtype:
            expression = f"({expression}).view({self.program.bind(slot.dtype, 'dt')})"
        return ((slot.index, expression),)


def _single(operand: syntax.Operand) -> syntax.Operand:
    """Return the element of a vector of one: compilers write `ld.global.b8 {%rs1}, [...]`."""
    if isinstance(operand, syntax.Vector) and len(operand.items) == 1:
        return operand.items[0]
    return operand


def _immediate_value(operand: syntax.Immediate, ptx_type: str) -> int | float:
    """Return the value an immediate has when it is read as `ptx_type`."""
    dtype = numpy_dtype(ptx_type)
    if operand.bits is not None:
        if dtype.kind == "f" and operand.bits_type == ptx_type:
            return operand.value
        if dtype.kind == "f":
            return float(operand.value)
        return operand.bits
    if dtype.kind == "b":
        return bool(operand.value)
    if dtype.kind in "ui" and isinstance(operand.value, float):
        if dtype.itemsize == 8:  # a float literal is the bits of an .f64
            return int.from_bytes(struct.pack("<d", operand.value), "little")
        raise PtxError(f"float literal {operand.value} where .{ptx_type} is needed")
    return operand.value


def _bind_operands(
    names: tuple[str, ...], statement: syntax.Statement
) -> dict[str, syntax.Operand]:
    bound: dict[str, syntax.Operand] = {}
    for name, operand in zip(names, statement.operands, strict=True):
        if name.startswith("["):
            parts = [part.strip() for part in name[1:-1].split(",")]
            if isinstance(operand, syntax.Symbol) and operand.is_element:
                operand = syntax.Memory(syntax.Symbol(operand.name), operand.offset)
            if not isinstance(operand, syntax.Memory):
                raise PtxError(
                    f"`{statement.text}`: operand {name} must be in brackets", statement.line
                )
            if len(parts) != 1 + len(operand.rest):
                raise PtxError(
                    f"`{statement.text}`: operand {name} has {1 + len(operand.rest)} parts",
                    statement.line,
                )
            bound[parts[0]] = operand
            bound.update(zip(parts[1:], operand.rest))
        elif "|" in name:
            first, second = name.split("|")
            if isinstance(operand, syntax.Pair):
                bound[first], bound[second] = operand.first, operand.second
            else:
                bound[first] = operand
        else:
            if isinstance(operand, syntax.Memory | syntax.Pair):
                raise PtxError(
                    f"`{statement.text}`: operand {name} cannot be {operand}", statement.line
                )
            bound[name] = operand
    return bound
