"""The kernel of `mod_variant`; a module of its own because it imports cutlass."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from mod_variant import THREADS, ModVariant

from fovea.kernels.device.fake_arguments import CAPTURE_TYPES
from fovea.kernels.device.mods import ModArguments, ModEvaluator, Position
from fovea.kernels.device.values import select
from fovea.plan.captures import PAIR_ALIGNMENT


def host(variant: ModVariant) -> Any:
    """Return the host function."""

    @cute.kernel
    def kernel(score: cute.Tensor, indices: cute.Tensor, out: cute.Tensor, captures, scalars):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < score.shape[0]:
            position = _position(indices, i)
            for g, graph in enumerate(variant.graphs):
                evaluator = ModEvaluator(
                    graph, ModArguments(captures, scalars), wide_integers=variant.wide_integers
                )
                if cutlass.const_expr(variant.in_pairs):
                    pair = _pair(position, i)
                    evaluator.prefetch(pair)
                    values = [evaluator.score(score[i], each) for each in pair]
                    out[g, i] = select(i % 2 == 0, *values)
                else:
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


def _position(indices: cute.Tensor, i: cutlass.Int32) -> Position:
    """Return an element's, in column 1 of a register row: arithmetic along it is tested too."""
    b, h, q_idx, kv_idx = (indices[which, i] for which in range(4))
    return Position(
        b=b, h=h, q_idx=q_idx, first_kv_idx=kv_idx - 1, column_offset=1, row=0, column=1
    )


def _pair(position: Position, i: cutlass.Int32) -> tuple[Position, Position]:
    """Return an element's position and its neighbour's, by the parity of their keys."""
    first = position._replace(first_kv_idx=position.kv_idx - i % 2, column_offset=0, column=0)
    return first, first._replace(column_offset=1, column=1)


def arguments(variant: ModVariant) -> list[Any]:
    """Return the fake arguments."""
    length = cute.sym_int32()

    def fake(dtype: Any, shape: tuple[Any, ...], align: int = 1) -> Any:
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        align = max(dtype.width // 8, align)
        return make_fake_tensor(dtype, shape, strides, assumed_align=align)

    captures, scalars = variant.graphs[0].captures, variant.graphs[0].scalars
    integer = cutlass.Int64 if variant.wide_integers else cutlass.Int32
    return [
        fake(cutlass.Float32, (length,)),
        fake(cutlass.Int32, (4, length)),
        fake(cutlass.Float32, (len(variant.graphs), length)),
        tuple(
            fake(
                CAPTURE_TYPES[c.dtype],
                tuple(cute.sym_int32() for _ in range(max(c.rank, 1))),
                PAIR_ALIGNMENT if variant.in_pairs else 1,
            )
            for c in captures
        ),
        tuple(cutlass.Float32(1.0) if s == "f64" else integer(1) for s in scalars),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
