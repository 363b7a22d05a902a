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

from fovea.emulator.host_object import LauncherError

SUCCESS = 0
_INVALID_VALUE = 1
_INVALID_RESOURCE_HANDLE = 400
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


def callbacks_of(launcher: Host) -> dict[str, Any]:
    """Return the ctypes callbacks for every symbol a launcher may need."""
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    callbacks: dict[str, Any] = {}

    def answer(name: str, *types: Any, result: Any = integer) -> Callable[[Any], Any]:
        def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
            def guarded(*values: Any) -> int | None:
                try:
                    return function(*values)
                # An exception cannot cross the launcher's machine code; the caller raises it.
                except BaseException as failure:
                    launcher.keep_failure(failure)
                    return LAUNCH_FAILURE if result is integer else None

            callbacks[name] = ctypes.CFUNCTYPE(result, *types)(guarded)
            return function

        return register

    def store_int(address: int, value: int) -> int:
        ctypes.c_int32.from_address(address).value = value
        return SUCCESS

    @answer("_cudaLibraryLoadData", *[pointer] * 4, integer, pointer, pointer, integer)
    def _load(library: int, *_: Any) -> int:
        ctypes.c_uint64.from_address(library).value = 1
        return SUCCESS

    @answer("_cudaLibraryGetKernel", pointer, pointer, text)
    def _get_kernel(kernel: int, _library: int, name: bytes) -> int:
        ctypes.c_uint64.from_address(kernel).value = launcher.find_kernel(name.decode())
        return SUCCESS

    @answer("_cudaLibraryUnload", pointer)
    def _unload(_library: int) -> int:
        return SUCCESS

    @answer("_cudaGetDevice", pointer)
    def _get_device(device: int) -> int:
        return store_int(device, 0)

    @answer("_cudaGetDeviceCount", pointer)
    def _get_device_count(count: int) -> int:
        return store_int(count, 1)

    @answer("_cudaSetDevice", integer)
    def _set_device(device: int) -> int:
        return SUCCESS if device == 0 else 101

    @answer("_cudaDeviceGetAttribute", pointer, integer, integer)
    def _device_attribute(value: int, attribute: int, _device: int) -> int:
        return store_int(value, launcher.device_attribute(attribute))

    @answer("_cudaFuncSetAttribute", pointer, integer, integer)
    def _set_function_attribute(*_: Any) -> int:
        return SUCCESS

    @answer("_cudaKernelSetAttributeForDevice", pointer, integer, integer, integer)
    def _set_kernel_attribute(*_: Any) -> int:
        return SUCCESS

    @answer("_cuKernelGetAttribute", pointer, integer, pointer, integer)
    def _kernel_attribute(value: int, attribute: int, _kernel: int, _device: int) -> int:
        # 0 is the thread limit; 1 the static shared memory, which the machine adds by itself.
        known = {0: 1024, 1: 0}
        if attribute not in known:
            raise LauncherError(f"kernel attribute {attribute} is not modelled (modelled: {known})")
        return store_int(value, known[attribute])

    @answer("_cudaLaunchKernelEx", pointer, pointer, pointer)
    def _launch(config: int, kernel: int | None, parameters: int) -> int:
        return launcher.launch(config, kernel or 0, parameters)

    @answer("cuda_dialect_init_library_once", pointer, pointer, pointer, pointer)
    def _init_once(slot: int, init: int, load: int, _on_error: int) -> int:
        return launcher.init_once(slot, init, load)

    @answer("cuda_dialect_unload_library_once", pointer, result=None)
    def _unload_once(_slot: int) -> None:
        return None

    @answer("TVMFFIEnvGetStream", integer, integer, result=pointer)
    def _stream(_device_type: int, _device: int) -> int:
        return 0

    @answer("TVMFFIErrorSetRaisedFromCStr", text, text, result=None)
    def _set_error(kind: bytes, message: bytes) -> None:
        launcher.set_message(f"{kind.decode()}: {message.decode()}")

    @answer("TVMFFIErrorSetRaisedFromCStrParts", text, ctypes.POINTER(text), integer, result=None)
    def _set_error_parts(kind: bytes, parts: Any, count: int) -> None:
        message = "".join(part.decode() for i in range(count) if (part := parts[i]) is not None)
        launcher.set_message(f"{kind.decode()}: {message}")

    @answer("CuteDSLRT_TVMFFISetRaisedCudaError", pointer, integer, result=None)
    def _set_cuda_error(_setter: int, status: int) -> None:
        launcher.set_message(f"the launcher stopped with CUDA error {status}")

    @answer(
        "CuteDSLRT_TVMFFISetRaisedCudaLaunchError",
        pointer,
        *[integer] * 7,
        ctypes.c_int64,
        *[integer] * 10,
        text,
        text,
        *[integer] * 3,
        result=None,
    )
    def _set_launch_error(_setter: int, *values: Any) -> None:
        launcher.set_message(
            f"the launcher refuses its launch: {values[18].decode()} (grid {values[0:3]}, block "
            f"{values[3:6]}, {values[7]} bytes of dynamic shared memory)"
        )

    return callbacks
