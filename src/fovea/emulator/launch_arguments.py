"""Arguments of a launch: from Python values to the bytes of a kernel's parameters.

Lives here: which values a parameter takes, by its declared type and size. Not here: arguments of
host launchers (`host_arguments.py`), what else a launch needs (`run.py`). Invariant: an array goes
to a parameter of 64 bits that is no float, and nothing else does that has no number for a value.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from fovea.emulator.arguments import shown, wrong
from fovea.emulator.errors import LaunchError
from fovea.emulator.host_arguments import device_array
from fovea.emulator.isa.instruction import Array
from fovea.emulator.machine.memory import GlobalMemory
from fovea.emulator.ptx.module import Kernel, Parameter
from fovea.emulator.ptx.types import numpy_dtype

_ADDRESS_BYTES = 8
_ADDRESS_TYPES = ("u64", "s64", "b64", "b8")  # .b8: an array of 8 bytes
_KINDS = "biuf"  # numpy's kinds of numbers; those of ml_dtypes (bfloat16) are of kind V


def pack(kernel: Kernel, args: Sequence[Any], memory: GlobalMemory) -> Array:
    """Return the bytes of a kernel's parameters; arrays among the values join the memory.

    Raises:
        LaunchError: a value that its parameter does not take, or another number of them.
    """
    wanted = ", ".join(_declared(parameter) for parameter in kernel.parameters)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong(
            "args", args, f"a list or tuple of {len(kernel.parameters)} values: {wanted or 'none'}",
            "write args=[value, ...], also for one value",
        )  # fmt: skip
    if len(args) != len(kernel.parameters):
        raise LaunchError(
            f"kernel {kernel.name} has {len(kernel.parameters)} parameters, args has {len(args)}; "
            f"pass a value for each of: {wanted or 'none'}"
        )
    packed = np.zeros(kernel.parameter_bytes + 64, np.uint8)
    # tensor maps must be 64-byte aligned: the parameter offsets are, so align the buffer too
    start = -packed.ctypes.data % 64
    packed = packed[start : start + kernel.parameter_bytes]
    for position, (parameter, value) in enumerate(zip(kernel.parameters, args)):
        label = f"args[{position}]"
        if _is_memory(value):
            _check_takes_address(kernel, args, position)
            raw = _address(label, value, memory).to_bytes(_ADDRESS_BYTES, "little")
        else:
            raw = _number_bytes(label, parameter, value)
        packed[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(raw, np.uint8)
    packed.setflags(write=False)
    return packed


def host_memory(address: int, size: int) -> Array:
    """Return `size` bytes of this process at `address` as an array (no copy)."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _declared(parameter: Parameter) -> str:
    count = f"[{parameter.size // numpy_dtype(parameter.type).itemsize}]"
    return f".{parameter.type} {parameter.name}{count if parameter.is_array else ''}"


# --- arrays ---------------------------------------------------------------------------------------


