"""A whole launch: its query tiles, laid on the SMs in the order of the kernel.

Lives here: how long a query tile takes by the KV tiles that it visits, the walk of every query tile
of a call, the SM that is through last. Not here: the roles inside an SM (`sm90.py`, `sm100.py`).
Invariant: a query tile's time is simulated for a few numbers of visits and is a straight line
between them and beyond; a launch has no other state between SMs than the next query tile.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Visits at which a query tile is simulated; beyond the last a further one costs what it did there.
SAMPLED_VISITS = (1, 2, 4, 8, 14)

RunTiles = Callable[[list[int]], float]  # KV tiles by query tile -> cycles of a CTA that does them


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTimes:
    """Cycles of a query tile in a row of its like, and what a CTA needs besides for its first.

    `times` belong to SAMPLED_VISITS.
    """

    times: tuple[float, ...]
    start: float

    @classmethod
    def of(cls, run_tiles: RunTiles, *, least_visit: float, is_persistent: bool) -> "TileTimes":
        """Return the times of a kernel, simulated.

        Args:
            run_tiles: simulates a CTA.
            least_visit: cycles in which memory delivers a KV tile to each of all SMs.
            is_persistent: a CTA goes on to another query tile; else each is done by itself.
        """
        times: list[float] = []
        start = 0.0
        for visits in SAMPLED_VISITS:
            if is_persistent:
                two, four = run_tiles([visits] * 2), run_tiles([visits] * 4)
                time = (four - two) / 2
                start = two - 2 * time
            else:
                time = run_tiles([visits])
            times.append(max(time, visits * least_visit))
        return cls(times=tuple(times), start=max(0.0, start))

    @property
    def visit(self) -> float:
        """Cycles of one more KV tile in a long walk."""
        return (self.times[-1] - self.times[-2]) / (SAMPLED_VISITS[-1] - SAMPLED_VISITS[-2])

    def at(self, visits: int) -> float:
        """Return the cycles of a query tile of so many KV tiles."""
        if visits >= SAMPLED_VISITS[-1]:
            return self.times[-1] + (visits - SAMPLED_VISITS[-1]) * self.visit
        points = zip(SAMPLED_VISITS, self.times, strict=True)
        for (low, before), (high, after) in itertools.pairwise(points):
            if low <= visits <= high:
                return before + (after - before) * (visits - low) / (high - low)
        return self.times[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A dense call of plain attention; `causal` is aligned to the bottom right."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def flops(self) -> int:
        """FLOPs as benchmarks count them: a causal call of equal lengths has half of the pairs."""
        pairs = self.seqlen_q * self.seqlen_kv
        if self.causal:
            pairs -= self.seqlen_q * self.seqlen_q // 2
        return 2 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)

    def walks(self, tile_rows: int, tile_n: int) -> list[int]:
        """Return the visits of each query tile of one head, longest first."""
        tiles = -(-self.seqlen_q // tile_rows)
        hidden = self.seqlen_q - self.seqlen_kv if self.causal else 0
        ends = [min(self.seqlen_q, (tile + 1) * tile_rows) for tile in range(tiles)]
        keys = [end - hidden if self.causal else self.seqlen_kv for end in ends]
        return [max(1, -(-each // tile_n)) for each in reversed(keys)]


def launch_cycles(call: Call, times: TileTimes, *, shape: tuple[int, int], workers: int) -> float:
    """Return the cycles from the first CTA's start to the last one's end.

    Args:
        shape: query rows and KV columns of a tile; rows of all CTAs of a cluster.
        workers: CTAs, or clusters of them, that run at a time.
    """
    walks = call.walks(*shape)
    costs = [times.at(visits) for visits in walks for _ in range(call.batch * call.heads)]
    return times.start + last_end(costs, workers)


def last_end(costs: Sequence[float], workers: int) -> float:
    """Return when the last worker is through if each takes the next piece when it is free."""
    if len(set(costs)) == 1:
        return -(-len(costs) // workers) * costs[0]
    free = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
