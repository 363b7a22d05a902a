"""Calls of device functions, and the two system functions kernels call: vprintf, __assertfail.

Parameters of calls live in the local memory of the thread; a call copies the caller's variables to
the callee's, a return copies the results back. There is no recursion (an error when the kernel is
decoded): each function has one place.
Lives here: matching of arguments to parameters, and the system functions. Not here: the jump
(`machine/warp.py`). Invariant: a call of anything else is an error that names it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fovea.emulator.errors import PtxError, Trap, UnsupportedForm
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.machine.memory import LOCAL_WINDOW, WINDOW_SHIFT
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES

_FORMAT = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d*))?(hh|h|ll|l|z)?([diouxXcsfFeEgGaAp%])")
_STRING_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Signature:
    """Names and sizes of a device function's results and parameters, and its entry label."""

    label: str
    results: tuple[tuple[str, int], ...]
    parameters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What a call does: jump to `label` with copies, or run a system function."""

    label: str = ""
    arguments: tuple[tuple[int, int, int], ...] = ()
    results: tuple[tuple[int, int, int], ...] = ()
    builtin: Callable[[Any, Array], None] | None = None


def plan_call(ins: Instruction, signatures: Mapping[str, Signature]) -> CallPlan:
    """Return what a call instruction does.

    Raises:
        PtxError: arguments do not fit the function.
        UnsupportedForm: an indirect call, or an external function that is not known.
    """
    operands = [ins.operands[name] for name in "abcd" if name in ins.operands]
    place = next((n for n, o in enumerate(operands) if isinstance(o, syntax.Symbol)), None)
    if place is None or place > 1 or any(isinstance(o, syntax.Register) for o in operands):
        raise UnsupportedForm(
            f"`{ins.text}`: an indirect call, through the address of a function; only calls by "
            "name are implemented",
            ins.line,
            ins.opcode,
        )
    function = operands[place]
    assert isinstance(function, syntax.Symbol)
    results = _symbols(ins, operands[0]) if place == 1 else ()
    arguments = _symbols(ins, operands[place + 1]) if len(operands) > place + 1 else ()
    signature = signatures.get(function.name)
    if signature is not None:
        return CallPlan(
            signature.label,
            _copies(ins, signature.parameters, arguments, is_result=False),
            _copies(ins, signature.results, results, is_result=True),
        )
    makers = {"vprintf": _vprintf, "__assertfail": _assertfail}
    if function.name not in makers:
        raise UnsupportedForm(
            f"call of {function.name}, which the module does not define (known: "
            f"{', '.join(makers)})",
            ins.line,
            ins.opcode,
        )
    count = {"vprintf": 2, "__assertfail": 5}[function.name]
    if len(arguments) != count:
        raise PtxError(
            f"`{ins.text}`: {function.name} takes {count} parameters, got {len(arguments)}",
            ins.line,
        )
    return CallPlan(builtin=makers[function.name](ins, results, arguments))


def _symbols(ins: Instruction, operand: syntax.Operand) -> tuple[int, ...]:
    """Return the places in local memory of a list of parameter variables."""
    places: list[int] = []
    for item in operand.items if isinstance(operand, syntax.Vector) else (operand,):
        if not isinstance(item, syntax.Symbol):
            raise UnsupportedForm(
                f"`{ins.text}`: only .param variables are passed", ins.line, ins.opcode
            )
        space, offset = ins.variable(item.name)
        if space != "local":
            raise PtxError(f"`{ins.text}`: {item.name} is no parameter variable", ins.line)
        places.append(offset)
    return tuple(places)


def _copies(
    ins: Instruction,
    formal: tuple[tuple[str, int], ...],
    actual: tuple[int, ...],
    *,
    is_result: bool,
) -> tuple[tuple[int, int, int], ...]:
    if len(formal) != len(actual):
        what = "results" if is_result else "arguments"
        raise PtxError(
            f"`{ins.text}`: {len(actual)} {what}, the function has {len(formal)}", ins.line
        )
    copies: list[tuple[int, int, int]] = []
    for (name, size), place in zip(formal, actual):
        own = ins.variable(name)[1]
        copies.append((place, own, size) if is_result else (own, place, size))
    return tuple(copies)


# --- system functions -----------------------------------------------------------------------------


def _vprintf(ins: Instruction, results: tuple[int, ...], arguments: tuple[int, ...]) -> Any:
    """Print one line of text per lane into the result of the launch."""

    def run(w: Any, mask: Array) -> None:
        for lane in np.flatnonzero(mask).tolist():
            text = read_string(w, lane, _value(w, lane, arguments[0]))
            buffer = _value(w, lane, arguments[1])
            w.machine.printed.append(format_c(w, lane, text, buffer))
            for place in results:
                _store_word(w, lane, place, len(text))

    return run


def _assertfail(ins: Instruction, results: tuple[int, ...], arguments: tuple[int, ...]) -> Any:
    """Raise a Trap with the message of a failed device assertion."""

    def run(w: Any, mask: Array) -> None:
        lane = int(np.flatnonzero(mask)[0])
        message, file = (read_string(w, lane, _value(w, lane, place)) for place in arguments[:2])
        line = _value(w, lane, arguments[2]) & 0xFFFFFFFF
        raise Trap(f"device assertion failed: {message} ({file}:{line})", w.where(ins, lane=lane))

    return run


def _value(w: Any, lane: int, place: int) -> int:
    data = w.local_memory().data.reshape(LANES, -1)[lane]
    return int.from_bytes(data[place : place + 8].tobytes(), "little")


def _store_word(w: Any, lane: int, place: int, value: int) -> None:
    memory = w.local_memory()
    raw = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
    memory.data.reshape(LANES, -1)[lane, place : place + 4] = raw
    if memory.initialised is not None:
        memory.initialised.reshape(LANES, -1)[lane, place : place + 4] = 1


def read_bytes(w: Any, lane: int, address: int, size: int) -> bytes:
    """Return bytes at a generic address as a lane sees it."""
    if address >> WINDOW_SHIFT == LOCAL_WINDOW >> WINDOW_SHIFT:
        offset = address & ((1 << WINDOW_SHIFT) - 1)
        thread = w.local_memory().data.reshape(LANES, -1)[lane]
        return thread[offset : offset + size].tobytes()
    found = w.machine.segment(w, address)
    if found is None:
        return b""
    segment, offset = found
    return segment.data[offset : offset + size].tobytes()


def read_string(w: Any, lane: int, address: int) -> str:
    """Return the zero-terminated string at a generic address."""
    raw = read_bytes(w, lane, address, _STRING_LIMIT)
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def format_c(w: Any, lane: int, text: str, buffer: int) -> str:
    """Return `text` with its C conversions filled from a va_list buffer."""
    offset = 0

    def take(size: int) -> bytes:
        nonlocal offset
        offset = -(-offset // size) * size
        offset += size
        return read_bytes(w, lane, buffer + offset - size, size)

    def number(field: str | None) -> str:
        """Return a width or precision, which `*` takes from the arguments."""
        return str(int.from_bytes(take(4), "little", signed=True)) if field == "*" else field or ""

    def convert(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        layout = f"%{flags}{number(width)}"
        if precision is not None:
            layout += f".{number(precision)}"
        raw = take(8 if kind in "fFeEgGaAsp" or length in ("l", "ll", "z") else 4)
        if kind in "fFeEgGaA":
            value = float(np.frombuffer(raw, np.float64)[0])
            if kind not in "aA":
                return f"{layout}{kind}" % value
            text = re.sub(r"\.?0*p", "p", value.hex())
            return f"{layout}s" % (text if kind == "a" else text.upper())
        value = int.from_bytes(raw, "little", signed=kind in "di")
        if kind == "s":
            return f"{layout}s" % read_string(w, lane, value)
        if kind == "p":
            return f"{layout}s" % hex(value)
        return f"{layout}{kind}" % value

    return _FORMAT.sub(convert, text)
