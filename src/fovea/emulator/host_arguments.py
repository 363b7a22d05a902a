"""Arguments of a host launcher: arrays dressed as device tensors, scalars, tuples, streams.

What lives here: DLTensor and TVM-FFI value layouts, the reading of numpy arrays and CPU DLPack
tensors, and the plain C interface's structs (read from the exported header). Not here: calling
(driver.py).

Invariant: a packed argument only points at memory owned by the caller's arrays or by the
`PackedArguments` that holds it, so both must live until the call returns. No data is copied:
kernels write the caller's arrays.

Source: dlpack.h (DLTensor, DLDataType); tvm/ffi/c_api.h (TVMFFIAny, type indices, array cells).
"""

import ctypes
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.arguments import wrong
from fovea.emulator.errors import LauncherError, LaunchError

_DEVICE_CPU = 1
_DEVICE_CUDA = 2

# DLPack type codes by dtype name: (code, bits).
_DTYPES: dict[str, tuple[int, int]] = {
    "bool": (6, 8),
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
    "float8_e8m0fnu": (14, 8),
    "float4_e2m1fn": (17, 4),
}

_NONE, _INT, _BOOL, _FLOAT, _OPAQUE, _DLTENSOR, _ARRAY = 0, 1, 2, 3, 4, 7, 71


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _AnyPayload(ctypes.Union):
    _fields_ = (
        ("integer", ctypes.c_int64),
        ("floating", ctypes.c_double),
        ("pointer", ctypes.c_void_p),
    )


class FfiValue(ctypes.Structure):
    """TVM-FFI's 16-byte tagged value (TVMFFIAny)."""

    _fields_ = (
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("value", _AnyPayload),
    )


