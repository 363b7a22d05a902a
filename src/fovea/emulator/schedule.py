"""Who runs next: warps in seeded random order, asynchronous work at random moments.

Lives here: the loop, waits, deadlock reports, and turning any exception into a located fault.
Not here: what instructions do. Invariant: with equal seeds two runs make equal choices; a launch
ends with all warps exited and all asynchronous work done, or with a Fault.
"""

from collections.abc import Iterable
from typing import Any

from fovea.emulator.async_engine import Operation
from fovea.emulator.errors import (
    DeadlockError,
    EmulatorError,
    Fault,
    IllegalOperand,
    PtxError,
    RaceError,
    StepLimitExceeded,
    UninitialisedRead,
    Where,
)
from fovea.emulator.isa.instruction import ALL_LANES, Instruction
from fovea.emulator.machine.grid import Cluster, Machine
from fovea.emulator.machine.meeting import Parted, attend, check_waits, part
from fovea.emulator.machine.registers import registers_of
from fovea.emulator.machine.warp import (
    DIVERGED,
    InFlight,
    PackedInFlight,
    Split,
    Uninitialised,
    Unreadable,
    Warp,
)
from fovea.emulator.pace import Pace
from fovea.emulator.ptx import syntax
from fovea.emulator.stuck import EndlessLoops, describe_waits

# scheduler steps without any event after which another cluster is started: a running one may be
# waiting, by polling global memory, for a cluster that has not been started
_PATIENCE = 2000
# steps of each active warp without any event after which, if all do nothing but look at memory,
# they are taken to wait for a cluster not started or for lanes that wait for them to converge
_SPIN_LIMIT = 16
# failed polls in a row, per active warp, after which nothing can be expected to change any more
_POLL_LIMIT = 200
# times in a row that waits with a time limit are ended before all is taken to be stuck: as many
# looks at one barrier as a loop without any other effect may take
_EXPIRY_LIMIT = 64


