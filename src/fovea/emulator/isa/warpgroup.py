"""A warpgroup's matrix products: four warps issue one product, the unit does it later.

What lives here: the meeting of the four warps' issues, the checks of their registers, and the
product itself. Not here: accumulators in flight (`isa/accumulator.py`), forms (`isa/wgmma.py`).

Products of one warpgroup happen in issue order; the moment is the engine's choice. A accumulator
stays a matrix from its first product to the wait that covers its last one. The shared operands
are read with what the issuing warps had seen: all of B by what all four had, the 16 rows of A of
each warp by what that warp had.

Invariant: a product chained on an accumulator in flight finds `accumulator.parts` in its registers
in every warp; anything else found there is a race.

Source: PTX ISA 9.7.15; reading A by rows is what kernels rely on that write P with a warp-level
barrier only (inferred).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.emulator.arithmetic.accumulate import (
    accumulation,
    multiply_aligned,
    multiply_exact,
    multiply_fast,
    multiply_integer,
)
from fovea.emulator.arithmetic.formats import to_float32
from fovea.emulator.async_engine import Operation
from fovea.emulator.clocks import Clock
from fovea.emulator.errors import IllegalOperand, RaceError, UninitialisedRead
from fovea.emulator.isa.accumulator import (
    ROWS,
    WARPS,
    Accumulator,
    AccumulatorPart,
    Product,
    RegisterFence,
    Ticket,
    deliver_copies,
    spoil_copies,
)
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.layout import fragment
from fovea.emulator.layout.descriptor import (
    CHUNK_BYTES,
    decode_wgmma_descriptor,
    operand_chunks,
)
from fovea.emulator.layout.sparsity import (
    DISTINCT,
    ONE_OF_TWO,
    codes_from_registers,
    expand,
)
from fovea.emulator.machine.warp import UNINITIALISED, InFlight
from fovea.emulator.races import Access

_K_BYTES = 32
# The fast mode, too, sums as the unit does where it keeps 25 bits and float32 can hold the terms:
# in long sums the truncated bits show in the results of attention. It leaves fp8 its float32.
_FULL_ALIGNMENT = 25
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Warpgroup:
    """Four consecutive warps and their products."""

    __slots__ = ("_issued", "_last", "_tickets")

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._issued = [0] * WARPS
        self._last: Operation | None = None

    def issue(
        self,
        warp: Any,
        product: Product,
        operands: tuple[int, int, bool],
        metadata: Array | None = None,
    ) -> Ticket:
        """Take one warp's issue; the fourth one sets the product going.

        Raises:
            RaceError: registers written since the last wgmma.fence, or in flight.
            UninitialisedRead: registers that were never written.
            IllegalOperand: the warps of the warpgroup disagree.
        """
        rank: int = warp.index % WARPS
        number: int = self._issued[rank]
        self._issued[rank] += 1
        ticket = self._tickets.get(number)
        is_first = ticket is None
        if ticket is None:
            head = warp.registers[product.d_slots[0]]
            chained = head.accumulator if head.__class__ is AccumulatorPart else None
            ticket = self._tickets[number] = Ticket(product, operands, chained)
        elif ticket.product is not product or ticket.operands != operands:
            raise self._disagreement(warp, product, ticket, operands)
        ticket.warps[rank] = warp
        ticket.clocks[rank] = warp.access.clock.copy()
        ticket.metadata[rank] = metadata
        _take_registers(warp, ticket, rank, is_first)
        if all(member is not None for member in ticket.warps):
            del self._tickets[number]
            self._start(warp, ticket)
        return ticket

    def deliver(self, warp: Any, wait: Instruction, tickets: Sequence[Ticket]) -> None:
        """Give a warp the accumulators of products it has waited for.

        Raises:
            RaceError: a register with a fragment of A was written before this wait.
        """
        rank = warp.index % WARPS
        registers, dtypes = warp.registers, warp.slot_dtypes
        fence: RegisterFence | None = warp.state.get("wgmma.fence")
        seen = warp.access.clock.seen
        for ticket in tickets:
            operation = ticket.operation
            assert operation is not None
            agent = operation.access.agent
            seen[agent] = max(int(seen[agent]), operation.access.time)
            _check_a_untouched(warp, wait, ticket, rank)
            accumulator = ticket.accumulator
            if accumulator.last_of[rank] is not ticket:
                continue
            block = accumulator.registers()[rank]
            rows = list(block)
            for part, slot, row in zip(accumulator.parts, ticket.product.d_slots, rows):
                if registers[slot] is part:
                    registers[slot] = row if dtypes[slot] == row.dtype else row.view(dtypes[slot])
            values = [registers[slot] for slot in ticket.product.d_slots]
            copies = ticket.product.instruction.program.accumulator_copies
            if copies:
                values += deliver_copies(warp, accumulator, rows, copies)
            if fence is not None:
                fence.add(values)

    def _start(self, warp: Any, ticket: Ticket) -> None:
        after = () if self._last is None or self._last.is_complete else (self._last,)

        product = ticket.product
        warp.machine.counters.add(f"mma_flops.{product.a_type}", product.flops)

        def multiply(operation: Operation) -> None:
            _multiply(ticket, operation)

        self._last = ticket.operation = warp.cta.cluster.engine.submit(
            warp,
            product.instruction,
            [multiply],
            kind="wgmma",
            channel=("wgmma", warp.cta.rank, warp.index // WARPS),
            after=after,
        )

    def _disagreement(
        self, warp: Any, product: Product, ticket: Ticket, operands: tuple[int, int, bool]
    ) -> IllegalOperand:
        other = ticket.product.instruction
        if ticket.product is not product:
            what = f"another warp's next product is PTX line {other.line} `{other.opcode}`"
        else:
            names = ("descriptor of A", "descriptor of B", "scale-d")
            what = "; ".join(
                f"{name} is {mine:#x}, another warp has {theirs:#x}"
                for name, mine, theirs in zip(names, operands, ticket.operands)
                if mine != theirs
            )
        return IllegalOperand(
            f"the warps of a warpgroup must issue the same wgmma.mma_async: {what}",
            warp.where(product.instruction),
        )


def warpgroup_of(warp: Any) -> Warpgroup:
    """Return the warpgroup a warp belongs to."""
    key = ("warpgroup", warp.index // WARPS)
    group = warp.cta.state.get(key)
    if group is None:
        group = warp.cta.state[key] = Warpgroup()
    return group


def _take_registers(warp: Any, ticket: Ticket, rank: int, is_first: bool) -> None:
    """Check and take a warp's A fragment and accumulators, and mark the latter in flight."""
    product, registers = ticket.product, warp.registers
    fence: RegisterFence | None = warp.state.get("wgmma.fence")
    if fence is None:
        raise RaceError(
            "wgmma.mma_async before any wgmma.fence of this warp",
            warp.where(product.instruction),
            rule="wgmma.fence must order register accesses before the first wgmma.mma_async",
        )
    if product.a_slots:
        values = [registers[slot] for slot in product.a_slots]
        for j, value in enumerate(values):
            _check_source(warp, product, fence, value, f"register {j} of A")
        ticket.a_values[rank] = values
    values = [registers[slot] for slot in product.d_slots]
    head = values[0]
    if head.__class__ is AccumulatorPart:
        accumulator = head.accumulator
        if is_first:
            _check_chain(warp, ticket, accumulator)
            accumulator.last = ticket
        if ticket.accumulator is not accumulator or values != accumulator.parts:
            raise _overlap(warp, product, accumulator)
        copies = product.instruction.program.accumulator_copies
        if copies:
            spoil_copies(warp, accumulator, product, copies)
    else:
        accumulator = ticket.accumulator
        scale = ticket.operands[2]
        for j, value in enumerate(values):
            if value is UNINITIALISED and not scale:
                continue
            _check_source(warp, product, fence, value, f"register {j} of D")
        if (
            not is_first
            and accumulator.last_of.count(None) < WARPS
            and (accumulator.last_of[rank] is not None)
        ):
            raise _overlap(warp, product, accumulator)
        accumulator.values[rank] = values if scale else None
    accumulator.last_of[rank] = ticket
    for slot, part in zip(product.d_slots, accumulator.parts):
        registers[slot] = part


