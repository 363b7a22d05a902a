"""Bulk copies without a tensor map, their reductions and prefetch, and bulk async-groups.

What lives here: cp.async.bulk, cp.reduce.async.bulk, commit_group and wait_group. Not here: tensor
copies (`isa/tensor_copy.py`), cp.async (`isa/copy_async.py`).

Invariant: bulk async-groups belong to one thread; a wait by a thread covers only its own.
"""

from typing import Any

import numpy as np

from fovea.emulator.arithmetic.reduction import check_reduction, reduce_elements
from fovea.emulator.async_engine import Effect, Operation
from fovea.emulator.errors import IllegalOperand, Misaligned, OutOfBounds
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import (
    SharedPlace,
    active_lanes,
    add_to_bulk_groups,
    barrier_channel,
    bulk_channel,
    bulk_queue,
    complete_bytes,
    issues,
    multicast_ranks,
    own_shared_place,
    shared_place,
    start,
)
from fovea.emulator.isa.instruction import Array, Instruction, Read
from fovea.emulator.machine.warp import Wait
from fovea.emulator.memory_order import CLUSTER, GPU

_SOURCE = "PTX ISA 9.7.9.25.4"
_ALIGNMENT = 16


def _checked_size(i: Instruction, warp: Any, lane: int, sizes: Array) -> int:
    size = int(sizes[lane])
    if size % 16:
        raise IllegalOperand(f"size {size} is no multiple of 16 bytes", warp.where(i, lane=lane))
    return size


def _global_place(
    i: Instruction, warp: Any, lane: int, address: int, size: int, *, is_write: bool
) -> tuple[Any, int]:
    """Return (segment, offset) of a global range."""
    where = warp.where(i, lane=lane, address=address, space="global")
    if address % _ALIGNMENT:
        raise Misaligned(f"global address must be a multiple of {_ALIGNMENT} bytes", where)
    segment = warp.machine.memory.find(address)
    if segment is None or address + size > segment.base + len(segment.data):
        raise OutOfBounds(
            f"{size} bytes of global memory leave every allocation; "
            f"{warp.machine.memory.nearest(address)}",
            where,
        )
    if is_write and segment.is_read_only:
        raise OutOfBounds(segment.read_only_text, where)
    return segment, address - segment.base


def _barrier_operands(i: Instruction) -> tuple[Read, Read, Read, Read]:
    """Return readers of destination, source, mbarrier and size."""
    return i.address("d"), i.address("a"), i.address("mbar"), i.read("size", "u32")


@instruction(
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes{.L2::cache_hint} "
    "[d], [a], size, [mbar]{, cache-policy}",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{.multicast::cluster}"
    "{.L2::cache_hint} [d], [a], size, [mbar]{, ctaMask}{, cache-policy}",
    source=f"{_SOURCE}.1",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
)
def cp_async_bulk_load(i: Instruction) -> Any:
    """Copy bytes of global memory to shared memory and signal them at an mbarrier."""
    operands = _barrier_operands(i)
    read_mask = i.read("ctaMask", "u16") if i.has("ctaMask") else None
    read_policy = i.read("cache-policy", "b64") if i.has("cache-policy") else None
    place_of = own_shared_place if i.has("shared::cta") else shared_place

    def run(warp: Any, mask: Array) -> None:
        if read_policy is not None:
            read_policy(warp)
        targets, sources, barriers, sizes = (read(warp) for read in operands)
        ctas = None if read_mask is None else read_mask(warp)
        for lane, *_ in issues(mask, targets, sources, barriers, sizes, ctas):
            size = _checked_size(i, warp, lane, sizes)
            segment, offset = _global_place(i, warp, lane, int(sources[lane]), size, is_write=False)
            to = place_of(
                i, warp, lane, int(targets[lane]), alignment=_ALIGNMENT, what="destination"
            )
            mbar = shared_place(i, warp, lane, int(barriers[lane]), alignment=8, what="mbarrier")
            ranks = [to.cta.rank]
            if ctas is not None:
                ranks = multicast_ranks(i, warp, lane, int(ctas[lane]))
            elif mbar.cta is not to.cta:
                raise IllegalOperand(
                    "mbarrier and destination are in different CTAs", warp.where(i, lane=lane)
                )

            effects = [
                _load_effect(segment, offset, size, to.in_cta(rank), mbar.in_cta(rank))
                for rank in ranks
            ]
            warp.machine.counters.add("bulk_load_bytes", size)
            channel = barrier_channel([mbar.in_cta(rank) for rank in ranks])
            start(warp, i, effects, kind="bulk load", channel=channel)

    return run


def _load_effect(
    segment: Any, offset: int, size: int, to: SharedPlace, mbar: SharedPlace
) -> Effect:
    def effect(operation: Operation) -> None:
        data = segment.read(offset, size, operation.access)
        to.cta.shared.write(to.offset, data, operation.access)
        complete_bytes(mbar, size, operation)

    return effect


