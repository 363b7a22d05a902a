"""Who read each word of an allocation last, so that a write that overtakes a read is found.

Lives here: the log of reads, and the records it becomes once the allocation is written. Not here:
who wrote what, and reports (`global_races.py`). Invariant: a read is noted with its cluster, agent
and that agent's time; of each word the last read stays, and the last one of another cluster than
that one's. The writer may be late for an earlier one, which is then missed, never invented.

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
CLUSTER, AGENT, TIME, INSTRUCTION, BYTES = range(5)
_OTHER = 5  # first column of the second, which has the same
_COLUMNS = 2 * _OTHER


class GlobalReaders:
    """The last reads of the words of one allocation."""

    __slots__ = ("_is_written", "_log", "_logged", "_records", "_words")

    def __init__(self, words: int):
        self._words = words
        self._log: list[tuple[Any, Any, tuple[int, ...]]] = []
        self._logged = 0
        self._records: Array | None = None
        self._is_written = False

    def note(self, cells: Any, access: Access, byte_mask: Any) -> None:
        """Note a read of words."""
        cluster = access.warp.cta.cluster.number + 1
        row = (cluster, access.agent, access.time, access.instruction.index, ALL_BYTES)
        if self._is_written or self._logged > _LOG_WORDS:
            self._keep(cells, byte_mask, row)
            return
        self._log.append((cells, byte_mask, row))
        self._logged += _count(cells)

    def late(self, cells: Any, access: Access, byte_mask: Any) -> tuple[Array, Array] | None:
        """Return which words were last read by somebody a write does not know of, and the reads.

        Shapes:
            result: [cells] of bool, [cells, (cluster, agent, instruction)]; None: no word.
        """
        self._is_written = True
        if self._records is None and not self._log:
            return None
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
        foreign = np.where(is_own[:, None], rows[:, _OTHER:], rows[:, :_OTHER])
        unknown = access.clock.unknown(
            cluster.number, foreign[:, CLUSTER], foreign[:, AGENT], foreign[:, TIME]
        )
        unknown &= foreign[:, BYTES] & byte_mask != 0
        late = overtaken | unknown
        if not late.any():
            return None
        shown = (CLUSTER, AGENT, INSTRUCTION)
        found = foreign[:, shown]
        found[overtaken] = rows[overtaken][:, shown]
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
            last[is_other, _OTHER:] = last[is_other, :_OTHER]
        last[:, :_OTHER] = row
        if not isinstance(byte_mask, int):
            last[:, BYTES] = np.ravel(byte_mask)
        records[cells] = last.reshape(records[cells].shape)


def _count(cells: Any) -> int:
    if isinstance(cells, slice):
        span = cast(Any, cells)
        return int(span.stop) - int(span.start)
    return len(cells)