def _check_source(warp: Any, product: Product, fence: RegisterFence, value: Any, what: str) -> None:
    if value.__class__ is np.ndarray:
        if fence.covers(value) or (_is_constant(value) and warp.machine.program.is_cute):
            return
        raise RaceError(
            f"race: {what} of wgmma.mma_async was written after the last wgmma.fence",
            warp.where(product.instruction),
            rule="wgmma.fence must stand between a register access and wgmma.mma_async",
        )
    if isinstance(value, InFlight):
        raise RaceError(
            f"race: {what} of wgmma.mma_async {value.describe()}",
            warp.where(product.instruction),
            rule="asynchronous results need a wait before they are used",
        )
    raise UninitialisedRead(
        f"{what} of wgmma.mma_async was never written", warp.where(product.instruction)
    )


def _is_constant(value: Array) -> bool:
    """Return whether a register holds a constant of the text (its lanes are shared, read-only).

    LLVM moves the zeros of accumulators behind the wgmma.fence of the source, which it does not
    see as a use; ptxas puts them back (CUTLASS's Hopper GEMMs rely on it).
    """
    return not value.flags.writeable


def _check_chain(warp: Any, ticket: Ticket, accumulator: Accumulator) -> None:
    earlier = accumulator.last.product
    if not ticket.product.shares_accumulators_with(earlier):
        raise RaceError(
            f"race: the accumulator is in flight in `{earlier.instruction.opcode}` (PTX line "
            f"{earlier.instruction.line}), a product of another shape",
            warp.where(ticket.product.instruction),
            rule="only products of one shape may share accumulators without wgmma.wait_group",
        )


