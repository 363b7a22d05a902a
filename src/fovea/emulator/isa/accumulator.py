"""Accumulators of warpgroup products in flight, and what a warp has issued.

What lives here: the static part of a product, its ticket while four warps issue it, the accumulator
that stays a matrix until a wait delivers it, and what a wgmma.fence covers. Not here: who may
issue what when (`isa/warpgroup.py`), forms (`isa/wgmma.py`).

Invariant: a register of an accumulator in flight is `accumulator.parts[j]`, an unreadable object,
in every warp that has issued.

A `mov` of such a register before the wait is undefined by the manual (9.7.15.4), yet compilers
emit it between chained products, where ptxas allots both one register or serialises. So a copy is
delivered by the wait like the original, unless another product has accumulated since: then it is
unreadable for good.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from fovea.emulator.async_engine import Operation
from fovea.emulator.clocks import Clock
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.layout import fragment
from fovea.emulator.machine.warp import (
    InFlight,
    PackedInFlight,
    SplitInFlight,
    Unreadable,
    pack_lanes,
)

WARPS = 4
ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """The static part of one wgmma.mma_async."""

    instruction: Instruction
    columns: int
    k_extent: int
    d_type: str
    a_type: str
    b_type: str
    element_bytes: int
    d_slots: tuple[int, ...]
    a_slots: tuple[int, ...]
    a_sign: int
    b_sign: int
    a_is_k_major: bool
    b_is_k_major: bool
    saturates: bool
    selector: int | None = None  # of the sparsity metadata (None: A is dense)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * ROWS * self.columns * self.k_extent

    def shares_accumulators_with(self, other: "Product") -> bool:
        """Return whether the two may follow each other on one accumulator without a wait."""
        return self.columns == other.columns and self.d_type == other.d_type


class AccumulatorPart(InFlight):
    """One register of an accumulator in flight."""

    __slots__ = ("accumulator",)

    def __init__(self, accumulator: "Accumulator", key: int):
        self.accumulator = accumulator
        self.key = key

    def describe(self) -> str:
        """Return why the register cannot be read."""
        ticket = self.accumulator.last
        place = ticket.product.instruction
        return (
            f"is the accumulator of `{place.opcode}` (PTX line {place.line}), which no "
            "wgmma.wait_group has waited for"
        )


class SpoiltCopy(Unreadable):
    """A copy of an accumulator in flight, taken before a further product changed the original."""

    __slots__ = ("place",)

    def __init__(self, place: Instruction):
        self.place = place

    def describe(self) -> str:
        """Return why the register cannot be read."""
        return (
            "was copied from an accumulator in flight, which "
            f"`{self.place.opcode}` (PTX line {self.place.line}) has changed since"
        )


class Accumulator:
    """The D matrix of products in flight.

    Attributes:
        matrix: 64 x N values, once the first product has happened.
        values: what each warp's registers held at issue (None where scale-d was false).
        last: the ticket of the newest product on it.
        last_of: the newest ticket each warp has issued on it.
    """

    __slots__ = ("_block", "last", "last_of", "matrix", "parts", "values")

    def __init__(self, product: Product, ticket: "Ticket"):
        self.parts = [AccumulatorPart(self, j) for j in range(len(product.d_slots))]
        self.matrix: Array | None = None
        self.values: list[list[Array] | None] = [None] * WARPS
        self.last = ticket
        self.last_of: list[Ticket | None] = [None] * WARPS
        self._block: Array | None = None

    def load(self, d_type: str) -> Array | None:
        """Return the matrix the first product adds to, from the warps' registers."""
        if self.matrix is not None or self.values[0] is None:
            return self.matrix
        lanes: list[Array] = []
        for values in self.values:
            assert values is not None
            lanes += values
        registers = np.concatenate(lanes).view(np.uint32).reshape(WARPS, -1, 32)
        if d_type == "f16":
            return fragment.packed_accumulator_from_registers(registers).view(np.float16)
        matrix = fragment.accumulator_from_registers(registers)
        return matrix.view(np.int32 if d_type == "s32" else np.float32)

    def store(self, matrix: Array) -> None:
        """Keep the result of a product."""
        self.matrix = matrix
        self._block = None

    def registers(self) -> Array:
        """Return the [4, registers, 32] block of the finished matrix."""
        if self._block is None:
            assert self.matrix is not None
            if self.matrix.dtype == np.float16:
                self._block = fragment.packed_accumulator_to_registers(self.matrix.view(np.uint16))
            else:
                self._block = fragment.accumulator_to_registers(self.matrix.view(np.uint32))
        return self._block


