"""Kernels of `toy_variants`; a module of its own because it imports cutlass."""

from typing import Any

import cutlass
from cutlass import cute


def add_on_host(name: str, threads: int) -> Any:
    @cute.kernel
    def add(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, alpha: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * threads + thread
        if i < cute.size(out):
            out[i] = a[i] + alpha * b[i]

    if name:
        add.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, alpha: cutlass.Float32, stream):
        blocks = cute.ceil_div(cute.size(out), threads)
        add(a, b, out, alpha).launch(grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream)

    return launch


def reverse_on_host(name: str) -> Any:
    @cute.kernel
    def reverse(a: cute.Tensor, out: cute.Tensor, shift: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile = cutlass.memory.SmemAllocator().allocate_tensor(
            cutlass.Float32, cute.make_layout(128), byte_alignment=16
        )
        tile[thread] = a[block * 128 + thread]
        cute.arch.sync_threads()
        kept = cute.make_rmem_tensor(cute.make_layout(64), cutlass.Float32)
        for i in cutlass.range(64, unroll=1):
            kept[(i * shift) % 64] = tile[127 - thread] + i
        out[block * 128 + thread] = kept[shift % 64]

    reverse.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def launch(a: cute.Tensor, out: cute.Tensor, shift: cutlass.Int32, stream):
        blocks = cute.size(out) // 128
        reverse(a, out, shift).launch(grid=[blocks, 1, 1], block=[128, 1, 1], stream=stream)

    return launch


def broken_on_host() -> Any:
    @cute.jit
    def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, alpha: cutlass.Float32, stream):
        out[0] = a.no_such_thing

    return launch
