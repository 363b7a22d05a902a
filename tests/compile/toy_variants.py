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


@dataclasses.dataclass(frozen=True)
class ToyReverse(ToyAdd):
    """Reverses blocks of 128 floats through shared memory, with an array that spills."""

    name: str = "toy_reverse"

    def key_text(self) -> str:
        return "toy reverse"

    def build(self) -> tuple[Any, list[Any]]:
        import cutlass
        import toy_kernels
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        length = cute.sym_int64()
        vectors = [make_fake_compact_tensor(cutlass.Float32, (length,)) for _ in range(2)]
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return toy_kernels.reverse_on_host(self.name), [*vectors, cutlass.Int32(0), stream]


@dataclasses.dataclass(frozen=True)
class ToyNamedByTheCompiler(ToyAdd):
    """A kernel that keeps the compiler's own name for it."""

    def build(self) -> tuple[Any, list[Any]]:
        import toy_kernels

        _, arguments = ToyAdd.build(self)
        return toy_kernels.add_on_host("", self.threads), arguments


@dataclasses.dataclass(frozen=True)
class ToyBroken(ToyAdd):
    """A kernel with an error in it."""

    name: str = "toy_broken"

    def build(self) -> tuple[Any, list[Any]]:
        import toy_kernels

        _, arguments = ToyAdd.build(self)
        return toy_kernels.broken_on_host(), arguments


@dataclasses.dataclass(frozen=True)
class ToyDeadly(ToyAdd):
    """A variant whose compilation ends the process."""

    name: str = "toy_deadly"

    def build(self) -> tuple[Any, list[Any]]:
        import os

        os._exit(3)
