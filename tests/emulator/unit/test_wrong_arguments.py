"""Arguments of every public function of the emulator with values of every wrong kind.

Each is an error of the emulator that names the argument.
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
    ("ptx", lambda v: _launcher(ptx=v)),
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
        except emulator.EmulatorError as error:
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
        "ptx": ("PTX line", ".version"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": (200,)}, r"strides=\(200,\) .*multiples of 16 bytes"),
        ({"box": (4, 64)}, r"box=\(4, 64\) .*a multiple of 8 up to 64 elements of \.f16"),
        ({"box": (4, 64), "swizzle": 0}, r"a multiple of 8 elements of \.f16"),
        ({"box": (128, 64)}, r"no wider than swizzle=128\); .* choose a wider swizzle"),
        ({"box": (32, 64), "swizzle": 32}, r"up to 16 elements"),
        ({"element": "f64", "box": (1, 64)}, r"a multiple of 2 up to 16 elements of \.f64"),
    ],
)
def test_tensor_map_that_no_driver_makes_is_an_error_about_its_argument(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(emulator.LaunchError, match=message):
        emulator.make_tensor_map(**(MAP | changes))


# --- arguments of a launch against the declared parameters ----------------------------------------

SUM = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n, .param .f64 s, .param .align 8 .b8 t[16])
{ ret; }
"""
STRUCT = bytes(16)


def _sum(*args: Any) -> emulator.Result:
    return emulator.load_ptx(SUM).launch("k", 1, 1, args=args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (5, np.zeros(3), 1.0, STRUCT),
            r"args\[1\]=<ndarray of float64, shape \(3,\)> is an array, .* the parameter is "
            r"\.u32 n; pass a number; is it exchanged with args\[0\]=5, .* passed for \.u64 p",
        ),
        ((np.zeros(3), np.zeros(3), 1.0, STRUCT), r"parameter is \.u32 n; pass a number$"),
        ((0, 1, np.zeros(3), STRUCT), r"args\[2\].* parameter is \.f64 s; pass a number"),
        ((0, 1, 1.0, np.zeros(2)), r"parameter is \.b8 t\[16\]; pass bytes of the parameter"),
        ((0, 1, 1.0, 7), r"args\[3\] is a parameter of 16 bytes \(\.b8 t\[16\]\), 7 is none"),
        ((0, -(1 << 40), 1.0, STRUCT), r"args\[1\]=-1099511627776 .*32 bits of \.u32 n .*-2\^31"),
        ((0, 1, 10**400, STRUCT), r"args\[2\]=1000.* a number of \.f64"),
        ((0, 2.5, 1.0, STRUCT), r"args\[1\]=2\.5 is a float, the parameter is \.u32 n"),
        ((0, 1), r"4 parameters, args has 2; .*\.u64 p, \.u32 n, \.f64 s, \.b8 t\[16\]"),
        ((0, 1, 1.0, b"x"), r"args\[3\] has 1 bytes, the parameter has 16"),
    ],
)
def test_value_that_its_parameter_does_not_take_is_explained(
    args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(emulator.LaunchError, match=message):
        _sum(*args)


@pytest.mark.parametrize(
    "value",
    [
        np.array(None), np.array([1], object)[0:1].reshape(()), np.datetime64("2020-01-01"),
        np.timedelta64(3, "s"), np.void(b"12345678"), np.str_("ab"),
        np.complex64(1), np.zeros((), [("a", "i4"), ("b", "i4")]),
    ],
    ids=lambda v: str(v.dtype),
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 2])
def test_numpy_value_that_is_no_number_is_an_error(value: Any, place: int) -> None:
    args: list[Any] = [0, 1, 1.0, STRUCT]
    args[place] = value
    with pytest.raises(emulator.LaunchError, match=rf"args\[{place}\]"):
        _sum(*args)


def test_numbers_of_every_kind_still_pass() -> None:
    for n in (1, True, np.int8(-1), np.bool_(True), np.uint64(3), np.array(2), b"1234"):
        _sum(np.uint64(0), n, np.float32(1), STRUCT)
    _sum(np.zeros(1), 1, 3, bytearray(16))


# --- other errors of the family -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, r"seed=-1 .*an int of 0 or more"),
        ({"max_steps": 0}, r"max_steps=0 .*1 or more, or None"),
        ({"max_steps": -5}, "max_steps=-5"),
        ({"seed": 1.5}, r"seed=1\.5"),
        ({"trace": 1}, r"trace=1 .*True or False"),
        ({"async_delay": "soon"}, r"async_delay='soon' .*'random', 'eager', 'late'"),
    ],
)
def test_wrong_option_is_an_error_of_the_family(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(emulator.LaunchError, match=message):
        emulator.Options(**changes)


@pytest.mark.parametrize("path", ["/tmp/x.ptx", "kernel.ptx", "C:\\k.ptx", "a b/c", "out.cubin"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("text", emulator.load_ptx),
        ("text", plant_faults),
        ("ptx", lambda path: _launcher(ptx=path)),
        ("header", lambda path: _launcher(header=path)),
    ],
)
def test_path_in_place_of_a_text_is_explained(
    name: str, call: Callable[[str], Any], path: str
) -> None:
    with pytest.raises(emulator.LaunchError) as info:
        call(path)
    text = str(info.value)
    assert text.startswith(f"{name}={path!r} is not valid")
    assert "not the path of a file" in text
    assert "read_text()" in text


def test_trace_that_was_not_collected_or_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(emulator.LaunchError, match=r"Options\(trace=True\)"):
        _launch().write_trace(tmp_path / "t.json")
    result = _launch(options=emulator.Options(trace=True))
    with pytest.raises(emulator.LaunchError, match=r"path=.* name a file that can be written"):
        result.write_trace(tmp_path / ("t" * 300))
    with pytest.raises(emulator.LaunchError, match=r"path=.*null"):
        result.write_trace("t\0.json")


def test_launcher_that_cannot_be_loaded_is_an_error_of_the_family() -> None:
    with pytest.raises(emulator.EmulatorError, match="not a 64-bit little-endian ELF") as info:
        _launcher(object_bytes=b"x")
    assert isinstance(info.value, emulator.LauncherError)
