"""Block-scaled products of tensor memory: tcgen05.mma with .block_scale.

What lives here: kinds mxf8f6f4, mxf4 and mxf4nvf4, dense, K of 32 or 64. Not here: the other kinds
and what they share (`isa/tcgen05_product.py`).

The scale of row r of A (or column r of B) lies in lane r mod 32, column r / 32 of its matrix, and
again in the other three quarters of the lanes. A word holds up to four scales of one row; the
instruction descriptor's ID says which bytes count. With two CTAs each scales its rows of A, and
all columns of B, from its own tensor memory.

Invariant: a product reads A, B, both scale matrices and D, and writes D, in one effect. Sums are of
exact products, rounded once: `Options.exact_mma` has no rule for these kinds and is refused.

Source: PTX ISA 9.7.16.10.7; places of the scales in lanes and columns: CUTLASS's layout of scale
factors and tcgen05.cp.32x128b (evidence: inferred).
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fovea.emulator.arithmetic.formats import to_float32
from fovea.emulator.async_engine import Operation
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import issues
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tcgen05_product import (
    Issue,
    blocks_of,
    check_addresses,
    offsets_of_a,
    offsets_of_b,
    read_d,
    shared_operand,
    tensor_memory_a,
    write_d,
)
from fovea.emulator.isa.tensor_core import SM100, member_ctas, submit_tracked
from fovea.emulator.layout.instruction_descriptor import ScaledDescriptor, decode_scaled_descriptor
from fovea.emulator.machine.tmem import TMEM_LANES
from fovea.emulator.ptx import syntax

_QUARTER = 32
# (kind, qualifier) -> scales of a row; PTX ISA table 57
_SCALES = {
    ("mxf8f6f4", ""): 1,
    ("mxf8f6f4", "scale_vec::1X"): 1,
    ("mxf8f6f4", "block32"): 1,
    ("mxf4", ""): 2,
    ("mxf4", "scale_vec::2X"): 2,
    ("mxf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2,
    ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::4X"): 4,
    ("mxf4nvf4", "block16"): 4,
}
_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}

_decode = lru_cache(maxsize=256)(decode_scaled_descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    """A product as issued, and where its scales are."""

    issue: Issue
    descriptor: ScaledDescriptor
    count: int
    a_column: int
    b_column: int


@instruction(
    "tcgen05.mma.group.what.block_scale{.vec}{.collector} "
    "[d], a-desc|a-tmem, b-desc, idesc, [scale-a], [scale-b], e1",
    source="PTX ISA 9.7.16.10.9.1",
    evidence="inferred",
    targets=SM100,
    kind="mma",
    group="cta_group::1 cta_group::2",
    what="kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4",
    vec="scale_vec::1X scale_vec::2X scale_vec::4X block16 block32",
    collector="collector::a::fill collector::a::use collector::a::lastuse collector::a::discard",
)
def tcgen05_mma_block_scale(i: Instruction) -> Any:
    """D = (A scale_A) (B scale_B) + D, or without D if enable-input-d is false, asynchronously."""
    group, kind = int(i["group"][-1]), i["what"].removeprefix("kind::")
    count = _SCALES.get((kind, i["vec"]))
    if count is None:
        allowed = ", ".join(f".{vec or 'none'}" for k, vec in _SCALES if k == kind)
        raise i.error(f".kind::{kind} with .{i['vec'] or 'none'} (allowed: {allowed})")
    a_in_tensor_memory = isinstance(i.operands["a-desc"], syntax.Memory)
    reads = (
        i.read("idesc", "b32"),
        i.address("a-desc") if a_in_tensor_memory else i.read("a-desc", "b64"),
        i.read("b-desc", "b64"),
        i.address("d"),
        i.address("scale-a"),
        i.address("scale-b"),
        i.read("e1", "pred"),
    )

    def run(warp: Any, mask: Array) -> None:
        values = [read(warp) for read in reads]
        for lane, *_ in issues(mask, *values):
            idesc, a, b, d, scale_a, scale_b, enable = (int(value[lane]) for value in values)
            descriptor = _decoded(i, warp, lane, idesc, count)
            shape = descriptor.product
            issue = Issue(
                instruction=i,
                warp=warp,
                ctas=member_ctas(i, warp, group),
                shape=shape,
                blocks=blocks_of(shape, group),
                d_address=d,
                a_address=a if a_in_tensor_memory else None,
                a_offsets=None if a_in_tensor_memory else offsets_of_a(i, warp, a, shape, group),
                b_offsets=offsets_of_b(i, warp, b, shape, group),
                adds_d=bool(enable),
                d_scale=0,
                disabled=None,
            )
            check_addresses(issue)
            if issue.a_address is not None and len({block.columns for block in issue.blocks}) > 1:
                raise IllegalOperand(
                    "A in tensor memory with M=128 and cta_group::2 is not implemented for block-"
                    "scaled kinds; use M=256",
                    warp.where(i, lane=lane),
                )
            product = _Scaled(
                issue=issue,
                descriptor=descriptor,
                count=count,
                a_column=_column(i, warp, lane, scale_a, "scale-A"),
                b_column=_column(i, warp, lane, scale_b, "scale-B"),
            )
            flops = 2 * shape.rows * shape.columns * shape.k_extent
            warp.machine.counters.add(f"mma_flops.{shape.a_type.removesuffix('x2')}", flops)
            effect = partial(_multiply, product)
            submit_tracked(i, warp, [effect], kind="tcgen05.mma", group=group, lane=lane)

    return run


def _decoded(i: Instruction, warp: Any, lane: int, value: int, count: int) -> ScaledDescriptor:
    where = warp.where(i, lane=lane)
    if warp.machine.options.exact_mma:
        raise IllegalOperand("exact_mma has no rule for block-scaled kinds; run without it", where)
    kind, group = i["what"].removeprefix("kind::"), int(i["group"][-1])
    try:
        descriptor = _decode(value, kind, group)
    except ValueError as error:
        raise IllegalOperand(str(error), where) from error
    for name, number in (("A", descriptor.a_scale_id), ("B", descriptor.b_scale_id)):
        if number not in _IDS[count]:
            raise IllegalOperand(
                f"scale factor ID {number} of {name} with {count} scales a row (allowed: "
                f"{_IDS[count]})",
                where,
            )
    if descriptor.scale_type == "ue4m3" and count != 4:
        raise IllegalOperand(".ue4m3 scales need .scale_vec::4X or .block16", where)
    return descriptor


def _column(i: Instruction, warp: Any, lane: int, address: int, name: str) -> int:
    # CUTLASS keeps the scale factor ID in the two highest bits: they are no part of the lane
    first = address >> 16 & 0x3FFF
    if first:
        raise IllegalOperand(
            f"{name} starts at lane {first} of tensor memory; it must be lane 0",
            warp.where(i, lane=lane, address=address, space="tensor"),
        )
    return address & 0xFFFF


# --- the product ----------------------------------------------------------------------------------


def _multiply(product: _Scaled, operation: Operation) -> None:
    issue, descriptor = product.issue, product.descriptor
    shape = issue.shape
    raw_b = [
        shared_operand(cta, issue.b_offsets, shape.b_type, operation, shape.b_is_k_major)
        for cta in issue.ctas
    ]
    b = _values(np.concatenate(raw_b), shape.b_type, is_negated=shape.b_is_negated)
    blocks = issue.blocks
    for index, cta in enumerate(issue.ctas):
        if issue.a_offsets is not None:
            raw = shared_operand(cta, issue.a_offsets, shape.a_type, operation, shape.a_is_k_major)
        else:
            raw = tensor_memory_a(issue, cta, operation, blocks)
        a = _values(raw, shape.a_type, is_negated=shape.a_is_negated)
        scale_a = _scales(product, cta, product.a_column, len(a), descriptor.a_scale_id, operation)
        scale_b = _scales(product, cta, product.b_column, len(b), descriptor.b_scale_id, operation)
        d = _scaled(a, scale_a) @ _scaled(b, scale_b).T
        if issue.adds_d:
            d += read_d(issue, cta, blocks, operation)
        with np.errstate(over="ignore"):
            result = d.astype(np.float32)
        write_d(issue, cta, index, blocks, result, operation)


def _values(raw: Array, name: str, *, is_negated: bool) -> Array:
    """Return elements [rows, K] of A or B as float64."""
    if name == "e2m1x2":
        raw = np.stack((raw & 0xF, raw >> 4), axis=-1).reshape(len(raw), -1)
        name = "e2m1"
    value = to_float32(raw, name).astype(np.float64)
    return -value if is_negated else value


def _scaled(value: Array, scales: Array) -> Array:
    """Return each row's blocks of K times their scales."""
    blocks = value.reshape(len(value), scales.shape[1], -1)
    return (blocks * scales[:, :, None]).reshape(value.shape)


def _scales(
    product: _Scaled, cta: Any, column: int, rows: int, first: int, operation: Operation
) -> Array:
    """Return the scales [rows, count] of one matrix as float64."""
    columns = -(-rows // _QUARTER)
    cells = cta.tmem.read(0, TMEM_LANES, column, columns, operation.access)
    quarters = np.ascontiguousarray(cells).reshape(4, _QUARTER, columns)
    raw = quarters[0].view(np.uint8).reshape(_QUARTER, columns, 4)
    copies = quarters.view(np.uint8).reshape(4, _QUARTER, columns, 4)
    used = slice(first, first + product.count)
    if (copies[..., used] != raw[..., used]).any():
        access = operation.access
        raise IllegalOperand(
            f"the scale factors at column {column} of tensor memory differ between the four "
            "quarters of the lanes; every quarter needs a copy",
            access.warp.where(access.instruction),
        )
    codes = raw[..., used].transpose(1, 0, 2).reshape(columns * _QUARTER, -1)[:rows]
    if product.descriptor.scale_type == "ue4m3":
        return to_float32(codes & 0x7F, "e4m3").astype(np.float64)
    powers = np.ldexp(1.0, codes.astype(np.int64) - 127)
    return np.where(codes == 255, np.nan, powers)
