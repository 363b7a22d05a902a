"""Pipeline edges: which data passes between which roles, in how many stages, with which arrivals.

Lives here: the `Edge` value with its derived arrive counts. Not here: the device code that waits
and arrives (`kernels/device/pipeline.py`). Invariant: a barrier's expected arrivals are derived
from the roles' warps, never written by hand: too many deadlock, too few race.
"""

from dataclasses import dataclass

BARRIER_BYTES = 8  # an mbarrier is one 64-bit word


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A ring of stages filled by TMA and emptied by consumer warps.

    The producer is one thread: it arrives once per stage with the byte count, and the copy engine
    completes the bytes. Where warps fill a stage themselves, `producer_warps` arrive, each once.
    Each consumer warp arrives once when its last read is done.
    """

    name: str
    stages: int
    consumer_warps: int
    stage_bytes: int
    producer_warps: int = 1
    ctas: int = 1  # of a cluster whose stages are filled together, and freed by all

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete `<name>_full`: the single expect-tx arrival, or the warps'."""
        return self.producer_warps

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that complete `<name>_empty`: one lane of every consuming warp."""
        return self.consumer_warps * self.ctas

    @property
    def num_barriers(self) -> int:
        """Barriers of the edge: a full and an empty one per stage."""
        return 2 * self.stages
