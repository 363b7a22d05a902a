"""The CUDA runtime and TVM-FFI symbols a host launcher calls, answered from Python.

What lives here: the callbacks, the modelled device's attributes and the launch attributes. Not
here: what a launch or a failure means to a call (driver.py).

Invariant: no exception leaves a callback; it goes to `keep_failure` and the launcher sees an error
code.

Source: CUDA runtime API (cudaLaunchConfig_t, attribute numbers); tvm/ffi/c_api.h.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Protocol

from fovea.emulator.errors import LauncherError

SUCCESS = 0
_INVALID_DEVICE = 101
LAUNCH_FAILURE = 719

# cudaLaunchConfig_t: grid, block (six uint32), shared bytes, stream, attributes, their count.
CONFIG = struct.Struct("<6IQQQI")
# cudaLaunchAttribute: the id, padded to 8, then a 64-byte value.
_ATTRIBUTE_BYTES = 72
_ATTRIBUTE_CLUSTER = 4
_ATTRIBUTES_IGNORED = {
    1: "access policy window",
    2: "cooperative",
    3: "synchronization policy",
    5: "cluster scheduling policy",
    6: "programmatic stream serialization",
    7: "programmatic event",
    8: "priority",
    9: "memory sync domain map",
    10: "memory sync domain",
    11: "preferred cluster dimension",
    14: "preferred shared memory carveout",
}

# cudaDeviceAttr by number for one device of the compute capability in `target`.
DEVICE_ATTRIBUTES: dict[int, int] = {
    1: 1024,
    2: 1024,
    3: 1024,
    4: 64,
    5: 2147483647,
    6: 65535,
    7: 65535,
    8: 49152,
    9: 65536,
    10: 32,
    12: 65536,
    39: 2048,
    81: 233472,
    82: 65536,
    95: 1,
    97: 232448,
    106: 32,
    111: 1024,
    120: 1,
}


class Host(Protocol):
    """What the callbacks ask of a launcher."""

    def keep_failure(self, failure: BaseException) -> None: ...
    def set_message(self, message: str) -> None: ...
    def find_kernel(self, name: str) -> int: ...
    def device_attribute(self, number: int) -> int: ...
    def launch(self, config: int, handle: int, parameters: int) -> int: ...
    def init_once(self, slot: int, init: int, load: int) -> int: ...


def cluster_of(attributes: int, count: int) -> tuple[int, int, int]:
    """Return the cluster dimension among a launch's attributes."""
    cluster = (1, 1, 1)
    for i in range(count):
        at = attributes + i * _ATTRIBUTE_BYTES
        number = ctypes.c_uint32.from_address(at).value
        if number == _ATTRIBUTE_CLUSTER:
            cluster = struct.unpack("<3I", ctypes.string_at(at + 8, 12))
        elif number not in _ATTRIBUTES_IGNORED:
            raise LauncherError(
                f"launch attribute {number} is not known (known: 4 cluster, {_ATTRIBUTES_IGNORED})"
            )
    return cluster


_POINTER, _INTEGER, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p