@instruction(
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [a], size, [mbar]",
    source=f"{_SOURCE}.1",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
)
def cp_async_bulk_shared(i: Instruction) -> Any:
    """Copy shared memory to the shared memory of another CTA of the cluster."""
    return _to_cluster(i, None, "")


@instruction(
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.op.type "
    "[d], [a], size, [mbar]",
    source=f"{_SOURCE}.2",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
    op="and or xor add inc dec min max",
    type="b32 u32 s32 b64 u64",
)
def cp_reduce_async_bulk_shared(i: Instruction) -> Any:
    """Reduce shared memory into the shared memory of a CTA of the cluster."""
    return _to_cluster(i, i["op"], i["type"])


def _check_form(i: Instruction, reduction: str, element: str) -> None:
    try:
        check_reduction(reduction, element)
    except ValueError as error:
        raise i.error(str(error)) from error


def _to_cluster(i: Instruction, reduction: str | None, element: str) -> Any:
    if reduction is not None:
        _check_form(i, reduction, element)
    operands = _barrier_operands(i)

    def run(warp: Any, mask: Array) -> None:
        targets, sources, barriers, sizes = (read(warp) for read in operands)
        for lane, *_ in issues(mask, targets, sources, barriers, sizes):
            size = _checked_size(i, warp, lane, sizes)
            origin = own_shared_place(
                i, warp, lane, int(sources[lane]), alignment=_ALIGNMENT, what="source"
            )
            to = shared_place(
                i, warp, lane, int(targets[lane]), alignment=_ALIGNMENT, what="destination"
            )
            mbar = shared_place(i, warp, lane, int(barriers[lane]), alignment=8, what="mbarrier")
            if mbar.cta is not to.cta:
                raise IllegalOperand(
                    "mbarrier and destination are in different CTAs", warp.where(i, lane=lane)
                )
            read: list[Array] = []

            def read_source(
                operation: Operation,
                origin: SharedPlace = origin,
                size: int = size,
                read: list[Array] = read,
            ) -> None:
                read.append(origin.cta.shared.read(origin.offset, size, operation.access))

            def write_target(
                operation: Operation,
                to: SharedPlace = to,
                mbar: SharedPlace = mbar,
                size: int = size,
                read: list[Array] = read,
            ) -> None:
                data = read[0]
                if reduction is not None:
                    # Each word is reduced atomically: two reductions are no race.
                    operation.access.strength = CLUSTER + 1
                    old = to.cta.shared.read(to.offset, size, operation.access)
                    data = reduce_elements(reduction, element, old, data)
                to.cta.shared.write(to.offset, data, operation.access)
                complete_bytes(mbar, size, operation)

            effects = [read_source, write_target]
            channel = barrier_channel([mbar])
            start(warp, i, effects, kind="bulk copy to cluster", channel=channel)

    return run


@instruction(
    "cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint} [d], [a], size{, cache-policy}",
    source=f"{_SOURCE}.1",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
)
@instruction(
    "cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.cp_mask "
    "[d], [a], size{, cache-policy}{, byteMask}",
    source=f"{_SOURCE}.1",
    evidence="manual-only",
    targets="sm_100,sm_100a,sm_103,sm_103a,sm_110a,sm_120,sm_120a",
    kind="copy",
)
def cp_async_bulk_store(i: Instruction) -> Any:
    """Copy shared memory to global memory, all bytes or those of a mask."""
    if i.has("cp_mask") != i.has("byteMask"):
        raise i.error(".cp_mask needs its byteMask operand")
    return _to_global(i, None, "")


@instruction(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.op.type "
    "[d], [a], size{, cache-policy}",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.op.noftz.type "
    "[d], [a], size{, cache-policy}",
    source=f"{_SOURCE}.2",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
    op="and or xor add inc dec min max",
    type="f16 bf16 b32 u32 s32 b64 u64 s64 f32 f64",
)
def cp_reduce_async_bulk_global(i: Instruction) -> Any:
    """Reduce shared memory into global memory."""
    needs_noftz = i["op"] == "add" and i["type"] in ("f16", "bf16")
    if needs_noftz != i.has("noftz"):
        raise i.error(".noftz is required for .add.f16 and .add.bf16, and allowed nowhere else")
    return _to_global(i, i["op"], i["type"])


