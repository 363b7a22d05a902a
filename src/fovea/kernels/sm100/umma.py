"""Products on Blackwell's tensor cores: descriptors, shared-memory layouts and the issue loop.

Lives here: what is special to `tcgen05.mma`. Not here: when products are issued and what they wait
for (`forward/mma.py`). Invariant: one thread issues; products run in the order of issue, and a
commit tells of every one issued before it.

Source: PTX ISA, "tcgen05 shared memory descriptor", "Instruction descriptor".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05

from fovea.plan.sm100 import ForwardPlan
from fovea.plan.sm100_tiles import ELEMENT_BYTES, STREAM_ROWS

_FORMATS = {"bfloat16": 1, "float16": 0}  # of operands, in an instruction descriptor
K_STEP = 16  # elements of K that one instruction multiplies
_ATOM_BYTES = 128  # a row of the widest swizzle, which every operand here uses
_ATOM_ROWS = 8
_UNIT_BYTES = 16  # of addresses in a descriptor
_SWIZZLE_128 = 2 << 61
_VERSION = 1 << 46
_BOTH_CTAS = 0b11  # a bit for each rank


def row_major_layout(
    dtype: type[cutlass.Numeric], rows: int, columns: int, stages: int
) -> cute.ComposedLayout:
    """Return the swizzled (rows, columns, stages) layout of an operand whose K axis is contiguous.

    Columns come in blocks of 128 bytes, each with all rows.
    """
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def transposed_layout(
    dtype: type[cutlass.Numeric], rows: int, columns: int, stages: int
) -> cute.ComposedLayout:
    """Return the swizzled (rows, columns, stages) layout of B whose N axis (rows) is contiguous.

    Rows come in blocks of 128 bytes, each with all columns.
    """
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.MN_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(1, 0, 2))


class Product(NamedTuple):
    """What is fixed of a product: its instruction descriptor, and how A and B step along K.

    B steps through one stage of shared memory, A through all of K. Offsets are in units of 16
    bytes, as descriptors have them, or columns of tensor memory. In a pair they hold in both CTAs.
    """

    cluster: int
    instruction: int
    a_steps: tuple[int, ...]
    b_steps: tuple[int, ...]
    b_fixed: int  # constant fields of B's shared-memory descriptor


def scores_product(plan: ForwardPlan) -> Product:
    """Return S = Q K^T: both operands with head_dim contiguous."""
    return Product(
        cluster=plan.cluster,
        instruction=_instruction(plan, plan.tile_n, is_b_transposed=False),
        a_steps=_k_major_steps(STREAM_ROWS, plan.head_dim),
        b_steps=_k_major_steps(plan.k_rows, plan.head_dim // plan.k_parts),
        b_fixed=K_MAJOR,
    )


def output_product(plan: ForwardPlan) -> Product:
    """Return O += P V: P from tensor memory, V with head_dim_v contiguous."""
    keys = plan.tile_n // plan.v_parts
    block_bytes = keys * _ATOM_BYTES  # from 128 bytes of head_dim_v to the next
    return Product(
        cluster=plan.cluster,
        instruction=_instruction(plan, plan.head_dim_v, is_b_transposed=True),
        a_steps=tuple(plan.p_offset(key) for key in range(0, plan.tile_n, K_STEP)),
        b_steps=tuple(k * _ATOM_BYTES // _UNIT_BYTES for k in range(0, keys, K_STEP)),
        b_fixed=_fixed_fields(leading=block_bytes, stride=_ATOM_ROWS * _ATOM_BYTES),
    )


def _k_major_steps(rows: int, columns: int) -> tuple[int, ...]:
    """Return where each step of K begins in an operand of `row_major_layout`."""
    per_atom = _ATOM_BYTES // ELEMENT_BYTES
    return tuple(
        (k // per_atom * rows * _ATOM_BYTES + k % per_atom * ELEMENT_BYTES) // _UNIT_BYTES
        for k in range(0, columns, K_STEP)
    )


def _instruction(plan: ForwardPlan, columns: int, *, is_b_transposed: bool) -> int:
    """Return the instruction descriptor of a stream's rows, `columns` columns, fp32 accumulation.

    In a pair rows and columns are those of both CTAs.
    """
    operand = _FORMATS[plan.dtype]
    accumulator = 1  # fp32
    return (
        accumulator << 4
        | operand << 7
        | operand << 10
        | is_b_transposed << 16
        | columns // 8 << 17
        | plan.stream_rows // 16 << 24
    )


def _fixed_fields(*, leading: int, stride: int) -> int:
    return _SWIZZLE_128 | _VERSION | leading // _UNIT_BYTES << 16 | stride // _UNIT_BYTES << 32


K_MAJOR = _fixed_fields(leading=_UNIT_BYTES, stride=_ATOM_ROWS * _ATOM_BYTES)


def descriptor_start(pointer: cute.Pointer) -> cutlass.Int32:
    """Return the address field of a descriptor for a place in shared memory."""
    return (pointer.toint().to(cutlass.Int32) & 0x3FFFF) >> 4


def _descriptor(start: cutlass.Int32, fixed: int) -> cutlass.Int64:
    return start.to(cutlass.Int64) | cutlass.Int64(_signed(fixed))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def issue_from_shared(
    product: Product,
    accumulator: cutlass.Int32,
    a_start: cutlass.Int32,
    b_start: cutlass.Int32,
    part: int,
) -> None:
    """Issue D (+)= A B^T over the steps of K in one part of B, A in shared memory.

    The first part overwrites D. Run by one thread.
    """
    for index, b_step in enumerate(product.b_steps):
        step = part * len(product.b_steps) + index
        cute.arch.inline_ptx(
            _mma(product, "{$r1}"),
            read_only_args=[
                accumulator,
                _descriptor(a_start + product.a_steps[step], K_MAJOR),
                _descriptor(b_start + b_step, product.b_fixed),
                cutlass.Int32(product.instruction),
                cutlass.Int32(1 if step > 0 else 0),
            ],
        )


def issue_from_tensor_memory(
    product: Product,
    accumulator: cutlass.Int32,
    a_address: cutlass.Int32,
    b_start: cutlass.Int32,
    steps: range,
    accumulates: cutlass.Int32,
) -> None:
    """Issue D (+)= A B^T over steps of K in one stage of B, A in tensor memory. Run by one thread.

    `accumulates` says whether step 0 adds to D or overwrites it; later steps add.
    """
    for step in steps:
        cute.arch.inline_ptx(
            _mma(product, "[{$r1}]"),
            read_only_args=[
                accumulator,
                a_address + product.a_steps[step],
                _descriptor(
                    b_start + product.b_steps[step % len(product.b_steps)], product.b_fixed
                ),
                cutlass.Int32(product.instruction),
                cutlass.Int32(1) if step > 0 else accumulates,
            ],
        )


def _mma(product: Product, a: str) -> str:
    return (
        "{ .reg .pred accumulates; setp.ne.b32 accumulates, {$r4}, 0; "
        f"tcgen05.mma.cta_group::{product.cluster}.kind::f16 "
        "[{$r0}], " + a + ", {$r2}, {$r3}, accumulates; }"
    )


def commit(plan: ForwardPlan, barrier: cute.Pointer) -> None:
    """Arrive on a barrier once every product issued so far by this thread is done.

    In a pair on the barrier at this place in both CTAs.
    """
    if plan.cluster == 1:
        tcgen05.commit(barrier)
    else:
        tcgen05.commit(barrier, _BOTH_CTAS, tcgen05.CtaGroup.TWO)
