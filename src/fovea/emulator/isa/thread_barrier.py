"""Barriers of threads: named ones of a CTA, those of a warp and of a cluster.

Lives here: the instructions. Not here: counts and phases (`machine/barrier.py`), barriers in shared
memory (`barrier.py`). Invariant: an arrival releases the warp's clock, the end of a wait acquires
the barrier's, unless `.relaxed`. Source: PTX ISA 9.7.13.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.barrier import check_barrier
from fovea.emulator.isa.instruction import ALL_LANES, Action, Array, Decoded, Instruction
from fovea.emulator.isa.shuffle import exchange
from fovea.emulator.machine.barrier import count_part
from fovea.emulator.machine.meeting import meet_all
from fovea.emulator.machine.warp import Wait
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES

# --- named barriers -------------------------------------------------------------------------------


def _check_together(ins: Instruction, w: Any, mask: Array) -> None:
    """Wait until every lane that has not exited executes an aligned barrier, all as one."""
    if mask is ALL_LANES:
        return
    lanes = int(np.count_nonzero(mask))
    meet_all(
        w,
        ins,
        mask,
        f"{ins.opcode} is aligned: all lanes of a warp that have not exited must execute it "
        f"together, {lanes} do; let them meet first, or use its form without .aligned "
        "(barrier.sync)",
    )


def _common(ins: Instruction, name: str) -> Callable[[Any, Array], int]:
    """Return `read(warp, mask) -> int`: the value of an operand in all active lanes.

    The reader raises IllegalOperand if they differ: that would be arrivals at several barriers.
    """
    read = ins.uniform(name, "u32")
    if not isinstance(ins.operands[name], syntax.Register):
        return read
    lanes = ins.read(name, "u32")

    def checked(w: Any, mask: Array) -> int:
        value = read(w, mask)
        differs = mask & (lanes(w) != value)
        if differs.any():
            lane = int(differs.argmax())
            raise IllegalOperand(
                f"{ins.opcode}: operand {name} is {value} in the first active lane and "
                f"{int(lanes(w)[lane])} in lane {lane}: an aligned barrier needs the same in all, "
                "and the emulator models one barrier and one count for the lanes that execute "
                "it together (let them branch apart)",
                w.where(ins, lane=lane),
            )
        return value

    return checked


def _named(
    ins: Instruction, is_waiting: bool, value: Action | None = None, finish: Any = None
) -> Action:
    """Return the action of `bar.sync`, `bar.arrive` and `bar.red`."""
    number = _common(ins, "a")
    amount = _common(ins, "b") if "b" in ins.operands else None
    # `bar` is `barrier` with `.aligned`.
    is_aligned = ins.opcode.startswith("bar.") or ".aligned" in ins.opcode

    def run(w: Any, mask: Array) -> Wait | None:
        if is_aligned:
            _check_together(ins, w, mask)
        identity = number(w, mask)
        if not 0 <= identity <= 15:
            raise IllegalOperand(f"barrier {identity} must lie in 0..15", w.where(ins))
        barrier = w.cta.named_barrier(identity)
        if amount is None:
            expected = w.cta.live_warps * LANES
            if not barrier.arrived:
                barrier.counts_all = True
        else:
            expected = amount(w, mask)
            barrier.counts_all = False
            if expected % LANES or not expected >= LANES:
                raise IllegalOperand(
                    f"thread count {expected} must be a positive multiple of 32", w.where(ins)
                )
        generation = barrier.generation
        contribution = None if value is None else value(w, mask)
        threads = LANES if mask is ALL_LANES else count_part(barrier.parts, w, mask)
        check_barrier(
            barrier.arrive(threads, expected, w.touch(ins, mask), contribution), ins, w, 0
        )
        w.machine.notify()
        if not is_waiting:
            return None

        def resume() -> None:
            w.access.clock.join(barrier.released)
            if finish is not None:
                finish(w, mask, barrier.result)

        return Wait(
            lambda: barrier.generation != generation,
            barrier.describe,
            resume,
            name=f"barrier {identity}",
        )

    return run


@instruction("bar.sync a{, b}", "barrier.sync{.aligned} a{, b}", "bar.cta.sync a{, b}",
             "barrier.cta.sync{.aligned} a{, b}", source="PTX ISA 9.7.13.1", kind="sync",
             evidence="manual-only")  # fmt: skip
def bar_sync(ins: Instruction) -> Decoded:
    """Wait until the named number of threads has arrived."""
    return _named(ins, is_waiting=True)


@instruction("bar.arrive a, b", "barrier.arrive{.aligned} a, b", "bar.cta.arrive a, b",
             "barrier.cta.arrive{.aligned} a, b", source="PTX ISA 9.7.13.1", kind="sync",
             evidence="manual-only")  # fmt: skip
def bar_arrive(ins: Instruction) -> Decoded:
    """Count as arrived and go on."""
    return _named(ins, is_waiting=False)


@instruction("bar.red.popc.u32 d, a, c", "bar.red.popc.u32 d, a, b, c",
             "barrier.red.popc{.aligned}.u32 d, a, c", "barrier.red.popc{.aligned}.u32 d, a, b, c",
             "bar.cta.red.popc.u32 d, a, c", "barrier.cta.red.popc{.aligned}.u32 d, a, c",
             "barrier.cta.red.popc{.aligned}.u32 d, a, b, c",
             source="PTX ISA 9.7.13.1", kind="sync", evidence="manual-only")  # fmt: skip
def bar_red_popc(ins: Instruction) -> Decoded:
    """Wait, then d = number of threads whose predicate c held."""
    read, write = ins.read("c", "pred"), ins.write("d", "u32")

    def finish(w: Any, mask: Array, values: list[int]) -> None:
        write(w, mask, np.full(LANES, sum(values), np.uint32))

    def value(w: Any, mask: Array) -> int:
        return int(np.count_nonzero(read(w)[mask]))

    return _named(ins, True, value, finish)


@instruction(
    "bar.red.op.pred p, a, c",
    "bar.red.op.pred p, a, b, c",
    "barrier.red.op{.aligned}.pred p, a, c",
    "barrier.red.op{.aligned}.pred p, a, b, c",
    "bar.cta.red.op.pred p, a, c",
    "barrier.cta.red.op{.aligned}.pred p, a, c",
    "barrier.cta.red.op{.aligned}.pred p, a, b, c",
    source="PTX ISA 9.7.13.1",
    kind="sync",
    evidence="manual-only",
    op="and or",
)
def bar_red_pred(ins: Instruction) -> Decoded:
    """Wait, then p = and / or of the threads' predicates c."""
    read, write = ins.read("c", "pred"), ins.write("p", "pred")
    combine = all if ins["op"] == "and" else any

    def value(w: Any, mask: Array) -> bool:
        chosen = read(w)[mask]
        return bool(chosen.all() if combine is all else chosen.any())

    def finish(w: Any, mask: Array, values: list[bool]) -> None:
        write(w, mask, np.full(LANES, combine(values)))

    return _named(ins, True, value, finish)


