"""Arguments of every public function of the emulator with values of every wrong kind.

Each is an error of the emulator, or a ValueError or TypeError of its own, that names the argument.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator.planting import plant_faults

TEXT = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .f32 s)
{
.reg .b64 %a; ld.param.u64 %a, [p]; st.global.b32 [%a], 1; ret;
}
"""
WRONG = [
    None, 5, -1, 0, 1.5, "x", "8", b"x", [], (), {}, {"a": 1}, object(), [None], ["a"], [[1]],
    (1, 2, 3, 4), np.zeros(3), np.zeros((2, 2)), np.float32(2), math.nan, math.inf, 10**30, True,
    1j, len, {1}, range(3), type, Path("x"), np.int64(3), np.array(3), iter([1]),
    np.zeros(4, object), np.array(["a"]), np.zeros((4, 4))[:, ::2], np.zeros(4)[::-1],
    np.broadcast_to(np.zeros(1), (4,)),
]  # fmt: skip
LAUNCH = ("kernel", "grid", "block", "cluster", "args", "shared_bytes", "options", "memory")
OPTIONS = tuple(emulator.Options.__dataclass_fields__)
MAP = {
    "address": 1024, "element": "f16", "sizes": (128, 64), "strides": (256,), "box": (64, 64),
    "swizzle": 128, "element_strides": (1, 1), "fills_nan": False,
}  # fmt: skip


def _launch(**changes: Any) -> emulator.Result:
    use: dict[str, Any] = {"kernel": "k", "grid": 1, "block": 1, "args": (np.zeros(64), 1.0)}
    return emulator.load_ptx(TEXT).launch(**(use | changes))


def _launcher(**changes: Any) -> Any:
    return emulator.load_launcher(**({"object_bytes": b"", "ptx": TEXT} | changes))


def _register(**changes: Any) -> int:
    use: dict[str, Any] = {"flat": np.zeros(3, np.uint8), "address": 16, "name": "a"}
    return emulator.GlobalMemory().register_bytes(**(use | changes))


CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("text", lambda v: emulator.load_ptx(v)),
    *[(name, lambda v, n=name: _launch(**{n: v})) for name in LAUNCH],
    ("args[0]", lambda v: _launch(args=(v, 1.0))),
    ("args[1]", lambda v: _launch(args=(np.zeros(64), v))),
    *[(name, lambda v, n=name: emulator.Options(**{n: v})) for name in OPTIONS],
    ("kernel", lambda v: emulator.load_ptx(TEXT).parameter_sizes(v)),
    ("name", lambda v: emulator.load_ptx(TEXT).global_variable(v)),
    ("path", lambda v: _launch(options=emulator.Options(trace=True)).write_trace(v)),
    ("a", lambda v: emulator.GlobalMemory().register(v, "a")),
    ("flat", lambda v: _register(flat=v)),
    ("address", lambda v: _register(address=v)),
    *[(name, lambda v, n=name: emulator.make_tensor_map(**(MAP | {n: v}))) for name in MAP],
    ("tensor", lambda v: emulator.encode_tensor_map(v)),
    ("text", lambda v: plant_faults(v)),
    ("object_bytes", lambda v: _launcher(object_bytes=v)),
    ("text", lambda v: _launcher(ptx=v)),
    ("header", lambda v: _launcher(header=v)),
    ("options", lambda v: _launcher(options=v)),
]


@pytest.mark.parametrize("value", WRONG, ids=lambda v: f"{type(v).__name__}")
def test_value_of_a_wrong_kind_is_an_error_that_names_the_argument(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a good file name for a trace
    errors: list[tuple[str, str]] = []
    for name, call in CALLS:
        try:
            call(value)
        except emulator.Fault:
            pass  # the value was an address, and the kernel went there
        except (emulator.EmulatorError, ValueError, TypeError, RuntimeError) as error:
            errors.append((name, str(error)))
    assert len(errors) > 15
    for name, text in errors:
        assert name in text or _is_about(name, text)
        assert len(text) < 500


def _is_about(name: str, message: str) -> bool:
    """Return whether a message speaks of an argument in other words."""
    words = {
        "text": ("PTX line", "PTX text", ".version"),
        "kernel": ("kernel",),
        "strides": ("tensor map stride",),
        "header": ("object_bytes",),  # which are wrong in that call too
        "options": ("object_bytes",),
    }
    return any(word in message for word in words.get(name, ()))


def test_one_array_in_place_of_a_list_of_arguments_is_explained() -> None:
    with pytest.raises(emulator.LaunchError) as info:
        _launch(args=np.zeros(64))
    assert str(info.value) == (
        "args=<ndarray of float64, shape (64,)> is not valid (allowed: a list or tuple of 2 "
        "values: .u64 p, .f32 s); write args=[value, ...], also for one value."
    )


def test_trace_in_a_folder_that_does_not_exist_is_an_error() -> None:
    result = _launch(options=emulator.Options(trace=True))
    with pytest.raises(emulator.LaunchError, match=r"path='/nowhere/t\.json'.*that exists"):
        result.write_trace("/nowhere/t.json")


def test_stride_that_is_no_multiple_of_16_bytes_is_an_error() -> None:
    with pytest.raises(ValueError, match="stride 200 of dimension 1 is no multiple of 16"):
        emulator.make_tensor_map(**(MAP | {"strides": (200,)}))
