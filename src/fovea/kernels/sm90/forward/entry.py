"""The Hopper forward as the compiler takes it: host function and fake arguments.

Lives here: the types and alignments that the launcher checks. Not here: the values of a call
(`runtime/arguments.py`, which passes them in the same order). Invariant: every extent and stride
but the unit one is a run-time value, so one artifact serves every length.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

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
from fovea.kernels.sm90.forward.kernel import ForwardKernel
from fovea.kernels.sm90.wgmma import element_type
from fovea.plan.sm90 import ForwardPlan


def build(plan: ForwardPlan) -> tuple[Any, list[Any]]:
    """Return the host function of a plan and its fake arguments."""
    kernel = ForwardKernel(plan)
    kernel.kernel.set_name_prefix(plan.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    if kernel.merge is not None:
        kernel.merge.kernel.set_name_prefix(
            kernel.merge.plan.name, remove_cutlass_symbol=True, keep_mangled_name=False
        )
    kernel.make_table.kernel.set_name_prefix(
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
    return [
        operand(dtype, (*outer, rows_q, heads_q, head_dim)),
        operand(dtype, (*keys, heads_kv, head_dim)),
        operand(dtype, (*keys, heads_kv, head_dim_v)),
        operand(dtype, (*outer, rows_q, heads_q, head_dim_v)),
        aligned(cutlass.Float32, stats, 4),
        aligned(cutlass.Float32, stats, 4) if features.max_score else None,
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