class _ArrayCell(ctypes.Structure):
    """TVM-FFI's array object: the 24-byte object header, then its items."""

    _fields_ = (
        ("reference_count", ctypes.c_uint64),
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("deleter", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """Host memory that a launcher shall take for a device tensor.

    `owner` keeps the memory alive; strides are in elements, as in DLPack.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: object = field(repr=False)
    writable: bool = True

    def byte_range(self) -> tuple[int, int]:
        """Return the first address and the size in bytes of the memory the elements span."""
        bits = _DTYPES[self.dtype][1]
        if 0 in self.shape:
            return self.address, 0
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = sum(r for r in reach if r < 0)
        high = sum(r for r in reach if r > 0) + 1
        first = self.address + low * bits // 8
        return first, -(-high * bits // 8) - low * bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A raw device pointer argument; `array` is the memory behind it."""

    array: DeviceArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream handle. The emulator runs every launch at once, so only its presence matters."""

    handle: int = 0


def device_array(value: object, *, dtype: str | None = None) -> DeviceArray:
    """Return numpy's or a CPU DLPack tensor's memory as a `DeviceArray`, without copying.

    Args:
        value: a numpy array, or an object with `__dlpack__` on the CPU (a torch tensor).
        dtype: element type to claim instead, of the same width: how uint16 storage passes as
            "bfloat16", or uint8 as "float8_e4m3fn".

    Raises:
        LaunchError: `value` is neither or not on the CPU, or one of the types is unknown or of
            another width.
    """
    if isinstance(value, DeviceArray):
        array = value
    elif isinstance(value, np.ndarray):
        array = _from_numpy(cast("NDArray[Any]", value))
    elif hasattr(value, "__dlpack__"):
        array = _from_dlpack(value)
    else:
        remedy = "pass a numpy array, or a CPU tensor that supports DLPack"
        raise wrong("value", value, f"an array, not {type(value).__name__}", remedy)
    if dtype is None or dtype == array.dtype:
        return array
    if dtype not in _DTYPES:
        raise wrong("dtype", dtype, ", ".join(_DTYPES), "name the type of the elements")
    if _DTYPES[dtype][1] != _DTYPES[array.dtype][1]:
        bits = _DTYPES[array.dtype][1]
        allowed = f"a type of {bits} bits, as the array's {array.dtype}"
        raise wrong("dtype", dtype, allowed, "pass storage of the same width")
    return DeviceArray(
        address=array.address,
        dtype=dtype,
        shape=array.shape,
        strides=array.strides,
        owner=array.owner,
        writable=array.writable,
    )


def _from_numpy(array: NDArray[Any]) -> DeviceArray:
    name = array.dtype.name
    if name not in _DTYPES or not array.dtype.isnative:
        allowed = f"an array of this machine's {', '.join(_DTYPES)}"
        raise wrong("value", array, allowed, "convert it, or pass a view of the same width")
    if any(stride % array.itemsize for stride in array.strides):
        allowed = f"strides of whole elements, not of {array.strides} bytes"
        raise wrong("value", array, allowed, "pass numpy.ascontiguousarray(array)")
    return DeviceArray(
        address=array.ctypes.data,
        dtype=name,
        shape=array.shape,
        strides=tuple(stride // array.itemsize for stride in array.strides),
        owner=array,
        writable=array.flags.writeable,
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _from_dlpack(tensor: Any) -> DeviceArray:
    # The capsule is left unconsumed: when it is collected its own destructor frees it, so it is the
    # owner.
    try:
        capsule = tensor.__dlpack__()
    except Exception as error:
        allowed = f"a tensor that exports its memory; {error}"
        raise wrong("value", tensor, allowed, "pass tensor.detach().cpu()") from error
    address = _capsule_pointer(capsule, b"dltensor")
    view = _DLTensor.from_address(address)
    if view.device_type != _DEVICE_CPU:
        allowed = f"a tensor on the CPU, not on DLPack's device type {view.device_type}"
        raise wrong("value", tensor, allowed, "pass tensor.cpu()")
    names = {key: name for name, key in _DTYPES.items()}
    key = (int(view.code), int(view.bits))
    if key not in names or view.lanes != 1:
        allowed = f"a tensor of {', '.join(_DTYPES)}"
        remedy = f"convert it (its DLPack type is {key}, {view.lanes} lanes)"
        raise wrong("value", tensor, allowed, remedy)
    shape = tuple(int(view.shape[i]) for i in range(view.ndim))
    if view.strides:
        strides = tuple(int(view.strides[i]) for i in range(view.ndim))
    else:
        strides = _contiguous_strides(shape)
    return DeviceArray(
        address=int(view.data or 0) + int(view.byte_offset),
        dtype=names[key],
        shape=shape,
        strides=strides,
        owner=(tensor, capsule),
    )


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


@contextmanager
def _naming(argument: str, value: object) -> Generator[None]:
    """Let a complaint about a value begin with the argument it stands for."""
    try:
        yield
    except LaunchError as error:
        raise LaunchError(f"launcher {argument}: {error}") from error
    except (TypeError, ValueError, OverflowError, ctypes.ArgumentError) as error:
        allowed = "an array, a CPU tensor, a number, None, or a tuple of these"
        raise wrong(f"launcher {argument}", value, allowed, f"see: {error}") from error


class PackedArguments:
    """Arguments of one call in the launcher's layout, and the arrays behind them."""

    def __init__(self) -> None:
        self.arrays: list[DeviceArray] = []
        self._keep: list[object] = []

    def ffi_values(
        self, values: Sequence[object], prefix: str = "argument"
    ) -> "ctypes.Array[FfiValue]":
        """Return the values as consecutive TVM-FFI values."""
        packed = (FfiValue * len(values))()
        for position, (slot, value) in enumerate(zip(packed, values, strict=True)):
            with _naming(f"{prefix} {position}", value):
                self._fill(slot, value)
        self._keep.append(packed)
        return packed

    def _fill(self, slot: FfiValue, value: object) -> None:
        if value is None:
            slot.type_index = _NONE
        elif isinstance(value, bool | np.bool_):
            slot.type_index, slot.value.integer = _BOOL, int(cast(bool, value))
        elif isinstance(value, int | np.integer):
            number = int(cast(int, value))
            if not -(1 << 63) <= number < 1 << 63:
                raise wrong("value", number, "-2^63 to 2^63 - 1", "pass a smaller number")
            slot.type_index, slot.value.integer = _INT, number
        elif isinstance(value, float | np.floating):
            slot.type_index, slot.value.floating = _FLOAT, float(cast(float, value))
        elif isinstance(value, Stream):
            slot.type_index, slot.value.pointer = _OPAQUE, value.handle
        elif isinstance(value, Pointer):
            self.arrays.append(value.array)
            slot.type_index, slot.value.pointer = _OPAQUE, value.array.address
        elif isinstance(value, list | tuple):
            items: list[object] = list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            cell = _ArrayCell(reference_count=1 | 1 << 32, type_index=_ARRAY)
            cell.data = ctypes.addressof(self.ffi_values(items, "element"))
            cell.size = cell.capacity = len(items)
            self._keep.append(cell)
            slot.type_index, slot.value.pointer = _ARRAY, ctypes.addressof(cell)
        else:
            tensor = self._dltensor(device_array(value))
            slot.type_index, slot.value.pointer = _DLTENSOR, ctypes.addressof(tensor)

    def _dltensor(self, array: DeviceArray) -> _DLTensor:
        self.arrays.append(array)
        rank = len(array.shape)
        code, bits = _DTYPES[array.dtype]
        tensor = _DLTensor(
            data=array.address,
            device_type=_DEVICE_CUDA,
            device_id=0,
            ndim=rank,
            code=code,
            bits=bits,
            lanes=1,
            shape=(ctypes.c_int64 * rank)(*array.shape),
            strides=(ctypes.c_int64 * rank)(*array.strides),
        )
        self._keep.append(tensor)
        return tensor

    def c_arguments(self, signature: "CSignature", values: Sequence[object]) -> list[int]:
        """Return the addresses of the values laid out for the plain C interface."""
        if len(values) != len(signature.parameters):
            raise LaunchError(
                f"the launcher takes {len(signature.parameters)} arguments "
                f"({', '.join(p.name for p in signature.parameters)}), got {len(values)}"
            )
        addresses: list[int] = []
        for parameter, value in zip(signature.parameters, values, strict=True):
            with _naming(f"argument {parameter.name!r}", value):
                packed = self._c_value(parameter, value)
            self._keep.append(packed)
            addresses.append(ctypes.addressof(packed))
        return addresses

    def _c_value(self, parameter: "CParameter", value: object) -> Any:
        if parameter.struct is not None:
            tensor = value if isinstance(value, CTensor) else CTensor(array=device_array(value))
            self.arrays.append(tensor.array)
            return parameter.struct.pack(tensor, parameter.name)
        if parameter.pointer:
            if isinstance(value, Stream) or value is None:
                return ctypes.c_void_p(value.handle if isinstance(value, Stream) else 0)
            if isinstance(value, int):
                return ctypes.c_void_p(value)
            array = value.array if isinstance(value, Pointer) else device_array(value)
            self.arrays.append(array)
            return ctypes.c_void_p(array.address)
        return parameter.scalar(value)


_C_SCALARS: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    **{f"int{b}_t": getattr(ctypes, f"c_int{b}") for b in (8, 16, 32, 64)},
    **{f"uint{b}_t": getattr(ctypes, f"c_uint{b}") for b in (8, 16, 32, 64)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CTensor:
    """A tensor argument of a plain C launcher with the sizes that its struct keeps.

    None means all of the array's (strides: all but those equal to 1).
    """

    array: DeviceArray
    dynamic_shapes: tuple[int, ...] | None = None
    dynamic_strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CTensorStruct:
    """A tensor struct of the exported header: a data pointer, then dynamic sizes."""

    shapes: int
    strides: int
    shape_bytes: int
    stride_bytes: int

    def pack(self, tensor: "CTensor", name: str) -> Any:
        """Return the struct's bytes for `tensor` as a ctypes object."""
        array = tensor.array
        shapes, strides = tensor.dynamic_shapes, tensor.dynamic_strides
        if shapes is None:
            shapes = array.shape if self.shapes else ()
        if strides is None:
            strides = array.strides if self.strides == len(array.strides) else ()
            if self.strides == len(array.strides) - 1:
                strides = tuple(s for s in array.strides if s != 1)
        if len(shapes) != self.shapes or len(strides) != self.strides:
            raise LauncherError(
                f"argument {name!r} of rank {len(array.shape)} keeps {self.shapes} sizes and "
                f"{self.strides} strides, and the header does not say which; pass "
                "CTensor(array=..., dynamic_shapes=(...), dynamic_strides=(...))"
            )
        shape_type = ctypes.c_int64 if self.shape_bytes == 8 else ctypes.c_int32
        stride_type = ctypes.c_int64 if self.stride_bytes == 8 else ctypes.c_int32

        class Packed(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p),
                ("shapes", shape_type * self.shapes),
                ("strides", stride_type * self.strides),
            )

        return Packed(
            array.address,
            (shape_type * self.shapes)(*shapes),
            (stride_type * self.strides)(*strides),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CParameter:
    """One parameter of the exported header's wrapper function."""

    name: str
    struct: CTensorStruct | None
    pointer: bool
    scalar: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CSignature:
    """The parameters of a plain C launcher, in order."""

    parameters: tuple[CParameter, ...]


_STRUCT = re.compile(r"typedef struct \{(?P<body>[^}]*)\}\s*(?P<name>\w+);")
_DYNAMIC = re.compile(r"int(?P<bits>32|64)_t dynamic_(?P<kind>shapes|strides)\[(?P<count>\d+)\];")
_WRAPPER = re.compile(r"int32_t cute_dsl_\w+_wrapper\((?P<parameters>[^)]*)\)")


def read_c_signature(header: str) -> CSignature:
    """Return the launcher's parameters from the header that export_to_c wrote.

    Raises:
        LauncherError: when the header has no wrapper or a parameter of unknown type.
    """
    structs: dict[str, CTensorStruct] = {}
    for match in _STRUCT.finditer(header):
        found = {"shapes": (0, 8), "strides": (0, 8)}
        for entry in _DYNAMIC.finditer(match["body"]):
            found[entry["kind"]] = (int(entry["count"]), int(entry["bits"]) // 8)
        structs[match["name"]] = CTensorStruct(
            shapes=found["shapes"][0],
            strides=found["strides"][0],
            shape_bytes=found["shapes"][1],
            stride_bytes=found["strides"][1],
        )
    wrapper = _WRAPPER.search(header)
    if wrapper is None:
        raise LauncherError("the header declares no cute_dsl_<name>_wrapper function")
    parameters: list[CParameter] = []
    # The first parameter is the loaded module, which is the emulator's business.
    for text in wrapper["parameters"].split(",")[1:]:
        kind, name = text.strip().rsplit(" ", 1)
        pointer = kind.endswith("*") or name.startswith("*") or kind in ("cudaStream_t", "CUstream")
        struct = structs.get(kind.rstrip("* "))
        scalar = _C_SCALARS.get(kind)
        if struct is None and not pointer and scalar is None:
            raise LauncherError(
                f"parameter {name!r} of the header has type {kind!r}, which is not known here; "
                "export the launcher with --enable-tvm-ffi instead"
            )
        parameters.append(
            CParameter(name=name.lstrip("*"), struct=struct, pointer=pointer, scalar=scalar)
        )
    return CSignature(parameters=tuple(parameters))
