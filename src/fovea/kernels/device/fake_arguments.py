"""Fake arguments that host functions of any architecture take: types and alignments, no values.

Lives here: tensors, block lists, captures and numbers of mods as the compiler sees them. Not here:
which of them a kernel takes, in which order (`portable/entry.py`). Invariant: every extent
and stride but the unit one is a run-time value.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from fovea.plan.captures import PAIR_ALIGNMENT, read_in_pairs
from fovea.plan.features import ForwardFeatures
from fovea.tiling.mask_bits import BLOCK, LANES

ALIGNMENT_BYTES = 16  # what the copy engine asks of addresses and strides
CAPTURE_TYPES: dict[str, Any] = {
    "b1": cutlass.Uint8,  # the host passes a view: a bool tensor's bytes are 0 or 1
    "u8": cutlass.Uint8,
    "i8": cutlass.Int8,
    "i16": cutlass.Int16,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "f32": cutlass.Float32,
    "f64": cutlass.Float64,
}


def operand(dtype: Any, shape: tuple[Any, ...]) -> Any:
    """Return a tensor with unit last stride whose other strides the copy engine can take."""
    divisibility = ALIGNMENT_BYTES // (dtype.width // 8)
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[:-1]), 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=ALIGNMENT_BYTES)


def aligned(dtype: Any, shape: tuple[Any, ...], align: int) -> Any:
    """Return a tensor of any strides whose address is a multiple of `align` bytes."""
    strides = tuple(cute.sym_int64() for _ in shape)
    return make_fake_tensor(dtype, shape, strides, assumed_align=align)


def strided(dtype: Any, rank: int) -> Any:
    """Return a tensor of any layout, element aligned."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    return aligned(dtype, shape, max(dtype.width // 8, 1))


def block_lists(features: ForwardFeatures) -> tuple[Any, ...] | None:
    """Return torch's block lists, the order of query tiles, and their run-time numbers."""
    if not features.block_lists:
        return None
    counts = (strided(cutlass.Int32, 3), strided(cutlass.Int32, 4))
    full = (strided(cutlass.Int32, 3), strided(cutlass.Int32, 4))
    return (
        *counts,
        *(full if features.full_lists else (None, None)),
        *(_bits() if features.block_bits else (None, None)),
        strided(cutlass.Int32, 1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def _bits() -> tuple[Any, ...]:
    """Return the bits of partial blocks, and the first block of each list."""
    shape = (cute.sym_int32(), BLOCK, LANES)
    bits = make_fake_tensor(cutlass.Int32, shape, (BLOCK * LANES, LANES, 1), assumed_align=16)
    return bits, strided(cutlass.Int32, 3)


def key_ranges() -> tuple[Any, ...]:
    """Return the ranges of rows and of groups of rows, and the order of query tiles."""

    def numbers(width: int) -> Any:
        batch, heads, rows = (cute.sym_int32() for _ in range(3))
        strides = tuple(cute.sym_int64(divisibility=width) for _ in range(3))
        shape = (batch, heads, rows, width)
        return make_fake_tensor(cutlass.Int32, shape, (*strides, 1), assumed_align=4 * width)

    return numbers(2), numbers(4), strided(cutlass.Int32, 1)


def captures(features: ForwardFeatures) -> tuple[Any, ...] | None:
    """Return what mods captured; None, not an empty tuple: the launcher has no type for nothing."""
    return (
        tuple(
            _capture(CAPTURE_TYPES[capture.dtype], max(capture.rank, 1), is_paired=is_paired)
            for graph in features.graphs
            for capture, is_paired in zip(graph.captures, read_in_pairs(graph), strict=True)
        )
        or None
    )


def mod_scalars(features: ForwardFeatures) -> tuple[Any, ...] | None:
    """Return the run-time numbers of mods, or None."""
    return (
        tuple(_scalar(kind, features) for graph in features.graphs for kind in graph.scalars)
        or None
    )


def _capture(dtype: Any, rank: int, *, is_paired: bool) -> Any:
    """Return a captured tensor: unit last stride, which spares a product per register."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    strides = (*(cute.sym_int64() for _ in shape[:-1]), 1)
    align = PAIR_ALIGNMENT if is_paired else max(dtype.width // 8, 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=align)


def _scalar(kind: str, features: ForwardFeatures) -> Any:
    if kind == "f64":
        return cutlass.Float32(1.0)
    return cutlass.Int64(1) if features.wide_integers else cutlass.Int32(1)


def partials() -> tuple[Any, ...]:
    """Return where the parts of packed plans are left, and their number.

    Shapes of their own: a launch with one part leaves nothing, and passes something small.
    """
    out = tuple(cute.sym_int32() for _ in range(5))
    rows = tuple(cute.sym_int32() for _ in range(5))
    out_strides = (*(cute.sym_int64(divisibility=8) for _ in out[:-1]), 1)
    return (
        make_fake_tensor(cutlass.Float32, out, out_strides, assumed_align=ALIGNMENT_BYTES),
        aligned(cutlass.Float32, rows, 4),
        cutlass.Int32(1),
    )


def sequences(*, has_pages: bool) -> tuple[Any, ...]:
    """Return the table, which the kernel makes, the page table, and where the sequences lie."""
    pages = strided(cutlass.Int32, 2) if has_pages else None
    starts = (strided(cutlass.Int32, 1), strided(cutlass.Int32, 1))
    used = (strided(cutlass.Int32, 1), strided(cutlass.Int32, 1))
    flags = (cutlass.Int32(1), cutlass.Int32(1))
    return (strided(cutlass.Int32, 1), pages, *starts, *used, *flags)