class HostRuntime:
    """Answers of one launcher; a method per symbol, listed with its C signature in `_SYMBOLS`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def callbacks(self) -> dict[str, Any]:
        """Return a ctypes callback for every symbol; they must outlive the linked code."""
        return {
            symbol: ctypes.CFUNCTYPE(result, *types)(self._guarded(method, result))
            for symbol, (method, result, types) in _SYMBOLS.items()
        }

    def _guarded(self, name: str, result: Any) -> Callable[..., int | None]:
        method: Callable[..., int | None] = getattr(self, name)

        def guarded(*values: Any) -> int | None:
            try:
                return method(*values)
            # An exception cannot cross the launcher's machine code; the caller raises it.
            except BaseException as failure:
                self._host.keep_failure(failure)
                return LAUNCH_FAILURE if result is _INTEGER else None

        return guarded

    # --- kernels and launches ---------------------------------------------------------------------

    def load_library(self, library: int, *_: Any) -> int:
        ctypes.c_uint64.from_address(library).value = 1
        return SUCCESS

    def get_kernel(self, kernel: int, _library: int, name: bytes) -> int:
        ctypes.c_uint64.from_address(kernel).value = self._host.find_kernel(name.decode())
        return SUCCESS

    def succeed(self, *_: Any) -> int:
        return SUCCESS

    def get_kernel_attribute(self, value: int, attribute: int, *_: Any) -> int:
        # 0 is the thread limit; 1 the static shared memory, which the machine adds by itself.
        known = {0: 1024, 1: 0}
        if attribute not in known:
            raise LauncherError(f"kernel attribute {attribute} is not modelled (modelled: {known})")
        return _store(value, known[attribute])

    def launch_kernel(self, config: int, kernel: int | None, parameters: int) -> int:
        return self._host.launch(config, kernel or 0, parameters)

    def init_library_once(self, slot: int, init: int, load: int, _on_error: int) -> int:
        return self._host.init_once(slot, init, load)

    def unload_library_once(self, _slot: int) -> None:
        return None

    # --- the device -------------------------------------------------------------------------------

    def get_device(self, device: int) -> int:
        return _store(device, 0)

    def get_device_count(self, count: int) -> int:
        return _store(count, 1)

    def set_device(self, device: int) -> int:
        return SUCCESS if device == 0 else _INVALID_DEVICE

    def get_device_attribute(self, value: int, attribute: int, _device: int) -> int:
        return _store(value, self._host.device_attribute(attribute))

    def get_stream(self, _device_type: int, _device: int) -> int:
        return 0

    # --- what the launcher reports ----------------------------------------------------------------

    def set_error(self, kind: bytes, message: bytes) -> None:
        self._host.set_message(f"{kind.decode()}: {message.decode()}")

    def set_error_parts(self, kind: bytes, parts: Any, count: int) -> None:
        texts: list[bytes | None] = [parts[i] for i in range(count)]
        message = b"".join(text for text in texts if text is not None)
        self._host.set_message(f"{kind.decode()}: {message.decode()}")

    def set_cuda_error(self, _setter: int, status: int) -> None:
        self._host.set_message(f"the launcher stopped with CUDA error {status}")

    def set_launch_error(self, _setter: int, *values: Any) -> None:
        self._host.set_message(
            f"the launcher refuses its launch: {values[18].decode()} (grid {values[0:3]}, block "
            f"{values[3:6]}, {values[7]} bytes of dynamic shared memory)"
        )


def _store(address: int, value: int) -> int:
    ctypes.c_int32.from_address(address).value = value
    return SUCCESS


# Symbol -> (method, result type, argument types).
_SYMBOLS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "_cudaLibraryLoadData": (
        "load_library",
        _INTEGER,
        (*[_POINTER] * 4, _INTEGER, _POINTER, _POINTER, _INTEGER),
    ),
    "_cudaLibraryGetKernel": ("get_kernel", _INTEGER, (_POINTER, _POINTER, _TEXT)),
    "_cudaLibraryUnload": ("succeed", _INTEGER, (_POINTER,)),
    "_cudaFuncSetAttribute": ("succeed", _INTEGER, (_POINTER, _INTEGER, _INTEGER)),
    "_cudaKernelSetAttributeForDevice": (
        "succeed",
        _INTEGER,
        (_POINTER, _INTEGER, _INTEGER, _INTEGER),
    ),
    "_cuKernelGetAttribute": (
        "get_kernel_attribute",
        _INTEGER,
        (_POINTER, _INTEGER, _POINTER, _INTEGER),
    ),
    "_cudaLaunchKernelEx": ("launch_kernel", _INTEGER, (_POINTER, _POINTER, _POINTER)),
    "cuda_dialect_init_library_once": ("init_library_once", _INTEGER, (_POINTER,) * 4),
    "cuda_dialect_unload_library_once": ("unload_library_once", None, (_POINTER,)),
    "_cudaGetDevice": ("get_device", _INTEGER, (_POINTER,)),
    "_cudaGetDeviceCount": ("get_device_count", _INTEGER, (_POINTER,)),
    "_cudaSetDevice": ("set_device", _INTEGER, (_INTEGER,)),
    "_cudaDeviceGetAttribute": ("get_device_attribute", _INTEGER, (_POINTER, _INTEGER, _INTEGER)),
    "TVMFFIEnvGetStream": ("get_stream", _POINTER, (_INTEGER, _INTEGER)),
    "TVMFFIErrorSetRaisedFromCStr": ("set_error", None, (_TEXT, _TEXT)),
    "TVMFFIErrorSetRaisedFromCStrParts": (
        "set_error_parts",
        None,
        (_TEXT, ctypes.POINTER(_TEXT), _INTEGER),
    ),
    "CuteDSLRT_TVMFFISetRaisedCudaError": ("set_cuda_error", None, (_POINTER, _INTEGER)),
    "CuteDSLRT_TVMFFISetRaisedCudaLaunchError": (
        "set_launch_error",
        None,
        (
            _POINTER,
            *[_INTEGER] * 7,
            ctypes.c_int64,
            *[_INTEGER] * 10,
            _TEXT,
            _TEXT,
            *[_INTEGER] * 3,
        ),
    ),
}
