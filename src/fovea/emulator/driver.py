"""Running a CuTe-DSL host launcher on the CPU and catching the kernels it launches.

What lives here: the CUDA runtime and TVM-FFI symbols a launcher calls, answered from Python, and
`Launcher`, which calls it. Not here: linking the object (host_object.py), argument layouts
(host_arguments.py), running a kernel (run.py).

Invariant: everything belongs to one `Launcher` or to one call of it. A call's state is
thread-local, so launchers can be called from several threads; an exception raised while a callback
runs is kept, the launcher sees a CUDA error and returns, and the exception is raised to the caller.

Source: CUDA runtime API (cudaLaunchConfig_t, attribute numbers); tvm/ffi/c_api.h (safe-call
signature).
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fovea.emulator.host_arguments import (
    DeviceArray,
    FfiValue,
    PackedArguments,
    read_c_signature,
)
from fovea.emulator.host_object import HostObject, LauncherError, read_symbols

_SUCCESS = 0
_INVALID_VALUE = 1
_INVALID_RESOURCE_HANDLE = 400
_LAUNCH_FAILURE = 719

# cudaLaunchConfig_t: grid, block (six uint32), shared bytes, stream, attributes, their count.
_CONFIG = struct.Struct("<6IQQQI")
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
_DEVICE_ATTRIBUTES: dict[int, int] = {
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
_MULTIPROCESSOR_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch as the launcher made it.

    `parameters` holds the raw bytes of each kernel parameter; `arrays` the memory the call was
    given, which the parameters' pointers and tensor maps point into.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[bytes, ...]
    arrays: tuple[DeviceArray, ...]


@dataclass(slots=True)
class _Call:
    """State of one call of a launcher, on one thread."""

    arrays: tuple[DeviceArray, ...]
    results: list[Any] = field(default_factory=list[Any])
    failure: BaseException | None = None
    message: str = ""


class Launcher:
    """A host launcher that runs on this CPU; calling it runs its kernels in the emulator."""

    def __init__(
        self,
        object_bytes: bytes,
        *,
        parameter_sizes: Mapping[str, Sequence[int]],
        run: Callable[[Launch], Any],
        header: str | None = None,
        capability: tuple[int, int] = (9, 0),
        multiprocessor_count: int = 132,
    ) -> None:
        """Link `object_bytes`; see `load_launcher`.

        Args:
            parameter_sizes: the size in bytes of each parameter, by kernel name.
            run: what to do with a launch; its return value is collected.
            header: the exported header, which a plain C launcher needs.
            capability: compute capability the launcher is told.
            multiprocessor_count: number of SMs the launcher is told (persistent grids depend on
            it).
        """
        self._parameter_sizes = parameter_sizes
        self._run = run
        self._attributes = _DEVICE_ATTRIBUTES | {
            _MULTIPROCESSOR_COUNT: multiprocessor_count,
            _CAPABILITY_MAJOR: capability[0],
            _CAPABILITY_MINOR: capability[1],
        }
        self._calls = threading.local()
        self._setup = threading.RLock()
        self._kernels: list[str] = []
        # ctypes frees a callback with its object: they must live as long as the linked code.
        self._callbacks = _callbacks(self)
        imports = {
            name: ctypes.cast(callback, ctypes.c_void_p).value or 0
            for name, callback in self._callbacks.items()
        }
        defined = read_symbols(object_bytes).defined
        ffi = sorted(name for name in defined if name.startswith("__tvm_ffi_"))
        plain = sorted(
            name for name in defined if name.startswith("_mlir_") and "_mlir_ciface_" in name
        )
        self.interface = "tvm-ffi" if ffi else "c"
        entries = ffi or plain
        if len(entries) != 1:
            raise LauncherError(
                f"the object defines {len(entries)} launchers ({', '.join(entries) or 'none'}); "
                "export one function per object with export_to_c"
            )
        self.name = entries[0]
        prefix = self.name.split("_mlir_ciface_")[0].rstrip("_")
        setup = [] if ffi else [f"{prefix}_cuda_init", f"{prefix}_cuda_load_to_device"]
        self._signature = None
        if not ffi:
            if header is None:
                raise LauncherError(
                    "a plain C launcher needs its exported header to lay out arguments; pass "
                    "header=<text of the .h file>, or export with --enable-tvm-ffi"
                )
            self._signature = read_c_signature(header)
        self._object = HostObject(object_bytes, imports, frozenset([self.name, *setup]))
        self._setup_names = setup
        self._is_set_up = False

    def __call__(self, *values: object, memory: Sequence[DeviceArray] = ()) -> tuple[Any, ...]:
        """Run the launcher and return what each of its launches returned.

        Args:
            values: its arguments: numpy arrays, CPU DLPack tensors, `DeviceArray`s, numbers,
            tuples.
            memory: further memory the kernels may reach through raw pointers.

        Raises:
            LauncherError: when the launcher rejects its arguments or reports a failure.
            Exception: whatever running a kernel raised.
        """
        packed = PackedArguments()
        if self._signature is None:
            arguments: Any = packed.ffi_values(values)
        else:
            arguments = packed.c_arguments(self._signature, values)
        call = _Call(arrays=(*packed.arrays, *memory))
        outer = getattr(self._calls, "current", None)
        self._calls.current = call
        try:
            if self._signature is None:
                status = self._call_ffi(arguments, len(values))
            else:
                status = self._call_plain(arguments)
        finally:
            self._calls.current = outer
        if call.failure is not None:
            raise call.failure
        if status != 0:
            raise LauncherError(call.message or f"the launcher returned status {status}")
        return tuple(call.results)

    def _call_ffi(self, values: Any, count: int) -> int:
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
        )
        result = FfiValue()
        function = prototype(self._object.address(self.name))
        return function(None, ctypes.addressof(values), count, ctypes.addressof(result))

    def _call_plain(self, addresses: list[int]) -> int:
        status = self._set_up_plain()
        if status:
            return status
        result = ctypes.c_int32(0)
        packed = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(result))
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
        prototype(self._object.address(self.name))(packed, len(packed))
        return result.value

    def _set_up_plain(self) -> int:
        """Load the kernel library once, as the exported header's module loader does."""
        with self._setup:
            if self._is_set_up:
                return 0
            self._library = (ctypes.c_uint64 * 16)()
            library = ctypes.c_void_p(ctypes.addressof(self._library))
            device, status = ctypes.c_int32(0), ctypes.c_int32(0)
            prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
            init = (ctypes.c_void_p * 2)(ctypes.addressof(library), ctypes.addressof(status))
            load = (ctypes.c_void_p * 3)(
                ctypes.addressof(library), ctypes.addressof(device), ctypes.addressof(status)
            )
            for name, arguments in zip(self._setup_names, (init, load), strict=True):
                prototype(self._object.address(name))(ctypes.addressof(arguments))
                if status.value:
                    return status.value
            self._is_set_up = True
            return 0

    # --- what the callbacks do ------------------------------------------------------------------

    def current_call(self) -> _Call:
        """Return the state of the call this thread is in."""
        call = getattr(self._calls, "current", None)
        if call is None:
            raise LauncherError("the launcher called the CUDA runtime outside of a call")
        return cast(_Call, call)

    def keep_failure(self, failure: BaseException) -> None:
        """Remember the first exception of the call, to be raised when the launcher returns."""
        call = getattr(self._calls, "current", None)
        if call is not None and call.failure is None:
            call.failure = failure

    def find_kernel(self, name: str) -> int:
        """Return a handle for the kernel `name`."""
        if name not in self._parameter_sizes:
            raise LauncherError(
                f"the launcher wants kernel {name!r}, which the PTX does not define "
                f"(it defines: {', '.join(self._parameter_sizes)}); pass "
                "the PTX of the same compilation"
            )
        with self._setup:
            if name not in self._kernels:
                self._kernels.append(name)
            return 1 + self._kernels.index(name)

    def device_attribute(self, number: int) -> int:
        """Return a device attribute of the modelled device."""
        if number not in self._attributes:
            raise LauncherError(
                f"the launcher asks for device attribute {number}, which is not modelled "
                f"(modelled: {sorted(self._attributes)})"
            )
        return self._attributes[number]

    def launch(self, config: int, handle: int, parameters: int) -> int:
        """Run one launch and return a CUDA status."""
        call = self.current_call()
        if call.failure is not None:
            return _LAUNCH_FAILURE
        if not 1 <= handle <= len(self._kernels):
            raise LauncherError(f"launch of unknown kernel handle {handle}")
        name = self._kernels[handle - 1]
        values = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
        cluster = _cluster(values[8], values[9])
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        sizes = self._parameter_sizes[name]
        call.results.append(
            self._run(
                Launch(
                    kernel=name,
                    grid=values[0:3],
                    block=values[3:6],
                    cluster=cluster,
                    shared_bytes=values[6],
                    parameters=tuple(
                        ctypes.string_at(pointers[i] or 0, size) for i, size in enumerate(sizes)
                    ),
                    arrays=call.arrays,
                )
            )
        )
        return _SUCCESS

    def init_once(self, slot: int, init: int, load: int) -> int:
        """Load the kernel library into `slot` once (cuda_dialect_init_library_once)."""
        with self._setup:
            target = ctypes.c_uint64.from_address(slot)
            if target.value:
                return _SUCCESS
            self._library = (ctypes.c_uint64 * 16)()
            address = ctypes.addressof(self._library)
            status = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(init)(address)
            if status == _SUCCESS:
                prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
                status = prototype(load)(address, 0)
            if status == _SUCCESS:
                target.value = address
            return status