def _overlap(warp: Any, product: Product, accumulator: Accumulator) -> RaceError:
    earlier = accumulator.last.product.instruction
    return RaceError(
        f"race: accumulators overlap those in flight in `{earlier.opcode}` (PTX line "
        f"{earlier.line}) without being the same registers",
        warp.where(product.instruction),
        rule="wgmma.wait_group must come before accumulator registers are used otherwise",
    )


def _check_a_untouched(warp: Any, wait: Instruction, ticket: Ticket, rank: int) -> None:
    values = ticket.a_values[rank]
    if values is None:
        return
    ticket.a_values[rank] = None
    for slot, value in zip(ticket.product.a_slots, values):
        if warp.registers[slot] is not value:
            place = ticket.product.instruction
            raise RaceError(
                f"race: a register with A of `{place.opcode}` (PTX line {place.line}) was written "
                f"before the wgmma.wait_group at PTX line {wait.line}",
                warp.where(place),
                rule="registers of A must not be written before wgmma.wait_group",
            )


# --- the product ------------------------------------------------------------------------------


def _multiply(ticket: Ticket, operation: Operation) -> None:
    """Read the operands and put the product in the accumulator."""
    product = ticket.product
    descriptor_a, descriptor_b, scale = ticket.operands
    if product.a_slots:
        a = _fragment_a(ticket)
    else:
        a = _read_a(ticket, operation, descriptor_a)
    if product.selector is not None:
        a = _expanded(ticket, a)
    b = _read_b(ticket, operation, descriptor_b)
    accumulator = ticket.accumulator
    c = accumulator.load(product.d_type) if scale else None
    options = ticket.warps[0].machine.options
    accumulator.store(_product_of(product, a, b, c, exact=options.exact_mma))


def _product_of(product: Product, a: Array, b: Array, c: Array | None, *, exact: bool) -> Array:
    """Return A B + C for raw operands A [64, K] and B [K, N]."""
    if product.d_type == "s32":
        views = [np.int8 if kind == "s8" else np.uint8 for kind in (product.a_type, product.b_type)]
        return multiply_integer(a.view(views[0]), b.view(views[1]), c, saturates=product.saturates)
    x, y = to_float32(a, product.a_type), to_float32(b, product.b_type)
    if product.a_sign < 0:
        x = -x
    if product.b_sign < 0:
        y = -y
    how = accumulation("hopper", product.a_type, product.d_type)
    if exact or how.alignment_bits == _FULL_ALIGNMENT:
        multiply = multiply_exact if exact else multiply_aligned
        d = multiply(x, y, c, a_format=product.a_type, b_format=product.b_type, how=how)
        if d is not None:
            return d
    if product.d_type == "f16" and c is None:
        return multiply_fast(x, y, None).astype(np.float16)
    return multiply_fast(x, y, c)


