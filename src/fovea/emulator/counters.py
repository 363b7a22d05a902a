"""Counters of a launch: instructions by class, MUFU operations, bytes, MMA FLOPs, waits.

Lives here: the sums. Not here: events over time (`trace.py`). Invariant: block execution counts
are exact and cost one dictionary update per block; classes are derived from them at the end.
"""

from collections import Counter
from typing import Any


class Counters:
    """Sums over all warps of a launch."""

    def __init__(self, program: Any):
        self._program = program
        self.sums: Counter[str] = Counter()
        self.by_warp: dict[tuple[Any, int], Counter[str]] = {}

    def add(self, name: str, amount: int) -> None:
        """Add to a named sum, e.g. `mma_flops.bf16`, `tma_load_bytes`."""
        self.sums[name] += amount

    def collect(self, warp: Any) -> None:
        """Fold in the block counts of a finished warp."""
        totals: Counter[str] = Counter()
        for segment, count in warp.segment_counts.items():
            lanes = warp.lane_counts.get(segment, 0)
            for name, per_warp, per_lane in self._program.segment_costs(segment):
                totals[name] += per_warp * count + per_lane * lanes
        for name, steps in warp.waited_steps.items():
            totals[f"waited_steps.{name}"] += steps
        self.by_warp[warp.cta.index, warp.index] = totals
        self.sums.update(totals)
