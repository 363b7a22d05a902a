"""The Hopper forward as the compiler takes it: host function and fake arguments.

Lives here: the types and alignments that the launcher checks. Not here: the values of a call
(`runtime/arguments.py`, which passes them in the same order). Invariant: every extent and stride
but the unit one is a run-time value, so one artifact serves every length.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fovea.kernels.sm90.forward.kernel import ForwardKernel
from fovea.kernels.sm90.wgmma import element_type
from fovea.plan.captures import PAIR_ALIGNMENT, read_in_pairs
from fovea.plan.features import ForwardFeatures
from fovea.plan.sm90 import ForwardPlan

_ALIGNMENT_BYTES = 16  # what the copy engine asks of addresses and strides
_CAPTURE_TYPES: dict[str, Any] = {
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


def build(plan: ForwardPlan) -> tuple[Any, list[Any]]:
    """Return the host function of a plan and its fake arguments."""
    kernel = ForwardKernel(plan)
    kernel.kernel.set_name_prefix(plan.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    if kernel.merge is not None:
        kernel.merge.kernel.set_name_prefix(
            kernel.merge.plan.name, remove_cutlass_symbol=True, keep_mangled_name=False
        )
    kernel.table_kernel.set_name_prefix(
        f"{plan.name}_sequences", remove_cutlass_symbol=True, keep_mangled_name=False
    )
    return kernel, _arguments(plan)


def _arguments(plan: ForwardPlan) -> list[Any]:
    features = plan.features
    dtype = element_type(plan)
    batch, rows_q, rows_kv, heads_q, heads_kv = (cute.sym_int32() for _ in range(5))
    head_dim, head_dim_v = (cute.sym_int32(divisibility=8) for _ in range(2))
    outer = () if features.varlen else (batch,)
    stats = (*outer, heads_q, rows_q)
    keys = (batch, rows_kv) if plan.page_box else (*outer, rows_kv)
    lists = None
    if features.block_lists:
        counts = (_strided(cutlass.Int32, 3), _strided(cutlass.Int32, 4))
        full = (_strided(cutlass.Int32, 3), _strided(cutlass.Int32, 4))
        lists = (
            *counts,
            *(full if features.full_lists else (None, None)),
            _strided(cutlass.Int32, 1),
            cutlass.Int32(1),
            cutlass.Int32(1),
            cutlass.Int32(1),
        )
    return [
        _operand(dtype, (*outer, rows_q, heads_q, head_dim)),
        _operand(dtype, (*keys, heads_kv, head_dim)),
        _operand(dtype, (*keys, heads_kv, head_dim_v)),
        _operand(dtype, (*outer, rows_q, heads_q, head_dim_v)),
        _fake(cutlass.Float32, stats, 4),
        _fake(cutlass.Float32, stats, 4) if features.max_score else None,
        _fake(cutlass.Float32, (heads_q,), 4) if features.sink else None,
        _partials() if plan.packs_heads else None,
        _fake(cutlass.Int32, (1,), 4) if plan.is_dynamic and not features.varlen else None,
        lists,
        _sequences(plan) if features.varlen else None,
        (cutlass.Float32(1.0), cutlass.Float32(1.0), cutlass.Float32(1.0)),
        tuple(cutlass.Int32(1) for _ in range(5)),
        # None, not an empty tuple: the launcher has no type for nothing.
        tuple(
            _capture(_CAPTURE_TYPES[capture.dtype], max(capture.rank, 1), is_paired=is_paired)
            for graph in features.graphs
            for capture, is_paired in zip(graph.captures, read_in_pairs(graph), strict=True)
        )
        or None,
        tuple(_scalar(kind, features) for graph in features.graphs for kind in graph.scalars)
        or None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def _partials() -> tuple[Any, ...]:
    """Return where the parts of packed plans are left, and their number.

    Shapes of their own: a launch with one part leaves nothing, and passes something small.
    """
    out = tuple(cute.sym_int32() for _ in range(5))
    rows = tuple(cute.sym_int32() for _ in range(5))
    out_strides = (*(cute.sym_int64(divisibility=8) for _ in out[:-1]), 1)
    return (
        make_fake_tensor(cutlass.Float32, out, out_strides, assumed_align=_ALIGNMENT_BYTES),
        _fake(cutlass.Float32, rows, 4),
        cutlass.Int32(1),
    )


def _sequences(plan: ForwardPlan) -> tuple[Any, ...]:
    """Return the table, which the kernel makes, the page table, and where the sequences lie."""
    pages = _strided(cutlass.Int32, 2) if plan.page_box else None
    starts = (_strided(cutlass.Int32, 1), _strided(cutlass.Int32, 1))
    used = (_strided(cutlass.Int32, 1), _strided(cutlass.Int32, 1))
    flags = (cutlass.Int32(1), cutlass.Int32(1))
    return (_strided(cutlass.Int32, 1), pages, *starts, *used, *flags)


def _scalar(kind: str, features: ForwardFeatures) -> Any:
    if kind == "f64":
        return cutlass.Float32(1.0)
    return cutlass.Int64(1) if features.wide_integers else cutlass.Int32(1)


def _operand(dtype: Any, shape: tuple[Any, ...]) -> Any:
    """Return a tensor with unit last stride whose other strides the copy engine can take."""
    divisibility = _ALIGNMENT_BYTES // (dtype.width // 8)
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[:-1]), 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=_ALIGNMENT_BYTES)


def _fake(dtype: Any, shape: tuple[Any, ...], align: int) -> Any:
    strides = tuple(cute.sym_int64() for _ in shape)
    return make_fake_tensor(dtype, shape, strides, assumed_align=align)


def _capture(dtype: Any, rank: int, *, is_paired: bool) -> Any:
    """Return a captured tensor: unit last stride, which spares a product per register."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    strides = (*(cute.sym_int64() for _ in shape[:-1]), 1)
    align = PAIR_ALIGNMENT if is_paired else max(dtype.width // 8, 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=align)


def _strided(dtype: Any, rank: int) -> Any:
    """Return a tensor of any layout, element aligned."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    return _fake(dtype, shape, max(dtype.width // 8, 1))
