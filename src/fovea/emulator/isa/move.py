"""mov, address conversion, and packing of vectors.

Invariant: `mov` of a register copies a reference, so registers in flight may be moved.
Source: PTX ISA 9.7.9.2 (mov), 9.7.9.20-22 (cvta, isspacep, mapa).
"""

from typing import Any

import numpy as np

from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Decoded, Inline, Instruction
from fovea.emulator.machine.memory import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_SHIFT,
)
from fovea.emulator.machine.registers import registers_of
from fovea.emulator.machine.warp import InFlight, PackedInFlight, SplitInFlight, pack_lanes
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import size_bytes

_TYPES = "pred b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"
_WINDOWS = {
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "param::entry": PARAM_WINDOW,
    "const": CONST_WINDOW,
    "global": 0,
}


@instruction("mov.type d, a", source="PTX ISA 9.7.9.2", evidence="manual-only", type=_TYPES)
def mov(ins: Instruction) -> Inline:
    """d = a; vectors on either side are packed or unpacked."""
    t = ins["type"]
    destination, source = ins.operands["d"], ins.operands["a"]
    targets = {ins.slot(register).index for register in registers_of(destination)}
    for register in registers_of(source):
        ins.program.moves.setdefault(ins.slot(register).index, set()).update(targets)
    if isinstance(source, syntax.Vector):
        return _pack(ins, source, t)
    if isinstance(destination, syntax.Vector):
        return _unpack(ins, destination, t)
    if isinstance(source, syntax.Symbol):
        space, _ = ins.variable(source.name)
        if size_bytes(t) not in (4, 8):
            raise ins.error(f"the address of a .{space} variable needs a 32- or 64-bit register")
    return ins.assign("d", ins.src("a", t), t)


@instruction("mov.vec.type d, a", source="PTX ISA 6.4.3", evidence="manual-only", vec="v2 v4",
             type="b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64")  # fmt: skip
def mov_vector(ins: Instruction) -> Inline:
    """d = a, element by element; a may be a special register of four, such as %tid."""
    count, t = int(ins["vec"][1]), ins["type"]
    if count * size_bytes(t) > 16:
        raise ins.error(f"a vector of {count} .{t} exceeds 128 bits")
    source, targets = ins.operands["a"], ins.items("d")
    items = ins.items("a")
    if isinstance(source, syntax.SpecialRegister):
        items = tuple(syntax.SpecialRegister(f"{source.name}.{c}") for c in "xyzw"[:count])
    if len(items) != count or len(targets) != count:
        raise ins.error(f"both sides must be vectors of {count}")
    results: tuple[tuple[int, str], ...] = ()
    for position, (target, item) in enumerate(zip(targets, items)):
        for register in registers_of(item):
            slots = {ins.slot(register).index for register in registers_of(target)}
            ins.program.moves.setdefault(ins.slot(register).index, set()).update(slots)
        ins.operands[f"d{position}"] = target
        results += ins.result(f"d{position}", f"v{position}", t)
        del ins.operands[f"d{position}"]
    # all elements are read before one is written: `mov.v2.u32 {a, b}, {b, a}`
    return Inline(results, tuple(f"v{n} = {ins.src_operand(a, t)}" for n, a in enumerate(items)))


def _element_type(ins: Instruction, vector: syntax.Vector, ptx_type: str) -> str:
    size, count = size_bytes(ptx_type), len(vector.items)
    if size % count or size // count not in (1, 2, 4, 8):
        raise ins.error(f"{count} elements do not make a .{ptx_type}")
    return f"b{8 * size // count}"


def _pack(ins: Instruction, source: syntax.Vector, ptx_type: str) -> Inline:
    element = _element_type(ins, source, ptx_type)
    bind = ins.program.bind
    parts = ", ".join(ins.src_operand(item, element) for item in source.items)
    whole = bind(np.dtype(f"u{size_bytes(ptx_type)}"), "dt")
    stack = bind(_interleave, "f")
    return ins.assign("d", f"{stack}({whole}, {parts})", f"b{8 * size_bytes(ptx_type)}")


def _interleave(whole: np.dtype, *parts: Any) -> Any:
    for part in parts:
        if isinstance(part, InFlight | PackedInFlight):
            return PackedInFlight(whole, list(parts))
    return pack_lanes(whole, list(parts))


def _unpack(ins: Instruction, destination: syntax.Vector, ptx_type: str) -> Inline:
    element = _element_type(ins, destination, ptx_type)
    count = len(destination.items)
    split = ins.program.bind(_split, "f")
    dtype = ins.program.bind(np.dtype(f"u{size_bytes(element)}"), "dt")
    source = ins.src("a", f"b{8 * size_bytes(ptx_type)}")
    results: tuple[tuple[int, str], ...] = ()
    for position, item in enumerate(destination.items):
        ins.operands[f"d{position}"] = item
        results += ins.result(f"d{position}", f"v[{position}]", element)
        del ins.operands[f"d{position}"]
    return Inline(results, (f"v = {split}({source}, {dtype}, {count})",))


