"""Warpgroup matrix multiply-accumulate: wgmma.mma_async and its fence, commit and wait.

What lives here: decoding of the forms and the issue of one warp. Not here: the work of the four
warps together (`isa/warpgroup.py`), layouts (`layout/`), arithmetic (`arithmetic/`).

Invariant: from issue until a `wgmma.wait_group` that covers it, accumulator registers hold an
unreadable object; so any use of them raises, whatever the schedule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.accumulator import Product, RegisterFence, Ticket
from fovea.emulator.isa.collective import check_aligned
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.warpgroup import warpgroup_of
from fovea.emulator.machine.warp import Wait
from fovea.emulator.ptx import syntax

_SOURCE = "PTX ISA 9.7.15"
_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_COLUMNS = range(8, 257, 8)
_INTEGER_COLUMNS = (8, 16, 24, *range(32, 257, 16))

Decoder = Callable[..., Any]


def _shapes(k: int, columns: Sequence[int]) -> str:
    return " ".join(f"m64n{n}k{k}" for n in columns)


def _product(i: Instruction) -> Product:
    """Return the static part of an mma_async: shape, types, scales, majorness, registers."""
    n, k = (int(part) for part in i["shape"][4:].split("k"))
    d, a = i.operands["d"], i.operands["a"]
    a_in_registers = isinstance(a, syntax.Vector)
    bytes_ = _ELEMENT_BYTES[i["atype"]]
    expected = n // 4 if i["dtype"] == "f16" else n // 2
    d_slots = _slots(i, d, expected, f"D of {i['shape']} in .{i['dtype']}")
    a_slots = _slots(i, a, 4, "A in registers") if a_in_registers else ()
    scales = [_sign(i, name) if i.has(name) else 1 for name in ("imm-scale-a", "imm-scale-b")]
    transposes = [name for name in ("imm-trans-1", "imm-trans-2") if i.has(name)]
    wanted = 0 if bytes_ != 2 else 1 if a_in_registers else 2
    if len(transposes) != wanted:
        raise i.error(f"{len(transposes)} transpose operands; this form has {wanted}")
    values = [_bit(i, name) for name in transposes]
    return Product(
        instruction=i,
        columns=n,
        k_extent=k,
        d_type=i["dtype"],
        a_type=i["atype"],
        b_type=i["btype"],
        element_bytes=bytes_,
        d_slots=d_slots,
        a_slots=a_slots,
        a_sign=scales[0],
        b_sign=scales[1],
        a_is_k_major=a_in_registers or not values or not values[0],
        b_is_k_major=not values or not values[-1],
        saturates=i.has("satfinite"),
        selector=_selector(i) if i.has("sp-sel") else None,
    )


def _slots(i: Instruction, operand: syntax.Operand, count: int, what: str) -> tuple[int, ...]:
    if not isinstance(operand, syntax.Vector) or len(operand.items) != count:
        got = len(operand.items) if isinstance(operand, syntax.Vector) else 1
        raise i.error(f"{what} takes {count} registers, got {got}")
    slots: list[int] = []
    for item in operand.items:
        if not isinstance(item, syntax.Register) or i.slot(item).dtype.itemsize != 4:
            raise i.error(f"{what}: {item} is no 32-bit register")
        slots.append(i.slot(item).index)
    return tuple(slots)


def _selector(i: Instruction) -> int:
    value, allowed = i.immediate("sp-sel"), 1 if _ELEMENT_BYTES[i["atype"]] == 1 else 2
    if not 0 <= value < allowed:
        raise i.error(f"sp-sel is {value}; allowed for .{i['atype']}: 0 to {allowed - 1}")
    return value


def _sign(i: Instruction, name: str) -> int:
    value = i.immediate(name)
    if value not in (1, -1):
        raise i.error(f"{name} is {value}; allowed: 1, -1")
    return value


def _bit(i: Instruction, name: str) -> int:
    value = i.immediate(name)
    if value not in (0, 1):
        raise i.error(f"{name} is {value}; allowed: 0, 1")
    return value


_OPERANDS = "d, a, b-desc, scale-d"
_SPARSE_OPERANDS = "d, a, b-desc, sp-meta, sp-sel, scale-d"
_MORE = ", imm-scale-a, imm-scale-b{, imm-trans-1}{, imm-trans-2}"
# K of the dense shape, types of D, types of A and B.
_FLOAT_FORMS = (
    (16, "f16 f32", "f16"),
    (16, "f32", "bf16"),
    (8, "f32", "tf32"),
    (32, "f16 f32", "e4m3 e5m2"),
)


def _form(
    *notations: str,
    k: int,
    d_types: str,
    types: str,
    columns: Sequence[int] = _COLUMNS,
    is_sparse: bool = False,
) -> Callable[[Decoder], Decoder]:
    return instruction(
        *notations,
        source=f"{_SOURCE}.6.3" if is_sparse else f"{_SOURCE}.5.2",
        evidence="inferred" if is_sparse else "manual-only",
        targets="sm_90a",
        kind="mma",
        shape=_shapes(k, columns),
        dtype=d_types,
        atype=types,
        btype=types,
    )


def _float_forms(decode: Decoder) -> Decoder:
    """Register the decoder for every floating-point form."""
    qualifiers = "sync.aligned.shape.dtype.atype.btype "
    dense = f"wgmma.mma_async.{qualifiers}{_OPERANDS}{_MORE}"
    sparse = f"wgmma.mma_async.sp.{qualifiers}{_SPARSE_OPERANDS}{_MORE}"
    for k, d_types, types in _FLOAT_FORMS:
        _form(dense, k=k, d_types=d_types, types=types)(decode)
        _form(sparse, k=2 * k, d_types=d_types, types=types, is_sparse=True)(decode)
    return decode


@_float_forms
@_form(
    f"wgmma.mma_async.sync.aligned.shape{{.satfinite}}.dtype.atype.btype {_OPERANDS}",
    f"wgmma.mma_async.sync.aligned.shape.dtype.atype.btype{{.satfinite}} {_OPERANDS}",
    k=32,
    d_types="s32",
    types="s8 u8",
    columns=_INTEGER_COLUMNS,
)
@_form(
    f"wgmma.mma_async.sp.sync.aligned.shape{{.satfinite}}.dtype.atype.btype {_SPARSE_OPERANDS}",
    f"wgmma.mma_async.sp.sync.aligned.shape.dtype.atype.btype{{.satfinite}} {_SPARSE_OPERANDS}",
    k=64,
    d_types="s32",
    types="s8 u8",
    columns=_INTEGER_COLUMNS,
    is_sparse=True,
)
def wgmma_mma_async(i: Instruction) -> Any:
    """D = A B + D, or A B if scale-d is false; A from registers or shared memory.

    A sparse A is multiplied as a whole one; its sums therefore have the dense product's order.
    """
    product = _product(i)
    i.program.accumulators.update(product.d_slots)
    read_a = None if product.a_slots else i.uniform("a", "b64")
    read_b = i.uniform("b-desc", "b64")
    read_scale = i.read("scale-d", "pred")
    read_metadata = None if product.selector is None else i.read("sp-meta", "b32")

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        scale = read_scale(warp)
        if bool(scale[0]) != bool(scale.all()):
            raise IllegalOperand("scale-d differs between lanes", warp.where(i))
        descriptor_a = 0 if read_a is None else read_a(warp, mask)
        ticket = warpgroup_of(warp).issue(
            warp,
            product,
            (descriptor_a, read_b(warp, mask), bool(scale[0])),
            None if read_metadata is None else read_metadata(warp).view(np.uint32),
        )
        warp.queue("wgmma").add(ticket)

    return run


@instruction(
    "wgmma.fence.sync.aligned",
    source=f"{_SOURCE}.7.1",
    evidence="manual-only",
    targets="sm_90a",
    kind="sync",
)
def wgmma_fence(i: Instruction) -> Any:
    """Order earlier accesses of registers before later wgmma.mma_async."""

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        warp.state["wgmma.fence"] = RegisterFence(warp.registers)

    return run


@instruction(
    "wgmma.commit_group.sync.aligned",
    source=f"{_SOURCE}.7.2",
    evidence="manual-only",
    targets="sm_90a",
    kind="sync",
)
def wgmma_commit_group(i: Instruction) -> Any:
    """Close the group of the products issued since the last commit."""

    def run(warp: Any, mask: Array) -> None:
        check_aligned(i, warp, mask)
        warp.queue("wgmma").commit()

    return run


@instruction(
    "wgmma.wait_group.sync.aligned n",
    source=f"{_SOURCE}.7.3",
    evidence="manual-only",
    targets="sm_90a",
    kind="sync",
)
def wgmma_wait_group(i: Instruction) -> Any:
    """Wait until at most n groups are pending; their accumulators become readable."""
    newest = i.natural("n")

    def run(warp: Any, mask: Array) -> Wait | None:
        check_aligned(i, warp, mask)
        queue = warp.queue("wgmma")
        tickets: list[Ticket] = queue.covered(newest)  # pyright: ignore[reportAssignmentType]
        if not tickets:
            return None

        def describe() -> str:
            return f"wgmma.wait_group {newest}: " + "; ".join(
                ticket.describe() for ticket in tickets if not ticket.is_complete
            )

        def resume() -> None:
            queue.retire(newest)
            warpgroup_of(warp).deliver(warp, i, tickets)

        return Wait(
            lambda: all(ticket.is_complete for ticket in tickets), describe, resume, name="wgmma"
        )

    return run
