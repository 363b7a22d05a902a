"""cp.async: copies of 4, 8 or 16 bytes from global to shared memory, by thread.

Lives here: the non-bulk copies and their groups. Not here: bulk and tensor copies
(`bulk_copy.py`, `tensor_copy.py`). Invariant: groups belong to threads; lanes that have always
issued, committed and waited together share a queue. A wait by some of the lanes that issued a copy
together counts for all of it. The copies are of the generic proxy.
Source: PTX ISA 9.7.9.25.
"""

from typing import Any

import numpy as np

from fovea.emulator.async_engine import GroupQueue, Operation
from fovea.emulator.errors import IllegalOperand, Misaligned, OutOfBounds
from fovea.emulator.isa import instruction
from fovea.emulator.isa.barrier import barrier_at, lanes_of, wide_address
from fovea.emulator.isa.instruction import ALL_LANES, Array, Decoded, Instruction, Read
from fovea.emulator.machine.memory import RANK_SHIFT
from fovea.emulator.machine.warp import Wait

_QUEUES = "cp.async"
_LOW = (1 << RANK_SHIFT) - 1


@instruction("cp.async.ca.state.global{.L2::cache_hint}{.prefetch}"
             " [dst], [src], size{, cache-policy}",
             "cp.async.ca.state.global{.prefetch} [dst], [src], size, src-size",
             "cp.async.cg.state.global{.L2::cache_hint}{.prefetch}"
             " [dst], [src], size{, cache-policy}",
             "cp.async.cg.state.global{.L2::cache_hint}{.prefetch}"
             " [dst], [src], size, src-size{, cache-policy}",
             source="PTX ISA 9.7.9.25.3.1", evidence="manual-only", kind="copy",
             state="shared shared::cta", prefetch="L2::64B L2::128B L2::256B")  # fmt: skip
def cp_async(ins: Instruction) -> Decoded:
    """Copy `src-size` bytes per lane and zero the rest of `size`, later."""
    size = ins.immediate("size")
    allowed = (16,) if ".cg." in ins.opcode else (4, 8, 16)
    if size not in allowed:
        raise ins.error(f"size {size} is not one of {allowed}")
    read_target, read_source = ins.address("dst"), ins.address("src")
    read_size = _source_size(ins)

    def run(w: Any, mask: Array) -> None:
        targets, sources = read_target(w)[mask], read_source(w)[mask]
        counts = read_size(w)[mask] if read_size is not None else np.full(len(targets), size)
        _check_places(ins, w, mask, targets, sources, counts, size)

        def effect(operation: Operation) -> None:
            _copy(w, operation, targets, sources, counts, size)

        cluster = w.cta.cluster
        operation = cluster.engine.submit(
            w, ins, [effect], kind="cp.async", channel=_channel(w, mask), is_async_proxy=False
        )
        operation.access.mask = mask
        if not cluster.engine.shares_agents:
            cluster.notes.needs_fence[operation.access.agent] = True
        for queue in _queues(w, mask):
            queue.add(operation)
        w.machine.counters.add("copy_async_bytes", int(counts.sum()))

    return run


def _channel(w: Any, mask: Array) -> tuple[Any, ...]:
    """Return the channel of the copies of some lanes: their groups complete in order."""
    return ("cp.async", w.access.agent, mask.tobytes())


def _queues(w: Any, mask: Array) -> list[GroupQueue]:
    """Return the queues of some lanes; lanes that do not act together get queues of their own."""
    parts: list[tuple[Array, GroupQueue]] = w.state.setdefault(_QUEUES, [(ALL_LANES, GroupQueue())])
    found: list[GroupQueue] = []
    split: list[tuple[Array, GroupQueue]] = []
    for lanes, queue in parts:
        inside, outside = lanes & mask, lanes & ~mask
        if inside.any():
            found.append(queue)
            split.append((inside, queue))
            if outside.any():
                split.append((outside, queue.copy()))
        else:
            split.append((lanes, queue))
    w.state[_QUEUES] = split
    return found


def _rejoin(w: Any) -> None:
    """Let lanes whose groups are the same again share a queue."""
    parts: list[tuple[Array, GroupQueue]] = []
    for lanes, queue in w.state[_QUEUES]:
        for position, (others, other) in enumerate(parts):
            if other.open == queue.open and other.committed == queue.committed:
                parts[position] = others | lanes, other
                break
        else:
            parts.append((lanes, queue))
    w.state[_QUEUES] = parts


def _source_size(ins: Instruction) -> Read | None:
    """Return the reader of src-size; a predicate there means `ignore-src`."""
    if "src-size" not in ins.operands:
        return None
    if ins.type_of("src-size") == "pred":
        ignore, size = ins.read("src-size", "pred"), ins.immediate("size")

        def read(w: Any) -> Array:
            return np.where(ignore(w), 0, size)

        return read
    return ins.read("src-size", "u32")


