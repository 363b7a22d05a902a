"""The product of a tcgen05.mma: which cells of which memory it reads, multiplies and writes.

What lives here: an issued product of the kinds without block scaling, its checks, operands,
sparsity metadata and column mask. Not here: the forms (`isa/tcgen05_mma.py`), block-scaled kinds
(`isa/tcgen05_scaled.py`), layouts (`layout/`).

Invariant: a product reads A, B, D and the metadata, and writes D, in one effect, through the async
proxy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tensor_core import descriptor_offsets
from fovea.emulator.layout.column_mask import ColumnMask
from fovea.emulator.layout.descriptor import CHUNK_BYTES
from fovea.emulator.layout.instruction_descriptor import InstructionDescriptor
from fovea.emulator.layout.sparsity import (
    ONE_OF_TWO,
    TENSOR_MEMORY,
    codes_from_tensor_memory,
    expand,
)
from fovea.emulator.layout.tensor_memory import Block, accumulator_blocks

_K_BYTES = 32  # of a row of A, packed if it is sparse, and of a dense row of B
_A_COLUMNS = _K_BYTES // 4
_STORAGE_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SUB_BYTE_BITS = {"e2m3": 6, "e3m2": 6, "e2m1": 4}
_FP4_SHIFT = 2  # 4-bit elements of A in tensor memory are in the middle of their byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One tcgen05.mma as issued; addresses are tensor memory addresses (lane << 16 | column).

    Attributes:
        metadata: address of the sparsity metadata (None: A is dense).
        mask: which columns of B count as zero (None: none, and B starts at its first column).
    """

    instruction: Instruction
    warp: Any
    ctas: tuple[Any, ...]
    shape: InstructionDescriptor
    blocks: tuple[Block, ...]
    d_address: int
    a_address: int | None
    a_offsets: Array | None
    b_offsets: Array
    adds_d: bool
    d_scale: int
    disabled: Array | None
    metadata: int | None = None
    mask: ColumnMask | None = None

    @property
    def rows_per_cta(self) -> int:
        """Rows of A and D in each CTA."""
        return self.shape.rows // len(self.ctas)


def storage_bytes(name: str) -> int:
    """Return the bytes of an element of A or B in shared memory, padding included."""
    return _STORAGE_BYTES.get(name, 1)


def blocks_of(
    shape: InstructionDescriptor, group: int, *, is_ws: bool = False
) -> tuple[Block, ...]:
    """Return where the part of D in one CTA lies."""
    return accumulator_blocks(
        shape.rows,
        shape.columns,
        group,
        is_weight_stationary=is_ws,
        is_sparse=shape.sparsity is not None,
    )


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
    i: Instruction,
    warp: Any,
    value: int,
    shape: InstructionDescriptor,
    group: int,
    mask: ColumnMask | None = None,
) -> Array:
    """Return the offsets of the chunks of one CTA's part of B."""
    columns = shape.columns // group + (0 if mask is None else -(-mask.shift // 8) * 8)
    return descriptor_offsets(
        i,
        warp,
        value,
        "B",
        columns,
        _K_BYTES * (1 if shape.sparsity is None else 2),
        storage_bytes(shape.b_type),
        is_k_major=shape.b_is_k_major,
    )


def check_addresses(issue: Issue) -> None:
    """Raise IllegalOperand unless the lanes of D, A and the metadata suit the layout of this M."""
    where = issue.warp.where(issue.instruction, address=issue.d_address, space="tensor")
    lane = issue.d_address >> 16
    allowed = (0, 16) if issue.blocks[0].rows[1] == 16 else (0,)
    if lane not in allowed:
        raise IllegalOperand(
            f"D of M={issue.shape.rows} starts at lane {lane} (allowed: {allowed})", where
        )
    if issue.metadata is not None and (issue.metadata >> 16 != lane or issue.metadata & 1):
        raise IllegalOperand(
            f"sparsity metadata at lane {issue.metadata >> 16}, column {issue.metadata & 0xFFFF}: "
            f"the lane must be that of D ({lane}), the column even",
            where,
        )
    if issue.a_address is None:
        return
    if issue.a_address >> 16 != lane:
        raise IllegalOperand(
            f"A starts at lane {issue.a_address >> 16} and D at {lane}; they must be equal", where
        )
    if not issue.shape.a_is_k_major:
        raise IllegalOperand("A in tensor memory must be K-major (bit 15 must be 0)", where)


# --- the product ----------------------------------------------------------------------------------


def multiply(issue: Issue, operation: Operation) -> None:
    """Do the product: the effect of the operation."""
    shape = issue.shape
    b = np.concatenate(
        [shared_operand(cta, issue.b_offsets, shape.b_type, operation, shape.b_is_k_major)
         for cta in issue.ctas]
    )  # fmt: skip
    if issue.mask is not None:
        b = issue.mask.apply(b, shape.columns)
    exact = issue.warp.machine.options.exact_mma
    for index, cta in enumerate(issue.ctas):
        for blocks in _banks(issue.blocks):
            a = _operand_a(issue, cta, blocks, operation)
            first, count = blocks[0].columns
            c = read_d(issue, cta, blocks, operation) if issue.adds_d else None
            d = _product(shape, a, b[first : first + count].T, c, exact=exact)
            write_d(issue, cta, index, blocks, d, operation)


