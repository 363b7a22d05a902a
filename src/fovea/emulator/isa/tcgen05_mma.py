"""Products of the tensor core in tensor memory: tcgen05.mma, and tcgen05.commit.

What lives here: kinds f16, tf32, f8f6f4 and i8, dense, one or two CTAs, and what block-scaled kinds
share with them. Not here: block-scaled kinds (`isa/tcgen05_scaled.py`), sparse ones and `.ws` (not
implemented), loads and stores (`isa/tcgen05_memory.py`).

Invariant: a product reads A, B and D and writes D in one effect, through the async proxy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fovea.emulator.arithmetic.accumulate import (
    accumulation,
    multiply_exact,
    multiply_fast,
    multiply_integer,
)
from fovea.emulator.arithmetic.formats import to_float32
from fovea.emulator.async_engine import Operation
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import (
    SharedPlace,
    issues,
    multicast_ranks,
    shared_place,
    signal,
)
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tensor_core import (
    SM100,
    commit_tracked,
    descriptor_offsets,
    member_ctas,
    shared_address,
    submit_tracked,
)
from fovea.emulator.layout.descriptor import CHUNK_BYTES
from fovea.emulator.layout.instruction_descriptor import (
    InstructionDescriptor,
    decode_instruction_descriptor,
)
from fovea.emulator.layout.tensor_memory import Block, accumulator_blocks
from fovea.emulator.ptx import syntax

_SOURCE = "PTX ISA 9.7.16"
_K_BYTES = 32
_A_COLUMNS = _K_BYTES // 4
_STORAGE_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SUB_BYTE_BITS = {"e2m3": 6, "e3m2": 6, "e2m1": 4}

_decode = lru_cache(maxsize=256)(decode_instruction_descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One tcgen05.mma as issued; addresses are tensor memory addresses (lane << 16 | column)."""

    instruction: Instruction
    warp: Any
    ctas: tuple[Any, ...]
    shape: InstructionDescriptor
    d_address: int
    a_address: int | None
    a_offsets: Array | None
    b_offsets: Array
    adds_d: bool
    d_scale: int
    disabled: Array | None

    @property
    def rows_per_cta(self) -> int:
        """Rows of A and D in each CTA."""
        return self.shape.rows // len(self.ctas)


@instruction(
    "tcgen05.mma.group.what{.collector} [d], a-desc|a-tmem, b-desc, idesc, e1{, e2}{, e3}",
    source=f"{_SOURCE}.10.9.1",
    evidence="manual-only",
    targets=SM100,
    kind="mma",
    group="cta_group::1 cta_group::2",
    what="kind::f16 kind::tf32 kind::f8f6f4 kind::i8",
    collector="collector::a::fill collector::a::use collector::a::lastuse collector::a::discard",
)
def tcgen05_mma(i: Instruction) -> Any:
    """D = A B + D * 2^-scale, or A B if enable-input-d is false, asynchronously.

    Collector hints have no effect: A is read again by every product.
    """
    group, kind = int(i["group"][-1]), i["what"].removeprefix("kind::")
    if kind == "i8" and i.program.target.endswith("f"):
        raise i.error(f".kind::i8 is not available on {i.program.target} (use sm_100a)")
    read_mask, enable, scale = _trailing(i, group, kind)
    read_enable = i.read_operand(enable, "pred")
    d_address, read_idesc = i.address("d"), i.read("idesc", "b32")
    a_in_tensor_memory = isinstance(i.operands["a-desc"], syntax.Memory)
    read_a = i.address("a-desc") if a_in_tensor_memory else i.read("a-desc", "b64")
    read_b = i.read("b-desc", "b64")

    def run(warp: Any, mask: Array) -> None:
        ctas = member_ctas(i, warp, group)
        descriptors, a_values, b_values, d_addresses, enables = (
            read_idesc(warp),
            read_a(warp),
            read_b(warp),
            d_address(warp),
            read_enable(warp),
        )
        for lane, *_ in issues(mask, descriptors, a_values, b_values, d_addresses, enables):
            try:
                shape = _decode(int(descriptors[lane]), kind, group)
            except ValueError as error:
                raise IllegalOperand(str(error), warp.where(i, lane=lane)) from error
            a_value = int(a_values[lane])
            issue = Issue(
                instruction=i,
                warp=warp,
                ctas=ctas,
                shape=shape,
                d_address=int(d_addresses[lane]),
                a_address=a_value if a_in_tensor_memory else None,
                a_offsets=None
                if a_in_tensor_memory
                else offsets_of_a(i, warp, a_value, shape, group),
                b_offsets=offsets_of_b(i, warp, int(b_values[lane]), shape, group),
                adds_d=bool(enables[lane]),
                d_scale=scale,
                disabled=None if read_mask is None else read_mask(warp, lane),
            )
            check_addresses(issue)
            flops = 2 * shape.rows * shape.columns * shape.k_extent
            warp.machine.counters.add(f"mma_flops.{shape.a_type}", flops)
            submit_tracked(
                i,
                warp,
                [lambda operation, issue=issue: _multiply(issue, operation)],
                kind="tcgen05.mma",
                group=group,
                lane=lane,
            )

    return run


