"""mma.sync: matrix multiply-accumulate of one warp.

Lives here: fragments of the m16n8 shapes and m8n8k4, dense and sparse. Not here: accumulation
(`arithmetic/`), places of sparsity metadata (`layout/sparsity.py`), wgmma and tcgen05.
Invariant: fragments are gathered to whole matrices, multiplied, scattered.
Source: PTX ISA 9.7.15.5 (fragment figures).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from fovea.emulator.arithmetic.accumulate import (
    accumulation,
    multiply_exact,
    multiply_fast,
    multiply_integer,
)
from fovea.emulator.arithmetic.formats import to_float32
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.collective import check_aligned
from fovea.emulator.isa.instruction import Array, Decoded, Instruction
from fovea.emulator.layout.sparsity import (
    DISTINCT,
    ONE_OF_TWO,
    ORDERED,
    codes_from_registers,
    expand,
)
from fovea.emulator.ptx.types import LANES

_COLUMNS = 8
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f64": 8}


@cache
def _places(kind: str, rows: int, registers: int, per: int) -> Array:
    """Return, for each element of A, B or C, its place in a [registers, lanes, per] block.

    Fragments: pairs of registers of A (and C) are 8 rows apart; a lane holds `per` consecutive
    elements along K (along N for C).
    """
    number, lane, element = np.meshgrid(
        np.arange(registers), np.arange(LANES), np.arange(per), indexing="ij"
    )
    group, member = lane // 4, lane % 4
    if kind == "a":
        stride = 2 if rows == 16 else 1
        row = group + 8 * (number % stride)
        column = 4 * per * (number // stride) + member * per + element
        shape = (rows, 4 * per * registers // stride)
    elif kind == "b":
        row, column = 4 * per * number + member * per + element, group
        shape = (4 * per * registers, _COLUMNS)
    else:
        row, column = group + 8 * (number // 2), 2 * member + number % 2
        shape = (rows, _COLUMNS)
    places = np.zeros(shape, np.intp)
    places[row, column] = np.arange(number.size).reshape(number.shape)
    return places


def _gather(kind: str, registers: Sequence[Array], dtype: Any, rows: int) -> Array:
    block = np.array(registers).view(dtype)
    per = block.size // (len(registers) * LANES)
    return block.reshape(-1)[_places(kind, rows, len(registers), per)]


def gather_a(registers: Sequence[Array], dtype: Any, rows: int) -> Array:
    """Return A (rows x K) from its fragment; `dtype` is the element type of the registers."""
    return _gather("a", registers, dtype, rows)


def gather_b(registers: Sequence[Array], dtype: Any) -> Array:
    """Return B (K x 8) from its fragment."""
    return _gather("b", registers, dtype, _COLUMNS)


def gather_c(registers: Sequence[Array], rows: int, dtype: Any) -> Array:
    """Return C (rows x 8) from its fragment of full-width registers."""
    return _gather("c", registers, dtype, rows)


def scatter_d(matrix: Array, count: int) -> list[Array]:
    """Return the fragment of D as full-width registers."""
    block = np.empty(count * LANES, matrix.dtype)
    block[_places("c", matrix.shape[0], count, 1)] = matrix
    return list(block.reshape(count, LANES))


def _expect(ins: Instruction, name: str, count: int) -> None:
    if len(ins.items(name)) != count:
        raise ins.error(f"{name} has {len(ins.items(name))} registers, the shape needs {count}")


_SOURCE = "PTX ISA 9.7.15.5.14"


def _sparse(
    shape: str, satfinite: str = "", **types: str
) -> Callable[[Callable[[Instruction], Decoded]], Callable[[Instruction], Decoded]]:
    """Register a decoder for the sparse forms of some shapes."""
    form = f"sync.aligned.shape.row.col{satfinite}.dtype.atype.btype.ctype d, a, b, c, e, f"
    return instruction(
        f"mma.sp.{form}", f"mma.sp::ordered_metadata.{form}",
        source="PTX ISA 9.7.15.5.15", evidence="inferred", kind="mma", shape=shape, **types,
    )  # fmt: skip


def _whole_a(ins: Instruction, depth: int) -> Callable[[Any, Array], Array] | None:
    """Return what makes a packed sparse A whole, or None in a dense form."""
    if "e" not in ins.operands:
        return None
    read, selector = ins.read("e", "b32"), ins.immediate("f")
    chunks = depth // (2 if ins["atype"] == "tf32" else 4)
    allowed = ORDERED if ".sp::ordered_metadata" in ins.opcode else DISTINCT
    allowed = ONE_OF_TWO if ins["atype"] == "tf32" else allowed
    codes_of = partial(
        codes_from_registers,
        selector=selector,
        chunks=chunks,
        is_narrow=ins["atype"] in ("e4m3", "e5m2", "s8", "u8"),
    )
    try:
        codes_of(np.zeros(LANES, np.uint32))
    except ValueError as error:
        raise ins.error(str(error)) from error

    def whole(w: Any, packed: Array) -> Array:
        codes = codes_of(read(w).view(np.uint32))
        try:
            return expand(packed, codes, allowed)
        except ValueError as error:
            raise IllegalOperand(str(error), w.where(ins)) from error

    return whole


@instruction("mma.sync.aligned.shape.row.col.dtype.atype.btype.ctype d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m16n8k8 m16n8k16",
             dtype="f16 f32", atype="f16", btype="f16", ctype="f16 f32")  # fmt: skip
@instruction("mma.sync.aligned.shape.row.col.dtype.atype.btype.ctype d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m16n8k8 m16n8k16",
             dtype="f32", atype="bf16", btype="bf16", ctype="f32")  # fmt: skip
@instruction("mma.sync.aligned.shape.row.col.dtype.atype.btype.ctype d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m16n8k4 m16n8k8",
             dtype="f32", atype="tf32", btype="tf32", ctype="f32")  # fmt: skip
@instruction("mma.sync.aligned.shape.row.col.dtype.atype.btype.ctype d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m16n8k16 m16n8k32",
             targets="sm_89+", dtype="f16 f32", atype="e4m3 e5m2", btype="e4m3 e5m2",
             ctype="f16 f32")  # fmt: skip
@instruction("mma.sync.aligned.shape.row.col.kind::f8f6f4.dtype.atype.btype.ctype d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m16n8k16 m16n8k32",
             targets="sm_100a,sm_100f,sm_101a,sm_103a,sm_103f,sm_110a,sm_120a",
             dtype="f16 f32", atype="e4m3 e5m2", btype="e4m3 e5m2", ctype="f16 f32")  # fmt: skip
@_sparse("m16n8k16 m16n8k32", dtype="f16 f32", atype="f16", btype="f16", ctype="f16 f32")
@_sparse("m16n8k16 m16n8k32", dtype="f32", atype="bf16", btype="bf16", ctype="f32")
@_sparse("m16n8k8 m16n8k16", dtype="f32", atype="tf32", btype="tf32", ctype="f32")
@_sparse("m16n8k64", targets="sm_89+", dtype="f32", atype="e4m3 e5m2", btype="e4m3 e5m2",
         ctype="f32")  # fmt: skip
def mma_float(ins: Instruction) -> Decoded:
    """d = a * b + c in floats."""
    size, depth = _BYTES[ins["atype"]], int(ins["shape"].partition("k")[2])
    whole = _whole_a(ins, depth)
    _expect(ins, "a", 16 * depth * size // (128 if whole is None else 256))
    _expect(ins, "b", 8 * depth * size // 128)
    half_c, half_d = ins["ctype"] == "f16", ins["dtype"] == "f16"
    _expect(ins, "c", 2 if half_c else 4)
    _expect(ins, "d", 2 if half_d else 4)
    raw = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
    read_a, read_b = ins.read_vector("a", "b32"), ins.read_vector("b", "b32")
    read_c = ins.read_vector("c", "b32" if half_c else "f32")
    write = ins.write_vector("d", "b32" if half_d else "f32")
    flops = f"mma_flops.{ins['atype']}"
    how = accumulation("hopper", ins["atype"], ins["dtype"])

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        packed = gather_a(read_a(w), raw, 16)
        a = to_float32(packed if whole is None else whole(w, packed), ins["atype"])
        b = to_float32(gather_b(read_b(w), raw), ins["btype"])
        c = _half_c(read_c(w)) if half_c else gather_c(read_c(w), 16, np.float32)
        if half_d:
            c = c.astype(np.float16)
        elif half_c:
            c = c.astype(np.float32)
        if w.machine.options.exact_mma:
            d = multiply_exact(a, b, c, a_format=ins["atype"], b_format=ins["btype"], how=how)
        else:
            d = multiply_fast(a, b, c)
        w.machine.counters.add(flops, 2 * 16 * 8 * depth)
        if half_d:
            write(w, mask, _half_d(d.astype(np.float16)))
        else:
            write(w, mask, scatter_d(d.astype(np.float32), 4))

    return run


def _half_c(registers: Sequence[Array]) -> Array:
    pairs = [np.ascontiguousarray(r).view(np.float16).reshape(LANES, 2) for r in registers]
    return gather_c([pairs[n // 2][:, n % 2] for n in range(4)], 16, np.float16)


def _half_d(matrix: Array) -> list[Array]:
    lanes = scatter_d(matrix, 4)
    return [
        np.ascontiguousarray(np.stack(lanes[2 * n : 2 * n + 2], axis=1)).view(np.uint32).ravel()
        for n in range(2)
    ]


@instruction("mma.sync.aligned.shape.row.col{.satfinite}.s32.atype.btype.s32 d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m16n8k16 m16n8k32",
             atype="s8 u8", btype="s8 u8")  # fmt: skip
@instruction("mma.sync.aligned.shape.row.col{.satfinite}.s32.atype.btype.s32 d, a, b, c",
             source=_SOURCE, evidence="manual-only", kind="mma", shape="m8n8k16",
             atype="s8 u8", btype="s8 u8")  # fmt: skip
@_sparse("m16n8k32 m16n8k64", "{.satfinite}", dtype="s32", atype="s8 u8", btype="s8 u8",
         ctype="s32")  # fmt: skip
def mma_integer(ins: Instruction) -> Decoded:
    """d = a * b + c in 8-bit integers."""
    rows = int(ins["shape"][1:].partition("n")[0])
    depth = int(ins["shape"].partition("k")[2])
    whole = _whole_a(ins, depth)
    _expect(ins, "a", rows * depth // (128 if whole is None else 256))
    _expect(ins, "b", 8 * depth // 128)
    count = rows * 8 // LANES
    _expect(ins, "c", count)
    _expect(ins, "d", count)
    kinds = [np.int8 if ins[name] == "s8" else np.uint8 for name in ("atype", "btype")]
    read_a, read_b = ins.read_vector("a", "b32"), ins.read_vector("b", "b32")
    read_c, write = ins.read_vector("c", "s32"), ins.write_vector("d", "s32")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        a, b = gather_a(read_a(w), kinds[0], rows), gather_b(read_b(w), kinds[1])
        a = a if whole is None else whole(w, a)
        c = gather_c(read_c(w), rows, np.int32)
        d = multiply_integer(a, b, c, saturates=ins.has("satfinite"))
        w.machine.counters.add(f"mma_flops.{ins['atype']}", 2 * rows * 8 * depth)
        write(w, mask, scatter_d(d.astype(np.int32), count))

    return run


@instruction("mma.sync.aligned.shape.row.col{.rnd}.f64.f64.f64.f64 d, a, b, c",
             source=_SOURCE, evidence="inferred", kind="mma",
             shape="m8n8k4 m16n8k4 m16n8k8 m16n8k16", rnd="rn")  # fmt: skip
def mma_double(ins: Instruction) -> Decoded:
    """d = a * b + c in double precision (products and sums each rounded)."""
    rows = int(ins["shape"][1:].partition("n")[0])
    depth = int(ins["shape"].partition("k")[2])
    _expect(ins, "a", rows * depth // LANES)
    _expect(ins, "b", 8 * depth // LANES)
    count = rows * 8 // LANES
    read_a, read_b = ins.read_vector("a", "f64"), ins.read_vector("b", "f64")
    read_c, write = ins.read_vector("c", "f64"), ins.write_vector("d", "f64")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        a, b = gather_a(read_a(w), np.float64, rows), gather_b(read_b(w), np.float64)
        d = a @ b + gather_c(read_c(w), rows, np.float64)
        w.machine.counters.add("mma_flops.f64", 2 * rows * 8 * depth)
        write(w, mask, scatter_d(d, count))

    return run
