"""The shadow memory that finds unordered accesses.

An agent is a warp (its generic accesses) or a channel of asynchronous work (`async_engine`).
`Shadow` keeps, per memory cell, the last write and the last weak read of each agent that reads
there, and raises `RaceError` when an access conflicts with one its clock has not seen.

Strong accesses may meet unordered within their scopes; a weak one may meet none. Who reads a
strong write by a strong read is ordered behind that write, if behind nothing else: the observers.

Proxies: `seen` covers everything observed; `fenced` covers only generic writes followed by
`fence.proxy.async`, of the state space in question. A generic access is judged by `seen`; an access
of the async proxy is judged by `fenced` for earlier generic writes, by `seen` for everything else.
A generic read before an async write needs no proxy fence where a copy fills a stage again: the
arrival that frees the stage orders it, and the pipelines of CUTLASS, flash-attn-4 and Triton have
no fence there. Where the manual's own example has one, the access says so
(`Access.needs_fenced_reads`).

A generic write that leaves the bytes of a cell as they are conflicts with no generic access: the
cell then has several writers of equal bytes. A reader must know of one of them, a writer of other
bytes of all.

Lives here: shadow, the judgement. Not here: clocks (`clocks.py`), which instruction joins what
(`memory_order.py`, `isa/barrier.py`, `machine/barrier.py`, `async_engine.py`), global memory
(`global_races.py`). Invariant: with detection off every call returns at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.clocks import Clock
from fovea.emulator.errors import IllegalOperand, RaceError

Array = NDArray[Any]

ALL_BYTES = 15  # the mask of a whole cell of shared memory
_OBJECT = np.iinfo(np.int32).max  # in place of a time: an mbarrier lies there, nobody knows of it
Changed = Callable[[], Array]  # tells which of the cells a write is about to change
Writer = tuple[int, int, int]  # agent, its time, note


@dataclass(slots=True)
class Access:
    """Who touches memory: the identity every memory call carries.

    Attributes:
        warp: the issuing warp (for reports; None for the host).
        instruction: the static instruction (for line and text).
        agent: index of the agent in its cluster's clocks.
        clock: what the agent had seen: a warp now, an operation at its issue. An operation knows
            no other one of its channel by being a later one.
        time: the agent's own time, under which its accesses are noted.
        is_async: whether the access goes through the async proxy.
        mask: lanes that take part, for reports.
        strength: of an access that is atomic, volatile, relaxed, acquire or release its scope
            (1: cta, 2: cluster, 3: gpu or sys), within which such accesses may meet unordered;
            0 of a weak one.
        fenced: what a warp had seen at its last fence: a relaxed arrival after it hands that on.
        unfenced: what relaxed waits of a warp have met, for its next fence to acquire (both of
            mbarriers and cluster barriers; of memory, `memory_order.py`).
        tensor: what a tcgen05 operation may rely on in tensor memory where its kernel uses
            tcgen05.fence (None: all that `clock` has seen).
        needs_fenced_reads: whether a write of the async proxy asks a proxy fence of earlier generic
            reads too, as the response to clusterlaunchcontrol does.
    """

    warp: Any
    instruction: Any
    agent: int
    clock: Clock
    is_async: bool = False
    mask: Any = None
    strength: int = 0
    time: int = 0
    fenced: Clock | None = None
    unfenced: Clock | None = None
    tensor: Clock | None = None
    needs_fenced_reads: bool = False

    def tick(self) -> None:
        """Advance a warp's own time: call after a release, so later work is told apart."""
        self.time += 1
        self.clock.seen[self.agent] = self.time

    def release(self, clock: Clock) -> None:
        """Add to `clock` what the agent has seen, and what it has done until now."""
        clock.join(self.clock)
        if clock.seen[self.agent] < self.time:
            clock.seen[self.agent] = self.time

    def fence(self, *, is_acquire: bool = True, is_release: bool = True) -> None:
        """Note a fence of the warp: it may stand beside relaxed arrivals and waits."""
        if is_acquire and self.unfenced is not None:
            self.clock.join(self.unfenced)
            self.unfenced = None
        if is_release:
            self.fenced = self.clock.copy()
            self.tick()

    def describe(self) -> str:
        """Return who and where, for reports."""
        proxy = "async proxy" if self.is_async else "generic proxy"
        place = f"PTX line {self.instruction.line} `{self.instruction.text}`"
        return f"{place}, CTA {self.warp.cta.index} warp {self.warp.index} ({proxy})"


