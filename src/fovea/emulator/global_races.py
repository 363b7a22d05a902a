"""Races on global memory: who wrote each word last, who read it, and whether a later access knows.

Clocks decide, proxies included within a cluster; of other clusters they know what releases and
acquires have handed on (`memory_order.py`). Strong accesses and who observes them are treated as in
`races.py`.

Lives here: the shadow of one allocation, the report. Not here: who read what
(`global_readers.py`), shared and tensor memory (`races.py`), which accesses are strong
(`isa/load_store.py`). Not modelled: a weak write that overtakes a strong read, strong accesses of
one word that differ in size. Invariant: a write that leaves the bytes of a word as they are is no
report; the word is not watched after it.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.errors import RaceError
from fovea.emulator.global_readers import GlobalReaders
from fovea.emulator.memory_order import GPU
from fovea.emulator.races import ALL_BYTES, Access, Changed, needed_strength

Array = NDArray[Any]

_LIMIT_BYTES = 1 << 28  # larger allocations are not watched: the shadow takes six times as much
# columns of the shadow: cluster number + 1 (0: nobody wrote), agent, its time, strength of the
# write, instruction and the bytes of the word
_CLUSTER, _AGENT, _TIME, _STRENGTH, _INSTRUCTION, _BYTES, _COLUMNS = 0, 1, 2, 3, 4, 5, 6


class GlobalRaces:
    """What the shadows of one launch share."""

    __slots__ = ("instructions",)

    def __init__(self) -> None:
        self.instructions: dict[int, Any] = {}  # those that have read or written, for reports

    def watch(self, segments: list[Any]) -> None:
        """Give each writable allocation a fresh shadow."""
        for segment in segments:
            is_watched = segment.base % 4 == 0 and not segment.is_read_only
            if is_watched and len(segment.data) <= _LIMIT_BYTES:
                segment.shadow = GlobalShadow(self, len(segment.data))


class GlobalShadow:
    """The last writer of every word of one allocation, and its last weak readers."""

    is_active = True

    __slots__ = ("_is_written", "_observers", "_races", "_readers", "_rows", "_size")

    def __init__(self, races: GlobalRaces, size: int):
        self._races = races
        self._size = size
        self._rows: Array = np.zeros((0, _COLUMNS), np.int32)
        self._readers = GlobalReaders(-(-size // 4))
        self._is_written = False  # until then no read can be wrong
        # word -> (cluster + 1, agent) -> when it saw the last write, a strong one, by a strong read
        self._observers: dict[int, dict[tuple[int, int], int]] = {}

    def on_read(self, cells: Any, access: Access, byte_mask: Any = ALL_BYTES) -> None:
        """Check a read of words.

        Raises:
            RaceError: their last write is not ordered before it.
        """
        if self._is_written:
            late = self._late(cells, access, byte_mask)
            if late is not None:
                self._report(cells, late, access, "read")
        if access.strength:
            self._observe(cells, access)
            return
        self._races.instructions[access.instruction.index] = access.instruction
        self._readers.note(cells, access, byte_mask)

    def on_constant_read(self, cells: Any, access: Access, byte_mask: Any = ALL_BYTES) -> None:
        """Check a read that is for memory which the kernel does not write.

        Raises:
            RaceError: the kernel has written it, whatever orders the two.
        """
        if not self._is_written:
            return
        rows = self._rows[cells]
        written = (rows[..., _CLUSTER] != 0) & (rows[..., _BYTES] & byte_mask != 0)
        if not written.any():
            return
        position = int(np.argmax(written))
        row = rows[position]
        other = self._describe(
            int(row[_INSTRUCTION]), int(row[_CLUSTER]), int(row[_AGENT]), access.warp.cta.cluster
        )
        rule = "the memory of ld.global.nc and ldu must be read-only while the kernel runs"
        raise _race(access, "read", _cell(cells, position), _Before("written", other), rule)

    def on_write(
        self,
        cells: Any,
        access: Access,
        byte_mask: Any = ALL_BYTES,
        changed: Changed | None = None,
    ) -> None:
        """Check and note a write of words that is about to happen.

        Args:
            cells: the words.
            access: who writes.
            byte_mask: which bytes of each word.
            changed: tells which words will have other bytes than now (None: all).

        Raises:
            RaceError: the last write, or a read, is not ordered before it and saw other bytes.
        """
        if not self._is_written:
            self._rows = np.zeros((-(-self._size // 4), _COLUMNS), np.int32)
            self._is_written = True
        self._judge_reads(cells, access, byte_mask, changed)
        late = self._late(cells, access, byte_mask)
        if late is not None:
            conflicts = late & changed() if changed is not None else late
            if conflicts.any():
                self._report(cells, conflicts, access, "write")
        instruction = access.instruction
        self._races.instructions[instruction.index] = instruction
        cluster = access.warp.cta.cluster.number + 1
        row = (
            cluster, access.agent, access.time, access.strength, instruction.index, ALL_BYTES
        )  # fmt: skip
        self._rows[cells] = row
        if not isinstance(byte_mask, int):
            self._rows[cells, _BYTES] = byte_mask
        if late is not None:
            self._rows[np.r_[cells][late]] = 0
        if self._observers:
            for cell in np.r_[cells].tolist():
                self._observers.pop(cell, None)
        if isinstance(byte_mask, int) and not access.strength:
            self._readers.forget(cells)

    def _observe(self, cells: Any, access: Access) -> None:
        """Note that a strong read has seen the strong writes of words."""
        if not self._is_written:
            return
        who = access.warp.cta.cluster.number + 1, access.agent
        for cell in np.r_[cells][np.ravel(self._rows[cells][..., _STRENGTH]) > 0].tolist():
            self._observers.setdefault(cell, {}).setdefault(who, access.time)

    def _judge_reads(
        self, cells: Any, access: Access, byte_mask: Any, changed: Changed | None
    ) -> None:
        """Raise RaceError if a write of other bytes overtakes a read."""
        found = self._readers.late(cells, access, byte_mask)
        if found is None:
            return
        late, reads = found
        if changed is not None:
            late = late & np.ravel(changed())
        if not late.any():
            return
        position = int(np.argmax(late))
        cluster, agent, instruction = (int(value) for value in reads[position])
        other = self._describe(instruction, cluster, agent, access.warp.cta.cluster)
        rule = "no barrier, phase or wait orders the two accesses"
        if cluster != access.warp.cta.cluster.number + 1:
            rule = "no release and acquire on global memory order the two clusters"
        raise _race(access, "write", _cell(cells, position), _Before("read", other), rule)

    def _late(self, cells: Any, access: Access, byte_mask: Any) -> Array | None:
        """Return which words were last written by somebody the access does not know of."""
        rows = self._rows[cells]
        owners = rows[..., _CLUSTER]
        if not owners.any():
            return None
        cluster = access.warp.cta.cluster
        is_own = owners == cluster.number + 1
        clock, agents, times = access.clock, rows[..., _AGENT], rows[..., _TIME]
        known = clock.seen
        if access.is_async:
            known = np.where(cluster.notes.is_generic, clock.fenced_global, clock.seen)
        late = is_own & (times > known[agents])
        late &= (agents != access.agent) | (times != access.time)
        if not is_own.all():
            late |= clock.unknown(cluster.number, owners, agents, times)
        late &= rows[..., _BYTES] & byte_mask != 0
        if late.any():
            self._forgive_strong(cells, rows, late, access)
        return late if late.any() else None

    def _forgive_strong(self, cells: Any, rows: Array, late: Array, access: Access) -> None:
        """Take out of `late` strong writes that a strong access may meet, or has seen."""
        earlier = rows[..., _STRENGTH]
        if not earlier.any():
            return
        cluster = access.warp.cta.cluster
        own = cluster.number + 1
        if access.strength:
            needed = needed_strength(rows[..., _AGENT], access.warp.cta.rank, cluster)
            needed = np.where(rows[..., _CLUSTER] == own, needed, GPU + 1)
            late &= np.minimum(earlier, access.strength) < needed
        clock = access.clock
        for position in np.flatnonzero(late & (earlier > 0)).tolist():
            for (owner, agent), time in self._observers.get(_cell(cells, position), {}).items():
                rows_of = clock.rows if owner == own else clock.others.get(owner - 1)
                if rows_of is not None and time <= rows_of[0][agent]:
                    late[position] = False
                    break

    def _report(self, cells: Any, late: Array, access: Access, what: str) -> None:
        position = int(np.argmax(late))
        row = self._rows[cells].reshape(-1, _COLUMNS)[position]
        cluster = access.warp.cta.cluster
        other = self._describe(
            int(row[_INSTRUCTION]), int(row[_CLUSTER]), int(row[_AGENT]), cluster
        )
        rule = "no barrier, phase or wait orders the two accesses"
        is_own = row[_CLUSTER] == cluster.number + 1
        if is_own and access.is_async and row[_TIME] <= access.clock.seen[row[_AGENT]]:
            rule = "a generic write needs fence.proxy.async before the async proxy may touch it"
        elif not is_own:
            rule = "no release and acquire on global memory order the two clusters"
        raise _race(access, what, _cell(cells, position), _Before("written", other), rule)

    def _describe(self, instruction: int, number: int, agent: int, cluster: Any) -> str:
        place = self._races.instructions[instruction]
        text = f"PTX line {place.line} `{place.text}`, cluster {number - 1}"
        warps = cluster.warps_per_cta
        if 0 <= agent < warps * len(cluster.ctas):
            text += f" CTA {agent // warps} warp {agent % warps}"
        return text


class _Before(NamedTuple):
    """The earlier access of a race: "read" or "written", and by whom."""

    how: str
    who: str


def _race(access: Access, what: str, cell: int, before: _Before, rule: str) -> RaceError:
    """Return the report of an access that an earlier one of the same word is not ordered with."""
    return RaceError(
        f"race: {what} by {access.describe()} of global memory last {before.how} by {before.who}; "
        f"{rule}",
        access.warp.where(access.instruction, address=4 * cell, space="allocation offset"),
        before.who,
        rule,
        before.who if before.how == "written" else "",
    )


def _cell(cells: Any, position: int) -> int:
    """Return the word at a position of an access."""
    if isinstance(cells, slice):
        return int(cast(Any, cells).start) + position
    return int(np.ravel(cells)[position])
