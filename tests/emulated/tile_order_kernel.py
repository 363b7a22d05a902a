"""The kernel of `tile_order_variant`; a module of its own because it imports cutlass."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tile_order_variant import NAME, THREADS

from fovea.kernels.device.scheduler import TileOrder, decode_tile


def host() -> Any:
    """Return the host function: one thread a tile number."""

    @cute.kernel
    def kernel(out: cute.Tensor, order: TileOrder):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < out.shape[1]:
            tile = decode_tile(i, order)
            out[0, i] = tile.m_idx
            out[1, i] = tile.head
            out[2, i] = tile.batch

    kernel.set_name_prefix(NAME, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def launch(out: cute.Tensor, order: tuple, stream):
        kernel(out, TileOrder(*order)).launch(
            grid=[cute.ceil_div(out.shape[1], THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    return launch


def arguments() -> list[Any]:
    """Return the fake arguments."""
    strides = (cute.sym_int64(), cute.sym_int64())
    return [
        make_fake_tensor(cutlass.Int32, (3, cute.sym_int32()), strides, assumed_align=4),
        tuple(cutlass.Int32(1) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
