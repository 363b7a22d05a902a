"""A kernel ready to run: decoded instructions, and segments compiled to Python functions.

Each segment becomes two functions `(w, R, M) -> next segment`: one for warps with all 32 lanes
active, one for any mask `M`. They are made when first needed.
Lives here: decoding and code generation. Not here: what instructions do (`isa/`) or who runs
(`schedule.py`). Invariant: generated line `n` belongs to the instruction `Segment.lines[n]`, so
that any exception finds its PTX line.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.emulator.counters import instruction_costs
from fovea.emulator.errors import PtxError
from fovea.emulator.isa import find
from fovea.emulator.isa.instruction import (
    ALL_BYTES,
    ALL_LANES,
    NO_BYTES,
    Array,
    Inline,
    Instruction,
    Jump,
    Program,
    Slot,
    junk,
    merge,
)
from fovea.emulator.isa.operand_types import check_operand_types
from fovea.emulator.machine.calls import Signature, plan_call
from fovea.emulator.machine.flow import EXIT, JUMPS, SWITCH_KINDS, Piece, cut
from fovea.emulator.machine.registers import registers_of, stored_dtypes
from fovea.emulator.machine.uses import decisive_registers
from fovea.emulator.machine.warp import UNINITIALISED, Wait
from fovea.emulator.ptx import syntax

Compiled = Callable[[Any, list[Any], Array], int]


@dataclass(slots=True)
class Segment:
    """One compiled segment; `full` and `masked` are None until first run.

    Attributes:
        following: the segment after it in the text, or EXIT.
        origin: the segment of which it is the tail, where lanes went on that waited in the middle.
    """

    number: int
    following: int
    origin: int
    piece: Piece
    instructions: list[Instruction]
    full: Compiled | None = None
    masked: Compiled | None = None
    lines: dict[str, dict[int, Instruction]] = field(
        default_factory=dict[str, dict[int, Instruction]]
    )


def leave_undefined(w: Any, slots: tuple[int, ...]) -> None:
    """Give registers a junk value that a skipped conditional instruction would have written."""
    for slot in slots:
        if w.registers[slot] is UNINITIALISED:
            w.registers[slot] = junk(w.slot_dtypes[slot])


def narrow(mask: Array) -> Array | None:
    """Return a mask in canonical form: ALL_LANES if full, None if empty."""
    packed = mask.tobytes()
    if packed == NO_BYTES:
        return None
    return ALL_LANES if packed == ALL_BYTES else mask


_TENSOR_LOAD, _TENSOR_LOAD_WAIT = "tcgen05.ld.", "tcgen05.wait::ld"
# a kernel with fewer loads and no wait more likely misses one than leaves all to ptxas, unless its
# name says that CuTe-DSL has made it: that compiler emits a wait only where the source has one
_LOADS_WITHOUT_WAIT = 8
_CUTE_KERNEL = "kernel_cutlass_"


def _waits_for_loads(function: syntax.Function, rule: str) -> bool:
    """Return whether tensor-memory loads wait for themselves; see `Options.tensor_load_wait`."""
    if rule != "auto":
        return rule == "implicit"
    opcodes = [item.opcode for item in function.body if isinstance(item, syntax.Statement)]
    loads = sum(opcode.startswith(_TENSOR_LOAD) for opcode in opcodes)
    waits = sum(opcode.startswith(_TENSOR_LOAD_WAIT) for opcode in opcodes)
    is_trusted = function.name.startswith(_CUTE_KERNEL) or loads >= _LOADS_WITHOUT_WAIT
    return is_trusted and not waits


def _launch_registers(directives: Mapping[str, tuple[int, ...]]) -> int:
    """Return the registers of a thread at launch that setmaxnreg starts from (0: unknown).

    ptxas gives such a kernel as many as `.maxnreg` says, else as many as its threads and
    `.minnctapersm` leave of the 65536 of an SM; without either it ignores setmaxnreg.
    Source: PTX ISA 9.7.19.5 and what ptxas reports (384 threads: 168); evidence: inferred.
    """
    limit = directives.get("maxnreg")
    if limit:
        return limit[0]
    threads = directives.get("reqntid") or directives.get("maxntid")
    if not threads:
        return 0
    ctas = max((directives.get("minnctapersm") or (1,))[0], 1)
    warps = -(-math.prod(threads) // 32)
    if not warps:
        return 0
    return min(65536 // (32 * warps * ctas) // 8 * 8, 256)


def wait_for_tensor_loads(w: Any) -> Wait | None:
    """Return a wait for the warp's loads from tensor memory, as `tcgen05.wait::ld` does."""
    loads = list(w.queue("tcgen05.ld").open)
    if not loads:
        return None

    def resume() -> None:
        w.queue("tcgen05.ld").open.clear()
        w.observe(loads)

    return Wait(
        lambda: all(load.is_complete for load in loads),
        lambda: "its loads from tensor memory",
        resume,
        name="tcgen05.ld",
    )