def _trailing(
    i: Instruction, group: int, kind: str
) -> tuple[Callable[[Any, int], Array] | None, syntax.Operand, int]:
    """Return (reader of the disabled lanes, enable-input-d, scale-input-d)."""
    rest = [i.operands[name] for name in ("e1", "e2", "e3") if name in i.operands]
    read_mask = None
    if isinstance(rest[0], syntax.Vector):
        words = rest.pop(0)
        assert isinstance(words, syntax.Vector)
        if len(words.items) != 4 * group:
            raise i.error(f"disable-output-lane has {len(words.items)} words, not {4 * group}")
        reads = [i.read_operand(item, "b32") for item in words.items]

        def read(warp: Any, lane: int) -> Array:
            values = np.array([int(read(warp)[lane]) for read in reads], np.uint32)
            return np.unpackbits(values.view(np.uint8), bitorder="little").astype(np.bool_)

        read_mask = read
    if not rest or len(rest) > 2:
        raise i.error("operands after idesc are {disable-output-lane}, enable-input-d, scale")
    scale = 0
    if len(rest) == 2:
        amount = rest[1]
        if not isinstance(amount, syntax.Immediate) or kind not in ("f16", "tf32"):
            raise i.error("scale-input-d is a constant of kind::f16 and kind::tf32 only")
        scale = int(amount.value)
        if not 0 <= scale <= 15:
            raise i.error(f"scale-input-d is {scale}; allowed: 0 to 15")
    return read_mask, rest[0], scale


def storage_bytes(name: str) -> int:
    """Return the bytes of an element of A or B in shared memory, padding included."""
    return _STORAGE_BYTES.get(name, 1)


def offsets_of_a(
    i: Instruction, warp: Any, value: int, shape: InstructionDescriptor, group: int
) -> Array:
    """Return the offsets of the chunks of A of one CTA."""
    return descriptor_offsets(
        i,
        warp,
        value,
        "A",
        shape.rows // group,
        _K_BYTES,
        storage_bytes(shape.a_type),
        is_k_major=shape.a_is_k_major,
    )


def offsets_of_b(
    i: Instruction, warp: Any, value: int, shape: InstructionDescriptor, group: int
) -> Array:
    """Return the offsets of the chunks of one CTA's part of B."""
    return descriptor_offsets(
        i,
        warp,
        value,
        "B",
        shape.columns // group,
        _K_BYTES,
        storage_bytes(shape.b_type),
        is_k_major=shape.b_is_k_major,
    )


