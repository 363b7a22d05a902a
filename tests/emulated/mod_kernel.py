"""The kernel of `mod_variant`; a module of its own because it imports cutlass."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from mod_variant import THREADS, ModVariant

from fovea.kernels.device.fake_arguments import CAPTURE_TYPES
from fovea.kernels.device.mods import ModArguments, ModEvaluator, Position


def host(variant: ModVariant) -> Any:
    """Return the host function."""

    @cute.kernel
    def kernel(score: cute.Tensor, indices: cute.Tensor, out: cute.Tensor, captures, scalars):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < score.shape[0]:
            b, h, q_idx, kv_idx = (indices[which, i] for which in range(4))
            # Column 1 of a register row, so that arithmetic along the row is tested too.
            position = Position(
                b=b,
                h=h,
                q_idx=q_idx,
                first_kv_idx=kv_idx - 1,
                column_offset=1,
                row=0,
                column=1,
            )
            for g, graph in enumerate(variant.graphs):
                evaluator = ModEvaluator(
                    graph, ModArguments(captures, scalars), wide_integers=variant.wide_integers
                )
                out[g, i] = evaluator.score(score[i], position)

    kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def launch(
        score: cute.Tensor, indices: cute.Tensor, out: cute.Tensor, captures, scalars, stream
    ):
        blocks = cute.ceil_div(score.shape[0], THREADS)
        kernel(score, indices, out, captures, scalars).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    return launch


def arguments(variant: ModVariant) -> list[Any]:
    """Return the fake arguments."""
    length = cute.sym_int32()

    def fake(dtype: Any, shape: tuple[Any, ...]) -> Any:
        strides = tuple(cute.sym_int64() for _ in shape)
        return make_fake_tensor(dtype, shape, strides, assumed_align=max(dtype.width // 8, 1))

    captures, scalars = variant.graphs[0].captures, variant.graphs[0].scalars
    integer = cutlass.Int64 if variant.wide_integers else cutlass.Int32
    return [
        fake(cutlass.Float32, (length,)),
        fake(cutlass.Int32, (4, length)),
        fake(cutlass.Float32, (len(variant.graphs), length)),
        tuple(
            fake(CAPTURE_TYPES[c.dtype], tuple(cute.sym_int32() for _ in range(max(c.rank, 1))))
            for c in captures
        ),
        tuple(cutlass.Float32(1.0) if s == "f64" else integer(1) for s in scalars),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
