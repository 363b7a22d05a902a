"""Warps: registers, lanes, divergence and waits.

A warp is a list of splits, each a set of lanes at one place of the program. A divergent branch
makes two splits and a reconvergence record at the immediate post-dominator; splits of one warp
run independently, so one may wait while another goes on.
Lives here: that state, and the objects that stand for unreadable registers. Not here: who runs
next (`schedule.py`), lanes that wait for each other at `.sync` instructions (`meeting.py`).
Invariant: the lanes of the splits and the waiting lanes of the records
partition the lanes that have not exited.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fovea.emulator.async_engine import GroupQueue, Operation
from fovea.emulator.clocks import Clock
from fovea.emulator.errors import IllegalOperand, Trap, Where
from fovea.emulator.isa.instruction import ALL_BYTES, ALL_LANES, Array
from fovea.emulator.machine.memory import Segment
from fovea.emulator.machine.unwritten import unwritten_bytes, unwritten_registers
from fovea.emulator.ptx.types import LANES
from fovea.emulator.races import Access

DIVERGED = -2

# (target, source, bytes) within a thread's local memory: parameters of a device function
Copies = tuple[tuple[int, int, int], ...]
# where each call of a device function returns to, and the results it copies then
Calls = tuple[tuple[int, Copies], ...]


class RegisterUnavailable(TypeError):
    """A register was used that holds no value (never written, or still in flight)."""


class Unreadable:
    """Base of the objects that stand in a register slot in place of 32 lanes.

    Any arithmetic on one raises TypeError, so that compiled blocks need no check of their own.
    Copying the reference (`mov`) is legal, as it is on the machine.
    """

    __slots__ = ()
    __array_ufunc__ = None

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise RegisterUnavailable(self.describe())

    def view(self, dtype: Any) -> "Unreadable":
        """Return itself: a move may reinterpret the bits of a register it does not look into."""
        return self

    def describe(self) -> str:
        """Return why the register cannot be read."""
        raise NotImplementedError


class Uninitialised(Unreadable):
    """A register that was never written."""

    __slots__ = ()

    def describe(self) -> str:
        return "was never written"


UNINITIALISED = Uninitialised()


class InFlight(Unreadable):
    """A register an asynchronous operation will write.

    Attributes:
        operation: the operation.
        key: which of its results this is: `operation.results[key]`, 32 lanes of the dtype the
            instruction writes, once the operation is complete.
    """

    __slots__ = ("key", "operation")

    def __init__(self, operation: Operation, key: Any):
        self.operation = operation
        self.key = key

    def describe(self) -> str:
        return f"is still being written by {self.operation.describe()}"


class PackedInFlight(Unreadable):
    """A wider register that `mov` packed from registers, at least one of them in flight.

    Compilers pack results of asynchronous loads before the wait: no data moves, so it is legal.
    """

    __slots__ = ("parts", "whole")

    def __init__(self, whole: np.dtype, parts: list[Any]):
        self.whole = whole
        self.parts = parts

    def describe(self) -> str:
        return next(part for part in self.parts if isinstance(part, Unreadable)).describe()

    def resolve(self, done: set[Operation]) -> Any:
        """Put in what has arrived; return the register once nothing is missing, else itself."""
        for position, part in enumerate(self.parts):
            if part.__class__ is InFlight and part.operation in done:
                self.parts[position] = part.operation.results[part.key]
        if any(isinstance(part, Unreadable) for part in self.parts):
            return self
        size = self.whole.itemsize // len(self.parts)
        return pack_lanes(self.whole, [part.view(f"u{size}") for part in self.parts])


class SplitInFlight(Unreadable):
    """A part of a register in flight, which `mov` has unpacked before the wait."""

    __slots__ = ("count", "dtype", "position", "whole")

    def __init__(self, whole: InFlight, dtype: np.dtype, count: int, position: int):
        self.whole = whole
        self.dtype = dtype
        self.count = count
        self.position = position

    def describe(self) -> str:
        return self.whole.describe()

    def part_of(self, value: Array) -> Array:
        """Return the part, from the value that the whole register has got."""
        return np.ascontiguousarray(
            value.view(self.dtype).reshape(-1, self.count)[:, self.position]
        )


def pack_lanes(whole: np.dtype, parts: list[Array]) -> Array:
    """Return 32 lanes of a wide type from lanes of its parts, lowest first."""
    packed = np.empty((LANES, len(parts)), parts[0].dtype)
    for position, part in enumerate(parts):
        packed[:, position] = part
    return packed.view(whole).ravel()


class Wait:
    """Why a split cannot go on.

    Attributes:
        ready: returns whether it can.
        describe: returns what it waits for, for the deadlock report.
        resume: called once when it goes on (joins clocks, writes results).
        name: short name for counters and traces, e.g. "mbarrier 0x400".
        expire: called in place of `resume` when nothing else can go on: the wait has a time limit.
        instruction: which one waits.
    """

    __slots__ = ("describe", "expire", "instruction", "name", "ready", "resume", "since")

    def __init__(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        resume: Callable[[], None] | None = None,
        name: str = "other",
        expire: Callable[[], None] | None = None,
    ):
        self.name = name
        self.instruction: Any = None
        self.expire = expire
        self.ready = ready
        self.describe = describe
        self.resume = resume
        self.since = 0


class Reconvergence:
    """Lanes that meet again at segment `pc`; `mask` are those still expected or arrived."""

    __slots__ = ("arrived", "calls", "mask", "outer", "pc")

    def __init__(self, pc: int, mask: Array, outer: "Reconvergence | None"):
        self.pc = pc
        self.mask = mask
        self.arrived = np.zeros(LANES, np.bool_)
        self.calls: Calls = ()
        self.outer = outer


class Split:
    """Lanes of one warp at one place."""

    __slots__ = ("calls", "lanes", "mask", "pc", "record", "turns", "wait")

    def __init__(self, pc: int, mask: Array, record: Reconvergence | None):
        self.pc = pc
        self.mask = ALL_LANES if mask.tobytes() == ALL_BYTES else mask
        self.lanes = int(np.count_nonzero(mask))
        self.record = record
        self.wait: Wait | None = None
        self.calls: Calls = ()
        self.turns = 0  # how often it has run


class Warp:
    """One warp of a CTA."""

    __slots__ = ("access", "cta", "current", "exited", "gatherings", "groups", "index",
                 "lane_counts", "local", "looked", "max_registers", "polled", "registers",
                 "running_mask", "segment_counts", "slot_dtypes", "specials", "splits", "state",
                 "wait", "waited_steps")  # fmt: skip

    def __init__(self, cta: Any, index: int, mask: Array, program: Any, agent: int, agents: int):
        self.cta = cta
        self.index = index
        self.slot_dtypes: list[np.dtype] = program.slot_dtypes
        content = cta.cluster.machine.junk
        self.registers: list[Any] = [UNINITIALISED] * len(self.slot_dtypes)
        if content is not None:
            self.registers[:] = unwritten_registers(content, self.slot_dtypes)
        self.access = Access(self, None, agent, Clock(agents))
        self.access.tick()
        self.exited = ~mask
        self.splits = [Split(0, mask, None)]
        self.current = self.splits[0]
        self.running_mask = self.current.mask
        self.wait: Wait | None = None
        self.polled = False
        self.looked = -1  # the scheduler step of the last atomic or strong load
        self.groups: dict[Any, GroupQueue] = {}
        self.gatherings: list[Any] = []  # of lanes that have parted: `machine/meeting.py`
        self.state: dict[Any, Any] = {}
        self.specials: dict[str, Array] = {}
        self.segment_counts: dict[int, int] = {}
        self.lane_counts: dict[int, int] = {}
        self.waited_steps: dict[str, int] = {}
        self.local: Any = None
        self.max_registers: int = program.launch_registers

    # --- for instruction handlers -----------------------------------------------------------

    @property
    def machine(self) -> Any:
        """The launch this warp belongs to."""
        return self.cta.cluster.machine

    def touch(self, instruction: Any, mask: Array) -> Access:
        """Return the warp's generic access, set to `instruction`, for memory calls."""
        access = self.access
        access.instruction = instruction
        access.mask = mask
        access.strength = 0
        return access

    def queue(self, key: Any) -> GroupQueue:
        """Return the commit-group queue of `key`, e.g. `("bulk", lane)` or `"wgmma"`."""
        queue = self.groups.get(key)
        if queue is None:
            queue = self.groups[key] = GroupQueue()
        return queue

    def special(self, name: str) -> Array:
        """Return 32 lanes of a special register."""
        value = self.specials.get(name)
        if value is None:
            value = self.cta.special(self, name)
        return value

    def local_memory(self) -> Segment:
        """Return the local memory of the warp: 32 threads one after the other."""
        if self.local is None:
            size: int = self.machine.program.local_bytes
            data = unwritten_bytes(self.machine.junk or 0, LANES * size)
            self.local = Segment("local memory", "local", data, 0)
            if self.machine.options.detect_uninitialised and self.machine.junk is None:
                self.local.track_initialised()
        return self.local

    def observe(self, operations: Iterable[Operation]) -> None:
        """Note that the warp has waited for operations: join their clocks, deliver results."""
        done: set[Operation] = set()
        clock = self.access.clock
        for operation in operations:
            operation.access.release(clock)
            operation.is_observed = True
            if operation.results:
                done.add(operation)
        if not done:
            return
        registers = self.registers
        for index, value in enumerate(registers):
            if value.__class__ is InFlight and value.operation in done:
                result = value.operation.results[value.key]
            elif value.__class__ is PackedInFlight:
                result = value.resolve(done)
            elif value.__class__ is SplitInFlight and value.whole.operation in done:
                whole: Array = value.whole.operation.results[value.whole.key]
                result = value.part_of(whole)
            else:
                continue
            dtype = self.slot_dtypes[index]
            if result.__class__ is np.ndarray and result.dtype != dtype:
                result = result.view(dtype)
            registers[index] = result

    def where(self, instruction: Any, **more: Any) -> Where:
        """Return the location of a fault of this warp at `instruction`."""
        line = instruction.line if instruction is not None else 0
        text = instruction.text if instruction is not None else ""
        return Where(
            kernel=self.cta.cluster.machine.program.kernel,
            line=line,
            text=text,
            cta=self.cta.index,
            warp=self.index,
            **more,
        )

    # --- control flow -----------------------------------------------------------------------

    def fork(self, meet: int) -> Reconvergence | None:
        """Return the record of where the running lanes meet again if they part."""
        record = self.current.record
        if meet < 0 or (record is not None and record.pc == meet):
            return record
        return Reconvergence(meet, self.current.mask.copy(), record)

    def diverge(self, taken: Array, target: int, other: int, meet: int) -> int:
        """Split the running lanes at a branch; return DIVERGED."""
        active = self.current.mask
        return self._divide(((other, active & ~taken), (target, active & taken)), meet)

    def _divide(self, places: Iterable[tuple[int, Array]], meet: int) -> int:
        split = self.current
        record = self.fork(meet)
        self.splits.remove(split)
        for pc, mask in places:
            part = Split(pc, mask, record)
            part.calls = split.calls
            self.splits.append(part)
            self._arrive(part)
        return DIVERGED

    def branch_to(
        self, targets: tuple[int, ...], index: Array, taken: Array, following: int, meet: int
    ) -> int:
        """Jump the lanes of `taken` to `targets[index]`, the others go on at `following`.

        Returns:
            The segment that all lanes go to, or DIVERGED.
        """
        wanted = index[taken]
        if int(wanted.max()) >= len(targets):
            raise IllegalOperand(
                f"brx.idx index {int(wanted.max())} of {len(targets)} targets", self.where(None)
            )
        places = np.array(targets)[np.minimum(index, len(targets) - 1)]
        mask = self.current.mask
        places = np.where(taken, places, following)
        distinct = sorted(set(places[mask].tolist()))
        if len(distinct) == 1:
            return distinct[0]
        return self._divide([(pc, mask & (places == pc)) for pc in distinct], meet)

    def meet(self, split: Split) -> bool:
        """Merge a split into its record if it stands at its place; return whether it did."""
        record = split.record
        if record is None or split.pc != record.pc:
            return False
        self._arrive(split)
        return True

    def trap(self, instruction: Any) -> None:
        """Raise the fault of a `trap` instruction."""
        raise Trap("the kernel executed trap", self.where(instruction))

    def call(
        self, mask: Array, target: int, following: int, arguments: Copies, results: Copies
    ) -> int:
        """Let the lanes of a mask enter a device function; return its first segment or DIVERGED."""
        self._copy_parameters(mask, arguments)
        calls = (*self.current.calls, (following, results))
        if (self.current.mask & ~mask).any():
            self.diverge(mask, target, following, following)
            self.splits[-1].calls = calls  # no function starts where the other lanes wait
            return DIVERGED
        self.current.calls = calls
        return target

    def ret(self, mask: Array, following: int) -> int:
        """Return from a device function, or (in the kernel itself) let lanes exit."""
        split = self.current
        if not split.calls:
            return self.leave(mask, following)
        back, results = split.calls[-1]
        split.calls = split.calls[:-1]
        self._copy_parameters(mask, results)
        return back

    def _copy_parameters(self, mask: Array, copies: Copies) -> None:
        if not copies:
            return
        memory = self.local_memory()
        for data in (memory.data, memory.initialised):
            if data is not None:
                threads = data.reshape(LANES, -1)
                for target, source, size in copies:
                    threads[mask, target : target + size] = threads[mask, source : source + size]

    def leave(self, mask: Array, following: int) -> int:
        """Let lanes exit; the others go on at `following`. Return DIVERGED."""
        self.current.pc = following
        self._exit_lanes(mask)
        if self.splits:
            self.cta.cluster.on_lanes_exit(self)
        return DIVERGED

    def _exit_lanes(self, mask: Array) -> None:
        split = self.current
        self.exited = self.exited | mask
        rest = split.mask & ~mask
        self.splits.remove(split)
        record = split.record
        while record is not None:
            record.mask = record.mask & ~mask
            record = record.outer
        if rest.any():
            part = Split(split.pc, rest, split.record)
            part.calls = split.calls
            self.splits.append(part)
            return
        record = split.record
        while record is not None and not record.mask.any():
            record = record.outer
        if record is not None:
            self.settle(record)

    def _arrive(self, split: Split) -> None:
        record = split.record
        if record is None or split.pc != record.pc:
            return
        record.arrived = record.arrived | split.mask
        record.calls = split.calls
        self.splits.remove(split)
        self.settle(record)

    def settle(self, record: Reconvergence) -> None:
        """Let the lanes of a record go on as one if all have arrived."""
        if not (record.mask & ~record.arrived).any():
            part = Split(record.pc, record.mask, record.outer)
            part.calls = record.calls
            self.splits.append(part)
            self._arrive(part)

    def records_of(self, split: Split) -> Iterable[Reconvergence]:
        """Yield where lanes of a split will meet others, the next place first."""
        record = split.record
        while record is not None:
            yield record
            record = record.outer

    def records(self) -> list[Reconvergence]:
        """Return every place where lanes of the warp will meet."""
        return list(dict.fromkeys(r for split in self.splits for r in self.records_of(split)))

    def let_go(self, record: Reconvergence) -> None:
        """Let lanes that have arrived where lanes meet go on without the others."""
        part = Split(record.pc, record.arrived, record.outer)
        part.calls = record.calls
        record.mask = record.mask & ~record.arrived
        record.arrived = np.zeros(LANES, np.bool_)
        self.splits.append(part)
        self._arrive(part)

    def part_ways(self) -> bool:
        """Let lanes that wait where lanes meet go on alone; return whether there were any.

        The lanes they wait for may spin until one of them releases a lock: the manual promises
        progress to each thread.
        """
        waiting = [record for record in self.records() if record.arrived.any()]
        for record in waiting:
            self.let_go(record)
        return bool(waiting)

    def note_waited(self, wait: Wait) -> None:
        """Count the steps of a wait that ends now."""
        waited = self.machine.step - wait.since
        if waited:
            self.waited_steps[wait.name] = self.waited_steps.get(wait.name, 0) + waited
        if self.machine.trace is not None:
            self.machine.trace.wait(self, wait, self.machine.step)

    @property
    def is_finished(self) -> bool:
        """Whether every lane has exited."""
        return not self.splits