def check_addresses(issue: Issue) -> None:
    """Raise IllegalOperand unless the lanes of D and A suit the layout of this M."""
    where = issue.warp.where(issue.instruction, address=issue.d_address, space="tensor")
    lane = issue.d_address >> 16
    allowed = (0, 16) if issue.shape.rows == 64 else (0,)
    if lane not in allowed:
        raise IllegalOperand(
            f"D of M={issue.shape.rows} starts at lane {lane} (allowed: {allowed})", where
        )
    if issue.a_address is None:
        return
    if issue.a_address >> 16 != lane:
        raise IllegalOperand(
            f"A starts at lane {issue.a_address >> 16} and D at {lane}; they must be equal", where
        )
    if issue.shape.rows == 128 and len(issue.ctas) == 2:
        raise IllegalOperand(
            "A in tensor memory with M=128 and cta_group::2 is not implemented; use M=256", where
        )
    if not issue.shape.a_is_k_major or issue.shape.a_type in _SUB_BYTE_BITS:
        raise IllegalOperand(
            f"A of .{issue.shape.a_type} in tensor memory must be K-major with 8 bits or more",
            where,
        )


# --- the product ----------------------------------------------------------------------------------


def _multiply(issue: Issue, operation: Operation) -> None:
    shape = issue.shape
    b = np.concatenate(
        [shared_operand(cta, issue.b_offsets, shape.b_type, operation, shape.b_is_k_major)
         for cta in issue.ctas]
    ).T  # fmt: skip
    for index, cta in enumerate(issue.ctas):
        if issue.a_offsets is not None:
            a = shared_operand(cta, issue.a_offsets, shape.a_type, operation, shape.a_is_k_major)
        else:
            a = tensor_memory_a(issue, cta, operation)
        blocks = accumulator_blocks(shape.rows, shape.columns, len(issue.ctas))
        c = read_d(issue, cta, blocks, operation) if issue.adds_d else None
        exact = issue.warp.machine.options.exact_mma
        d = _product(shape, a, b, c, exact=exact)
        write_d(issue, cta, index, blocks, d, operation)


def shared_operand(
    cta: Any, offsets: Array, name: str, operation: Operation, is_k_major: bool
) -> Array:
    """Return an operand of one CTA as raw elements [rows, K]."""
    chunks = np.ascontiguousarray(cta.shared.read_at(offsets, CHUNK_BYTES, operation.access))
    if name in _SUB_BYTE_BITS:
        chunks = _unpacked(chunks, _SUB_BYTE_BITS[name])
    raw = chunks.reshape(chunks.shape[0], -1).view(_UNSIGNED[storage_bytes(name)])
    return raw if is_k_major else raw.T


def _unpacked(chunks: Array, bits: int) -> Array:
    """Return padded chunks of 16 packed elements (the low bits of each chunk) as a byte each."""
    stream = np.unpackbits(chunks, axis=-1, bitorder="little")[..., : 16 * bits]
    fields = stream.reshape(*chunks.shape[:-1], 16, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]


def tensor_memory_a(issue: Issue, cta: Any, operation: Operation) -> Array:
    """Return A of one CTA, from tensor memory, as raw elements [rows, K]."""
    assert issue.a_address is not None
    lane, column = issue.a_address >> 16, issue.a_address & 0xFFFF
    blocks = accumulator_blocks(issue.shape.rows, issue.shape.columns, len(issue.ctas))
    cells = [
        cta.tmem.read(lane + block.lane, block.rows[1], column, _A_COLUMNS, operation.access)
        for block in blocks
    ]
    return np.concatenate(cells).view(_UNSIGNED[storage_bytes(issue.shape.a_type)])


def read_d(issue: Issue, cta: Any, blocks: tuple[Block, ...], operation: Operation) -> Array:
    """Return what the product adds to, scaled if the instruction says so."""
    lane, column = issue.d_address >> 16, issue.d_address & 0xFFFF
    cells = np.zeros((issue.rows_per_cta, issue.shape.columns), np.uint32)
    for block in blocks:
        (row, rows), (first, columns) = block.rows, block.columns
        cells[row : row + rows, first : first + columns] = cta.tmem.read(
            lane + block.lane, rows, column, columns, operation.access
        )
    if issue.shape.d_type == "f16":
        value = cells.astype(np.uint16).view(np.float16)
    else:
        value = cells.view(np.int32 if issue.shape.d_type == "s32" else np.float32)
    if not issue.d_scale:
        return value
    return np.ldexp(value, -issue.d_scale).astype(value.dtype)