def _store_effects(
    origin: SharedPlace,
    segment: Any,
    offset: int,
    size: int,
    change: tuple[str, str] | None,
    keep: Array | None,
) -> list[Effect]:
    """Return the effects of a bulk store: read shared memory, then write, reduce or mask.

    Args:
        origin: where the bytes are.
        segment: the allocation they go to, at `offset`.
        offset: see above.
        size: bytes.
        change: operation and element type of a reduction.
        keep: the bytes to be written, all if None.
    """
    read: list[Array] = []

    def read_source(operation: Operation) -> None:
        read.append(origin.cta.shared.read(origin.offset, size, operation.access))

    def write_target(operation: Operation) -> None:
        data, old = read[0], segment.data[offset : offset + size]
        access = operation.written or operation.access
        if change is not None:
            # each element is reduced atomically: two reductions are no race
            access.strength = GPU + 1
            data = reduce_elements(*change, old.copy(), data)
        byte_mask = None
        if keep is not None:
            # other threads may own the bytes that are left out
            data = np.where(keep, data, old)
            byte_mask = np.packbits(keep.reshape(-1, 4), axis=1, bitorder="little").ravel()
        segment.write(offset, data, access, byte_mask)

    return [read_source, write_target]


def _to_global(i: Instruction, reduction: str | None, element: str) -> Any:
    if reduction is not None:
        _check_form(i, reduction, element)
    target, source, read_size = i.address("d"), i.address("a"), i.read("size", "u32")
    read_policy = i.read("cache-policy", "b64") if i.has("cache-policy") else None
    read_bytes = i.read("byteMask", "u16") if i.has("byteMask") else None

    def run(warp: Any, mask: Array) -> None:
        if read_policy is not None:
            read_policy(warp)
        targets, sources, sizes = target(warp), source(warp), read_size(warp)
        byte_masks = None if read_bytes is None else read_bytes(warp)
        for lanes in issues(mask, targets, sources, sizes, byte_masks):
            lane = lanes[0]
            size = _checked_size(i, warp, lane, sizes)
            origin = own_shared_place(
                i, warp, lane, int(sources[lane]), alignment=_ALIGNMENT, what="source"
            )
            segment, offset = _global_place(i, warp, lane, int(targets[lane]), size, is_write=True)
            keep = None
            if byte_masks is not None:
                bits = int(byte_masks[lane])
                chosen = np.array([bits >> n & 1 for n in range(16)], np.bool_)
                keep = np.tile(chosen, size // 16)
            warp.machine.counters.add("bulk_store_bytes", size)
            change = None if reduction is None else (reduction, element)
            operation = start(
                warp,
                i,
                _store_effects(origin, segment, offset, size, change, keep),
                kind="bulk store",
                channel=bulk_channel(warp, lane),
            )
            operation.read_effects = 1
            add_to_bulk_groups(warp, lanes, operation)

    return run


@instruction(
    "cp.async.bulk.prefetch.L2.global{.L2::cache_hint} [a], size{, cache-policy}",
    source=f"{_SOURCE}.3",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
)
def cp_async_bulk_prefetch(i: Instruction) -> Any:
    """Check the operands of a prefetch to L2; it has no other effect."""
    source, read_size = i.address("a"), i.read("size", "u32")

    def run(warp: Any, mask: Array) -> None:
        sources, sizes = source(warp), read_size(warp)
        for lane, *_ in issues(mask, sources, sizes):
            size = _checked_size(i, warp, lane, sizes)
            _global_place(i, warp, lane, int(sources[lane]), size, is_write=False)

    return run


@instruction(
    "cp.async.bulk.commit_group",
    source="PTX ISA 9.7.9.27.2.1",
    targets="sm_90+",
    evidence="manual-only",
    kind="sync",
)
def cp_async_bulk_commit_group(i: Instruction) -> Any:
    """Close the group of the thread's bulk operations since the last commit."""

    def run(warp: Any, mask: Array) -> None:
        for lane in active_lanes(mask):
            bulk_queue(warp, lane).commit()

    return run


@instruction(
    "cp.async.bulk.wait_group{.read} n",
    source="PTX ISA 9.7.9.27.2.2",
    targets="sm_90+",
    evidence="manual-only",
    kind="sync",
)
def cp_async_bulk_wait_group(i: Instruction) -> Any:
    """Wait until at most n groups of the thread are pending, or (.read) have unread sources."""
    newest = i.natural("n")
    only_read = i.has("read")

    def run(warp: Any, mask: Array) -> Wait | None:
        queues = [bulk_queue(warp, lane) for lane in active_lanes(mask)]
        for queue in queues:
            for operation in queue.open:
                operation.is_passed = True
        operations = [operation for queue in queues for operation in queue.covered(newest)]
        if not operations:
            return None

        def is_done(operation: Operation) -> bool:
            return operation.is_read if only_read else operation.is_complete

        def describe() -> str:
            pending = [item.describe() for item in operations if not is_done(item)]
            return f"{i.opcode} {newest}: {'; '.join(pending)}"

        def resume() -> None:
            if not only_read:
                for queue in queues:
                    queue.retire(newest)
            warp.observe(operations)
            for operation in () if only_read else operations:
                if operation.written is not None:
                    operation.written.release(warp.access.clock)

        name = "cp.async.bulk"
        return Wait(lambda: all(map(is_done, operations)), describe, resume, name)

    return run
