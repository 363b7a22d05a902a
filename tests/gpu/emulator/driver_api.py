"""The CUDA driver through ctypes, as far as these tests need it: modules, launches, tensor maps."""

import ctypes
from collections.abc import Sequence

import torch


class Driver:
    """The driver of the current device; torch owns the context and the memory."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes torch create the primary context
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with {status}: {text.value!r}")

    def run(
        self, ptx: str, kernel: str, grid: int, block: int, arguments: Sequence[object], shared: int
    ) -> None:
        """Compile PTX and run one kernel; tensors pass as their addresses, ints as 32 bits."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(16384)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.value.decode()}") from error
        self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        self.call("cuFuncSetAttribute", function, 8, shared)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        cells = [
            ctypes.c_uint64(argument.data_ptr())
            if isinstance(argument, torch.Tensor)
            else ctypes.c_uint32(argument)
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call(
            "cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, stream, pointers, None
        )
        torch.cuda.synchronize()
        self.call("cuModuleUnload", module)

    def encode_tiled(
        self,
        number: int,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        modes: tuple[int, int, int, int],
    ) -> bytes:
        """Return the driver's 128 bytes; `modes` are interleave, swizzle, promotion and fill."""
        rank = len(sizes)
        storage = ctypes.create_string_buffer(128 + 64)
        aligned = ctypes.addressof(storage) + -ctypes.addressof(storage) % 64
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(aligned),
            number,
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*element_strides),
            *modes,
        )
        return ctypes.string_at(aligned, 128)