class Shadow:
    """Last writer and last readers of every cell of one memory.

    A cell is 4 bytes of shared memory (with a mask of its bytes) or 16 lanes of one column of
    tensor memory. Cells are addressed by index arrays or slices.
    """

    is_active = True

    __slots__ = ("_bytes", "_columns", "_equal", "_no_proxy", "_observers", "_read_bytes",
                 "_readers", "_strength", "notes", "reads", "write_agent", "write_note",
                 "write_tick")  # fmt: skip

    def __init__(self, cells: int, notes: "AccessNotes"):
        # one column for each agent that has read here: most channels never read
        self.reads = np.zeros((cells, 0), np.int32)
        self._columns: dict[int, int] = {}
        self._readers = np.zeros(0, np.intp)
        self._read_bytes: Array | None = None  # made by the first read of less than a cell
        self.write_agent = np.zeros(cells, np.int16)
        self.write_tick = np.zeros(cells, np.int32)
        self.write_note = np.full(cells, -1, np.int32)
        self._bytes = np.zeros(cells, np.uint8)
        self._equal: dict[int, list[Writer]] = {}  # earlier writers of the bytes that are there
        self._no_proxy: dict[int, int] = {}  # cell -> time of a write that belongs to no proxy
        self._strength: Array | None = None  # of the last write; made by the first strong one
        self._observers: dict[int, dict[int, int]] = {}  # cell -> agent -> time it saw that write
        self.notes = notes

    def on_read(self, cells: Any, access: Access, byte_mask: Any = 15) -> None:
        """Check a read of `cells` and note it.

        Raises:
            RaceError: the last write of a cell is not ordered before this read.
        """
        self._judge_write(cells, access, byte_mask, "read")
        if access.strength:
            self._observe(cells, access)
            return
        self.notes.remember_read(access)
        column = self._columns.get(access.agent)
        if column is None:
            column = self._add_column(access.agent)
        self.reads[cells, column] = access.time
        if self._read_bytes is None and byte_mask is not ALL_BYTES:
            self._read_bytes = np.full(self.reads.shape, ALL_BYTES, np.uint8)
        if self._read_bytes is not None:
            self._read_bytes[cells, column] = byte_mask

    def on_write(
        self, cells: Any, access: Access, byte_mask: Any = 15, changed: Changed | None = None
    ) -> None:
        """Check a write of `cells` and note it; `changed` is asked before memory changes.

        Raises:
            RaceError: an earlier read or write of a cell is not ordered before this write.
        """
        self._judge_write(cells, access, byte_mask, "write", changed)
        if len(self._readers):
            times = self.reads[cells]
            clock, readers = access.clock, self._readers
            known = clock.seen[readers]
            if access.needs_fenced_reads:
                known = np.where(self.notes.is_generic[readers], clock.fenced[readers], known)
            late = times > known
            if late.any():
                self._judge_reads(cells, times, late, access, byte_mask, changed)
        self.write_agent[cells] = access.agent
        self.write_tick[cells] = access.time
        self.write_note[cells] = self.notes.note(access)
        self._bytes[cells] = byte_mask
        if access.strength and self._strength is None:
            self._strength = np.zeros(len(self.write_tick), np.uint8)
        if self._strength is not None:
            self._strength[cells] = access.strength
            for cell in _listed(cells) if self._observers else ():
                self._observers.pop(cell, None)

    def last_writer(self, cell: int) -> str:
        """Return who wrote a cell last ("" if nobody)."""
        note = int(self.write_note[cell])
        return self.notes.text(note) if note >= 0 else ""

    def leave_proxies(self, cell: int) -> None:
        """Say that the last write of a cell was made through no proxy: seeing it is enough."""
        self._no_proxy[cell] = int(self.write_tick[cell])

    def hold_object(self, cells: slice) -> None:
        """Say that an mbarrier object lies in cells just written: no access may touch it."""
        self.write_tick[cells] = _OBJECT

    def drop_object(self, cells: slice, access: Access) -> None:
        """Make cells of an mbarrier object memory again, as if the access had written them."""
        self.write_agent[cells] = access.agent
        self.write_tick[cells] = access.time
        self.write_note[cells] = self.notes.note(access)

    def place(self, cell: int) -> tuple[int, str]:
        """Return (address, space) of a cell, for reports."""
        return 4 * cell, "shared"

    def _observe(self, cells: Any, access: Access) -> None:
        """Note that a strong read has seen the strong writes of cells."""
        if self._strength is None:
            return
        for cell in _listed(cells):
            if self._strength[cell]:
                self._observers.setdefault(cell, {}).setdefault(access.agent, access.time)

    def _add_column(self, agent: int) -> int:
        column = self._columns[agent] = len(self._readers)
        self._readers = np.append(self._readers, agent)
        fresh = np.zeros((len(self.reads), 1), np.int32)
        self.reads = np.concatenate((self.reads, fresh), axis=1)
        if self._read_bytes is not None:
            fresh = np.full((len(self.reads), 1), ALL_BYTES, np.uint8)
            self._read_bytes = np.concatenate((self._read_bytes, fresh), axis=1)
        return column

    def _judge_reads(
        self,
        cells: Any,
        times: Array,
        late: Array,
        access: Access,
        byte_mask: Any,
        changed: Changed | None,
    ) -> None:
        column = self._columns.get(access.agent)
        if column is not None:
            late[..., column] &= times[..., column] != access.time
        if self._read_bytes is not None:
            late &= self._read_bytes[cells] & np.asarray(byte_mask)[..., None] != 0
        if changed is not None and late.any():
            late[:, self.notes.is_generic[self._readers]] &= changed()[:, None]
        if late.any():
            self._report_read(cells, late, access)

    def _judge_write(
        self,
        cells: Any,
        access: Access,
        byte_mask: Any,
        what: str,
        changed: Changed | None = None,
    ) -> None:
        agents, ticks = self.write_agent[cells], self.write_tick[cells]
        clock = access.clock
        if access.is_async:
            known = np.where(self.notes.needs_fence, clock.fenced, clock.seen)
        else:
            known = clock.seen
        if self._equal and what == "write":
            self._meet_equal(cells, access, known, changed)
        late = ticks > known[agents]
        if not late.any():
            return
        if (ticks == _OBJECT).any():
            self._report_object(cells, ticks, access, what)
        late &= (agents != access.agent) | (ticks != access.time)
        late &= (self._bytes[cells] & byte_mask) != 0
        if self._strength is not None and late.any():
            self._forgive_strong(cells, late, access, agents, known)
        if late.any():
            if what == "read":
                self._forgive_read(cells, late, access, known)
            elif changed is None:
                self._forgive_read(cells, late, access, None)
            else:
                self._forgive_write(cells, late, byte_mask, changed())
        if not late.any():
            return
        position = int(np.argmax(late))
        agent = int(np.ravel(agents)[position])
        tick = int(np.ravel(ticks)[position])
        note = int(np.ravel(self.write_note[cells])[position])
        rule = "the two accesses are not ordered by a barrier, phase or wait"
        if access.is_async and self.notes.needs_fence[agent] and tick <= clock.seen[agent]:
            rule = "a generic write needs fence.proxy.async before the async proxy may touch it"
        elif not access.is_async and not self.notes.is_generic[agent]:
            rule = "asynchronous work was not waited for (mbarrier phase, wait_group or wait::ld)"
        self._raise(what, "write", access, note, rule, self._cell_of(cells, position))

    def _forgive_strong(
        self, cells: Any, late: Array, access: Access, agents: Array, known: Array
    ) -> None:
        """Take out of `late` strong writes that a strong access may meet, or has seen."""
        assert self._strength is not None
        earlier = self._strength[cells]
        if access.strength:
            cluster = access.warp.cta.cluster
            needed = needed_strength(agents, access.warp.cta.rank, cluster)
            late &= np.minimum(earlier, access.strength) < needed
        positions: list[int] = np.flatnonzero(late & (earlier > 0)).tolist()
        for position in positions:
            observers = self._observers.get(self._cell_of(cells, position), {})
            if any(time <= known[agent] for agent, time in observers.items()):
                late[position] = False

    def _forgive_read(self, cells: Any, late: Array, access: Access, known: Array | None) -> None:
        """Take out of `late` what needs no proxy fence, and equal bytes of a `known` writer."""
        if not self._equal and not self._no_proxy:
            return
        positions: list[int] = np.flatnonzero(late).tolist()
        for position in positions:
            cell = self._cell_of(cells, position)
            agent, tick = int(self.write_agent[cell]), int(self.write_tick[cell])
            is_seen = self._no_proxy.get(cell) == tick <= access.clock.seen[agent]
            if known is not None:
                writers = self._equal.get(cell, ())
                is_seen = is_seen or any(time <= known[other] for other, time, _ in writers)
            if is_seen:
                late[position] = False

    def _forgive_write(self, cells: Any, late: Array, byte_mask: Any, changed: Array) -> None:
        """Take out of `late` where a generic write left these bytes; keep those that did."""
        masks = np.broadcast_to(byte_mask, late.shape)
        positions: list[int] = np.flatnonzero(late & ~changed).tolist()
        for position in positions:
            cell = self._cell_of(cells, position)
            agent = int(self.write_agent[cell])
            if not self.notes.is_generic[agent]:
                continue
            late[position] = False
            if self._strength is not None and self._strength[cell]:
                continue
            writer = (agent, int(self.write_tick[cell]), int(self.write_note[cell]))
            writers = self._equal.setdefault(cell, [])
            if self._bytes[cell] == masks[position] and writer not in writers:
                writers.append(writer)

    def _meet_equal(
        self, cells: Any, access: Access, known: Array, changed: Changed | None
    ) -> None:
        """Check a write against all writers of the bytes that are there, not the last alone."""
        if isinstance(cells, slice):
            place = cast(Any, cells)
            met = [cell for cell in self._equal if place.start <= cell < place.stop]
        else:
            met = sorted(set(np.ravel(cells).tolist()) & self._equal.keys())
        for cell in met:
            late = [
                (agent, time, note)
                for agent, time, note in self._equal[cell]
                if agent != access.agent and time > known[agent]
            ]
            if not late:
                del self._equal[cell]
            elif changed is not None and not changed()[np.asarray(cells) == cell].any():
                self._equal[cell] = late
            else:
                rule = "the two accesses are not ordered by a barrier, phase or wait"
                self._raise("write", "write", access, late[0][2], rule, cell)

    def _report_object(self, cells: Any, ticks: Array, access: Access, what: str) -> None:
        cell = self._cell_of(cells, int(np.argmax(ticks == _OBJECT)))
        other = self.last_writer(cell)
        address, space = self.place(cell)
        raise IllegalOperand(
            f"{what} by {access.describe()} touches the mbarrier initialised by {other}; "
            "mbarrier.inval must come before any other use of its memory",
            access.warp.where(access.instruction, address=address, space=space),
        )

    def _report_read(self, cells: Any, late: Array, access: Access) -> None:
        flat = late.reshape(-1, len(self._readers))
        position = int(np.argmax(flat.any(axis=1)))
        agent = int(self._readers[np.argmax(flat[position])])
        cell = self._cell_of(cells, position)
        note = self.notes.last_read_note(agent)
        rule = "the stage is reused before its last reader released it"
        time = int(self.reads[cell, self._columns[agent]])
        if access.needs_fenced_reads and time <= access.clock.seen[agent]:
            rule = (
                "a generic read needs fence.proxy.async before the async proxy writes there again"
            )
        self._raise("write", "read", access, note, rule, cell)

    def _cell_of(self, cells: Any, position: int) -> int:
        if isinstance(cells, slice):
            return int(cast(Any, cells).start) + position
        return int(np.ravel(cells)[position])

    def _raise(
        self, what: str, earlier: str, access: Access, note: int, rule: str, cell: int
    ) -> None:
        other = self.notes.text(note)
        address, space = self.place(cell)
        raise RaceError(
            f"race: {what} by {access.describe()} conflicts with a {earlier} by {other}; {rule}",
            access.warp.where(access.instruction, address=address, space=space),
            other,
            rule,
            other if earlier == "write" else "",
        )


