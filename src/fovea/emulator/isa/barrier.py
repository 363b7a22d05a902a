"""mbarriers.

Lives here: the instructions. Not here: counts and phases (`machine/barrier.py`), barriers without
memory (`thread_barrier.py`). Invariant: an
arrival releases the warp's clock, a successful wait acquires the barrier's, unless `.relaxed`.
Source: PTX ISA 9.7.13.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand, RaceError
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import ALL_LANES, Action, Array, Decoded, Instruction
from fovea.emulator.machine.barrier import COUNT_LIMIT, STATE_SHIFT, MBarrier
from fovea.emulator.machine.memory import RANK_SHIFT, SHARED_WINDOW, WINDOW_SHIFT
from fovea.emulator.machine.warp import Wait
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES

_SHARED = "shared shared::cta"
_ANY_SHARED = "shared shared::cta shared::cluster"
_LOW = (1 << RANK_SHIFT) - 1
_SPURIOUS = 0.5  # try_wait may return false early (the manual allows it): keeps loops honest
_LATE = 0.125  # and the completion, unless something else told of it, might have come after that


# --- where an mbarrier is -------------------------------------------------------------------------


def wide_address(space: str) -> str:
    """Return what to say of an address in a state space that has more than 32 bits."""
    return (
        f"the address is not one in .{space}: it has more than 32 bits, as generic and global "
        "addresses do"
    )


def shared_place(ins: Instruction, w: Any, address: int, lane: int) -> tuple[Any, int]:
    """Return (CTA, offset) of a shared address given as 32-bit or generic.

    Raises:
        IllegalOperand: the address is not in the shared memory of the cluster.
    """
    window = address >> WINDOW_SHIFT
    if ins["space"] and address >> 32:
        raise IllegalOperand(
            f"{wide_address(ins['space'])}; convert it with cvta.to.{ins['space']}.u64, or leave "
            f".{ins['space']} out",
            w.where(ins, lane=lane, address=address),
        )
    if window not in (0, SHARED_WINDOW >> WINDOW_SHIFT):
        raise IllegalOperand(
            "the address is not in shared memory", w.where(ins, lane=lane, address=address)
        )
    address &= (1 << WINDOW_SHIFT) - 1
    cta = w.cta.cluster.cta_of(address)
    if cta is None:
        raise IllegalOperand(
            "the address is not in the shared memory of this cluster",
            w.where(ins, lane=lane, address=address, space="shared"),
        )
    if not cta.visit(w, ins):
        raise IllegalOperand(
            f"CTA {cta.index} has exited: its mbarriers are gone (a cluster barrier before the "
            "exit is missing)",
            w.where(ins, lane=lane, address=address, space="shared"),
        )
    return cta, address & _LOW


def barrier_at(ins: Instruction, w: Any, address: int, lane: int) -> MBarrier:
    """Return the mbarrier object at a shared address, and note that it is used.

    Raises:
        IllegalOperand: no mbarrier was initialised there.
        RaceError: nothing orders its initialisation before.
    """
    cta, offset = shared_place(ins, w, address, lane)
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise IllegalOperand(
            "no mbarrier was initialised at this address (mbarrier.init missing, or not yet "
            "executed)",
            w.where(ins, lane=lane, address=address, space="shared"),
        )
    problem = barrier.check_known(w.access)
    if problem:
        raise RaceError(
            f"race: {problem}",
            w.where(ins, lane=lane, address=address, space="shared"),
            rule="mbarrier.init must be ordered before every other use of the mbarrier",
        )
    barrier.users[w.access.agent] = w.access.time, ins
    return barrier


def lanes_of(mask: Array) -> list[int]:
    """Return the numbers of the active lanes."""
    return list(range(LANES)) if mask is ALL_LANES else np.flatnonzero(mask).tolist()


def check_barrier(problem: str, ins: Instruction, w: Any, lane: int) -> None:
    """Raise what a barrier has against an operation, if anything."""
    if problem:
        raise IllegalOperand(problem, w.where(ins, lane=lane))


# --- init and inval -------------------------------------------------------------------------------


@instruction("mbarrier.init{.space}.b64 [addr], count", source="PTX ISA 9.7.13.16.9",
             evidence="manual-only", kind="sync", space=_SHARED)  # fmt: skip
def mbarrier_init(ins: Instruction) -> Decoded:
    """Make an mbarrier object that expects `count` arrivals."""
    address, count = ins.address("addr"), ins.read("count", "u32")

    def run(w: Any, mask: Array) -> None:
        addresses, counts = address(w), count(w)
        for lane in lanes_of(mask):
            expected = int(counts[lane])
            if not 1 <= expected <= COUNT_LIMIT:
                raise IllegalOperand(
                    f"count={expected} must lie in 1..{COUNT_LIMIT}", w.where(ins, lane=lane)
                )
            cta, offset = shared_place(ins, w, int(addresses[lane]), lane)
            if offset % 8:
                raise IllegalOperand(
                    "an mbarrier must be 8-byte aligned",
                    w.where(ins, lane=lane, address=offset, space="shared"),
                )
            old, shadow = cta.mbarriers.get(offset), cta.shared.shadow
            if old is not None and old.origin is not None and shadow is not None:
                # undefined by the manual; compilers do so with all lanes of a warp at once
                shadow.write_tick[offset // 4 : offset // 4 + 2] = old.origin[1]
            cta.shared.write(offset, np.zeros(8, np.uint8), w.touch(ins, mask))
            barrier = cta.mbarrier(offset, expected)
            if cta.shared.shadow is not None:
                cta.shared.shadow.hold_object(slice(offset // 4, offset // 4 + 2))
                barrier.initialised_by(w.touch(ins, mask))
                w.state.setdefault("mbarrier.init", []).append(barrier)

    return run


@instruction("mbarrier.inval{.space}.b64 [addr]", source="PTX ISA 9.7.13.16.10",
             evidence="manual-only", kind="sync", space=_SHARED)  # fmt: skip
def mbarrier_inval(ins: Instruction) -> Decoded:
    """Forget an mbarrier object, so that its memory may be reused."""
    address = ins.address("addr")

    def run(w: Any, mask: Array) -> None:
        for lane in lanes_of(mask):
            place = int(address(w)[lane])
            barrier = barrier_at(ins, w, place, lane)
            cta, offset = shared_place(ins, w, place, lane)
            cta.mbarriers.pop(offset, None)
            if cta.shared.shadow is None:
                continue
            access = w.touch(ins, mask)
            problem = barrier.check_unused(access)
            if problem:
                raise RaceError(
                    f"race: {problem}",
                    w.where(ins, lane=lane, address=place, space="shared"),
                    rule="mbarrier.inval must be ordered after every other use of the mbarrier",
                )
            cta.shared.shadow.drop_object(slice(offset // 4, offset // 4 + 2), access)

    return run


# --- arrive ---------------------------------------------------------------------------------------


def _arrive(
    ins: Instruction,
    amount: Callable[[Any], Array] | None,
    transaction: Callable[[Any], Array] | None,
    is_drop: bool = False,
) -> Action:
    """Return the action of the arrive family: expect-tx first, then the arrival."""
    address = ins.address("addr")
    write = ins.write("state", "u64") if "state" in ins.operands else None
    is_relaxed, may_complete = ins["sem"] == "relaxed", not ins.has("noComplete")

    def run(w: Any, mask: Array) -> None:
        addresses = address(w)
        counts = amount(w) if amount is not None else None
        sizes = transaction(w) if transaction is not None else None
        states = np.zeros(LANES, np.uint64)
        access = w.touch(ins, mask)
        for lane in lanes_of(mask):
            barrier = barrier_at(ins, w, int(addresses[lane]), lane)
            states[lane] = barrier.state
            if sizes is not None:
                check_barrier(barrier.expect_tx(int(sizes[lane])), ins, w, lane)
            count = 1 if counts is None else int(counts[lane])
            if not 1 <= count <= COUNT_LIMIT:
                raise IllegalOperand(
                    f"count={count} must lie in 1..{COUNT_LIMIT}", w.where(ins, lane=lane)
                )
            if is_drop:
                barrier.expected -= count
            phase = barrier.phase
            check_barrier(barrier.arrive(count, access, is_relaxed), ins, w, lane)
            if barrier.phase != phase and not may_complete:
                raise IllegalOperand(
                    f"this arrival completes phase {phase} of {barrier.name}, which .noComplete "
                    "excludes; leave the qualifier out",
                    w.where(ins, lane=lane),
                )
        w.machine.notify()
        if write is not None:
            write(w, mask, states)

    return run


@instruction("mbarrier.arrive{.sem.scope}{.space}.b64 state, [addr]{, count}",
             "mbarrier.arrive{.noComplete}{.sem.scope}{.space}.b64 state, [addr], count",
             "mbarrier.arrive_drop{.sem.scope}{.space}.b64 state, [addr]{, count}",
             source="PTX ISA 9.7.13.16.13-14", evidence="manual-only", kind="sync",
             sem="release relaxed", scope="cta cluster", space=_ANY_SHARED)  # fmt: skip
def mbarrier_arrive(ins: Instruction) -> Decoded:
    """Count arrivals (1 by default) and return the phase they belong to."""
    amount = ins.read("count", "u32") if "count" in ins.operands else None
    return _arrive(ins, amount, None, is_drop="arrive_drop" in ins.opcode)


@instruction("mbarrier.arrive.expect_tx{.sem.scope}{.space}.b64 state, [addr], tx",
             "mbarrier.arrive_drop.expect_tx{.sem.scope}{.space}.b64 state, [addr], tx",
             source="PTX ISA 9.7.13.16.13-14", targets="sm_90+",
             evidence="manual-only", kind="sync",
             sem="release relaxed", scope="cta cluster", space=_ANY_SHARED)  # fmt: skip
def mbarrier_arrive_expect_tx(ins: Instruction) -> Decoded:
    """Announce bytes, then arrive once."""
    return _arrive(ins, None, ins.read("tx", "u32"), is_drop="arrive_drop" in ins.opcode)


@instruction("mbarrier.op{.sem.scope}{.space}.b64 [addr], tx", source="PTX ISA 9.7.13.16.11-12",
             targets="sm_90+",
             evidence="manual-only", kind="sync", op="expect_tx complete_tx", sem="relaxed",
             scope="cta cluster", space=_ANY_SHARED)  # fmt: skip
def mbarrier_tx(ins: Instruction) -> Decoded:
    """Raise or lower the tx-count."""
    address, transaction = ins.address("addr"), ins.read("tx", "u32")
    is_expect = ins["op"] == "expect_tx"

    def run(w: Any, mask: Array) -> None:
        addresses, sizes = address(w), transaction(w)
        access = w.touch(ins, mask)
        for lane in lanes_of(mask):
            barrier = barrier_at(ins, w, int(addresses[lane]), lane)
            size = int(sizes[lane])
            problem = barrier.expect_tx(size) if is_expect else barrier.complete_tx(size, access)
            check_barrier(problem, ins, w, lane)
        w.machine.notify()

    return run


# --- wait -----------------------------------------------------------------------------------------


def _note_ignored(ins: Instruction, w: Any) -> None:
    w.state["ignored wait"] = ins.line
    w.machine.warn(
        f"PTX line {ins.line} `{ins.text}`: its result decides nothing, and it may be false: "
        "it waits for nothing and orders nothing"
    )


def _acquire(ins: Instruction, w: Any, barrier: MBarrier) -> None:
    """Let what comes before the completion be known, if the kernel asks whether it has happened.

    A wait may return false (test_wait at once, try_wait after some time), and code that never
    looks at the result goes on all the same: it knows nothing of the phase, however it went here.
    """
    if not _is_asked(ins):
        return
    if ins["sem"] != "relaxed":
        w.access.clock.join(barrier.released)
    elif w.access.unfenced is None:
        w.access.unfenced = barrier.released.copy()
    else:
        w.access.unfenced.join(barrier.released)


def _is_asked(ins: Instruction) -> bool:
    result = ins.operands["waitComplete"]
    return isinstance(result, syntax.Register) and result.uid in ins.program.decisive


def _may_be_late(w: Any, barrier: MBarrier) -> bool:
    """Return whether a completed phase is to look as if it would complete later, this time.

    What completed it is not ordered before the wait, so another schedule has it come after.
    """
    if w.machine.options.async_delay == "eager" or w.machine.random.random() >= _LATE:
        return False
    return bool((barrier.released.seen > w.access.clock.seen).any())


def _single(ins: Instruction, w: Any, mask: Array, values: Array, what: str) -> int:
    """Return the value all active lanes share, or raise."""
    chosen = values if mask is ALL_LANES else values[mask]
    first = int(chosen[0])
    if len(chosen) > 1 and bool((chosen != chosen[0]).any()):
        raise IllegalOperand(
            f"lanes wait for different {what}: the emulator models one wait per warp",
            w.where(ins),
        )
    return first


def _condition(
    ins: Instruction,
) -> Callable[[Any, Array], tuple[MBarrier, Callable[[], bool], int]]:
    """Return a function giving (barrier, whether the awaited phase is complete, phase)."""
    address = ins.address("addr")
    is_parity = ins.has("parity")
    read = ins.read("phaseParity" if is_parity else "state", "u32")  # low word of a state: phase

    def condition(w: Any, mask: Array) -> tuple[MBarrier, Callable[[], bool], int]:
        lane = 0 if mask is ALL_LANES else int(mask.argmax())
        place = _single(ins, w, mask, address(w), "mbarriers")
        phase = _single(ins, w, mask, read(w), "phases")
        barrier = barrier_at(ins, w, place, lane)
        if is_parity:
            if phase not in (0, 1):
                raise IllegalOperand(f"phaseParity={phase} must be 0 or 1", w.where(ins, lane=lane))
            return barrier, lambda: barrier.is_complete(phase), phase
        return barrier, lambda: barrier.is_state_complete(phase), phase

    return condition


@instruction("mbarrier.test_wait{.sem.scope}{.space}.b64 waitComplete, [addr], state",
             "mbarrier.test_wait.parity{.sem.scope}{.space}.b64"
             " waitComplete, [addr], phaseParity",
             source="PTX ISA 9.7.13.16.16", evidence="manual-only", kind="sync",
             sem="acquire relaxed", scope="cta cluster", space=_SHARED)  # fmt: skip
def mbarrier_test_wait(ins: Instruction) -> Decoded:
    """waitComplete = whether a phase is complete, now."""
    condition, write = _condition(ins), ins.write("waitComplete", "pred")
    is_asked = _is_asked(ins)

    def run(w: Any, mask: Array) -> None:
        barrier, is_complete, phase = condition(w, mask)
        if not is_asked:
            _note_ignored(ins, w)
        done = is_complete()
        if done:
            _acquire(ins, w, barrier)
        else:
            _note_poll(w, barrier, phase)
        write(w, mask, np.full(LANES, done))

    return run


def _note_poll(w: Any, barrier: MBarrier, phase: int) -> None:
    w.polled = True
    w.state["poll"] = f"{barrier.describe()}, awaited phase parity {phase & 1}"


@instruction("mbarrier.try_wait{.sem.scope}{.space}.b64 waitComplete, [addr], state{, hint}",
             "mbarrier.try_wait.parity{.sem.scope}{.space}.b64"
             " waitComplete, [addr], phaseParity{, hint}",
             source="PTX ISA 9.7.13.16.16", targets="sm_90+",
             evidence="manual-only", kind="sync",
             sem="acquire relaxed", scope="cta cluster", space=_SHARED)  # fmt: skip
def mbarrier_try_wait(ins: Instruction) -> Decoded:
    """Wait for a phase; sometimes give up early with false, as the manual allows."""
    condition, write = _condition(ins), ins.write("waitComplete", "pred")
    is_asked = _is_asked(ins)

    def run(w: Any, mask: Array) -> Wait | None:
        barrier, is_complete, phase = condition(w, mask)
        if not is_asked:
            _note_ignored(ins, w)
        if is_complete():
            done = not _may_be_late(w, barrier)
            if done:
                _acquire(ins, w, barrier)
            write(w, mask, np.full(LANES, done))
            return None
        if w.machine.random.random() < _SPURIOUS:
            write(w, mask, np.full(LANES, False))
            return None

        def resume() -> None:
            _acquire(ins, w, barrier)
            write(w, mask, np.full(LANES, True))

        def describe() -> str:
            return f"{barrier.describe()}; it waits for phase parity {phase & 1} to complete"

        def expire() -> None:
            write(w, mask, np.full(LANES, False))

        name = barrier.name.partition(" of")[0]
        return Wait(is_complete, describe, resume, name, expire)

    return run


@instruction("mbarrier.pending_count.b64 count, state", source="PTX ISA 9.7.13.16.17",
             evidence="manual-only", kind="sync")  # fmt: skip
def mbarrier_pending_count(ins: Instruction) -> Decoded:
    """count = arrivals that were pending before the arrival that gave `state`."""
    read, write = ins.read("state", "u64"), ins.write("count", "u32")
    return lambda w, mask: write(w, mask, (read(w) >> STATE_SHIFT).astype(np.uint32))