def _is_memory(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return cast(Array, value).ndim > 0
    return hasattr(value, "__dlpack__")


def _takes_address(parameter: Parameter) -> bool:
    return parameter.size == _ADDRESS_BYTES and parameter.type in _ADDRESS_TYPES


def _check_takes_address(kernel: Kernel, args: Sequence[Any], position: int) -> None:
    """Raise LaunchError unless the parameter at a position takes an array."""
    parameter = kernel.parameters[position]
    if _takes_address(parameter):
        return
    remedy = "pass bytes of the parameter's size" if parameter.is_array else "pass a number"
    for other, (candidate, value) in enumerate(zip(kernel.parameters, args)):
        if _takes_address(candidate) and not _is_memory(value) and not isinstance(value, bytes):
            remedy += (
                f"; is it exchanged with args[{other}]={shown(value)}, which is passed for "
                f"{_declared(candidate)}?"
            )
            break
    raise LaunchError(
        f"args[{position}]={shown(args[position])} is an array, whose address has 64 bits, but the "
        f"parameter is {_declared(parameter)}; {remedy}"
    )


def _address(label: str, value: Any, memory: GlobalMemory) -> int:
    """Make the bytes of an array accessible, without a copy, and return its address."""
    if isinstance(value, np.ndarray):
        return memory.register(cast(Array, value), label)
    try:
        found = device_array(value)
    except Exception as error:
        raise LaunchError(
            f"{label} is a {type(value).__name__} whose memory cannot be reached ({error}); pass "
            "a detached CPU tensor or a numpy array, e.g. tensor.detach().cpu()"
        ) from error
    expected = 1
    for size, stride in zip(reversed(found.shape), reversed(found.strides), strict=True):
        if size != 1 and stride != expected:
            raise LaunchError(f"{label} must be contiguous: pass {label}.contiguous()")
        expected *= size
    address, size = found.byte_range()
    memory.keep.append(found)
    return memory.register_bytes(host_memory(address, size), address, label)


# --- numbers and bytes ----------------------------------------------------------------------------


def _number_bytes(label: str, parameter: Parameter, value: Any) -> bytes:
    """Return the bytes of a value that is no array."""
    if isinstance(value, bytes | bytearray):
        if len(value) != parameter.size:
            raise LaunchError(
                f"{label} has {len(value)} bytes, the parameter has {parameter.size} "
                f"({_declared(parameter)}); pass as many"
            )
        return bytes(value)
    if parameter.is_array and parameter.size != _ADDRESS_BYTES:
        raise LaunchError(
            f"{label} is a parameter of {parameter.size} bytes ({_declared(parameter)}), "
            f"{shown(value)} is none: pass bytes of that size"
        )
    if isinstance(value, np.generic | np.ndarray):  # an array here has no dimensions
        given = cast(Array, value)
        _check_is_number(label, parameter, given)
        is_same_kind = (given.dtype.kind == "f") == (numpy_dtype(parameter.type).kind == "f")
        if given.nbytes == parameter.size and (is_same_kind or parameter.type[0] == "b"):
            return given.tobytes()
        value = given.item()
    if numpy_dtype(parameter.type).kind == "f" and isinstance(value, int | float):
        return _float_bytes(label, parameter, value)
    if isinstance(value, float):
        return _bits_of_float(label, parameter, value)
    if isinstance(value, int):
        return _int_bytes(label, parameter, value)
    raise LaunchError(
        f"{label}={shown(value)} has type {type(value).__name__}, the parameter is "
        f"{_declared(parameter)}; pass a numpy array, a CPU tensor, an int, a float, a numpy "
        "scalar or bytes"
    )


def _check_is_number(label: str, parameter: Parameter, given: Array) -> None:
    """Raise LaunchError unless a numpy scalar has a number for a value."""
    is_extension = given.dtype.kind == "V" and given.dtype.type is not np.void
    if given.dtype.kind not in _KINDS and not is_extension:
        raise LaunchError(
            f"{label}={shown(given)} is a numpy value of dtype {given.dtype}, which is no "
            f"number; the parameter is {_declared(parameter)}: pass an int, a float, a numpy "
            f"number, or {parameter.size} bytes"
        )


def _float_bytes(label: str, parameter: Parameter, value: float) -> bytes:
    try:
        with np.errstate(over="ignore"):
            return np.array(float(value), numpy_dtype(parameter.type)).tobytes()
    except OverflowError:
        allowed = f"a number of .{parameter.type}"
        raise wrong(label, value, allowed, "pass a smaller number, or float('inf')") from None


def _bits_of_float(label: str, parameter: Parameter, value: float) -> bytes:
    """Return a float's bytes for a parameter of bits."""
    bits = 8 * parameter.size
    if parameter.type[0] != "b" or parameter.size not in (4, 8):
        meant = f"np.float{bits}({value}).tobytes()" if bits > 8 else "bytes([...])"
        raise LaunchError(
            f"{label}={value} is a float, the parameter is {_declared(parameter)}: pass "
            f"int({value}), or {meant} if its bits are meant"
        )
    try:
        return struct.pack("<f" if parameter.size == 4 else "<d", value)
    except OverflowError:
        allowed = "a number that a float of 32 bits can hold"
        raise wrong(label, value, allowed, "pass a smaller one, or float('inf')") from None


def _int_bytes(label: str, parameter: Parameter, value: int) -> bytes:
    bits = 8 * parameter.size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchError(
            f"{label}={shown(value)} does not fit the {bits} bits of {_declared(parameter)} "
            f"(allowed: -2^{bits - 1} to 2^{bits} - 1); pass a smaller number"
        )
    return (value & ((1 << bits) - 1)).to_bytes(parameter.size, "little")
