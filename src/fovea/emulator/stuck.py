"""When a launch cannot go on: loops that nothing ends, and what each warp waits for.

Lives here: the recognition of such loops and the text of a deadlock report. Not here: who runs, and
what is tried before a deadlock is reported (`schedule.py`). Invariant: a loop counts as endless
only if its lanes have come to one place with equal registers twice, executed only what depends on
registers and memory in between, and no warp has changed any memory meanwhile.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fovea.emulator.isa.instruction import Array, Instruction, Slot
from fovea.emulator.machine.warp import Split, Warp
from fovea.emulator.ptx import syntax

# beside those that work on registers alone
_READS = frozenset(
    "ld ldu bra brx fence membar nanosleep shfl vote match redux elect activemask".split()
)
# chance has a part in what they give
_CHANCE = ("mbarrier.try_wait", "mbarrier.test_wait")
_CLOCKS = ("%clock", "%globaltimer")


@dataclass(slots=True)
class _Saved:
    """Where lanes were, and whether they have come there again."""

    split: Split
    turns: int
    state: int
    is_repeated: bool = False


class EndlessLoops:
    """Looks at the warps from time to time, while nothing happens."""

    def __init__(self, segments: list[Any]):
        self._segments = segments
        self._saved: dict[tuple[int, bytes], _Saved] = {}
        self._counts: dict[int, dict[int, int]] = {}  # what each warp had executed by then
        self._kinds: dict[int, tuple[bool, bool]] = {}
        self._since = -1
        self._looks = 0
        self._next = 0

    def look(self, active: list[Warp], blocked: list[Warp], idle: int, since: int) -> bool:
        """Return whether all running lanes are in loops that nothing ends.

        Args:
            active: the warps that run.
            blocked: the warps that wait.
            idle: scheduler steps since anything changed.
            since: the step when it did.
        """
        if since != self._since:
            self._since, self._looks, self._next = since, 0, 0
        if idle < self._next:
            return False
        self._next = idle + idle // 64
        self._looks += 1
        # Brent: keep one state, for twice as many looks each time, and wait for it to come again
        if self._looks & (self._looks - 1) == 0:
            self._saved = {}
            self._counts = {id(w): dict(w.segment_counts) for w in (*active, *blocked)}
        splits = [(warp, split) for warp in active for split in warp.splits if split.wait is None]
        again = [self._has_come_again(warp, split) for warp, split in splits]
        if not all(again) or not all(
            self._only_reads(w, w in blocked) for w in (*active, *blocked)
        ):
            return False
        for warp, split in splits:
            instructions = self._segments[split.pc].instructions
            place = f" at PTX line {instructions[0].line}" if instructions else ""
            warp.state["loop"] = f"loops{place}, and nothing that it reads changes"
        return True

    def _has_come_again(self, warp: Warp, split: Split) -> bool:
        key = (id(warp), split.mask.tobytes())
        state = _state(warp, split)
        saved = self._saved.get(key)
        if saved is None:
            self._saved[key] = _Saved(split, split.turns, state)
            return False
        if saved.state == state and (saved.split is not split or saved.turns != split.turns):
            saved.is_repeated = True
        return saved.is_repeated

    def _only_reads(self, warp: Warp, is_blocked: bool) -> bool:
        before = self._counts.get(id(warp))
        if before is None:
            return False
        kinds = [
            self._kind_of(number)
            for number, count in warp.segment_counts.items()
            if count != before.get(number)
        ]
        return all(only_reads and (is_blocked or is_sure) for only_reads, is_sure in kinds)

    def _kind_of(self, number: int) -> tuple[bool, bool]:
        """Return whether a segment changes no memory, and whether chance has no part in it."""
        found = self._kinds.get(number)
        if found is None:
            instructions = self._segments[number].instructions
            found = self._kinds[number] = (
                all(map(_changes_nothing, instructions)),
                not any(map(_has_chance, instructions)),
            )
        return found


def _changes_nothing(instruction: Instruction) -> bool:
    entry, opcode = instruction.entry, instruction.opcode
    return (
        entry.kind in ("alu", "mufu")
        or entry.form.mnemonic in _READS
        or opcode.startswith(("bar.warp.sync", *_CHANCE))
        # one that succeeds is an event of the machine
        or (entry.form.mnemonic == "atom" and ".cas" in opcode)
    )


def _has_chance(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(_CHANCE) or any(
        isinstance(operand, syntax.SpecialRegister) and operand.name.startswith(_CLOCKS)
        for operand in instruction.operands.values()
    )


def _state(warp: Warp, split: Split) -> int:
    """Return a hash of where lanes are and of all that their registers hold."""
    held = tuple(
        value[split.mask].tobytes() if value.__class__ is np.ndarray else value.__class__
        for value in warp.registers
    )
    return hash((split.pc, split.calls, held))


# --- reports --------------------------------------------------------------------------------------


def describe_waits(warps: Iterable[Warp], slots: Mapping[str, Slot]) -> Iterable[str]:
    """Yield what the lanes of each warp wait for."""
    for warp in sorted(warps, key=lambda w: (w.cta.cluster.number, w.cta.rank, w.index)):
        for split in warp.splits:
            who = f"CTA {warp.cta.index} warp {warp.index} ({_threads_of(warp, split, slots)})"
            if split.wait is not None:
                yield f"{who} waits for {split.wait.describe()}"
            elif "loop" in warp.state:
                yield f"{who} {warp.state['loop']}"
            elif warp.polled:
                yield f"{who} polls: {warp.state.get('poll', 'a condition that stays false')}"
            else:
                yield f"{who} is ready"


def _threads_of(warp: Warp, split: Split, slots: Mapping[str, Slot]) -> str:
    """Return how many threads of a warp wait, and how many its guard leaves out of it."""
    guard = split.wait.instruction.guard if split.wait is not None else None
    if guard is None:
        return f"{split.lanes} threads"
    taken: Array = warp.registers[slots[guard.register.uid].index] != guard.is_negated
    count = int(np.count_nonzero(taken & split.mask))
    held = split.lanes - count
    text = f"{count} threads"
    return f"{text}; the guard leaves out {held}, which go on with them" if held else text