class RegisterFence:
    """What the registers held at the last wgmma.fence of a warp.

    A value that was in any register then may be used: copies (`mov`) keep the object.
    """

    __slots__ = ("_ids", "_kept")

    def __init__(self, registers: Sequence[Any]):
        self._kept = list(registers)
        self._ids: set[int] | None = None

    def covers(self, value: Any) -> bool:
        """Return whether `value` was in a register at the fence, or was delivered since."""
        if self._ids is None:
            self._ids = set(map(id, self._kept))
        return id(value) in self._ids

    def add(self, values: list[Array]) -> None:
        """Count values that a wait has delivered as fenced."""
        self._kept += values
        if self._ids is not None:
            self._ids.update(map(id, values))


class Ticket:
    """One product of a warpgroup: issued by its warps one after the other, then done.

    `accumulator` is the one in flight that the product is chained on (None: it starts its own).
    """

    __slots__ = ("a_values", "accumulator", "clocks", "metadata", "operands", "operation",
                 "product", "warps")  # fmt: skip

    def __init__(
        self, product: Product, operands: tuple[int, int, bool], accumulator: Accumulator | None
    ):
        self.product = product
        self.operands = operands
        self.warps: list[Any] = [None] * WARPS
        self.a_values: list[list[Any] | None] = [None] * WARPS
        self.clocks: list[Clock | None] = [None] * WARPS
        self.metadata: list[Array | None] = [None] * WARPS  # of a sparse A
        self.accumulator = accumulator or Accumulator(product, self)
        self.operation: Operation | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the product has happened."""
        return self.operation is not None and self.operation.is_complete

    def describe(self) -> str:
        """Return the product and which warps have not issued it."""
        place = f"`{self.product.instruction.opcode}` (PTX line {self.product.instruction.line})"
        if self.operation is not None:
            return f"{place} under way"
        issued = [rank for rank, warp in enumerate(self.warps) if warp is not None]
        missing = [rank for rank in range(WARPS) if rank not in issued]
        return f"{place} issued by warps {issued} but not by warps {missing} of the warpgroup"


def deliver_copies(
    warp: Any, accumulator: Accumulator, rows: Sequence[Array], slots: Sequence[int]
) -> list[Array]:
    """Put the values of a finished accumulator where `mov` has copied it; return them.

    `slots` are the registers that a `mov` may have filled with one.
    """
    registers, dtypes = warp.registers, warp.slot_dtypes
    done: list[Array] = []
    for slot in slots:
        value = registers[slot]
        if value.__class__ is np.ndarray:
            continue
        result = _value_of(value, accumulator, rows)
        if result is not None:
            registers[slot] = result.view(dtypes[slot])
            done.append(registers[slot])
    return done


def _value_of(value: Any, accumulator: Accumulator, rows: Sequence[Array]) -> Array | None:
    """Return what a register holds now if it was a copy of the accumulator, else None."""
    if isinstance(value, PackedInFlight):
        return _unpacked(value, accumulator, rows)
    if isinstance(value, AccumulatorPart) and value.accumulator is accumulator:
        return rows[value.key]
    if isinstance(value, SplitInFlight) and _is_part(value.whole, accumulator):
        key = cast(int, value.whole.key)
        return value.part_of(rows[key])
    return None


def _is_part(value: object, accumulator: Accumulator) -> bool:
    """Return whether something is a register of the accumulator in flight."""
    return isinstance(value, AccumulatorPart) and value.accumulator is accumulator


def _unpacked(
    packed: PackedInFlight, accumulator: Accumulator, rows: Sequence[Array]
) -> Array | None:
    """Put values in a packed register; return it once nothing is missing."""
    for position, part in enumerate(packed.parts):
        if part.__class__ is AccumulatorPart and part.accumulator is accumulator:
            packed.parts[position] = rows[part.key]
    if any(isinstance(part, Unreadable) for part in packed.parts):
        return None
    size = packed.whole.itemsize // len(packed.parts)
    return pack_lanes(packed.whole, [part.view(f"u{size}") for part in packed.parts])


def spoil_copies(
    warp: Any, accumulator: Accumulator, product: Product, slots: Sequence[int]
) -> None:
    """Make copies of an accumulator unreadable that the registers of `product` are not.

    `slots` are the registers that a `mov` may have filled with one.
    """
    spoilt = SpoiltCopy(product.instruction)
    own = set(product.d_slots)
    registers = warp.registers
    for slot in slots:
        value = registers[slot]
        if isinstance(value, PackedInFlight):
            for position, part in enumerate(value.parts):
                if _is_part(part, accumulator):
                    value.parts[position] = spoilt
        elif _is_part(value, accumulator):
            if slot not in own:
                registers[slot] = spoilt
        elif isinstance(value, SplitInFlight) and _is_part(value.whole, accumulator):
            registers[slot] = spoilt
