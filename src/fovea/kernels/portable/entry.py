"""A forward kernel as the compiler takes it: host function and fake arguments.

Lives here: the types and alignments that the launcher checks. Not here: the values of a call
(`runtime/arguments.py`, which passes them in the same order). Invariant: every extent and stride
but the unit one is a run-time value, so one artifact serves every length.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.fake_arguments import (
    aligned,
    block_lists,
    captures,
    key_ranges,
    mod_scalars,
    operand,
    partials,
    sequences,
)
from fovea.plan.forward import ForwardPlan


def build(kernel: Any) -> tuple[Any, list[Any]]:
    """Return a forward kernel of any architecture, named as its plan says, and fake arguments."""
    plan: ForwardPlan = kernel.plan
    names = {kernel: plan.name, kernel.make_table: f"{plan.name}_sequences"}
    if kernel.merge is not None:
        names[kernel.merge] = kernel.merge.plan.name
    for each, name in names.items():
        each.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    return kernel, _arguments(plan)


def _arguments(plan: ForwardPlan) -> list[Any]:
    features = plan.features
    dtype = element_type(plan)
    batch, rows_q, rows_kv, heads_q, heads_kv = (cute.sym_int32() for _ in range(5))
    head_dim, head_dim_v = (cute.sym_int32(divisibility=8) for _ in range(2))
    outer = () if features.varlen else (batch,)
    statistics = (*outer, heads_q, rows_q)
    keys = (batch, rows_kv) if plan.page_box else (*outer, rows_kv)
    return [
        operand(dtype, (*outer, rows_q, heads_q, head_dim)),
        operand(dtype, (*keys, heads_kv, head_dim)),
        operand(dtype, (*keys, heads_kv, head_dim_v)),
        operand(dtype, (*outer, rows_q, heads_q, head_dim_v)),
        aligned(cutlass.Float32, statistics, 4),
        aligned(cutlass.Float32, statistics, 4) if features.max_score else None,
        aligned(cutlass.Float32, (heads_q,), 4) if features.sink else None,
        partials() if plan.packs_heads else None,
        aligned(cutlass.Int32, (1,), 4) if plan.needs_counter else None,
        key_ranges() if features.key_ranges else block_lists(features),
        sequences(has_pages=plan.page_box > 0) if features.varlen else None,
        (cutlass.Float32(1.0), cutlass.Float32(1.0), cutlass.Float32(1.0)),
        tuple(cutlass.Int32(1) for _ in range(5)),
        captures(features),
        mod_scalars(features),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
