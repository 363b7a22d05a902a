"""Element-wise reductions of bulk copies: old value and incoming value to new value.

What lives here: the operations on arrays. Not here: memory, or which forms exist (isa/).

Invariant: floating additions are rounded once, to nearest even. f32 flushes subnormal operands and
results to zero of their sign; f16 and bf16 keep them.

Source: PTX ISA 9.7.9.25.4.2 (cp.reduce.async.bulk), 9.7.9.27.1.3 (its tensor form).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITWISE = ("and", "or", "xor")
_INTEGERS: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}
_ADD = ("u32", "s32", "u64", "f32", "f32.ftz", "f64", "f16", "bf16")
_EXTREMA = ("u32", "s32", "u64", "s64", "f16", "bf16")
_ALLOWED = {
    "add": _ADD,
    "min": _EXTREMA,
    "max": _EXTREMA,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": tuple(_INTEGERS),
    "or": tuple(_INTEGERS),
    "xor": tuple(_INTEGERS),
}
_SMALLEST_NORMAL_F32 = np.float32(2.0**-126)


def check_reduction(operation: str, element: str) -> None:
    """Raise ValueError unless the operation exists for the element type."""
    if element not in _ALLOWED[operation]:
        raise ValueError(
            f"reduction .{operation} does not take .{element} (allowed: "
            f"{', '.join('.' + name for name in _ALLOWED[operation])})"
        )


def reduce_elements(
    operation: str, element: str, old: NDArray[np.uint8], new: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return the bytes of `old op new`; both are bytes of elements along the last axis."""
    check_reduction(operation, element)
    with np.errstate(all="ignore"):
        result = _reduce(operation, element, old, new)
    return np.ascontiguousarray(result).view(np.uint8)


def _reduce(operation: str, element: str, old: Any, new: Any) -> Any:
    if element in ("f16", "bf16"):
        x, y = (_widen(value, element) for value in (old, new))
        if operation == "add":
            return _narrow(x + y, element)
        return _narrow(np.fmin(x, y) if operation == "min" else np.fmax(x, y), element)
    if element in ("f32", "f32.ftz"):
        return _flush(_flush(old.view(np.float32)) + _flush(new.view(np.float32)))
    if element == "f64":
        return old.view(np.float64) + new.view(np.float64)
    return _reduce_integers(operation, old.view(_INTEGERS[element]), new.view(_INTEGERS[element]))


def _reduce_integers(operation: str, x: Any, y: Any) -> Any:
    if operation == "add":
        return x + y
    if operation in _BITWISE:
        if operation == "and":
            return x & y
        return x | y if operation == "or" else x ^ y
    where: Any = np.where
    if operation == "inc":
        return where(x >= y, np.uint32(0), x + np.uint32(1))
    if operation == "dec":
        return where((x == 0) | (x > y), y, x - np.uint32(1))
    return where((x < y) == (operation == "min"), x, y)


def _widen(raw: NDArray[np.uint8], element: str) -> NDArray[np.float64]:
    if element == "f16":
        return raw.view(np.float16).astype(np.float64)
    wide = raw.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).astype(np.float64)


def _narrow(value: NDArray[np.float64], element: str) -> NDArray[Any]:
    """Round float64 to f16 or bf16 once.

    The sum of two such numbers is exact in float64, or so lopsided that no tie can arise.
    """
    if element == "f16":
        return value.astype(np.float16)
    # Rounding to odd first makes the second rounding (to bf16) the only one that counts.
    nearest = value.astype(np.float32)
    is_above = np.abs(nearest.astype(np.float64)) > np.abs(value)
    bits = np.where(is_above, np.nextafter(nearest, np.float32(0)), nearest).view(np.uint32)
    bits = bits | ((nearest != value) & np.isfinite(value)).astype(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _flush(value: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(value) < _SMALLEST_NORMAL_F32, np.copysign(np.float32(0), value), value)