def _fragment_a(ticket: Ticket) -> Array:
    lanes: list[Array] = []
    for values in ticket.a_values:
        assert values is not None
        lanes += [value.view(np.uint32) for value in values]
    registers = np.concatenate(lanes).reshape(WARPS, 4, 32)
    return fragment.operand_from_registers(registers, ticket.product.element_bytes)


def _expanded(ticket: Ticket, a: Array) -> Array:
    """Return a sparse A as a whole one."""
    product = ticket.product
    chunks = product.k_extent // (2 if product.a_type == "tf32" else 4)
    allowed = ONE_OF_TWO if product.a_type == "tf32" else DISTINCT
    codes: list[Array] = []
    try:
        for words in ticket.metadata:
            assert words is not None
            assert product.selector is not None
            is_narrow = product.element_bytes == 1
            codes.append(codes_from_registers(words, product.selector, chunks, is_narrow=is_narrow))
        return expand(a, np.concatenate(codes), allowed)
    except ValueError as error:
        raise IllegalOperand(str(error), ticket.warps[0].where(product.instruction)) from error


def _read_a(ticket: Ticket, operation: Operation, value: int) -> Array:
    product = ticket.product
    offsets = _offsets(ticket, value, "A", ROWS, _K_BYTES)
    if product.a_is_k_major:
        raw = [
            _read(ticket, operation, offsets[16 * rank : 16 * rank + 16], rank)
            for rank in range(WARPS)
        ]
        return _elements(np.concatenate(raw), product.element_bytes)
    # 16 rows of 2-byte elements are two chunks of every k.
    raw = [
        _read(ticket, operation, offsets[:, 2 * rank : 2 * rank + 2], rank) for rank in range(WARPS)
    ]
    return _elements(np.concatenate(raw, axis=1), product.element_bytes).T


def _read_b(ticket: Ticket, operation: Operation, value: int) -> Array:
    product = ticket.product
    k_bytes = _K_BYTES * (1 if product.selector is None else 2)
    offsets = _offsets(ticket, value, "B", product.columns, k_bytes)
    raw = _elements(_read(ticket, operation, offsets, None), product.element_bytes)
    return raw.T if product.b_is_k_major else raw


def _offsets(ticket: Ticket, value: int, name: str, rows: int, k_bytes: int) -> Array:
    """Return the shared-memory offsets of an operand's chunks."""
    product = ticket.product
    is_k_major = product.a_is_k_major if name == "A" else product.b_is_k_major
    try:
        table, first = operand_chunks(
            decode_wgmma_descriptor(value),
            rows=rows,
            k_bytes=k_bytes,
            element_bytes=product.element_bytes,
            is_k_major=is_k_major,
        )
    except ValueError as error:
        raise IllegalOperand(
            f"descriptor of {name}: {error}", ticket.warps[0].where(product.instruction)
        ) from error
    return (table + first) * CHUNK_BYTES


def _read(ticket: Ticket, operation: Operation, offsets: Array, rank: int | None) -> Array:
    """Read chunks with what one warp (or, for None, every warp) had seen at issue."""
    clocks = [clock for clock in ticket.clocks if clock is not None]
    clock = _meet(clocks) if rank is None else clocks[rank]
    agent, time = operation.access.agent, operation.access.time
    warp = ticket.warps[rank or 0]
    access = Access(warp, ticket.product.instruction, agent, clock, is_async=True, time=time)
    return warp.cta.shared.read_at(offsets, CHUNK_BYTES, access)


def _meet(clocks: Sequence[Clock]) -> Clock:
    """Return what all of the clocks have seen."""
    meet = clocks[0].copy()
    for clock in clocks[1:]:
        meet.meet(clock)
    return meet


def _elements(chunks: Array, element_bytes: int) -> Array:
    """Return chunks [rows, chunks, 16] as rows of unsigned elements."""
    return np.ascontiguousarray(chunks).reshape(chunks.shape[0], -1).view(_UNSIGNED[element_bytes])