def _banks(blocks: Sequence[Block]) -> Iterator[tuple[Block, ...]]:
    """Yield the blocks of each range of columns: such a bank of lanes has its own A."""
    for columns in dict.fromkeys(block.columns for block in blocks):
        yield tuple(block for block in blocks if block.columns == columns)


def _operand_a(issue: Issue, cta: Any, blocks: tuple[Block, ...], operation: Operation) -> Array:
    """Return A of one CTA and bank as raw elements [rows, K]."""
    shape = issue.shape
    if issue.a_offsets is not None:
        a = shared_operand(cta, issue.a_offsets, shape.a_type, operation, shape.a_is_k_major)
    else:
        a = tensor_memory_a(issue, cta, operation, blocks)
    if issue.metadata is None:
        return a
    is_narrow = storage_bytes(shape.a_type) == 1
    chunks = shape.k_extent // (2 if shape.a_type == "tf32" else 4)
    column = (issue.metadata & 0xFFFF) + (shape.sparsity or 0)
    cells = [
        cta.tmem.read(
            (issue.metadata >> 16) + block.lane,
            block.rows[1],
            column,
            chunks // 8 if is_narrow else 1,
            operation.access,
        )
        for block in blocks
    ]
    codes = codes_from_tensor_memory(np.concatenate(cells), chunks, is_narrow=is_narrow)
    try:
        return expand(a, codes, ONE_OF_TWO if shape.a_type == "tf32" else TENSOR_MEMORY)
    except ValueError as error:
        raise IllegalOperand(str(error), issue.warp.where(issue.instruction)) from error


def shared_operand(
    cta: Any, offsets: Array, name: str, operation: Operation, is_k_major: bool
) -> Array:
    """Return an operand of one CTA as raw elements [rows, K]."""
    chunks = np.ascontiguousarray(cta.shared.read_at(offsets, CHUNK_BYTES, operation.access))
    if name in _SUB_BYTE_BITS:
        chunks = unpacked(chunks, _SUB_BYTE_BITS[name])
    raw = chunks.reshape(chunks.shape[0], -1).view(_UNSIGNED[storage_bytes(name)])
    return raw if is_k_major else raw.T


def unpacked(chunks: Array, bits: int) -> Array:
    """Return padded chunks of 16 packed elements (the low bits of each chunk) as a byte each."""
    stream = np.unpackbits(chunks, axis=-1, bitorder="little")[..., : 16 * bits]
    fields = stream.reshape(*chunks.shape[:-1], 16, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]


def tensor_memory_a(issue: Issue, cta: Any, operation: Operation, blocks: Sequence[Block]) -> Array:
    """Return A of one CTA and bank, from tensor memory, as raw elements [rows, K]."""
    assert issue.a_address is not None
    lane, column = issue.a_address >> 16, issue.a_address & 0xFFFF
    cells = [
        cta.tmem.read(lane + block.lane, block.rows[1], column, _A_COLUMNS, operation.access)
        for block in blocks
    ]
    raw = np.concatenate(cells).view(_UNSIGNED[storage_bytes(issue.shape.a_type)])
    return raw >> np.uint8(_FP4_SHIFT) if issue.shape.a_type == "e2m1" else raw


def read_d(issue: Issue, cta: Any, blocks: Sequence[Block], operation: Operation) -> Array:
    """Return what the product adds to in some blocks, scaled if the instruction says so."""
    lane, column = issue.d_address >> 16, issue.d_address & 0xFFFF
    start = blocks[0].columns[0]
    width = max(first + count for first, count in (block.columns for block in blocks)) - start
    cells = np.zeros((issue.rows_per_cta, width), np.uint32)
    for block in blocks:
        (row, rows), (first, columns) = block.rows, block.columns
        cells[row : row + rows, first - start : first - start + columns] = cta.tmem.read(
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
    blocks: Sequence[Block],
    d: Array,
    operation: Operation,
) -> None:
    """Write the result of one CTA in some blocks, except in disabled lanes."""
    lane, column = issue.d_address >> 16, issue.d_address & 0xFFFF
    start = blocks[0].columns[0]
    if issue.shape.d_type == "f16":
        cells = d.view(np.uint16).astype(np.uint32)
    else:
        cells = np.ascontiguousarray(d).view(np.uint32)
    for block in blocks:
        (row, rows), (first, columns) = block.rows, block.columns
        part = cells[row : row + rows, first - start : first - start + columns]
        top = lane + block.lane
        for begin, end in _enabled_runs(issue, index, top, rows):
            cta.tmem.write(top + begin, column, part[begin:end], operation.access)


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
