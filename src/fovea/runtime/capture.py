"""The first launch of a kernel while a CUDA graph is captured.

Lives here: whether the current stream is being captured, and permission for what opening a kernel
on its devices does, which has nothing to do with the capture. Not here: memory under capture
(`stream_memory.py`). Invariant: the permission is this thread's, and ends with the launch.
"""

import ctypes
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
# In builds of torch without CUDA it raises, and has no caller.
is_capturing: Callable[[], bool] = getattr(_torch_c, "_cuda_isCurrentStreamCapturing", bool)


@contextmanager
def unrelated_calls_allowed() -> Generator[None]:
    """Let this thread load modules and allocate for them while a stream is captured.

    Source: CUDA driver API, cuThreadExchangeStreamCaptureMode. The default mode, torch's too,
    refuses every call that could wait for the captured stream.
    """
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    _check(exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        _check(exchange(ctypes.byref(mode)))  # now the mode before


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUDA error {status}")