def needed_strength(agents: Array, rank: int, cluster: Any) -> Array:
    """Return the strength by which strong accesses may meet those of agents of the cluster."""
    warps = cluster.warps_per_cta
    is_other = (agents // warps != rank) & (agents < warps * len(cluster.ctas))
    return np.where(is_other, 2, 1)


def _listed(cells: Any) -> list[int]:
    """Return the numbers of cells."""
    if isinstance(cells, slice):
        place = cast(Any, cells)
        return list(range(place.start, place.stop))
    return np.ravel(cells).tolist()


class AccessNotes:
    """Numbers of (instruction, warp, proxy) triples, and which agents are generic.

    Attributes:
        is_generic: whether an agent is a warp.
        needs_fence: whether what an agent writes must pass a proxy fence before the async proxy
            may touch it: warps, and channels of cp.async.
    """

    __slots__ = ("_ids", "_last", "_texts", "is_generic", "needs_fence")

    def __init__(self, generic_agents: int, agents: int):
        self._ids: dict[tuple[int, int, bool], int] = {}
        self._texts: list[Access] = []
        self._last: dict[int, int] = {}
        self.is_generic = np.arange(agents) < generic_agents
        self.needs_fence = self.is_generic.copy()

    def note(self, access: Access) -> int:
        """Return the number of an access's author."""
        key = (access.instruction.index, access.agent, access.is_async)
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = len(self._texts)
            self._texts.append(
                Access(access.warp, access.instruction, access.agent, access.clock, access.is_async)
            )
        return number

    def text(self, number: int) -> str:
        """Return the description of a noted access."""
        return self._texts[number].describe() if number >= 0 else "an unknown access"

    def last_read_note(self, agent: int) -> int:
        """Return the number of some noted access of an agent (-1 if none)."""
        return self._last.get(agent, -1)

    def remember_read(self, access: Access) -> None:
        """Keep the author of the latest read of an agent, for reports."""
        self._last[access.agent] = self.note(access)
