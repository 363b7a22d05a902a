"""wmma: matrices of one warp, loaded, multiplied and stored whole.

Lives here: load, mma and store of every shape but the sub-byte ones. Not here: mma.sync
(`mma.py`), whose fragments the manual lays down. Invariant: where an element of a fragment lies is
left open by the manual; here lane l holds elements l * n to l * n + n - 1 of the matrix in rows,
as often as its registers have room for them.
Source: PTX ISA 9.7.15.4.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fovea.emulator.arithmetic.accumulate import (
    accumulation,
    multiply_exact,
    multiply_fast,
    multiply_integer,
)
from fovea.emulator.arithmetic.formats import to_float32
from fovea.emulator.isa import instruction
from fovea.emulator.isa.collective import check_aligned
from fovea.emulator.isa.instruction import Array, Decoded, Instruction
from fovea.emulator.isa.load_store import segments_of
from fovea.emulator.ptx.types import LANES

_SPACES = "global shared shared::cta"
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "s32": 4, "s8": 1, "u8": 1, "f64": 8}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHAPES = "m16n16k16 m32n8k16 m8n32k16 m16n16k8 m8n8k4"
_ABC = "f16 bf16 tf32 f32 s32 s8 u8 f64"


def _sizes(ins: Instruction) -> tuple[int, int, int]:
    m, _, rest = ins["shape"][1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


def _register_type(kind: str) -> str:
    return "b64" if kind == "f64" else "b32"


def _check_registers(ins: Instruction, name: str, elements: int, kind: str) -> None:
    """Raise unless the registers hold the matrix a whole number of times."""
    per_register = 8 if kind == "f64" else 4
    room = len(ins.items(name)) * LANES * per_register // _BYTES[kind]
    if room < elements or room % elements:
        raise ins.error(
            f"{len(ins.items(name))} registers of {name} hold {room} elements; the matrix has "
            f"{elements}"
        )


def _to_registers(matrix: Array, count: int) -> list[Array]:
    """Return a fragment: [rows, columns] raw elements in `count` registers of each lane."""
    own = np.ascontiguousarray(matrix).reshape(LANES, -1)
    wide = np.uint64 if own.dtype.itemsize == 8 else np.uint32
    words = own.view(wide)
    repeated = np.tile(words, (1, count // words.shape[1]))
    return [np.ascontiguousarray(repeated[:, n]) for n in range(count)]


def _to_matrix(registers: Sequence[Array], rows: int, columns: int, kind: str) -> Array:
    """Return the [rows, columns] raw elements of a fragment."""
    words = np.stack([np.ascontiguousarray(register) for register in registers], axis=1)
    raw = words.view(_UNSIGNED[_BYTES[kind]])
    own = np.ascontiguousarray(raw[:, : rows * columns // LANES])
    return own.reshape(rows, columns)


def _places(ins: Instruction, rows: int, columns: int) -> Callable[[Any], Array]:
    """Return a reader of the addresses [32, elements] of each lane's elements in memory."""
    size = _BYTES[ins["type"]]
    is_row_major = ins["layout"] == "row"
    address = ins.address("p")
    read_stride = ins.read("stride", "u32") if ins.has("stride") else None
    row, column = np.divmod(np.arange(rows * columns), columns)
    major, minor = (row, column) if is_row_major else (column, row)
    default = columns if is_row_major else rows

    def read(w: Any) -> Array:
        stride = default if read_stride is None else int(read_stride(w)[0])
        offsets = (major * stride + minor) * size
        return address(w)[0].astype(np.uint64) + offsets.astype(np.uint64).reshape(LANES, -1)

    return read


