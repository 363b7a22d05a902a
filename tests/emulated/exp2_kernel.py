"""The kernel of `exp2_variant`; a module of its own because it imports cutlass."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from exp2_variant import THREADS, Exp2Variant

from fovea.kernels.sm100.exp2 import distance, exp2_pair
from fovea.plan.numerics import EXP2_HIGHEST, EXP2_SPAN


def host(variant: Exp2Variant) -> Any:
    """Return the host function."""

    @cute.kernel
    def kernel(x: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = 2 * (block * THREADS + thread)
        if i < x.shape[0]:
            scale = cutlass.Float32(-1.0 / EXP2_SPAN)
            offset = cutlass.Float32(EXP2_HIGHEST / EXP2_SPAN)
            power = exp2_pair((distance(x[i], scale, offset), distance(x[i + 1], scale, offset)))
            out[i] = power[0]
            out[i + 1] = power[1]

    kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def launch(x: cute.Tensor, out: cute.Tensor, stream):
        blocks = cute.ceil_div(x.shape[0], 2 * THREADS)
        kernel(x, out).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    return launch


def arguments() -> list[Any]:
    """Return the fake arguments."""
    length = cute.sym_int32()

    def fake() -> Any:
        return make_fake_tensor(cutlass.Float32, (length,), (1,), assumed_align=4)

    return [fake(), fake(), make_fake_stream(use_tvm_ffi_env_stream=True)]