class Scheduler:
    """Runs one launch to its end."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._segments = machine.program.segments
        self._random = machine.random.random
        self._clusters: list[Cluster] = []
        self._active: list[Warp] = []
        self._blocked: list[Warp] = []
        self._seen_events = -1
        self._idle = 0
        self._last_events = -1
        self._expired_events = -1
        self._expiries = 0
        self._loops = EndlessLoops(self._segments)

    def run(self) -> None:
        """Run every cluster of the grid.

        Raises:
            Fault: the kernel did something wrong, cannot go on, or took too many steps.
        """
        machine = self._machine
        limit = machine.options.max_steps
        delay = machine.options.async_delay
        self._start_cluster()
        num_warps = len(self._clusters[0].ctas[0].warps) if self._clusters else 0
        pace = Pace(machine.options.seed, num_warps, self._random)
        while self._clusters:
            machine.step += 1
            if limit is not None and machine.step > limit:
                raise StepLimitExceeded(
                    f"the launch did not end within max_steps={limit} scheduler steps",
                    self._any_place(),
                )
            if self._active:
                position = pace.next(self._active)
                warp = self._active[position]
                first = self._run_warp(warp)
                if machine.trace is not None:
                    machine.trace.run(warp, machine.step, self._segments[first])
                if warp.gatherings:
                    attend(warp)
                if not self._can_run(warp):
                    self._active[position] = self._active[-1]
                    self._active.pop()
                    if warp.is_finished:
                        self._finish_warp(warp)
                    else:
                        self._blocked.append(warp)
                if delay != "late" and self._random() < 0.5:
                    self._step_engines()
            elif not self._step_engines() and not self._wake():
                self._stuck()
            if self._events() != self._seen_events:
                self._wake()
            self._watch_progress()

    # --- clusters ---------------------------------------------------------------------------

    def _start_cluster(self) -> bool:
        machine = self._machine
        while machine.next_cluster in machine.cancelled:
            machine.next_cluster += 1
        if machine.next_cluster >= machine.num_clusters:
            return False
        size = len(self._clusters) + 1
        if size > 1 and size * _size(machine) > machine.options.num_sms:
            return False
        cluster = Cluster(machine, machine.next_cluster)
        machine.next_cluster += 1
        self._clusters.append(cluster)
        self._active += cluster.warps
        self._idle = 0
        return True

    def _finish_warp(self, warp: Warp) -> None:
        cluster = warp.cta.cluster
        self._machine.counters.collect(warp)
        cluster.on_warp_exit(warp)
        self._machine.notify()
        if all(other.is_finished for other in warp.cta.warps):
            warp.cta.is_exited = True
            _check_left_over(warp)
        if all(other.is_finished for other in cluster.warps):
            while cluster.engine.pending:
                if not self._advance(cluster):
                    raise DeadlockError(
                        "asynchronous work can never complete",
                        waiting=tuple(o.describe() for o in cluster.engine.pending),
                    )
            for cta in cluster.ctas:
                if self._machine.options.detect_races:
                    cta.check_visits()
                if cta.tmem.allocated_columns:
                    raise IllegalOperand(
                        f"CTA {cta.index} exits with {cta.tmem.allocated_columns} tensor memory "
                        "columns still allocated (tcgen05.dealloc is missing)",
                        warp.where(warp.access.instruction),
                    )
            self._clusters.remove(cluster)
            if not self._clusters:
                self._start_cluster()

    # --- warps ------------------------------------------------------------------------------

    def _can_run(self, warp: Warp) -> bool:
        return any(split.wait is None for split in warp.splits)

    def _run_warp(self, warp: Warp) -> int:
        """Run a warp for some segments; return the first one."""
        splits = warp.splits
        split = splits[0]
        if len(splits) > 1:
            ready = [candidate for candidate in splits if candidate.wait is None]
            split = ready[int(self._random() * len(ready))]
        warp.current = split
        split.turns += 1
        program, segments = self._machine.program, self._segments
        registers = warp.registers
        counts, lane_counts = warp.segment_counts, warp.lane_counts
        budget = 1 + int(self._random() * self._machine.options.max_segments)
        mask, lanes = split.mask, split.lanes
        segment, first = None, split.pc
        try:
            while budget:
                budget -= 1
                pc = split.pc
                segment = segments[pc]
                counts[pc] = counts.get(pc, 0) + 1
                lane_counts[pc] = lane_counts.get(pc, 0) + lanes
                if mask is ALL_LANES:
                    run = segment.full or program.function(segment, True)
                else:
                    run = segment.masked or program.function(segment, False)
                following = run(warp, registers, mask)
                if following == DIVERGED:
                    break
                split.pc = following
                if warp.wait is not None:
                    warp.wait.instruction = segment.instructions[-1]
                    self._suspend(warp, split)
                    break
                if split.record is not None and warp.meet(split):
                    break
        except Parted as parted:
            part(warp, parted, segment, program)
        except EmulatorError as error:
            raise _located(error, warp, segment) from error.__cause__
        except Exception as error:
            raise _translated(error, warp, segment, program) from error
        return first

    def _suspend(self, warp: Warp, split: Split) -> None:
        wait, warp.wait = warp.wait, None
        assert wait is not None
        split.wait = wait
        wait.since = self._machine.step
        if wait.ready():
            self._resume(warp, split)

    def _resume(self, warp: Warp, split: Split) -> None:
        wait, split.wait = split.wait, None
        assert wait is not None
        warp.note_waited(wait)
        if wait.resume is not None:
            wait.resume()
        if split.record is not None:
            warp.meet(split)

    def _wake(self) -> bool:
        """Let go every split whose wait is over; return whether there was one."""
        self._seen_events = self._events()
        awake = False
        for warp in list(self._blocked):
            for split in list(warp.splits):
                if split.wait is not None and split.wait.ready():
                    self._resume(warp, split)
                    awake = True
            if self._can_run(warp):
                self._blocked.remove(warp)
                self._active.append(warp)
        for warp in self._active:
            if len(warp.splits) > 1:
                for split in list(warp.splits):
                    if split.wait is not None and split.wait.ready():
                        self._resume(warp, split)
        return awake

    # --- asynchronous work ------------------------------------------------------------------

    def _events(self) -> int:
        return self._machine.events + sum(cluster.engine.events for cluster in self._clusters)

    def _step_engines(self) -> bool:
        busy = [cluster for cluster in self._clusters if cluster.engine.pending]
        if not busy:
            return False
        return self._advance(busy[int(self._random() * len(busy))])

    def _advance(self, cluster: Cluster) -> bool:
        try:
            moved = cluster.engine.step()
        except EmulatorError:
            raise
        except Exception as error:
            operation = cluster.engine.current
            raise EmulatorError(
                f"internal error in {operation.describe() if operation else 'asynchronous work'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if moved:
            self._machine.notify()
            operation = cluster.engine.current
            if self._machine.trace is not None and operation is not None and operation.is_complete:
                self._machine.trace.instant(
                    operation.access.warp, f"{operation.kind} done", self._machine.step
                )
        return moved

    # --- progress ---------------------------------------------------------------------------

    def _watch_progress(self) -> None:
        events = self._events()
        if events != self._last_events:
            self._last_events = events
            self._idle = 0
            return
        self._idle += 1
        if self._active and self._idle % (_SPIN_LIMIT * len(self._active)) == 0:
            self._end_spinning()
        if self._idle % _PATIENCE == 0:
            self._start_cluster()
        polling = self._active and all(warp.polled for warp in self._active)
        if polling and self._idle > _POLL_LIMIT * len(self._active) and not self._step_engines():
            self._stuck()
        elif self._idle > _PATIENCE and self._idle % _SPIN_LIMIT == 0 and self._active:
            first = self._machine.step - self._idle
            is_endless = self._loops.look(self._active, self._blocked, self._idle, first)
            if is_endless and not self._step_engines():
                self._stuck()

    def _end_spinning(self) -> None:
        """If all active warps only look at memory, start a cluster or part lanes that wait."""
        first = self._machine.step - self._idle
        if any(warp.looked <= first for warp in self._active):
            return
        if not self._step_engines() and not self._start_cluster():
            for warp in self._active:
                warp.part_ways()

    def _expire(self) -> bool:
        """End the waits that have a time limit; return whether that may help.

        A kernel may look once whether a phase is complete and go on if not. It is no help if
        nothing has happened for many such looks: then every wait is in a loop.
        """
        if self._expired_events != self._events():
            self._expiries = 0
        self._expiries += 1
        if self._expiries > _EXPIRY_LIMIT:
            return False
        found = False
        for warp in self._blocked + self._active:
            for split in list(warp.splits):
                if split.wait is not None and split.wait.expire is not None:
                    expire, split.wait = split.wait.expire, None
                    expire()
                    if split.record is not None:
                        warp.meet(split)
                    found = True
        ready = [warp for warp in self._blocked if self._can_run(warp)]
        self._active += ready
        self._blocked = [warp for warp in self._blocked if warp not in ready]
        self._expired_events = self._events()
        return found

    def _stuck(self) -> None:
        """End waits or start another cluster if that can help, else report a deadlock."""
        if self._expire() or self._start_cluster() or self._attend():
            return
        slots = self._machine.program.decoding.slots
        waiting = (*describe_waits(self._blocked + self._active, slots), *self._not_started())
        first = (self._blocked + self._active)[0]
        raise DeadlockError(
            "deadlock: no warp can go on", _place_of(first, self._segments), waiting
        )

    def _not_started(self) -> Iterable[str]:
        machine = self._machine
        left = machine.num_clusters - machine.next_cluster
        if left > 0:
            yield (
                f"{left} clusters have not been started: {len(self._clusters)} are resident, with "
                f"Options.num_sms={machine.options.num_sms}"
            )

    def _attend(self) -> bool:
        """Let lanes go on that wait for each other; return whether there were any."""
        for warp in self._blocked:
            attend(warp)
        ready = [warp for warp in self._blocked if self._can_run(warp)]
        self._active += ready
        self._blocked = [warp for warp in self._blocked if warp not in ready]
        if not ready:
            for warp in self._blocked:
                check_waits(warp)
        return bool(ready)

    def _any_place(self) -> Where | None:
        warps = self._active + self._blocked
        return _place_of(warps[0], self._segments) if warps else None


def _size(machine: Machine) -> int:
    x, y, z = machine.cluster_shape
    return x * y * z


def _place_of(warp: Warp, segments: list[Any]) -> Where:
    if not warp.splits:
        return warp.where(None)
    split = warp.splits[0]
    if split.wait is not None:
        return warp.where(split.wait.instruction)
    instructions = segments[split.pc].instructions
    return warp.where(instructions[-1] if instructions else None)


def _check_left_over(warp: Warp) -> None:
    """Report stores from the shared memory of a CTA that has exited which no wait has covered.

    It does not matter whether the store happens to be done: nothing made sure of it. A store in
    no group that its thread never waited after is a warning only: the manual does not say that
    the reads of a bulk store end with its CTA, and shipped kernels (flash-attn-4's backward)
    leave their last stores to the hardware. A group without its wait, or a wait that misses a
    store because its commit is missing, is a fault.
    """
    for member in warp.cta.warps:
        for queue in member.groups.values():
            for operation in queue.unretired():
                # the queue of wgmma holds tickets, which read no source after the exit
                if not isinstance(operation, Operation):  # pyright: ignore[reportUnnecessaryIsInstance]
                    continue
                if not operation.read_effects or operation.is_observed:
                    continue
                message = f"exits while {operation.describe()} may still read its shared memory"
                if operation in queue.open and not operation.is_passed:
                    place = operation.access.instruction
                    member.machine.warn(
                        f"PTX line {place.line} `{place.text}`: a CTA exits while this store may "
                        "still read its shared memory; it is in no group and never waited for"
                    )
                    continue
                raise RaceError(
                    f"CTA {warp.cta.index} {message}",
                    member.where(operation.access.instruction),
                    rule="cp.async.bulk.wait_group.read must come before the CTA exits",
                )


_UNREADABLE = (Uninitialised, InFlight, PackedInFlight)


# --- faults -----------------------------------------------------------------------------------


def _located(error: EmulatorError, warp: Warp, segment: Any) -> EmulatorError:
    """Fill in what a fault does not know about its place."""
    instruction = _instruction_of(error, segment)
    if isinstance(error, Fault) and not error.where.line and instruction is not None:
        where = warp.where(instruction, lane=error.where.lane, address=error.where.address)
        return type(error)(error.message, where)
    ignored = warp.state.get("ignored wait")
    if ignored is not None and isinstance(error, RaceError | UninitialisedRead):
        error.args = (
            f"{error}; the result of the wait at PTX line {ignored} decides nothing, so that wait "
            "orders nothing",
        )
    if isinstance(error, PtxError) and not error.line and instruction is not None:
        return type(error)(str(error), instruction.line)
    return error


def _translated(error: Exception, warp: Warp, segment: Any, program: Any) -> EmulatorError:
    """Return the fault behind an exception of compiled code."""
    instruction = _instruction_of(error, segment)
    if instruction is None:
        return EmulatorError(f"internal error: {type(error).__name__}: {error}")
    for operand in _sources(instruction, error):
        value = warp.registers[instruction.slot(operand).index]
        if isinstance(value, Unreadable):
            message = f"register {operand.name} {value.describe()}"
            where = warp.where(instruction)
            if not isinstance(value, Uninitialised):
                rule = "asynchronous results need a wait before they are used"
                return RaceError(f"race: {message}; {rule}", where, rule=rule)
            return UninitialisedRead(message, where)
    return EmulatorError(
        f"internal error at PTX line {instruction.line} `{instruction.text}`: "
        f"{type(error).__name__}: {error}"
    )


def _sources(instruction: Instruction, error: Exception) -> Iterable[syntax.Register]:
    """Yield the registers an instruction reads: all but a destination in first place.

    The first operand comes last, and only if the exception speaks of an unreadable register: it
    is a source of the few instructions that have no destination (`bar.sync %r1`).
    """
    if instruction.guard is not None:
        yield instruction.guard.register
    first: list[syntax.Register] = []
    for position, operand in enumerate(instruction.operands.values()):
        if position or isinstance(operand, syntax.Memory):
            yield from registers_of(operand)
        else:
            first = registers_of(operand)
    if any(f"'{kind.__name__}'" in str(error) for kind in _UNREADABLE):
        yield from first


def _instruction_of(error: BaseException, segment: Any) -> Instruction | None:
    """Return the instruction whose compiled code an exception passed through."""
    if segment is None:
        return None
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name.startswith("<segment "):
            variant = name[:-1].rpartition(" ")[2]
            return segment.lines[variant].get(traceback.tb_lineno)
        traceback = traceback.tb_next
    return segment.instructions[-1] if segment.instructions else None
