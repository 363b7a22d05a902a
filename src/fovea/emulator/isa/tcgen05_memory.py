"""Tensor memory: tcgen05 alloc, dealloc, ld, st, wait and fence.

What lives here: the forms. Not here: products and commit (`isa/tcgen05_mma.py`), cp and shift
(`isa/tcgen05_copy.py`), the cells and their allocator (`machine/tmem.py`), fragments
(`layout/tensor_memory.py`).

Invariant: loads and stores are asynchronous until their `tcgen05.wait`. Registers of a load may be
read before it (the machine respects register dependencies, PTX ISA 9.7.16.6.4.5), so a load takes
its values at issue; but until the wait nothing may overwrite or free what it reads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.emulator.async_engine import Operation
from fovea.emulator.errors import IllegalOperand, RaceError
from fovea.emulator.isa import instruction
from fovea.emulator.isa.collective import check_aligned, check_uniform
from fovea.emulator.isa.copy_engine import own_shared_place, start
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tensor_core import (
    SM100,
    member_ctas,
    shared_address,
)
from fovea.emulator.isa.tensor_fence import (
    fence_after,
    fence_before,
    note_issue,
    relied_on,
)
from fovea.emulator.layout.tensor_memory import REGISTERS_PER_REPEAT, Access, access_table
from fovea.emulator.machine.warp import Wait
from fovea.emulator.ptx import syntax
from fovea.emulator.races import Shadow

_SOURCE = "PTX ISA 9.7.16"
_SHAPES = "32x32b 16x64b 16x128b 16x256b"
_REPEATS = "x1 x2 x4 x8 x16 x32 x64 x128"
_MAX_REGISTERS = 128


# --- allocation -----------------------------------------------------------------------------------


@instruction(
    "tcgen05.alloc.group.sync.aligned{.shared::cta}.b32 [d], nCols",
    source=f"{_SOURCE}.7.1",
    evidence="manual-only",
    targets=SM100,
    kind="sync",
    group="cta_group::1 cta_group::2",
)
def tcgen05_alloc(i: Instruction) -> Any:
    """Allocate columns (in both CTAs of a pair) and write the address to shared memory."""
    target, read_columns = i.address("d"), i.read("nCols", "u32")
    is_pair = i["group"] == "cta_group::2"

    def run(warp: Any, mask: Array) -> Wait | None:
        check_aligned(i, warp, mask)
        columns = check_uniform(i, warp, read_columns(warp), "nCols")
        address = int(target(warp)[0])
        if not i.has("shared::cta"):
            address = shared_address(i, warp, 0, address)
        place = own_shared_place(i, warp, 0, address, alignment=4, what="destination")
        meeting = _meet(i, warp, is_pair=is_pair)
        got: list[int] = []

        def ready() -> bool:
            if not meeting():
                return False
            start = warp.cta.tmem.allocate(columns, warp.touch(i, mask))
            if start is None:
                return False
            got.append(start)
            return True

        def resume() -> None:
            value = np.array([got[0]], np.uint32)
            place.cta.shared.write(place.offset, value, warp.touch(i, mask))
            shadow = place.cta.shared.shadow
            # allocation keeps the order of accesses to one address, whatever makes the others
            # (PTX ISA 9.7.16.6.1): no proxy fence is needed between it and a copy
            if isinstance(shadow, Shadow):
                shadow.leave_proxies(place.offset // 4)

        if ready():
            resume()
            return None
        return Wait(
            ready,
            lambda: (
                f"tcgen05.alloc of {columns} columns ({warp.cta.tmem.allocated_columns} are "
                f"taken{'; needs the pair' if is_pair else ''})"
            ),
            resume,
            name="tcgen05.alloc",
        )

    return run


@instruction(
    "tcgen05.dealloc.group.sync.aligned.b32 taddr, nCols",
    source=f"{_SOURCE}.7.1",
    evidence="manual-only",
    targets=SM100,
    kind="sync",
    group="cta_group::1 cta_group::2",
)
def tcgen05_dealloc(i: Instruction) -> Any:
    """Free an allocation."""
    read_address, read_columns = i.read("taddr", "u32"), i.read("nCols", "u32")

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        columns = check_uniform(i, warp, read_columns(warp), "nCols")
        address = check_uniform(i, warp, read_address(warp), "taddr")
        if address >> 16:
            raise IllegalOperand(
                f"tcgen05.dealloc of lane {address >> 16}; an allocation starts at lane 0",
                warp.where(i, address=address, space="tensor"),
            )
        _check_loads_are_waited(i, warp)
        warp.cta.tmem.deallocate(address & 0xFFFF, columns, warp.touch(i, mask))
        warp.machine.notify()

    return run


def _check_loads_are_waited(i: Instruction, warp: Any) -> None:
    for other in warp.cta.warps:
        queue = other.queue("tcgen05.ld")
        if queue.open:
            first = queue.open[0]
            if warp.machine.program.is_cute:
                place = first.access.instruction
                warp.machine.warn(
                    f"PTX line {place.line} `{place.opcode}`: tensor memory is freed while this "
                    "load was never waited for; only readers of its registers see to that"
                )
                continue
            raise RaceError(
                f"race: tensor memory is freed while {first.describe()} was never waited for",
                warp.where(i),
                other=first.describe(),
                rule="tcgen05.wait::ld must come before what was loaded is overwritten or freed",
            )


@instruction(
    "tcgen05.relinquish_alloc_permit.group.sync.aligned",
    source=f"{_SOURCE}.7.1",
    evidence="manual-only",
    targets=SM100,
    kind="sync",
    group="cta_group::1 cta_group::2",
)
def tcgen05_relinquish_alloc_permit(i: Instruction) -> Any:
    """Give up the CTA's right to allocate."""

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        warp.cta.tmem.relinquish()

    return run


