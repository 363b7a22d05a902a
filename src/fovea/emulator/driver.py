"""Running a CuTe-DSL host launcher on the CPU and catching the kernels it launches.

What lives here: `Launcher`, which calls a linked launcher and takes its launches. Not here: linking
the object (host_object.py), argument layouts (host_arguments.py), the symbols it calls
(host_runtime.py), running a kernel (run.py).

Invariant: everything belongs to one `Launcher` or to one call of it. A call's state is
thread-local, so launchers can be called from several threads; an exception raised while a callback
runs is kept, the launcher sees a CUDA error and returns, and the exception is raised to the caller.

Source: CUDA runtime API (cudaLaunchConfig_t, attribute numbers); tvm/ffi/c_api.h (safe-call
signature).
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fovea.emulator.arguments import check_kind, check_text, listed
from fovea.emulator.errors import LauncherError
from fovea.emulator.host_arguments import (
    DeviceArray,
    FfiValue,
    PackedArguments,
    read_c_signature,
)
from fovea.emulator.host_object import HostObject, read_symbols
from fovea.emulator.host_runtime import (
    CONFIG,
    DEVICE_ATTRIBUTES,
    LAUNCH_FAILURE,
    SUCCESS,
    HostRuntime,
    cluster_of,
)
from fovea.emulator.launch_arguments import host_memory
from fovea.emulator.machine.memory import GlobalMemory
from fovea.emulator.options import Options
from fovea.emulator.run import Result, load_ptx

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
    options: Options


def load_launcher(
    object_bytes: bytes,
    ptx: str,
    *,
    header: str | None = None,
    options: Options | None = None,
) -> "Launcher":
    """Return a host launcher whose kernels run in the emulator.

    Args:
        object_bytes: the object file that CuTe-DSL's `export_to_c` wrote, with the TVM-FFI
            interface (`--enable-tvm-ffi`) or the plain C one.
        ptx: the PTX of the same compilation (`--keep-ptx`).
        header: the text of the exported header; the plain C interface needs it.
        options: of calls that give none.

    Raises:
        LauncherError: when the object cannot be loaded.
        PtxError: when the PTX is wrong.
    """
    check_kind(
        "object_bytes", object_bytes, (bytes, bytearray, memoryview), "the bytes of an object file",
        'pass Path("kernel.o").read_bytes()',
    )  # fmt: skip
    if header is not None:
        check_text("header", header, "the text of the exported header",
                   'pass Path("kernel.h").read_text()', has="{")  # fmt: skip
    check_text("ptx", ptx, "the PTX text", 'pass Path("kernel.ptx").read_text()', has=".version")
    _check_options(options)
    module = load_ptx(ptx)

    def run(launch: Launch) -> Result:
        return module.launch(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.parameters,
            launch.shared_bytes,
            launch.options,
            memory=_memory_of(launch.arrays),
        )

    return Launcher(
        object_bytes,
        parameter_sizes={kernel: module.parameter_sizes(kernel) for kernel in module.kernels},
        run=run,
        header=header,
        capability=_capability(module.target),
        options=options,
    )


def _check_options(options: object) -> None:
    if options is not None:
        remedy = "write options=emulator.Options(seed=1)"
        check_kind("options", options, Options, "an emulator.Options or None", remedy)


def _capability(target: str) -> tuple[int, int]:
    """Return the compute capability of a PTX target such as "sm_100a"."""
    number = int(target.removeprefix("sm_").rstrip("af"))
    return number // 10, number % 10


def _memory_of(arrays: Sequence[DeviceArray]) -> GlobalMemory:
    """Return the bytes of the arrays as global memory; overlapping arrays are one allocation."""
    merged: list[list[Any]] = []
    for array in sorted(arrays, key=lambda item: item.byte_range()):
        start, size = array.byte_range()
        if not size:
            continue
        name = f"{array.dtype} array {list(array.shape)}"
        if merged and start < merged[-1][1] and array.writable == merged[-1][3]:
            merged[-1][1] = max(merged[-1][1], start + size)
            merged[-1][2] += f" with {name}"
        else:
            merged.append([start, start + size, name, array.writable])
    memory = GlobalMemory()
    for start, end, name, is_writable in merged:
        data = host_memory(start, end - start)
        data.flags.writeable = is_writable
        memory.register_bytes(data, start, name)
    return memory


@dataclass(slots=True)
class _Call:
    """State of one call of a launcher, on one thread."""

    arrays: tuple[DeviceArray, ...]
    options: Options
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
        options: Options | None = None,
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
        self._options = options or Options()
        self._attributes = DEVICE_ATTRIBUTES | {
            _CAPABILITY_MAJOR: capability[0],
            _CAPABILITY_MINOR: capability[1],
        }
        self._calls = threading.local()
        self._setup = threading.RLock()
        self._kernels: list[str] = []
        # ctypes frees a callback with its object: they must live as long as the linked code.
        self._callbacks = HostRuntime(self).callbacks()
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

    def __repr__(self) -> str:
        """Return the name, the interface and the kernels."""
        kernels = listed([*self._parameter_sizes])
        return f"<Launcher {self.name} by {self.interface}: kernels {kernels}>"

    def __call__(
        self,
        *values: object,
        memory: Sequence[DeviceArray] = (),
        options: Options | None = None,
    ) -> tuple[Any, ...]:
        """Run the launcher and return what each of its launches returned.

        Args:
            values: its arguments: numpy arrays, CPU DLPack tensors, `DeviceArray`s, numbers,
            tuples.
            memory: further memory the kernels may reach through raw pointers.
            options: of this call's launches.

        Raises:
            LauncherError: when the launcher rejects its arguments or reports a failure.
            Exception: whatever running a kernel raised.
        """
        _check_options(options)
        for position, array in enumerate(memory):
            check_kind(f"memory[{position}]", array, DeviceArray, "a DeviceArray",
                       "pass host_arguments.device_array(array)")  # fmt: skip
        packed = PackedArguments()
        if self._signature is None:
            arguments: Any = packed.ffi_values(values)
        else:
            arguments = packed.c_arguments(self._signature, values)
        call = _Call(arrays=(*packed.arrays, *memory), options=options or self._options)
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

    def set_message(self, message: str) -> None:
        """Remember what the launcher reports as its own failure."""
        self.current_call().message = message

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
        if number == _MULTIPROCESSOR_COUNT:
            return self.current_call().options.num_sms
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
            return LAUNCH_FAILURE
        if not 1 <= handle <= len(self._kernels):
            raise LauncherError(f"launch of unknown kernel handle {handle}")
        name = self._kernels[handle - 1]
        values = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        cluster = cluster_of(values[8], values[9])
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
                    options=call.options,
                )
            )
        )
        return SUCCESS

    def init_once(self, slot: int, init: int, load: int) -> int:
        """Load the kernel library into `slot` once (cuda_dialect_init_library_once)."""
        with self._setup:
            target = ctypes.c_uint64.from_address(slot)
            if target.value:
                return SUCCESS
            self._library = (ctypes.c_uint64 * 16)()
            address = ctypes.addressof(self._library)
            status = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(init)(address)
            if status == SUCCESS:
                prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
                status = prototype(load)(address, 0)
            if status == SUCCESS:
                target.value = address
            return status