def _check_places(
    ins: Instruction, w: Any, mask: Array, targets: Array, sources: Array, counts: Array, size: int
) -> None:
    for places, label in ((targets, "destination"), (sources, "source")):
        bad = places % np.uint64(size) != 0
        if bad.any():
            position = int(np.argmax(bad))
            raise Misaligned(
                f"the {label} is not a multiple of {size}",
                w.where(ins, lane=lanes_of(mask)[position], address=int(places[position])),
            )
    if (counts > size).any():
        position = int(np.argmax(counts > size))
        raise IllegalOperand(
            f"src-size={int(counts[position])} must lie in 0..{size}, the size of the copy",
            w.where(ins, lane=lanes_of(mask)[position]),
        )
    if (targets >> np.uint64(32)).any():
        position = int(np.argmax(targets >> np.uint64(32) != 0))
        raise IllegalOperand(
            f"{wide_address(ins['state'])}; convert it with cvta.to.shared.u64",
            w.where(ins, lane=lanes_of(mask)[position], address=int(targets[position])),
        )


def _copy(
    w: Any, operation: Operation, targets: Array, sources: Array, counts: Array, size: int
) -> None:
    access = operation.access
    blocks = np.zeros((len(targets), size), np.uint8)
    for position, (source, count) in enumerate(zip(sources.tolist(), counts.tolist())):
        if not count:
            continue
        found = w.machine.segment(w, source)
        if found is None:
            raise OutOfBounds(
                f"nothing lies at the source: {w.machine.memory.nearest(source)}",
                w.where(access.instruction, address=source, space="global"),
            )
        segment, offset = found
        blocks[position, :count] = segment.read(offset, count, access)
    offsets = (targets & np.uint64(_LOW)).astype(np.int64)
    w.cta.shared.write_at(offsets, blocks, size, access)


@instruction("cp.async.commit_group", source="PTX ISA 9.7.9.25.3.2", evidence="manual-only",
             kind="copy")  # fmt: skip
def cp_async_commit_group(ins: Instruction) -> Decoded:
    """Close the group of the copies issued since the last commit."""

    def run(w: Any, mask: Array) -> None:
        for queue in _queues(w, mask):
            queue.commit()

    return run


@instruction("cp.async.wait_group n", "cp.async.wait_all", source="PTX ISA 9.7.9.25.3.3",
             evidence="manual-only", kind="sync")  # fmt: skip
def cp_async_wait(ins: Instruction) -> Decoded:
    """Wait until at most n groups are pending (wait_all: until nothing is)."""
    newest = ins.natural("n") if "n" in ins.operands else None

    def run(w: Any, mask: Array) -> Wait | None:
        queues = _queues(w, mask)
        if newest is None:
            for queue in queues:
                queue.commit()
        operations = [operation for queue in queues for operation in queue.covered(newest or 0)]
        if not operations:
            return None

        def resume() -> None:
            for queue in _queues(w, mask):
                queue.retire(newest or 0)
            _rejoin(w)
            w.observe(operations)

        return Wait(
            lambda: all(operation.is_complete for operation in operations),
            lambda: f"{len(operations)} cp.async copies",
            resume,
            name="cp.async",
        )

    return run


@instruction("cp.async.mbarrier.arrive{.noinc}{.space}.b64 [addr]",
             source="PTX ISA 9.7.13.16.15", evidence="manual-only", kind="sync",
             space="shared shared::cta")  # fmt: skip
def cp_async_mbarrier_arrive(ins: Instruction) -> Decoded:
    """Arrive on an mbarrier once all earlier copies of the thread are complete."""
    address, counts_itself = ins.address("addr"), not ins.has("noinc")

    def run(w: Any, mask: Array) -> None:
        addresses = address(w)
        lanes = lanes_of(mask)
        barriers = [barrier_at(ins, w, int(addresses[lane]), lane) for lane in lanes]
        earlier = [operation for queue in _queues(w, mask) for operation in queue.unretired()]
        if counts_itself:
            for barrier in barriers:
                barrier.pending += 1

        def arrive(operation: Operation) -> None:
            for barrier in barriers:
                problem = barrier.arrive(1, operation.access)
                if problem:
                    raise IllegalOperand(problem, w.where(ins))
            w.machine.notify()

        w.cta.cluster.engine.submit(
            w,
            ins,
            [arrive],
            kind="cp.async.mbarrier.arrive",
            channel=_channel(w, mask),
            after=earlier,
            is_async_proxy=False,
        )

    return run