def _matrix_of(ins: Instruction) -> tuple[int, int]:
    m, n, k = _sizes(ins)
    return {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[ins["matrix"]]


@instruction("wmma.load.matrix.sync.aligned.layout.shape{.space}.type r, [p]{, stride}",
             source="PTX ISA 9.7.15.4.3", evidence="manual-only", kind="memory", matrix="a b c",
             layout="row col", shape=_SHAPES, space=_SPACES, type=_ABC)  # fmt: skip
def wmma_load(ins: Instruction) -> Decoded:
    """r = the fragment of a matrix in memory."""
    rows, columns = _matrix_of(ins)
    kind, count = ins["type"], len(ins.items("r"))
    _check_registers(ins, "r", rows * columns, kind)
    places, segments = _places(ins, rows, columns), segments_of(ins, ins["space"], "p")
    write = ins.write_vector("r", _register_type(kind))
    size = _BYTES[kind]

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        addresses = places(w)
        values = np.zeros(addresses.shape, _UNSIGNED[size])
        access = w.touch(ins, mask)
        for n in range(addresses.shape[1]):
            for segment, offsets, lanes in segments(w, addresses[:, n], mask):
                found = segment.load(offsets, size, 1, access)[0]
                values[slice(None) if lanes is None else lanes, n] = found
        write(w, mask, _to_registers(values, count))

    return run


@instruction("wmma.store.matrix.sync.aligned.layout.shape{.space}.type [p], r{, stride}",
             source="PTX ISA 9.7.15.4.4", evidence="manual-only", kind="memory", matrix="d",
             layout="row col", shape=_SHAPES, space=_SPACES, type="f16 f32 s32 f64")  # fmt: skip
def wmma_store(ins: Instruction) -> Decoded:
    """Store a fragment of D."""
    rows, columns = _matrix_of(ins)
    kind = ins["type"]
    _check_registers(ins, "r", rows * columns, kind)
    places, segments = _places(ins, rows, columns), segments_of(ins, ins["space"], "p")
    read = ins.read_vector("r", _register_type(kind))
    size = _BYTES[kind]

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        addresses = places(w)
        values = _to_matrix(read(w), rows, columns, kind).reshape(LANES, -1)
        access = w.touch(ins, mask)
        for n in range(addresses.shape[1]):
            for segment, offsets, lanes in segments(w, addresses[:, n], mask):
                part = values[slice(None) if lanes is None else lanes, n]
                segment.store(offsets, part[None], size, access)

    return run


_MMA = "wmma.mma.sync.aligned.alayout.blayout.shape"


@instruction(f"{_MMA}.dtype.ctype{{.satfinite}} d, a, b, c", source="PTX ISA 9.7.15.4.5",
             evidence="manual-only", kind="mma", alayout="row col", blayout="row col",
             shape="m16n16k16 m32n8k16 m8n32k16", dtype="f16 f32", ctype="f16 f32")  # fmt: skip
@instruction(f"{_MMA}.dtype.atype.btype.ctype{{.satfinite}} d, a, b, c",
             f"{_MMA}.rnd.dtype.atype.btype.ctype d, a, b, c", source="PTX ISA 9.7.15.4.5",
             evidence="manual-only", kind="mma", alayout="row col", blayout="row col",
             shape=_SHAPES, dtype="f32 s32 f64", atype="bf16 tf32 s8 u8 f64", rnd="rn rz rm rp",
             btype="bf16 tf32 s8 u8 f64", ctype="f32 s32 f64")  # fmt: skip
def wmma_mma(ins: Instruction) -> Decoded:
    """d = a * b + c of fragments."""
    m, n, k = _sizes(ins)
    a_type, b_type = ins["atype"] or "f16", ins["btype"] or "f16"
    shapes = {"a": (m, k, a_type), "b": (k, n, b_type), "c": (m, n, ins["ctype"])}
    for name, (rows, columns, kind) in (shapes | {"d": (m, n, ins["dtype"])}).items():
        _check_registers(ins, name, rows * columns, kind)
    if ins["rnd"] not in ("", "rn"):
        raise ins.error(f".{ins['rnd']} of a product in double precision is not implemented")
    reads = {
        name: ins.read_vector(name, _register_type(kind)) for name, (*_, kind) in shapes.items()
    }
    count = len(ins.items("d"))
    write = ins.write_vector("d", _register_type(ins["dtype"]))

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        a, b, c = (_to_matrix(reads[name](w), *shapes[name]) for name in "abc")
        d = _product(ins, (a, a_type), (b, b_type), c, exact=w.machine.options.exact_mma)
        w.machine.counters.add(f"mma_flops.{a_type}", 2 * m * n * k)
        write(w, mask, _to_registers(d, count))

    return run


def _product(
    ins: Instruction, a: tuple[Array, str], b: tuple[Array, str], c: Array, *, exact: bool
) -> Array:
    """Return the raw elements of D."""
    (x, a_type), (y, b_type) = a, b
    if a_type == "f64":
        return x.view(np.float64) @ y.view(np.float64) + c.view(np.float64)
    if ins["dtype"] == "s32":
        kinds = [np.int8 if kind == "s8" else np.uint8 for kind in (a_type, b_type)]
        saturates = ins.has("satfinite")
        whole = multiply_integer(
            x.view(kinds[0]), y.view(kinds[1]), c.view(np.int32), saturates=saturates
        )
        return whole.astype(np.int32)
    added = c.view(np.float16 if ins["ctype"] == "f16" else np.float32)
    narrow = np.float16 if ins["dtype"] == "f16" else np.float32
    left, right, added = to_float32(x, a_type), to_float32(y, b_type), added.astype(narrow)
    if exact:
        how = accumulation("hopper", a_type, ins["dtype"])
        found = multiply_exact(left, right, added, a_format=a_type, b_format=b_type, how=how)
    else:
        found = multiply_fast(left, right, added)
    return found.astype(narrow)
