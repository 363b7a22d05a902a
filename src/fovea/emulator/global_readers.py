"""Who read each word of an allocation last, so that a write that overtakes a read is found.

Lives here: the log of reads, and the records it becomes once the allocation is written. Not here:
who wrote what, and reports (`global_races.py`). Invariant: a read is noted with its cluster, agent,
that agent's time and the stamp of its moment; of each word the last read stays, and the last one of
another cluster than that one's.

The last read of another cluster speaks for all earlier ones of other clusters: whoever knows of its
stamp knows of theirs. Within a cluster only the last one is judged; the writer may be late for an
earlier one of another warp, which is then missed, never invented.

An allocation that nobody writes costs a list entry a read: kernels read their inputs, and write
elsewhere.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.races import ALL_BYTES, Access

Array = NDArray[Any]

_LOG_WORDS = 1 << 22  # so much is noted in the log before it becomes records
# columns of the records: the last read, then the last one of another cluster
CLUSTER, AGENT, TIME, STAMP, INSTRUCTION, BYTES = range(6)
_OTHER = 6  # first column of the second: cluster, stamp, instruction, bytes
_COLUMNS = _OTHER + 4
_KEPT = (CLUSTER, STAMP, INSTRUCTION, BYTES)


class GlobalReaders:
    """The last reads of the words of one allocation."""

    __slots__ = ("_is_written", "_log", "_logged", "_records", "_words")

    def __init__(self, words: int):
        self._words = words
        self._log: list[tuple[Any, Any, tuple[int, ...]]] = []
        self._logged = 0
        self._records: Array | None = None
        self._is_written = False

    def note(self, cells: Any, access: Access, stamp: int, byte_mask: Any) -> None:
        """Note a read of words."""
        cluster = access.warp.cta.cluster.number + 1
        row = (cluster, access.agent, access.time, stamp, access.instruction.index, ALL_BYTES)
        if self._is_written or self._logged > _LOG_WORDS:
            self._keep(cells, byte_mask, row)
            return
        self._log.append((cells, byte_mask, row))
        self._logged += _count(cells)

    def late(self, cells: Any, access: Access, byte_mask: Any) -> tuple[Array, Array] | None:
        """Return which words were last read by somebody a write does not know of, and the reads.

        Shapes:
            result: [cells] of bool, [cells, (cluster, agent, stamp, instruction)]; None: no word.
        """
        self._is_written = True
        records = self._filled()
        rows = records[cells].reshape(-1, _COLUMNS)
        owners = rows[:, CLUSTER]
        if not owners.any():
            return None
        cluster = access.warp.cta.cluster
        is_own = owners == cluster.number + 1
        agents = np.where(is_own, rows[:, AGENT], 0)
        overtaken = is_own & (rows[:, TIME] > access.clock.seen[agents])
        overtaken &= (rows[:, AGENT] != access.agent) & (rows[:, BYTES] & byte_mask != 0)
        foreign = np.where(is_own[:, None], rows[:, _OTHER:], rows[:, _KEPT])
        unknown = (foreign[:, 0] != 0) & (foreign[:, 1] >= cluster.known_stamp)
        unknown &= foreign[:, 3] & byte_mask != 0
        late = overtaken | unknown
        if not late.any():
            return None
        found = np.stack(
            (foreign[:, 0], np.full(len(rows), -1), foreign[:, 1], foreign[:, 2]), axis=1
        )
        found[overtaken] = rows[overtaken][:, (CLUSTER, AGENT, STAMP, INSTRUCTION)]
        return late, found

    def forget(self, cells: Any) -> None:
        """Drop the reads of whole words that were written: who knows of the write knows of them."""
        if self._records is not None:
            self._records[cells] = 0

    def _filled(self) -> Array:
        """Return the records, with all that was in the log."""
        if self._records is None:
            self._records = np.zeros((self._words, _COLUMNS), np.int32)
        log, self._log = self._log, []
        for cells, byte_mask, row in log:
            self._store(self._records, cells, byte_mask, row)
        return self._records

    def _keep(self, cells: Any, byte_mask: Any, row: tuple[int, ...]) -> None:
        self._store(self._filled(), cells, byte_mask, row)

    @staticmethod
    def _store(records: Array, cells: Any, byte_mask: Any, row: tuple[int, ...]) -> None:
        last = records[cells].reshape(-1, _COLUMNS)
        is_other = (last[:, CLUSTER] != row[CLUSTER]) & (last[:, CLUSTER] != 0)
        if is_other.any():
            last[is_other, _OTHER:] = last[is_other][:, _KEPT]
        last[:, :_OTHER] = row
        if not isinstance(byte_mask, int):
            last[:, BYTES] = np.ravel(byte_mask)
        records[cells] = last.reshape(records[cells].shape)


def _count(cells: Any) -> int:
    if isinstance(cells, slice):
        span = cast(Any, cells)
        return int(span.stop) - int(span.start)
    return len(cells)
