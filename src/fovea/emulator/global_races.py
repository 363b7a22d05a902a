"""Races on global memory: who wrote each word last, who read it, and whether a later access knows.

Within a cluster the vector clocks of `races.py` decide, proxies included. Between clusters, which
share no clocks, a stamp does: it grows with every release on global memory (a strong store or an
atomic), a write is noted under the stamp of its moment, and a strong load or atomic of a place
tells its cluster of everything before the last release there. That is more than such a pair of
accesses promises, so an order may be seen where none is, never the reverse.

Lives here: the stamps, the shadow of one allocation, the report. Not here: who read what
(`global_readers.py`), shared and tensor memory (`races.py`), which accesses are strong
(`isa/load_store.py`). Not modelled: accesses that atomics, reductions or strong stores make.
Invariant: a write that leaves the bytes of a word as they are is no report; the word is not watched
after it.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.errors import RaceError
from fovea.emulator.global_readers import GlobalReaders
from fovea.emulator.races import ALL_BYTES, Access, Changed

Array = NDArray[Any]

_PLACES = 1 << 16  # released places kept apart; past that all that was released counts for each
_LIMIT_BYTES = 1 << 28  # larger allocations are not watched: the shadow takes six times as much
# columns of the shadow: cluster number + 1 (0: nobody wrote), agent, its time, stamp, instruction
# and the bytes of the word
_CLUSTER, _AGENT, _TIME, _STAMP, _INSTRUCTION, _BYTES, _COLUMNS = 0, 1, 2, 3, 4, 5, 6


class GlobalRaces:
    """What the clusters of one launch know of each other."""

    __slots__ = ("_floor", "_released", "instructions", "stamp")

    def __init__(self) -> None:
        self.stamp = 0
        self._released: dict[int, int] = {}
        self._floor = 0
        self.instructions: dict[int, Any] = {}  # those that have read or written, for reports

    def release(self, address: int) -> None:
        """Note a release at a place."""
        self.stamp += 1
        if len(self._released) >= _PLACES:
            self._released.clear()
            self._floor = self.stamp
        self._released[address] = self.stamp

    def acquire(self, cluster: Any, address: int) -> None:
        """Tell a cluster what was done before the last release at a place."""
        known = max(self._released.get(address, 0), self._floor)
        cluster.known_stamp = max(cluster.known_stamp, known)

    def watch(self, segments: list[Any]) -> None:
        """Give each writable allocation a fresh shadow."""
        for segment in segments:
            is_watched = segment.base % 4 == 0 and not segment.is_read_only
            if is_watched and len(segment.data) <= _LIMIT_BYTES:
                segment.shadow = GlobalShadow(self, len(segment.data))


class GlobalShadow:
    """The last plain writer of every word of one allocation, and its last readers."""

    is_active = True

    __slots__ = ("_is_written", "_races", "_readers", "_rows", "_size")

    def __init__(self, races: GlobalRaces, size: int):
        self._races = races
        self._size = size
        self._rows: Array = np.zeros((0, _COLUMNS), np.int32)
        self._readers = GlobalReaders(-(-size // 4))
        self._is_written = False  # until then no read can be wrong

    def on_read(self, cells: Any, access: Access, byte_mask: Any = ALL_BYTES) -> None:
        """Check a read of words.

        Raises:
            RaceError: their last write is not ordered before it.
        """
        if access.is_strong:
            return
        if self._is_written:
            late = self._late(cells, access, byte_mask)
            if late is not None:
                self._report(cells, late, access, "read")
        self._races.instructions[access.instruction.index] = access.instruction
        self._readers.note(cells, access, self._races.stamp, byte_mask)

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
        if access.is_strong:
            return
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
        row = (cluster, access.agent, access.time, self._races.stamp, instruction.index, ALL_BYTES)
        self._rows[cells] = row
        if not isinstance(byte_mask, int):
            self._rows[cells, _BYTES] = byte_mask
        if late is not None:
            self._rows[np.r_[cells][late]] = 0
        if isinstance(byte_mask, int):
            self._readers.forget(cells)

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
        cluster, agent, _stamp, instruction = (int(value) for value in reads[position])
        other = self._describe(instruction, cluster, agent, access.warp.cta.cluster)
        rule = "no barrier, phase or wait orders the two accesses"
        if cluster != access.warp.cta.cluster.number + 1:
            rule = "no release and acquire on global memory order the two clusters"
        raise RaceError(
            f"race: write by {access.describe()} of global memory last read by {other}; {rule}",
            access.warp.where(
                access.instruction, address=4 * _cell(cells, position), space="allocation offset"
            ),
            other,
            rule,
        )

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
        late |= (owners != 0) & ~is_own & (rows[..., _STAMP] >= cluster.known_stamp)
        late &= rows[..., _BYTES] & byte_mask != 0
        return late if late.any() else None

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
        raise RaceError(
            f"race: {what} by {access.describe()} of global memory last written by {other}; {rule}",
            access.warp.where(
                access.instruction, address=4 * _cell(cells, position), space="allocation offset"
            ),
            other,
            rule,
            other,
        )

    def _describe(self, instruction: int, number: int, agent: int, cluster: Any) -> str:
        place = self._races.instructions[instruction]
        text = f"PTX line {place.line} `{place.text}`, cluster {number - 1}"
        warps = cluster.warps_per_cta
        if 0 <= agent < warps * len(cluster.ctas):
            text += f" CTA {agent // warps} warp {agent % warps}"
        return text


def _cell(cells: Any, position: int) -> int:
    """Return the word at a position of an access."""
    if isinstance(cells, slice):
        return int(cast(Any, cells).start) + position
    return int(np.ravel(cells)[position])
