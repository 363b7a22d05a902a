"""Block cases of the warp's matrix instructions: mma.sync, and the spellings of ldmatrix.

Lives here: the fragments as the manual's figures show them. Invariant: operands are small whole
numbers, so that the results are exact.
"""

from collections.abc import Iterator

import numpy as np
from block_numbers import draw, encode, results
from block_table import BlockCase, kernel, registers, words

MMA = "PTX ISA 9.7.15.5.14"


def fragment(codes: np.ndarray, rows: int) -> np.ndarray:
    """Return an operand in registers, [register, lane] of 32-bit words.

    Lane l holds 4 bytes of row l / 4 (+ 8 if there are 16 rows), from byte 4 (l % 4); further
    registers hold the next rows, then the next 16 bytes.
    """
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)
    row_groups, byte_groups = rows // 8, -(-raw.shape[1] // 16)
    out = np.zeros((row_groups * byte_groups, 32), np.uint32)
    for lane in range(32):
        for r in range(len(out)):
            row = lane // 4 + 8 * (r % row_groups)
            start = 16 * (r // row_groups) + lane % 4 * 4
            out[r, lane] = raw[row, start : start + 4].view(np.uint32)[0]
    return out


def wide_fragment(codes: np.ndarray, rows: int) -> np.ndarray:
    """Return an f64 operand, [register, lane, word]: column l % 4 of row l / 4, then as above."""
    row_groups, column_groups = rows // 8, codes.shape[1] // 4
    out = np.zeros((row_groups * column_groups, 32), np.uint64)
    for lane in range(32):
        for r in range(len(out)):
            row, column = lane // 4 + 8 * (r % row_groups), lane % 4 + 4 * (r // row_groups)
            out[r, lane] = codes[row, column]
    return out


def accumulator(bits: np.ndarray) -> np.ndarray:
    """Return D in registers, [register, lane]: pairs of columns of row l / 4, then 8 rows on."""
    out = np.zeros((len(bits) // 4, 32), bits.dtype)
    for lane in range(32):
        for j in range(len(out)):
            out[j, lane] = bits[lane // 4 + 8 * (j // 2), lane % 4 * 2 + j % 2]
    return out


def as_words(registers_of: np.ndarray) -> np.ndarray:
    """Return [register, lane] as 32-bit registers: f16 pairs share one, f64 take two slots."""
    if registers_of.dtype == np.uint16:
        low, high = registers_of[0::2].astype(np.uint32), registers_of[1::2].astype(np.uint32)
        return low | high << 16
    return registers_of


def mma_case(shape: str, a: str, b: str, d: str, *, tail: str = "", seed: int = 0) -> BlockCase:
    """One warp multiplies and adds."""
    m, n, k = (
        int(part) for part in shape.replace("m", "").replace("n", " ").replace("k", " ").split()
    )
    rng = np.random.default_rng(seed)
    if d == "f16":
        x, y = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (n, k))
    else:
        x, y = draw(rng, (m, k), a), draw(rng, (n, k), b)
    c = rng.integers(-100, 101, (m, n))
    total = x @ y.T + c
    make = wide_fragment if a == "f64" else fragment
    parts = [make(encode(x, a), m), make(encode(y, b), n)]
    parts += [as_words(accumulator(results(value, d))) for value in (c, total)]
    counts = [len(part) for part in parts]
    is_wide = a == "f64"
    name_of = (lambda j: f"%x{j}") if is_wide else (lambda j: f"%r{j}")
    size = 8 if is_wide else 4
    lines = [f"    mul.wide.u32 %a, %thread, {size};", "    add.u64 %b, %in, %a;",
             "    add.u64 %a, %out, %a;"]  # fmt: skip
    if is_wide:
        lines.insert(0, "    .reg .b64 %x<32>;")
    total_in = sum(counts[:3])
    lines += [
        f"    ld.global.b{8 * size} {name_of(j)}, [%b+{32 * size * j}];" for j in range(total_in)
    ]
    vectors, start = [], 0
    for count in counts[:3]:
        vectors.append("{" + ", ".join(name_of(start + j) for j in range(count)) + "}")
        start += count
    kinds = f"{d}.{a}.{b}.{d}"
    form = f"mma.sync.aligned.{shape}.row.col{tail}.{kinds}"
    lines.append(f"    {form} {vectors[2]}, {vectors[0]}, {vectors[1]}, {vectors[2]};")
    first = sum(counts[:2])
    lines += [
        f"    st.global.b{8 * size} [%a+{32 * size * j}], {name_of(first + j)};"
        for j in range(counts[2])
    ]
    return BlockCase(
        name=form, group="mma", source=MMA, ptx=kernel("\n".join(lines) + "\n"),
        inputs=np.concatenate([words(part) for part in parts[:3]]), expected=words(parts[3]),
    )  # fmt: skip


def products() -> Iterator[BlockCase]:
    """mma.sync of every shape and type."""
    for k in (8, 16):
        yield mma_case(f"m16n8k{k}", "bf16", "bf16", "f32")
        for d in ("f32", "f16"):
            yield mma_case(f"m16n8k{k}", "f16", "f16", d)
    for k in (4, 8):
        yield mma_case(f"m16n8k{k}", "tf32", "tf32", "f32")
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            yield mma_case("m16n8k32", a, b, "f32")
    for shape in ("m8n8k16", "m16n8k16", "m16n8k32"):
        for a in ("s8", "u8"):
            for b in ("s8", "u8"):
                yield mma_case(shape, a, b, "s32")
    yield mma_case("m16n8k32", "s8", "s8", "s32", tail=".satfinite")
    for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"):
        yield mma_case(shape, "f64", "f64", "f64")


def loads() -> Iterator[BlockCase]:
    """ldmatrix in its other spelling, and from rows in any order."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 1 << 32, 128, np.uint32)
    halves = data.view(np.uint16).reshape(32, 8)
    order = [(7 * row + 3) % 32 for row in range(32)]
    body = "\n".join(
        ["    shl.b32 %r8, %thread, 4;", "    add.u32 %r8, %smem, %r8;",
         "    mul.wide.u32 %a, %thread, 16;", "    add.u64 %b, %in, %a;",
         "    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%b];",
         "    st.shared.v4.b32 [%r8], {%r0, %r1, %r2, %r3};", "    bar.sync 0;",
         "    mad.lo.u32 %r9, %thread, 7, 3;", "    and.b32 %r9, %r9, 31;",
         "    shl.b32 %r9, %r9, 4;", "    add.u32 %r9, %smem, %r9;", "{load}",
         "    mul.wide.u32 %a, %thread, 4;", "    add.u64 %a, %out, %a;"]
    )  # fmt: skip
    for count, is_transposed in ((1, False), (2, True), (4, False), (4, True)):
        form = f"ldmatrix.sync.aligned.x{count}{'.trans' * is_transposed}.m8n8.shared.b16"
        vector = registers("r", count)
        text = body.replace("{load}", f"    {form} {vector}, [%r9];") + "\n"
        text += "".join(f"    st.global.b32 [%a+{128 * j}], %r{j};\n" for j in range(count))
        out = np.zeros((count, 32), np.uint32)
        for j in range(count):
            matrix = halves[[order[8 * j + row] for row in range(8)]]
            matrix = matrix.T if is_transposed else matrix
            out[j] = np.ascontiguousarray(matrix).view(np.uint32).ravel()
        yield BlockCase(
            name=form, group="mma", source="PTX ISA 9.7.15.5.15", ptx=kernel(text), inputs=data,
            expected=words(out),
        )  # fmt: skip


WMMA = "PTX ISA 9.7.15.4"
# (shape, a and b, c and d, registers of a, b, c)
WMMA_FORMS = (
    ("m16n16k16", "f16", "f32", (8, 8, 8)), ("m16n16k16", "f16", "f16", (8, 8, 4)),
    ("m32n8k16", "f16", "f32", (8, 8, 8)), ("m8n32k16", "f16", "f32", (8, 8, 8)),
    ("m16n16k16", "bf16", "f32", (4, 4, 8)), ("m16n16k8", "tf32", "f32", (4, 4, 8)),
    ("m16n16k16", "s8", "s32", (2, 2, 8)), ("m32n8k16", "u8", "s32", (4, 1, 8)),
)  # fmt: skip


def whole_products() -> Iterator[BlockCase]:
    """wmma: A in rows, B in columns, C and D in columns, each with a stride of its own."""
    for number, (shape, kind, d, counts) in enumerate(WMMA_FORMS):
        m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
        rng = np.random.default_rng(number)
        is_half = d == "f16"
        draw_one = (lambda s: rng.integers(-2, 3, s)) if is_half else (lambda s: draw(rng, s, kind))  # noqa: B023
        x, y, c = draw_one((m, k)), draw_one((n, k)), rng.integers(-50, 51, (n, m))
        parts = [encode(x, kind), encode(y, kind), results(c, d)]
        expected = results((x @ y.T).T + c, d)
        at = np.cumsum([0, *(words(part).nbytes for part in parts)]).tolist()
        text = "".join(f"    add.u64 %w{j}, %in, {at[j]};\n" for j in range(3))
        names, start = [], 0
        for count in counts:
            names.append(registers("d", count, start))
            start += count
        out = registers("d", counts[2], start)
        for j, (name, layout, stride, type_) in enumerate(
            (("a", "row", k, kind), ("b", "col", k, kind), ("c", "col", m, d))
        ):
            text += f"    wmma.load.{name}.sync.aligned.{layout}.{shape}.global.{type_} "
            text += f"{names[j]}, [%w{j}], {stride};\n"
        types = f"{d}.{d}" if kind == "f16" else f"{d}.{kind}.{kind}.{d}"
        form = f"wmma.mma.sync.aligned.row.col.{shape}.{types}"
        text += f"    {form} {out}, {', '.join(names)};\n"
        text += f"    wmma.store.d.sync.aligned.col.{shape}.global.{d} [%out], {out}, {m};\n"
        yield BlockCase(
            name=form, group="mma", source=WMMA,
            ptx=kernel(text, wide=(("d", start + counts[2]),)),
            inputs=np.concatenate([words(part) for part in parts]), expected=words(expected),
        )  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (products, loads, whole_products):
        yield from cases()