def _meet(i: Instruction, warp: Any, *, is_pair: bool) -> Any:
    """Return a test of whether the peer CTA has reached its own n-th collective allocation."""
    if not is_pair:
        return lambda: True
    mine, peer = member_ctas(i, warp, 2)
    if mine is not warp.cta:
        mine, peer = peer, mine
    key = "tcgen05.alloc count"
    number = mine.state[key] = mine.state.get(key, 0) + 1
    warp.machine.notify()
    return lambda: peer.state.get(key, 0) >= number


# --- ld and st ------------------------------------------------------------------------------------


def _repeat(i: Instruction) -> int:
    repeat = int(i["num"][1:])
    if REGISTERS_PER_REPEAT[_shape(i)] * repeat > _MAX_REGISTERS:
        raise i.error(f".{_shape(i)}.{i['num']} needs more than {_MAX_REGISTERS} registers")
    return repeat


def _shape(i: Instruction) -> str:
    return i["shape"] or "16x32bx2"


def _registers(i: Instruction, name: str, count: int) -> tuple[syntax.Operand, ...]:
    items = i.items(name)
    if len(items) != count:
        raise i.error(f"{len(items)} registers; .{_shape(i)}.{i['num']} takes {count}")
    return items


def _place(i: Instruction, warp: Any, lanes: Array, access: Access) -> tuple[int, int]:
    """Return lane and column of an access, checked against the warp's quarter of the lanes.

    Raises:
        IllegalOperand: the address differs between threads or leaves the warp's lanes.
    """
    address = check_uniform(i, warp, lanes, "taddr")
    lane, column = address >> 16, address & 0xFFFF
    first = warp.index % 4 * 32
    if not first <= lane <= first + 32 - access.lanes or (lane - first) % access.lanes:
        raise IllegalOperand(
            f"warp {warp.index} may access lanes {first} to {first + 31} in groups of "
            f"{access.lanes}; the address names lane {lane}",
            warp.where(i, address=address, space="tensor"),
        )
    return lane, column


def _half_columns(i: Instruction, access: Access, column: int) -> list[int]:
    """Return the first column of each block of an access."""
    if access.halves is None:
        return [column]
    return [column, column + i.immediate("immHalfSplitoff")]


@instruction(
    "tcgen05.ld.sync.aligned.shape.num{.pack::16b}.b32 r, [taddr]",
    "tcgen05.ld.sync.aligned.16x32bx2.num{.pack::16b}.b32 r, [taddr], immHalfSplitoff",
    source=f"{_SOURCE}.8.3",
    evidence="manual-only",
    targets=SM100,
    kind="memory",
    shape=_SHAPES,
    num=_REPEATS,
)
def tcgen05_ld(i: Instruction) -> Any:
    """Load cells of tensor memory to registers."""
    return _load(i, None)


@instruction(
    "tcgen05.ld.red.sync.aligned.shape.num.redOp{.abs}{.NaN}.type r, redval, [taddr]",
    "tcgen05.ld.red.sync.aligned.16x32bx2.num.redOp{.abs}{.NaN}.type r, redval, [taddr], "
    "immHalfSplitoff",
    source=f"{_SOURCE}.8.3",
    evidence="manual-only",
    targets="sm_103a,sm_110a",
    kind="memory",
    shape="32x32b",
    num="x2 x4 x8 x16 x32 x64 x128",
    redOp="min max",
    type="u32 s32 f32",
)
def tcgen05_ld_red(i: Instruction) -> Any:
    """Load cells and their minimum or maximum over the columns of each lane."""
    if i["type"] != "f32" and (i.has("abs") or i.has("NaN")):
        raise i.error(".abs and .NaN need .f32")

    def reduce(values: Array) -> Array:
        typed = values.view({"u32": np.uint32, "s32": np.int32, "f32": np.float32}[i["type"]])
        if i.has("abs"):
            typed = np.abs(typed)
        if i["type"] != "f32" or i.has("NaN"):
            result = typed.min(axis=0) if i["redOp"] == "min" else typed.max(axis=0)
        else:
            ufunc = np.fmin if i["redOp"] == "min" else np.fmax
            result = ufunc.reduce(typed, axis=0)
        return np.ascontiguousarray(result).view(np.uint32)

    return _load(i, reduce)


