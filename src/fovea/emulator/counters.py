"""Counters of a launch: instructions by class, MUFU operations, bytes, MMA FLOPs, waits.

Lives here: the sums. Not here: events over time (`trace.py`). Invariant: block execution counts
are exact and cost one dictionary update per block; classes are derived from them at the end.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from fovea.emulator.isa.instruction import Instruction
from fovea.emulator.ptx.types import size_bytes

_TILE_BYTES = 128  # of one 8x8 tile of 16-bit elements (ldmatrix, stmatrix)


class Counters:
    """Sums over all warps of a launch."""

    def __init__(self, program: Any):
        self._program = program
        self.sums: Counter[str] = Counter()
        self.by_warp: dict[tuple[Any, int], Counter[str]] = {}
        self._segments: set[int] = set()

    @property
    def lines(self) -> frozenset[int]:
        """PTX lines that warps which have finished got to."""
        segments = self._program.segments
        return frozenset(i.line for number in self._segments for i in segments[number].instructions)

    def add(self, name: str, amount: int) -> None:
        """Add to a named sum, e.g. `mma_flops.bf16`, `tma_load_bytes`."""
        self.sums[name] += amount

    def collect(self, warp: Any) -> None:
        """Fold in the block counts of a finished warp."""
        totals: Counter[str] = Counter()
        self._segments.update(warp.segment_counts)
        for segment, count in warp.segment_counts.items():
            lanes = warp.lane_counts.get(segment, 0)
            for name, per_warp, per_lane in self._program.segment_costs(segment):
                totals[name] += per_warp * count + per_lane * lanes
        for name, steps in warp.waited_steps.items():
            totals[f"waited_steps.{name}"] += steps
        self.by_warp[warp.cta.index, warp.index] = totals
        self.sums.update(totals)


def instruction_costs(instruction: Instruction) -> Iterator[tuple[str, int, int]]:
    """Yield (counter, amount per warp, amount per lane) of one execution of an instruction.

    Guarded instructions count as executed by all lanes of the warp that reach them.
    """
    entry = instruction.entry
    mnemonic = entry.form.mnemonic
    yield f"instructions.{entry.kind}", 1, 0
    if entry.kind == "mufu":
        yield f"mufu.{mnemonic}", 0, 1
    if mnemonic in ("ld", "st") and entry.family == "load_store" and instruction["type"]:
        space = (instruction["space"] or "generic").partition("::")[0]
        size = size_bytes(instruction["type"]) * int(instruction["vec"][1:] or 1)
        yield f"{space}_{'load' if mnemonic == 'ld' else 'store'}_bytes", 0, size
    if mnemonic in ("ldmatrix", "stmatrix") and instruction["num"]:
        tiles = int(instruction["num"][1:]) * (2 if "m16n16" in instruction.opcode else 1)
        yield (
            f"shared_{'load' if mnemonic == 'ldmatrix' else 'store'}_bytes",
            _TILE_BYTES * tiles,
            0,
        )
