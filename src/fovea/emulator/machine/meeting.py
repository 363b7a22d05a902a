"""Where lanes of a warp that have parted wait for each other: at `.sync` instructions.

A `.sync` instruction waits for the lanes its member mask names, an `.aligned` one for all of its
warp. Where all are there nothing waits; else the lanes that came leave their split in the middle of
a segment (`Parted`) and wait, and those that had waited at one place of the program go on as one
split.
Lives here: who waits for whom, and when that can never end. Not here: what is exchanged
(`isa/shuffle.py`), where lanes of a branch meet (`warp.py`). Invariant: a gathering is in
`warp.gatherings` exactly while a lane it waits for has neither come nor exited; no lane waits in
two.
Source: PTX ISA 9.7.9.6, 9.7.13.1-2, 9.7.13.10-15.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa.instruction import ALL_LANES, Array, Instruction
from fovea.emulator.machine.warp import Reconvergence, Split, Wait, Warp
from fovea.emulator.ptx.types import LANES

FULL = 0xFFFFFFFF
# what a part of the lanes gave: who, and the writers of what they get
_Part = tuple[Array, tuple[Callable[[Any, Array, Array], None] | None, ...]]


def pack_mask(lanes: Array) -> int:
    """Return 32 booleans as a bit mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def unpack_mask(bits: int) -> Array:
    """Return a bit mask as 32 booleans; ALL_LANES if it is full."""
    if bits == FULL:
        return ALL_LANES
    packed = np.frombuffer(bits.to_bytes(4, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").astype(np.bool_)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What lanes do that have met: results of the inputs of all of them, for all of them.

    Attributes:
        reads: the inputs of a lane.
        writes: what a lane gets, None if it does not want it.
        compute: `compute(warp, lanes that take part, *inputs) -> results`.
    """

    ins: Instruction
    reads: tuple[Callable[[Any], Array], ...]
    writes: tuple[Callable[[Any, Array, Array], None] | None, ...]
    compute: Callable[..., tuple[Array, ...]]

    def run(self, w: Any, lanes: Array) -> None:
        """Exchange among lanes that all execute it now."""
        results = self.compute(w, lanes, *[read(w) for read in self.reads])
        for write, result in zip(self.writes, results):
            if write is not None:
                write(w, lanes, result)


@dataclass(slots=True, eq=False)
class Gathering:
    """Lanes that wait for others at a `.sync` instruction.

    Attributes:
        key: equal for lanes that meet: the instruction's qualifiers and member mask.
        problem: what to say if the others never come, of the lanes that did.
        wanted: bit mask of who has to come, exited or not.
        exchange: what they do then; None: they execute the instruction (again) as one split.
        have: bit mask of the lanes that wait here.
        skipped: bit mask of lanes that went past a place where lanes meet, or past a guard.
    """

    key: object
    ins: Instruction
    problem: Callable[[int], str]
    wanted: int
    exchange: Exchange | None
    have: int = 0
    skipped: int = 0
    inputs: list[Array] = field(default_factory=list[Array])
    parts: list[_Part] = field(default_factory=list[_Part])
    splits: list[Split] = field(default_factory=list[Split])

    def missing(self, w: Warp) -> int:
        """Return the lanes that have neither come nor exited."""
        return self.wanted & ~self.have & ~pack_mask(w.exited)

    def fault(self, w: Warp, more: str = "") -> IllegalOperand:
        """Return (to raise) that some lanes will not come."""
        return IllegalOperand(self.problem(self.have) + more, w.where(self.ins))

    def describe(self) -> str:
        """Return what is waited for."""
        return (
            f"{self.ins.opcode} with lanes {self.wanted:#010x}, of which {self.have:#010x} wait "
            "here"
        )


class Parted(Exception):
    """Lanes of the running split have to wait: the scheduler hands this to `part`.

    Attributes:
        ins: where.
        joined: the gatherings and the lanes that wait there from now on.
        is_retry: whether the instruction is yet to be executed.
    """

    def __init__(self, ins: Instruction, joined: list[tuple[Gathering, Array]], *, is_retry: bool):
        super().__init__(ins.opcode)
        self.ins = ins
        self.joined = joined
        self.is_retry = is_retry


# --- for instructions -----------------------------------------------------------------------------


def exchange_by_mask(w: Any, exchange: Exchange, mask: Array, members: Array) -> None:
    """Run an exchange of which not all 32 lanes are here with a full mask.

    Lanes of one split may have several masks: each names the lanes of one exchange.

    Raises:
        IllegalOperand: a mask leaves its lane out, or names one that executes it with another mask.
        Parted: a named lane is elsewhere.
    """
    joined: list[tuple[Gathering, Array]] = []
    exited = pack_mask(w.exited)
    for wanted, lanes in _groups(w, exchange.ins, mask, members):
        have = pack_mask(lanes)
        if not wanted & ~have & ~exited:
            exchange.run(w, lanes)
            continue
        gathering = _gathering(w, exchange, wanted)
        _join(w, gathering, have)
        _give(w, gathering, exchange, lanes)
        joined.append((gathering, lanes))
    if joined:
        raise Parted(exchange.ins, joined, is_retry=False)


def _groups(w: Any, ins: Instruction, mask: Array, members: Array) -> list[tuple[int, Array]]:
    """Return the member masks of an instruction, each with the lanes that have it."""
    here = pack_mask(mask)
    groups: list[tuple[int, Array]] = []
    for wanted in np.unique(members[mask]).tolist():
        have = pack_mask(mask & (members == wanted))
        if have & ~wanted:
            lane = (have & ~wanted).bit_length() - 1
            raise IllegalOperand(
                f"{ins.opcode} is executed by lane {lane}, which member mask {wanted:#010x} "
                "leaves out",
                w.where(ins, lane=lane),
            )
        others = wanted & here & ~have
        if others:
            other = others.bit_length() - 1
            raise IllegalOperand(
                f"{ins.opcode} has member mask {wanted:#010x} but only lanes {have:#010x} execute "
                f"it with that mask: lane {other} executes it with {int(members[other]):#010x}",
                w.where(ins, lane=(have & -have).bit_length() - 1),
            )
        groups.append((wanted, unpack_mask(have)))
    return groups


def meet_all(w: Any, ins: Instruction, mask: Array, problem: str) -> None:
    """Let an `.aligned` instruction wait until every lane that has not exited executes it.

    Raises:
        IllegalOperand: its guard leaves out some.
        Parted: lanes are elsewhere.
    """
    have = pack_mask(mask)
    missing = FULL & ~have & ~pack_mask(w.exited)
    if not missing:
        return
    if missing & pack_mask(w.current.mask):
        raise IllegalOperand(problem, w.where(ins))
    key = (ins.index, w.current.calls)
    found = [gathering for gathering in w.gatherings if gathering.key == key]
    gathering = found[0] if found else Gathering(key, ins, lambda have: problem, FULL, None)
    _join(w, gathering, have)
    raise Parted(ins, [(gathering, mask)], is_retry=True)


def _gathering(w: Warp, exchange: Exchange, wanted: int) -> Gathering:
    ins = exchange.ins
    key = (ins.opcode, wanted)
    for gathering in w.gatherings:
        if gathering.key == key:
            return gathering

    def problem(have: int) -> str:
        return (
            f"{ins.opcode} has member mask {wanted:#010x} but only lanes {have:#010x} execute it "
            "with that mask"
        )

    return Gathering(key, ins, problem, wanted, exchange)


def _join(w: Warp, gathering: Gathering, lanes: int) -> None:
    """Add lanes to a gathering.

    Raises:
        IllegalOperand: they wait for others, which wait for them elsewhere.
    """
    gathering.have |= lanes
    if gathering not in w.gatherings:
        w.gatherings.append(gathering)
    for other in w.gatherings:
        if other is not gathering and other.have & gathering.wanted and lanes & other.wanted:
            raise gathering.fault(
                w,
                f"; lanes {other.have:#010x} wait for {lanes:#010x} at PTX "
                f"line {other.ins.line} `{other.ins.text}`",
            )


def _give(w: Warp, gathering: Gathering, exchange: Exchange, lanes: Array) -> None:
    """Keep what lanes bring to an exchange: their registers may be others in another split."""
    inputs = [read(w) for read in exchange.reads]
    if gathering.inputs:
        inputs = [np.where(lanes, new, old) for new, old in zip(inputs, gathering.inputs)]
    else:
        inputs = [np.where(lanes, value, value) for value in inputs]  # faults if it has no value
    gathering.inputs = inputs
    gathering.parts.append((lanes, exchange.writes))


# --- for the scheduler ----------------------------------------------------------------------------


def part(w: Warp, parted: Parted, segment: Any, program: Any) -> None:
    """Let the lanes of `parted` wait and the others of the running split go on."""
    split = w.current
    place = segment.instructions.index(parted.ins)
    pc = program.tail(segment, place if parted.is_retry else place + 1)
    rest = split.mask.copy()
    for _, lanes in parted.joined:
        rest &= ~lanes
    record = split.record
    if len(parted.joined) + bool(rest.any()) > 1:
        record = w.fork(segment.piece.meet)
    w.splits.remove(split)
    for gathering, lanes in parted.joined:
        waiting = _add(w, Split(pc, lanes, record), split)
        waiting.wait = Wait(_never, gathering.describe, name=parted.ins.opcode)
        waiting.wait.instruction = parted.ins
        waiting.wait.since = w.machine.step
        gathering.splits.append(waiting)
        gathering.skipped |= gathering.missing(w) & pack_mask(rest)
    if rest.any():
        _add(w, Split(pc, rest, record), split)


def attend(w: Warp) -> None:
    """Let lanes go on whose others have come or exited; call it whenever a warp has run.

    Raises:
        IllegalOperand: lanes wait for some that will never come.
    """
    for gathering in list(w.gatherings):
        missed = gathering.skipped & gathering.wanted & ~gathering.have & pack_mask(w.exited)
        if missed:
            raise gathering.fault(w, f"; lanes {missed:#010x} went past it and have exited")
        if not gathering.missing(w):
            _complete(w, gathering)
    while w.gatherings and all(split.wait is not None for split in w.splits):
        if not _untangle(w):
            return


def check_waits(w: Warp) -> None:
    """Raise for a warp that can never go on, if it is because its lanes wait for each other.

    Raises:
        IllegalOperand: every lane waits for others of its warp.
    """
    waiting = 0
    for gathering in w.gatherings:
        waiting |= gathering.have
    others = [split for split in w.splits if not pack_mask(split.mask) & waiting]
    if w.gatherings and not others:
        raise w.gatherings[0].fault(w)


def _never() -> bool:
    return False


def _add(w: Warp, new: Split, old: Split) -> Split:
    new.calls = old.calls
    w.splits.append(new)
    return new


def _complete(w: Warp, gathering: Gathering) -> None:
    """Exchange what lanes have brought, and let them go on."""
    w.gatherings.remove(gathering)
    if gathering.exchange is not None:
        lanes = unpack_mask(gathering.have)
        results = gathering.exchange.compute(w, lanes, *gathering.inputs)
        for some, writes in gathering.parts:
            for write, result in zip(writes, results):
                if write is not None:
                    write(w, some, result)
    places: dict[object, list[Split]] = {}
    for split in gathering.splits:
        wait, split.wait = split.wait, None
        assert wait is not None
        w.note_waited(wait)
        places.setdefault((split.pc, split.calls), []).append(split)
    for splits in places.values():
        if len(splits) > 1:
            _unite(w, splits)
    w.machine.notify()


def _unite(w: Warp, splits: list[Split]) -> None:
    """Make one split of several at one place; they leave records that not all of them have."""
    chains = [list(w.records_of(split)) for split in splits]
    common = next((r for r in chains[0] if all(r in chain for chain in chains)), None)
    mask = np.zeros(LANES, np.bool_)
    for split, chain in zip(splits, chains):
        mask |= split.mask
        w.splits.remove(split)
        for record in chain:
            if record is common:
                break
            record.mask = record.mask & ~split.mask
    _add(w, Split(splits[0].pc, mask, common), splits[0])
    left = {id(r): r for chain in chains for r in chain[: _place(chain, common)]}
    for record in left.values():
        if record.mask.any():
            w.settle(record)


def _place(chain: list[Reconvergence], record: Reconvergence | None) -> int:
    return len(chain) if record is None else chain.index(record)


def _untangle(w: Warp) -> bool:
    """Let lanes go on that wait where lanes meet, for lanes that wait for them; return if any did.

    Raises:
        IllegalOperand: the instruction that waits for them is `.aligned`: all had to go there.
    """
    for gathering in w.gatherings:
        missing = unpack_mask(gathering.missing(w))
        for record in w.records():
            held = record.arrived & missing
            if not held.any():
                continue
            if gathering.exchange is not None:
                gathering.skipped |= pack_mask(held)
                w.let_go(record)
                return True
            if (record.mask & unpack_mask(gathering.have)).any():
                raise gathering.fault(w)
    return False
