"""The table of single-instruction cases: how each form is exercised.

Lives here: forms, operand types, input values, and the PTX around an instruction. Not here:
expected values (in `cases/*.ptx`, recorded on silicon or computed by hand). Invariant: a case is a
kernel `case(in, out)`: thread i reads its inputs from 8-byte slots `in[i * inputs + j]` and writes
its results to `out[i * outputs + j]`.
"""

from dataclasses import dataclass

import numpy as np

THREADS = 32
SOURCE_TARGET = "sm_90a"
_REGISTER = {"pred": "pred", "8": "b16", "16": "b16", "32": "b32", "64": "b64"}


@dataclass(frozen=True, slots=True)
class Case:
    """One case: the form, its operands and its body."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    target: str = SOURCE_TARGET
    is_approximate: bool = False  # compared within a bound, not bit for bit
    group: str = ""


def width(kind: str) -> str:
    """Return the register width of an operand kind: "pred", "8", "16", "32" or "64"."""
    if kind == "pred":
        return "pred"
    for bits in ("64", "32", "16", "8"):
        if kind.endswith(bits):
            return "16" if kind == "bf16" else bits
    return {"shift": "32", "lane": "32", "f16x2": "32", "bf16x2": "32", "f32x2": "64",
            "small": "32", "pair8": "16", "angle": "32"}[kind]  # fmt: skip


def render(case: Case) -> str:
    """Return the PTX of a case, without expected values."""
    declare, load, store = [], [], []
    for letter, kinds, into in (("i", case.inputs, load), ("o", case.outputs, store)):
        for j, kind in enumerate(kinds):
            w = width(kind)
            name = f"%{letter}{j}"
            declare.append(f".reg .{_REGISTER[w]} {name};")
            slot = f"[%{'src' if letter == 'i' else 'dst'}+{8 * j}]"
            if letter == "i" and w == "pred":
                into += [f"ld.global.b32 %t, {slot};", "and.b32 %t, %t, 1;",
                         f"setp.ne.u32 {name}, %t, 0;"]  # fmt: skip
            elif letter == "i":
                into.append(f"ld.global.b{w} {name}, {slot};")
            elif w == "pred":
                into += [f"selp.b64 %w, 1, 0, {name};", f"st.global.b64 {slot}, %w;"]
            else:
                into += [f"st.global.b64 {slot}, 0;", f"st.global.b{w} {slot}, {name};"]
    lines = [
        ".version 8.7", f".target {case.target}", ".address_size 64", "",
        ".visible .entry case(.param .u64 in, .param .u64 out)", "{",
        "    .reg .b32 %t, %me, %base; .reg .b64 %src, %dst, %w;",
        *(f"    {line}" for line in declare),
        "    ld.param.u64 %src, [in]; ld.param.u64 %dst, [out];",
        "    mov.u32 %me, %tid.x; mov.u32 %base, %ctaid.x; mov.u32 %t, %ntid.x;",
        "    mad.lo.u32 %base, %base, %t, %me;",
        f"    mul.wide.u32 %w, %base, {8 * max(len(case.inputs), 1)}; add.u64 %src, %src, %w;",
        f"    mul.wide.u32 %w, %base, {8 * len(case.outputs)}; add.u64 %dst, %dst, %w;",
        *(f"    {line}" for line in load),
        *(f"    {line.strip()}" for line in case.body.strip().splitlines()),
        *(f"    {line}" for line in store),
        "    ret;", "}", "",
    ]  # fmt: skip
    return "\n".join(lines)


# --- inputs ---------------------------------------------------------------------------------------

_F32 = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000,
        0xFFC12345, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F7FFFFF,
        0x4B000001, 0xCB800000, 0x3F000000, 0x40200000, 0xC0600000, 0x4F000000, 0x33800000,
        0x3F808000, 0x3F818000, 0x477FF000, 0x38800000, 0x43E00000]  # fmt: skip
_F16 = [0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFD23, 0x0001, 0x83FF, 0x0400,
        0x7BFF, 0xFBFF, 0x3BFF, 0x3555, 0x4248, 0x5F00, 0xDF01]  # fmt: skip
_BF16 = [0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFA3, 0x0001, 0x807F, 0x0080,
         0x7F7F, 0xFF7F, 0x3F7F, 0x3EAB, 0x4049, 0x4380]  # fmt: skip
_F64 = [0x0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000,
        0xFFF0000000000000, 0x7FF8000000000000, 0x1, 0x7FEFFFFFFFFFFFFF, 0x3FE5555555555555,
        0x41DFFFFFFFC00000, 0xC1E0000000200000, 0x43E0000000000000, 0x36A0000000000000,
        0x380FFFFFF0000000, 0x3FF0000010000000, 0x3FF0000030000000]  # fmt: skip


def inputs_of(case: Case, threads: int = THREADS, seed: int = 0) -> np.ndarray:
    """Return `(threads, inputs)` uint64 slots: edge values first in every mixture, then random."""
    rng = np.random.Generator(np.random.PCG64([seed, sum(case.name.encode())]))
    columns = [_values(kind, threads, rng) for kind in case.inputs]
    if not columns:
        return np.zeros((threads, 1), np.uint64)
    return np.stack(columns, axis=1)


def _values(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    bits = {"pred": 1, "shift": 6, "lane": 5, "small": 4}.get(kind)
    if bits is not None:
        return rng.integers(0, 1 << bits, count, np.uint64)
    if kind == "angle":
        return rng.uniform(-8, 8, count).astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind in ("f16x2", "bf16x2", "f32x2"):
        half = _values(kind[:-2], 2 * count, rng).reshape(count, 2)
        return half[:, 0] | half[:, 1] << np.uint64(32 if kind == "f32x2" else 16)
    edges = {"f32": _F32, "f16": _F16, "bf16": _BF16, "f64": _F64}.get(kind)
    size = int(width(kind)) if kind != "pair8" else 16
    if edges is None:
        top = (1 << size) - 1
        edges = [0, 1, top, top >> 1, (top >> 1) + 1, 2, 31, 32, 33, top - 1, 0x55 & top]
    values = rng.integers(0, 1 << 63, count, np.uint64) << np.uint64(1)
    values |= rng.integers(0, 2, count, np.uint64)
    values >>= np.uint64(64 - size)
    if kind in ("f32", "f16", "bf16", "f64"):
        values = _near_one(values, kind, rng)
    chosen = rng.random(count) < 0.4
    picks = np.array(edges, np.uint64)[rng.integers(0, len(edges), count)]
    return np.where(chosen, picks, values)


def _near_one(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Put most exponents near 1, where sums and roundings interact."""
    fraction, bias = {"f32": (23, 127), "f16": (10, 15), "bf16": (7, 127), "f64": (52, 1023)}[kind]
    exponent = rng.integers(bias - 6, bias + 7, len(values), np.uint64)
    sign = values >> np.uint64(fraction) & np.uint64(1)
    low = values & np.uint64((1 << fraction) - 1)
    near = low | exponent << np.uint64(fraction)
    bits = {"f32": 32, "f16": 16, "bf16": 16, "f64": 64}[kind]
    near |= sign << np.uint64(bits - 1)
    return np.where(rng.random(len(values)) < 0.8, near, values)