def _cluster(attributes: int, count: int) -> tuple[int, int, int]:
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


def _callbacks(launcher: Launcher) -> dict[str, Any]:
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
                    return _LAUNCH_FAILURE if result is integer else None

            callbacks[name] = ctypes.CFUNCTYPE(result, *types)(guarded)
            return function

        return register

    def store_int(address: int, value: int) -> int:
        ctypes.c_int32.from_address(address).value = value
        return _SUCCESS

    @answer("_cudaLibraryLoadData", *[pointer] * 4, integer, pointer, pointer, integer)
    def _load(library: int, *_: Any) -> int:
        ctypes.c_uint64.from_address(library).value = 1
        return _SUCCESS

    @answer("_cudaLibraryGetKernel", pointer, pointer, text)
    def _get_kernel(kernel: int, _library: int, name: bytes) -> int:
        ctypes.c_uint64.from_address(kernel).value = launcher.find_kernel(name.decode())
        return _SUCCESS

    @answer("_cudaLibraryUnload", pointer)
    def _unload(_library: int) -> int:
        return _SUCCESS

    @answer("_cudaGetDevice", pointer)
    def _get_device(device: int) -> int:
        return store_int(device, 0)

    @answer("_cudaGetDeviceCount", pointer)
    def _get_device_count(count: int) -> int:
        return store_int(count, 1)

    @answer("_cudaSetDevice", integer)
    def _set_device(device: int) -> int:
        return _SUCCESS if device == 0 else 101

    @answer("_cudaDeviceGetAttribute", pointer, integer, integer)
    def _device_attribute(value: int, attribute: int, _device: int) -> int:
        return store_int(value, launcher.device_attribute(attribute))

    @answer("_cudaFuncSetAttribute", pointer, integer, integer)
    def _set_function_attribute(*_: Any) -> int:
        return _SUCCESS

    @answer("_cudaKernelSetAttributeForDevice", pointer, integer, integer, integer)
    def _set_kernel_attribute(*_: Any) -> int:
        return _SUCCESS

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
        launcher.current_call().message = f"{kind.decode()}: {message.decode()}"

    @answer("TVMFFIErrorSetRaisedFromCStrParts", text, ctypes.POINTER(text), integer, result=None)
    def _set_error_parts(kind: bytes, parts: Any, count: int) -> None:
        message = "".join(part.decode() for i in range(count) if (part := parts[i]) is not None)
        launcher.current_call().message = f"{kind.decode()}: {message}"

    @answer("CuteDSLRT_TVMFFISetRaisedCudaError", pointer, integer, result=None)
    def _set_cuda_error(_setter: int, status: int) -> None:
        launcher.current_call().message = f"the launcher stopped with CUDA error {status}"

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
        launcher.current_call().message = (
            f"the launcher refuses its launch: {values[18].decode()} (grid {values[0:3]}, block "
            f"{values[3:6]}, {values[7]} bytes of dynamic shared memory)"
        )

    return callbacks