@instruction("bar.warp.sync membermask", source="PTX ISA 9.7.13.2", kind="control",
             evidence="manual-only")  # fmt: skip
def bar_warp_sync(ins: Instruction) -> Decoded:
    """Wait until the members have come, by this or another such instruction."""
    return exchange(ins, _nothing)


def _nothing(w: Any, mask: Array) -> tuple[Array, ...]:
    return ()


# --- cluster barrier ------------------------------------------------------------------------------

_NO_PHASE = -1  # of a lane that has not arrived since it waited


@instruction("barrier.cluster.arrive{.sem}{.aligned}", source="PTX ISA 9.7.13.4", kind="sync",
             targets="sm_90+",
             evidence="manual-only", sem="release relaxed")  # fmt: skip
def barrier_cluster_arrive(ins: Instruction) -> Decoded:
    """Arrive at the cluster's barrier."""
    is_release, is_aligned = ins["sem"] != "relaxed", ".aligned" in ins.opcode

    def run(w: Any, mask: Array) -> None:
        if is_aligned:
            _check_together(ins, w, mask)
        barrier = w.cta.cluster.barrier
        phases = w.state.setdefault("cluster_phases", np.full(LANES, _NO_PHASE))
        if (phases[mask] != _NO_PHASE).any():
            raise IllegalOperand(
                "barrier.cluster.arrive twice without barrier.cluster.wait", w.where(ins)
            )
        phases[mask] = barrier.generation
        threads = LANES if mask is ALL_LANES else count_part(barrier.parts, w, mask)
        barrier.arrive(threads, w.touch(ins, mask), is_release)
        w.machine.notify()

    return run


@instruction("barrier.cluster.wait{.sem}{.aligned}", source="PTX ISA 9.7.13.4", kind="sync",
             targets="sm_90+",
             evidence="manual-only", sem="acquire")  # fmt: skip
def barrier_cluster_wait(ins: Instruction) -> Decoded:
    """Wait until every thread of the cluster has arrived."""
    is_aligned = ".aligned" in ins.opcode

    def run(w: Any, mask: Array) -> Wait:
        if is_aligned:
            _check_together(ins, w, mask)
        barrier = w.cta.cluster.barrier
        phases = w.state.get("cluster_phases")
        if phases is None or (phases[mask] == _NO_PHASE).any():
            raise IllegalOperand(
                "barrier.cluster.wait without barrier.cluster.arrive", w.where(ins)
            )
        newest = int(phases[mask].max())
        phases[mask] = _NO_PHASE
        return Wait(
            lambda: barrier.generation > newest,
            barrier.describe,
            lambda: barrier.acquire(w.access),
            name="cluster barrier",
        )

    return run