def _load(i: Instruction, reduce: Any) -> Any:
    packs = i.has("pack::16b")
    access = access_table(_shape(i), _repeat(i))
    items = list(_registers(i, "r", len(access.rows)))
    if reduce is not None:
        items.append(i.operands["redval"])
    writes = [i.write_operand(item, "b32") for item in items]
    address = i.address("taddr")
    width = access.columns * (2 if packs else 1)

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        lane, column = _place(i, warp, address(warp), access)
        starts = _half_columns(i, access, column)
        loaded: list[Array] = []

        def effect(operation: Operation) -> None:
            blocks = [
                warp.cta.tmem.read(lane, access.lanes, first, width, operation.access)
                for first in starts
            ]
            if packs:
                blocks = [(block[:, 0::2] & 0xFFFF) | block[:, 1::2] << 16 for block in blocks]
            rows = _gather(blocks, access)
            if reduce is not None:
                rows = [*rows, reduce(np.stack(rows))]
            loaded.extend(rows)

        channel = ("tcgen05.ld", warp.access.agent)
        tensor = relied_on(warp)
        operation = start(warp, i, [effect], kind="tcgen05.ld", channel=channel, tensor=tensor)
        note_issue(warp, operation, needs_fence=True)
        warp.cta.cluster.engine.finish(operation)
        warp.machine.counters.add("tensor_memory_load_bytes", 128 * len(access.rows))
        for write, lanes in zip(writes, loaded, strict=True):
            write(warp, mask, lanes)
        warp.queue("tcgen05.ld").add(operation)

    return run


def _gather(blocks: Sequence[Array], access: Access) -> list[Array]:
    if access.halves is None:
        return list(blocks[0][access.rows, access.cells])
    return list(np.stack(blocks)[access.halves, access.rows, access.cells])


@instruction(
    "tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr], r",
    "tcgen05.st.sync.aligned.16x32bx2.num{.unpack::16b}.b32 [taddr], immHalfSplitoff, r",
    source=f"{_SOURCE}.8.4",
    evidence="manual-only",
    targets=SM100,
    kind="memory",
    shape=_SHAPES,
    num=_REPEATS,
)
def tcgen05_st(i: Instruction) -> Any:
    """Store registers to cells of tensor memory, asynchronously."""
    unpacks = i.has("unpack::16b")
    access = access_table(_shape(i), _repeat(i))
    reads = [i.read_operand(item, "b32") for item in _registers(i, "r", len(access.rows))]
    address = i.address("taddr")

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        lane, column = _place(i, warp, address(warp), access)
        starts = _half_columns(i, access, column)
        values = np.stack([read(warp) for read in reads]).view(np.uint32)

        def effect(operation: Operation) -> None:
            for half, first in enumerate(starts):
                block = np.zeros((access.lanes, access.columns), np.uint32)
                chosen = slice(None) if access.halves is None else access.halves == half
                block[access.rows[:, chosen], access.cells[:, chosen]] = values[:, chosen]
                if unpacks:
                    block = np.stack((block & 0xFFFF, block >> 16), axis=-1)
                    block = block.reshape(access.lanes, -1)
                warp.cta.tmem.write(lane, first, block, operation.access)

        channel = ("tcgen05.st", warp.access.agent)
        tensor = relied_on(warp)
        operation = start(warp, i, [effect], kind="tcgen05.st", channel=channel, tensor=tensor)
        note_issue(warp, operation, needs_fence=True)
        warp.machine.counters.add("tensor_memory_store_bytes", 128 * len(access.rows))
        warp.queue("tcgen05.st").add(operation)

    return run


@instruction(
    "tcgen05.what.sync.aligned",
    source=f"{_SOURCE}.8.5",
    evidence="manual-only",
    targets=SM100,
    kind="sync",
    what="wait::ld wait::st",
)
def tcgen05_wait(i: Instruction) -> Any:
    """Wait for the warp's own loads or stores."""
    key = "tcgen05." + i["what"][-2:]

    def run(warp: Any, mask: Array) -> Wait | None:
        check_aligned(i, warp, mask)
        queue = warp.queue(key)
        queue.commit()
        operations = queue.covered(0)
        if not operations:
            return None

        def resume() -> None:
            queue.retire(0)
            warp.observe(operations)

        return Wait(
            lambda: all(operation.is_complete for operation in operations),
            lambda: f"{i.opcode}: {'; '.join(operation.describe() for operation in operations)}",
            resume,
            name=".".join(i.opcode.split(".")[:2]),
        )

    return run


@instruction(
    "tcgen05.what",
    source=f"{_SOURCE}.11.1",
    evidence="inferred",
    targets=SM100,
    kind="sync",
    what="fence::before_thread_sync fence::after_thread_sync",
)
def tcgen05_fence(i: Instruction) -> Any:
    """Order tcgen05 operations around a synchronisation of threads.

    A kernel without any is taken to rely on the synchronisation alone, see `isa/tensor_fence.py`.
    """
    fence = fence_before if i["what"] == "fence::before_thread_sync" else fence_after

    def run(warp: Any, mask: Array) -> None:
        fence(warp)

    return run