class KernelProgram:
    """A kernel and the device functions it may call, as one list of segments."""

    def __init__(
        self,
        function: syntax.Function,
        target: str,
        variables: dict[str, tuple[str, int]],
        static_bytes: int,
        local_bytes: int,
        tensor_load_wait: str = "auto",
        signatures: Mapping[str, Signature] | None = None,
    ):
        self.kernel = function.name
        self.static_bytes = static_bytes
        self.local_bytes = local_bytes
        self.signatures = signatures or {}
        self.decoding = Program(kernel=function.name, target=target, variables=variables)
        self.decoding.bound.update(
            np=np, merge=merge, narrow=narrow, A=ALL_LANES, ALLB=ALL_BYTES, NONEB=NO_BYTES
        )
        directives = function.directives
        self.launch_registers = _launch_registers(directives)
        self.decoding.decisive = decisive_registers(function.body)
        self._allocate_slots(function.body)
        instructions = self._decode(function.body)
        # CuTe-DSL leaves some orders of registers to ptxas: see `isa/tcgen05_memory.py` (loads that
        # nothing waited for) and `isa/warpgroup.py` (constants moved behind a wgmma.fence)
        self.is_cute = function.name.startswith(_CUTE_KERNEL)
        self._waits_for_loads = _waits_for_loads(function, tensor_load_wait)
        self.fences_tensor = any(
            isinstance(item, syntax.Statement) and item.opcode.startswith("tcgen05.fence")
            for item in function.body
        )
        switches = [
            instruction is not None
            and (
                instruction.entry.kind in SWITCH_KINDS
                or instruction.entry.form.mnemonic in JUMPS
                or self._has_implicit_wait(instruction)
            )
            for instruction in instructions
        ]
        pieces, self.labels = cut(function.body, switches, function.branch_targets)
        self._branch_targets = function.branch_targets
        self.segments = [
            Segment(
                n,
                n + 1 if n + 1 < len(pieces) else EXIT,
                n,
                piece,
                [i for i in instructions[piece.start : piece.end] if i is not None],
            )
            for n, piece in enumerate(pieces)
        ]
        self._tails: dict[tuple[int, int], int] = {}
        self._actions: dict[int, Any] = {}
        self._costs: dict[int, list[tuple[str, int, int]]] = {}

    @property
    def num_slots(self) -> int:
        """Number of registers of a thread."""
        return len(self.slot_dtypes)

    def dynamic_bytes(self, shared_bytes: int) -> int:
        """Return how many of `shared_bytes` are dynamic."""
        return shared_bytes - self.static_bytes

    def segment_costs(self, number: int) -> list[tuple[str, int, int]]:
        """Return (counter, amount per warp, amount per lane) of one run of a segment."""
        costs = self._costs.get(number)
        if costs is None:
            segment = self.segments[number]
            # a tail was counted with the whole segment
            instructions = segment.instructions if segment.origin == number else []
            costs = self._costs[number] = [
                cost for instruction in instructions for cost in instruction_costs(instruction)
            ]
        return costs

    def function(self, segment: Segment, is_full: bool) -> Compiled:
        """Return the compiled form of a segment, compiling it now if need be."""
        compiled = segment.full if is_full else segment.masked
        if compiled is None:
            compiled = self._compile(segment, is_full)
            if is_full:
                segment.full = compiled
            else:
                segment.masked = compiled
        return compiled

    def tail(self, segment: Segment, start: int) -> int:
        """Return the segment of the instructions of a segment from number `start` on."""
        rest = segment.instructions[start:]
        key = (segment.origin, len(rest))
        number = self._tails.get(key)
        if number is None:
            number = self._tails[key] = len(self.segments)
            self.segments.append(
                Segment(number, segment.following, segment.origin, segment.piece, rest)
            )
        return number

    # --- decoding ---------------------------------------------------------------------------

    def _allocate_slots(self, body: list[syntax.Statement | syntax.LabelMark]) -> None:
        dtypes = stored_dtypes(body)
        slots = self.decoding.slots
        for uid, (ptx_type, dtype) in dtypes.items():
            slots[uid] = Slot(len(slots), ptx_type, dtype)
        self.slot_dtypes = [slot.dtype for slot in slots.values()]
        self.slot_names = [uid.partition(":")[2] for uid in slots]

    def _decode(self, body: list[syntax.Statement | syntax.LabelMark]) -> list[Instruction | None]:
        decoded: list[Instruction | None] = []
        for position, item in enumerate(body):
            if isinstance(item, syntax.LabelMark):
                decoded.append(None)
                continue
            found = find(item.opcode, len(item.operands), item.line, self.decoding.target)
            instruction = Instruction(item, self.decoding, found, position)
            check_operand_types(instruction)
            decoded.append(instruction)
        return decoded

    def action(self, instruction: Instruction) -> Any:
        """Return what the decoder of an instruction made (Inline, Jump or a function)."""
        action = self._actions.get(instruction.index)
        if action is None:
            try:
                action = instruction.entry.decode(instruction)
            except PtxError as error:
                if error.line:
                    raise
                raise instruction.error(str(error)) from None
            except Exception as error:
                raise PtxError(
                    f"cannot decode `{instruction.text}`: {type(error).__name__}: {error}",
                    instruction.line,
                ) from error
            self._actions[instruction.index] = action
        return action

    def decode_all(self) -> None:
        """Decode every instruction, so that unsupported operands show before the first step."""
        for segment in self.segments:
            for instruction in segment.instructions:
                self.action(instruction)

    # --- code -------------------------------------------------------------------------------

    def _compile(self, segment: Segment, is_full: bool) -> Compiled:
        writer = _Writer(is_full)
        following = segment.following
        is_closed = False
        for instruction in segment.instructions:
            writer.instruction = instruction
            action = self.action(instruction)
            if isinstance(action, Jump):
                is_closed = self._write_jump(writer, segment, instruction, action, following)
            elif isinstance(action, Inline):
                self._write_inline(writer, instruction, action)
            else:
                self._write_call(writer, instruction, action)
        if not is_closed:
            writer.line("return w.leave(M, -1)" if following == EXIT else f"return {following}")
        variant = "full" if is_full else "masked"
        name = f"<segment {segment.number} {variant}>"
        segment.lines[variant] = writer.lines
        source = "def run(w, R, M):\n" + "\n".join(writer.source)
        namespace = self.decoding.bound
        exec(compile(source, name, "exec"), namespace)
        return namespace.pop("run")

    def _guard(self, writer: "_Writer", instruction: Instruction) -> str:
        """Write the guard of an instruction; return the name of its mask."""
        guard = instruction.guard
        if guard is None:
            return writer.mask
        sign = "~" if guard.is_negated else ""
        value = f"{sign}R[{self.decoding.slots[guard.register.uid].index}]"
        writer.line(f"m = narrow({value}{'' if writer.is_full else ' & M'})")
        return "m"

    def _write_inline(self, writer: "_Writer", instruction: Instruction, action: Inline) -> None:
        mask = self._guard(writer, instruction)
        indent = ""
        if mask == "m":
            writer.line("if m is not None:")
            indent = "    "
            if not action.results and not action.setup:
                writer.line("    pass")
        for line in action.setup:
            writer.line(indent + line)
        for index, expression in action.results:
            if mask == "A":
                writer.line(f"R[{index}] = {expression}")
            elif mask == "M":
                writer.line(f"R[{index}] = merge(M, {expression}, R[{index}])")
            else:
                writer.line(f"    t = {expression}")
                writer.line(f"    R[{index}] = t if m is A else merge(m, t, R[{index}])")
        if mask == "m":
            self._write_skipped(writer, tuple(index for index, _ in action.results))

    def _write_call(self, writer: "_Writer", instruction: Instruction, action: Any) -> None:
        name = self.decoding.bind(action, "h")
        mask = self._guard(writer, instruction)
        indent = ""
        if mask == "m":
            writer.line("if m is not None:")
            indent = "    "
        if instruction.entry.kind in SWITCH_KINDS:
            writer.line(f"{indent}w.wait = {name}(w, {mask})")
        else:
            writer.line(f"{indent}{name}(w, {mask})")
        if self._has_implicit_wait(instruction):
            wait = self.decoding.bind(wait_for_tensor_loads, "wait")
            writer.line(f"{indent}w.wait = {wait}(w)")
        if mask == "m":
            self._write_skipped(writer, self._destinations(instruction))

    def _write_skipped(self, writer: "_Writer", slots: tuple[int, ...]) -> None:
        if slots:
            name = self.decoding.bind(leave_undefined, "skip")
            writer.line(f"else: {name}(w, {slots})")

    def _destinations(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the registers an action may write: those of a first operand that is no address."""
        first = next(iter(instruction.operands.values()), None)
        if first is None or isinstance(first, syntax.Memory):
            return ()
        slots = self.decoding.slots
        return tuple(slots[register.uid].index for register in registers_of(first))

    def _has_implicit_wait(self, instruction: Instruction) -> bool:
        return self._waits_for_loads and instruction.opcode.startswith(_TENSOR_LOAD)

    def _write_jump(
        self,
        writer: "_Writer",
        segment: Segment,
        instruction: Instruction,
        jump: Jump,
        following: int,
    ) -> bool:
        """Write a control instruction; return whether the segment is closed by it."""
        mask = self._guard(writer, instruction)
        if jump.kind == "bra":
            target = segment.piece.successors[0]
            if mask == "m":
                writer.line(f"if m is None: return {following}")
                writer.line(f"if m is A or m.tobytes() == M.tobytes(): return {target}")
                meet = segment.piece.meet
                writer.line(f"return w.diverge(m, {target}, {following}, {meet})")
            else:
                writer.line(f"return {target}")
            return True
        if jump.kind == "call":
            return self._write_device_call(writer, instruction, mask, following)
        if jump.kind == "brx":
            operand = instruction.operands["tlist"]
            assert isinstance(operand, syntax.Label)
            targets = [self.labels[name] for name in self._branch_targets[operand.name]]
            table = self.decoding.bind(tuple(targets), "targets")
            index = instruction.src("index", "u32")
            if mask == "m":
                writer.line(f"if m is None: return {following}")
            meet = segment.piece.meet
            writer.line(f"return w.branch_to({table}, {index}, {mask}, {following}, {meet})")
            return True
        if mask == "m":
            writer.line("if m is not None:")
            indent = "    "
        else:
            indent = ""
        if jump.kind == "trap":
            writer.line(f"{indent}w.trap({self.decoding.bind(instruction, 'i')})")
            return False
        leave = "leave" if jump.kind == "exit" else "ret"
        writer.line(f"{indent}return w.{leave}({mask}, {following})")
        return mask != "m"

    def _write_device_call(
        self, writer: "_Writer", instruction: Instruction, mask: str, following: int
    ) -> bool:
        plan = plan_call(instruction, self.signatures)
        indent = ""
        if plan.builtin is not None:
            if mask == "m":
                writer.line("if m is not None:")
                indent = "    "
            writer.line(f"{indent}{self.decoding.bind(plan.builtin, 'builtin')}(w, {mask})")
            return False
        if mask == "m":
            writer.line(f"if m is None: return {following}")
        copies = [self.decoding.bind(c, "copies") for c in (plan.arguments, plan.results)]
        target = self.labels[plan.label]
        writer.line(f"return w.call({mask}, {target}, {following}, {copies[0]}, {copies[1]})")
        return True


class _Writer:
    """Source lines of one segment, and the instruction each belongs to."""

    def __init__(self, is_full: bool):
        self.is_full = is_full
        self.mask = "A" if is_full else "M"
        self.source: list[str] = []
        self.lines: dict[int, Instruction] = {}
        self.instruction: Instruction | None = None

    def line(self, text: str) -> None:
        self.source.append("    " + text)
        if self.instruction is not None:
            self.lines[len(self.source) + 1] = self.instruction
