"""Vector clocks: what an agent has seen, in its own cluster and in others.

Lives here: clocks, and what fences leave in them. Not here: which instruction joins what
(`memory_order.py`, `isa/barrier.py`, `machine/barrier.py`, `async_engine.py`), the judgement
(`races.py`, `global_races.py`). Invariant: a `Known` and its arrays are never changed in place, so
that clocks share them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Known = dict[int, Array]  # number of a cluster -> the rows of a clock over its agents
Levels = tuple[Known | None, Known | None, Known | None]  # by scope: cta, cluster, gpu and sys

NOBODY: Known = {}


def merged(one: Known, other: Known) -> Known:
    """Return what either knows; `one` itself if the other adds no cluster and no new array."""
    result = one
    for number, rows in other.items():
        mine = result.get(number)
        if mine is rows:
            continue
        if result is one:
            result = dict(one)
        result[number] = rows if mine is None else np.maximum(mine, rows)
    return result


@dataclass(frozen=True, slots=True)
class Fences:
    """What fences of an agent, and of those it has met, cover or may still acquire.

    Attributes:
        released: what a relaxed store hands on, by the scope it may be handed on in.
        met: what relaxed loads have met and no fence has acquired yet, by the same.
    """

    released: Levels = (None, None, None)
    met: Levels = (None, None, None)

    def joined(self, other: "Fences") -> "Fences":
        """Return both."""
        if other is NO_FENCES:
            return self
        if self is NO_FENCES:
            return other
        return Fences(_both(self.released, other.released), _both(self.met, other.met))


NO_FENCES = Fences()


def _both(one: Levels, other: Levels) -> Levels:
    first, second, third = (
        b if a is None else a if b is None else merged(a, b) for a, b in zip(one, other)
    )
    return first, second, third


class Clock:
    """What one agent has seen of all agents of its cluster, and of other clusters.

    Attributes:
        rows: the three below as one array, so that a join is one operation.
        seen: the time up to which each agent's accesses are known.
        fenced: the same of what a proxy fence covers in shared and tensor memory.
        fenced_global: the same in global memory.
        others: what is known of other clusters.
        fences: see there.
    """

    __slots__ = ("fenced", "fenced_global", "fences", "others", "rows", "seen")

    def __init__(self, agents: int):
        self._hold(np.zeros((3, agents), np.int32), NOBODY, NO_FENCES)

    def _hold(self, rows: Array, others: Known, fences: Fences) -> None:
        self.rows = rows
        self.seen: Array = rows[0]
        self.fenced: Array = rows[1]
        self.fenced_global: Array = rows[2]
        self.others = others
        self.fences = fences

    def copy(self) -> "Clock":
        """Return an independent copy."""
        twin = Clock.__new__(Clock)
        twin._hold(self.rows.copy(), self.others, self.fences)
        return twin

    def join(self, other: "Clock") -> None:
        """Add everything `other` has seen."""
        np.maximum(self.rows, other.rows, out=self.rows)
        if other.others is not self.others:
            self.others = merged(self.others, other.others)
        if other.fences is not self.fences:
            self.fences = self.fences.joined(other.fences)

    def meet(self, other: "Clock") -> None:
        """Keep only what `other` has seen too, of the cluster's agents."""
        np.minimum(self.rows, other.rows, out=self.rows)

    def snapshot(self, number: int) -> Known:
        """Return all that an agent of cluster `number` has seen, to be handed on."""
        return {**self.others, number: self.rows.copy()}

    def take(self, number: int, known: Known) -> None:
        """Add what was handed to an agent of cluster `number`."""
        own = known.get(number)
        if own is None:
            self.others = merged(self.others, known)
            return
        np.maximum(self.rows, own, out=self.rows)
        if len(known) > 1:
            rest = {other: rows for other, rows in known.items() if other != number}
            self.others = merged(self.others, rest)

    def unknown(self, own: int, owners: Array, agents: Array, times: Array) -> Array:
        """Return which accesses of other clusters than `own` the clock does not know.

        Args:
            own: number of its cluster.
            owners: number of each access's cluster, plus 1 (0: there is no access).
            agents: who made it.
            times: when.
        """
        late = np.zeros(owners.shape, np.bool_)
        for owner in set(np.ravel(owners).tolist()) - {0, own + 1}:
            chosen = owners == owner
            rows = self.others.get(owner - 1)
            late |= chosen if rows is None else chosen & (times > rows[0][agents])
        return late

    def fence_proxy(self, space: str = "") -> None:
        """Make every generic write seen so far visible to the async proxy.

        Args:
            space: the state space whose memory alone is meant, e.g. "global" ("": all).
        """
        if space != "global":
            np.maximum(self.fenced, self.seen, out=self.fenced)
        if not space.startswith("shared"):
            np.maximum(self.fenced_global, self.seen, out=self.fenced_global)
