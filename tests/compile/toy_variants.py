"""Small variants for the tests of compile/: out = a + alpha * b, alone or many times over."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToyAdd:
    """out = a + alpha * b on float32 vectors of any length; `unroll` only changes the code."""

    name: str = "toy_add"
    threads: int = 128

    def key_text(self) -> str:
        return f"toy add, {self.threads} threads"

    def build(self) -> tuple[Any, list[Any]]:
        import cutlass
        import toy_kernels
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        length = cute.sym_int64()
        vectors = [make_fake_compact_tensor(cutlass.Float32, (length,)) for _ in range(3)]
        host = toy_kernels.add_on_host(self.name, self.threads)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return host, [*vectors, cutlass.Float32(1.0), stream]