def _split(value: Any, dtype: np.dtype, count: int) -> Any:
    if value.__class__ is PackedInFlight and len(value.parts) == count:
        return value.parts
    if isinstance(value, InFlight):
        return [SplitInFlight(value, dtype, count, position) for position in range(count)]
    return np.ascontiguousarray(value.view(dtype).reshape(-1, count).T)


@instruction("mov.b128 d, a", source="PTX ISA 9.7.9.2", evidence="manual-only")
def mov_b128(ins: Instruction) -> Decoded:
    """d = a for 128-bit registers, packed from or unpacked to two 64-bit ones."""
    destination, source = ins.operands["d"], ins.operands["a"]
    if isinstance(source, syntax.Vector):
        reads = [ins.read_operand(item, "b64") for item in source.items]
        write = ins.write("d", "b128")

        def pack(w: Any, mask: Array) -> None:
            pair = np.stack([read(w) for read in reads], axis=1)
            write(w, mask, np.ascontiguousarray(pair).view(np.dtype((np.void, 16))).ravel())

        return pack
    if isinstance(destination, syntax.Vector):
        read = ins.read("a", "b128")
        write_all = ins.write_vector("d", "b64")

        def unpack(w: Any, mask: Array) -> None:
            write_all(w, mask, _split(read(w), np.dtype(np.uint64), 2))

        return unpack
    return ins.assign("d", ins.src("a", "b128"), "b128")


@instruction("cvta.space.size d, a", source="PTX ISA 9.7.9.20", evidence="manual-only",
             space="shared shared::cta shared::cluster local param const global param::entry",
             size="u64")  # fmt: skip
def cvta(ins: Instruction) -> Inline:
    """d = generic address of an address in a state space."""
    window = _WINDOWS[ins["space"].replace("::entry", "")]
    if not window:
        return ins.assign("d", ins.src("a", "u64"), "u64")
    return ins.assign("d", f"{ins.src('a', 'u64')} | {ins.program.constant(window, 'u64')}", "u64")


@instruction(
    "cvta.to.space.size d, a",
    source="PTX ISA 9.7.9.20",
    evidence="manual-only",
    space="shared shared::cta shared::cluster local param const global",
    size="u64",
)
def cvta_to(ins: Instruction) -> Inline:
    """d = address in a state space of a generic address."""
    if not _WINDOWS[ins["space"]]:
        return ins.assign("d", ins.src("a", "u64"), "u64")
    low = ins.program.constant((1 << WINDOW_SHIFT) - 1, "u64")
    return ins.assign("d", f"{ins.src('a', 'u64')} & {low}", "u64")


@instruction(
    "isspacep.space p, a",
    source="PTX ISA 9.7.9.21",
    evidence="manual-only",
    space="shared shared::cta shared::cluster local param param::entry const global",
)
def isspacep(ins: Instruction) -> Decoded:
    """p = whether a generic address lies in a state space."""
    window = _WINDOWS[ins["space"]] >> WINDOW_SHIFT
    is_own = ins["space"] in ("shared", "shared::cta")
    read, write = ins.read("a", "u64"), ins.write("p", "pred")
    shift, low = np.uint64(WINDOW_SHIFT), np.uint64((1 << WINDOW_SHIFT) - 1)

    def run(w: Any, mask: Array) -> None:
        address = read(w)
        inside = (address >> shift) == window
        if is_own:
            inside &= ((address & low) >> np.uint64(RANK_SHIFT)) == w.cta.rank
        write(w, mask, inside)

    return run


@instruction("mapa{.space}.type d, a, b", source="PTX ISA 9.7.9.22", targets="sm_90+",
             evidence="manual-only",
             space="shared::cluster", type="u32 u64")  # fmt: skip
def mapa(ins: Instruction) -> Inline:
    """d = the address of a in the shared memory of CTA b of the cluster."""
    t = ins["type"]
    dtype = np.uint32 if t == "u32" else np.uint64
    low = dtype((1 << RANK_SHIFT) - 1)
    window = dtype(0 if t == "u32" or ins["space"] else SHARED_WINDOW)

    def function(address: Array, rank: Array) -> Array:
        return (address & low) | (rank.astype(dtype) << dtype(RANK_SHIFT)) | window

    name = ins.program.bind(function, "f")
    return ins.assign("d", f"{name}({ins.src('a', t)}, {ins.src('b', 'u32')})", t)


@instruction("getctarank{.space}.type d, a", source="PTX ISA 9.7.9.23", targets="sm_90+",
             evidence="manual-only",
             space="shared::cluster", type="u32 u64")  # fmt: skip
def getctarank(ins: Instruction) -> Inline:
    """d = rank of the CTA whose shared memory holds an address."""
    t = ins["type"]

    def function(address: Array) -> Array:
        return ((address >> address.dtype.type(RANK_SHIFT)) & 0xFF).astype(np.uint32)

    name = ins.program.bind(function, "f")
    return ins.assign("d", f"{name}({ins.src('a', t)})", "u32")
