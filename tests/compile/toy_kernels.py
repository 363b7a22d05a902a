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

    add.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, alpha: cutlass.Float32, stream):
        blocks = cute.ceil_div(cute.size(out), threads)
        add(a, b, out, alpha).launch(grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream)

    return launch