def write_d(
    issue: Issue,
    cta: Any,
    index: int,
    blocks: tuple[Block, ...],
    d: Array,
    operation: Operation,
) -> None:
    """Write the result of one CTA, except in disabled lanes."""
    lane, column = issue.d_address >> 16, issue.d_address & 0xFFFF
    if issue.shape.d_type == "f16":
        cells = d.view(np.uint16).astype(np.uint32)
    else:
        cells = np.ascontiguousarray(d).view(np.uint32)
    for block in blocks:
        (row, rows), (first, columns) = block.rows, block.columns
        part = cells[row : row + rows, first : first + columns]
        start = lane + block.lane
        for begin, end in _enabled_runs(issue, index, start, rows):
            cta.tmem.write(start + begin, column, part[begin:end], operation.access)


def _enabled_runs(issue: Issue, index: int, start: int, rows: int) -> list[tuple[int, int]]:
    """Return the runs of enabled lanes among `rows` lanes from `start` of CTA `index`."""
    if issue.disabled is None:
        return [(0, rows)]
    enabled = ~issue.disabled[128 * index + start : 128 * index + start + rows]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], enabled.astype(np.int8), [0]))))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


def _product(
    shape: InstructionDescriptor, a: Array, b: Array, c: Array | None, *, exact: bool
) -> Array:
    if shape.d_type == "s32":
        views = [np.int8 if kind == "s8" else np.uint8 for kind in (shape.a_type, shape.b_type)]
        return multiply_integer(a.view(views[0]), b.view(views[1]), c, saturates=shape.saturates)
    x, y = to_float32(a, shape.a_type), to_float32(b, shape.b_type)
    x = -x if shape.a_is_negated else x
    y = -y if shape.b_is_negated else y
    if exact:
        how = accumulation("blackwell", shape.a_type, shape.d_type)
        return multiply_exact(x, y, c, a_format=shape.a_type, b_format=shape.b_type, how=how)
    d = multiply_fast(x, y, c)
    return d.astype(np.float16) if shape.d_type == "f16" else d


# --- commit ---------------------------------------------------------------------------------------


@instruction(
    "tcgen05.commit.group.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64 "
    "[mbar]{, ctaMask}",
    source=f"{_SOURCE}.12.1",
    evidence="manual-only",
    targets=SM100,
    kind="sync",
    group="cta_group::1 cta_group::2",
)
def tcgen05_commit(i: Instruction) -> Any:
    """Arrive at an mbarrier when the thread's earlier mma, cp and shift are complete."""
    address, group = i.address("mbar"), int(i["group"][-1])
    read_mask = i.read("ctaMask", "u16") if i.has("ctaMask") else None

    def run(warp: Any, mask: Array) -> None:
        addresses = address(warp)
        ctas = None if read_mask is None else read_mask(warp)
        for lane, *_ in issues(mask, addresses, ctas):
            at = int(addresses[lane])
            if not i.has("shared::cluster"):
                at = shared_address(i, warp, lane, at)
            place = shared_place(i, warp, lane, at, alignment=8, what="mbarrier")
            places = [place]
            if ctas is not None:
                ranks = multicast_ranks(i, warp, lane, int(ctas[lane]))
                places = [place.in_cta(rank) for rank in ranks]
            commit_tracked(
                i,
                warp,
                [lambda operation, place=place: _arrive(place, operation) for place in places],
                group=group,
                lane=lane,
            )

    return run


def _arrive(place: SharedPlace, operation: Operation) -> None:
    signal(place, operation, lambda barrier, access: barrier.arrive(1, access))
