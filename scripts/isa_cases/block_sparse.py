"""Block cases of sparse products: mma.sp, wgmma.mma_async.sp, tcgen05.mma.sp; and of `.ws`.

Lives here: sparse matrices, their packed form and metadata as the manual describes them, and the
zero-column mask. Not here: dense products. Invariant: operands are small whole numbers, so that the
results are exact; the dense matrix is drawn first and packed from there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from block_matrices import accumulator, as_words, fragment
from block_numbers import FORMATS, draw, encode, results
from block_operands import Operand, k_major
from block_table import (
    INIT_BARRIERS,
    BlockCase,
    fill,
    kernel,
    registers,
    store_registers,
    wait,
    words,
)
from block_tcgen05 import B_AT, CODE, D_CODE, KIND, chosen_columns, describe, rows_out
from block_tmem import COMMIT, WAIT_LD, WAIT_ST, alloc, dealloc, store_some
from block_wgmma import accumulators, address, tail_of, warpgroup_fragment

MMA = "PTX ISA 9.7.15.5.15 (places of the metadata in figures; those of silicon)"
WGMMA = "PTX ISA 9.7.15.6 (places of the metadata in figures; those of silicon)"
TCGEN05 = "PTX ISA 9.7.16.10.8 (places of the metadata inferred)"
STATIONARY = "PTX ISA 9.7.16.10.9.3 and 9.7.16.4.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """A sparse matrix: whole, packed, and the code of each chunk of a row."""

    whole: np.ndarray
    packed: np.ndarray
    codes: np.ndarray


def sparse_matrix(rng: np.random.Generator, rows: int, k: int, kind: str) -> Sparse:
    """Draw a matrix with half of its elements stored, zeros among them too."""
    chunk = 2 if kind == "tf32" else 4
    whole = np.zeros((rows, k), np.int64)
    packed: list[list[int]] = []
    codes = np.zeros((rows, k // chunk), np.int64)
    values = draw(rng, (rows, k // 2), kind)
    for row in range(rows):
        line: list[int] = []
        for n in range(k // chunk):
            if chunk == 2:
                place = int(rng.integers(2))
                places, codes[row, n] = [place], 0b1110 if place else 0b0100
            else:
                places = sorted(rng.choice(4, 2, replace=False).tolist())
                codes[row, n] = places[0] | places[1] << 2
            for place in places:
                whole[row, chunk * n + place] = values[row, len(line)]
                line.append(int(values[row, len(line)]))
        packed.append(line)
    return Sparse(whole=whole, packed=np.array(packed), codes=codes)


def warp_metadata(codes: np.ndarray, selector: int, kind: str) -> np.ndarray:
    """Return the metadata registers of 16 rows; threads that do not count hold a tell-tale."""
    is_narrow = FORMATS[kind][0] == 1  # a word belongs to one row of the two
    chunks = codes.shape[1]
    threads = chunks // 4  # of the four of a group
    out = np.full(32, 0xDEADBEEF, np.uint32)
    for group in range(8):
        for thread in range(threads):
            word = 0
            for place in range(8):
                half, chunk = divmod(place, 4)
                row, first = group + 8 * half, 4 * thread
                if is_narrow:
                    row, first, chunk = group + 8 * (thread % 2), 8 * (thread // 2), place
                word |= int(codes[row, first + chunk]) << 4 * place
            out[4 * group + selector * threads + thread] = word
    return out


def loads_of(parts: list[np.ndarray], letter: str, threads: int) -> str:
    """Thread t loads register j from word j * threads + t of `in`."""
    count = sum(len(part) for part in parts)
    lines = ["    mul.wide.u32 %a, %thread, 4;", "    add.u64 %b, %in, %a;"]
    lines += [f"    ld.global.b32 %{letter}{j}, [%b+{4 * threads * j}];" for j in range(count)]
    return "\n".join(lines) + "\n"


def warp_products() -> Iterator[BlockCase]:
    """mma.sp of every shape and type, with every selector of one."""
    shapes = [(k, kind, d) for k in (16, 32) for kind, d in
              (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))]  # fmt: skip
    shapes += [(8, "tf32", "f32"), (16, "tf32", "f32"), (64, "e4m3", "f32"), (64, "e5m2", "f32")]
    shapes += [(32, "s8", "s32"), (64, "s8", "s32"), (64, "u8", "s32")]
    for number, (k, kind, d) in enumerate(shapes):
        chunks = k // (2 if kind == "tf32" else 4)
        for selector in range({4: 4, 8: 2, 16: 1}[chunks] if number < 4 else 1):
            rng = np.random.default_rng(number)
            is_half = d == "f16"
            source = "e5m2" if is_half else kind  # small numbers: the sums must fit f16
            a = sparse_matrix(rng, 16, k, source)
            y = rng.integers(-2, 3, (8, k)) if is_half else draw(rng, (8, k), kind)
            c = rng.integers(-100, 101, (16, 8))
            parts = [fragment(encode(a.packed, kind), 16), fragment(encode(y, kind), 8)]
            parts += [as_words(accumulator(results(c, d)))]
            parts += [warp_metadata(a.codes, selector, kind)[None]]
            expected = as_words(accumulator(results(a.whole @ y.T + c, d)))
            at = np.cumsum([0, *(len(part) for part in parts)]).tolist()
            vectors = [registers("d", len(part), start) for part, start in zip(parts, at)]
            ordered = "::ordered_metadata" * (number % 2)
            form = f"mma.sp{ordered}.sync.aligned.m16n8k{k}.row.col.{d}.{kind}.{kind}.{d}"
            body = loads_of(parts, "d", 32)
            body += f"    {form} {vectors[2]}, {vectors[0]}, {vectors[1]}, {vectors[2]}, "
            body += f"%d{at[3]}, {selector};\n    add.u64 %a, %out, %a;\n"
            body += "".join(
                f"    st.global.b32 [%a+{128 * j}], %d{at[2] + j};\n" for j in range(len(expected))
            )
            yield BlockCase(
                name=f"{form} selector {selector}", group="sparse", source=MMA,
                ptx=kernel(body, wide=(("d", at[-1]),)),
                inputs=np.concatenate([words(part) for part in parts]), expected=words(expected),
            )  # fmt: skip


def warpgroup_products() -> Iterator[BlockCase]:
    """wgmma.mma_async.sp of every type, A from shared memory and from registers."""
    for number, (kind, d, k) in enumerate((
        ("bf16", "f32", 32), ("f16", "f32", 32), ("f16", "f16", 32), ("tf32", "f32", 16),
        ("e4m3", "f32", 64), ("e5m2", "f16", 64), ("s8", "s32", 64), ("u8", "s32", 64),
    )):  # fmt: skip
        for in_registers in (False, True):
            selector = 1 if in_registers and FORMATS[kind][0] > 1 else 0
            yield _warpgroup_case(number, (kind, d, k), selector, in_registers=in_registers)


def _warpgroup_case(
    number: int, what: tuple[str, str, int], selector: int, *, in_registers: bool
) -> BlockCase:
    kind, d, k = what
    rng, n = np.random.default_rng(50 + number), 16
    is_half = d == "f16"
    a = sparse_matrix(rng, 64, k, "e5m2" if is_half else kind)
    y = rng.integers(-2, 3, (n, k)) if is_half else draw(rng, (n, k), kind)
    start = rng.integers(-50, 51, (64, n))
    operand_a, operand_b = k_major(encode(a.packed, kind), 32), k_major(encode(y, kind), 64)
    before = as_words(accumulators(results(start, d)))
    expected = as_words(accumulators(results(a.whole @ y.T + start, d)))
    meta = np.concatenate(
        [warp_metadata(a.codes[16 * w : 16 * w + 16], selector, kind) for w in range(4)]
    )
    parts = [before, meta[None], warpgroup_fragment(encode(a.packed, kind))]
    body = loads_of(parts, "d", 128)
    at = words(np.concatenate(parts)).nbytes
    body += fill(operand_a.raw.nbytes, "fill_a", start=at)
    body += fill(operand_b.raw.nbytes, "fill_b", start=at + operand_a.raw.nbytes, at=B_AT)
    body += "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
    body += address(operand_a, "%smem", "%w0")
    body += f"    add.u32 %j, %smem, {B_AT};\n" + address(operand_b, "%j", "%w1")
    body += "    wgmma.fence.sync.aligned;\n"
    count = len(before)
    first = registers("d", 4, count + 1) if in_registers else "%w0"
    tail = tail_of(kind, a_registers=in_registers)
    form = f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{k}.{d}.{kind}.{kind}"
    body += f"    {form} {registers('d', count)}, {first}, %w1, %d{count}, {selector}, 1"
    body += f"{', ' + tail if tail else ''};\n"
    body += "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n"
    body += store_registers(count)
    place = "A in registers" if in_registers else "A in shared memory"
    return BlockCase(
        name=f"{form} selector {selector} {place}", group="sparse", source=WGMMA, threads=128,
        ptx=kernel(body, shared=32768, wide=(("d", count + 5),)),
        inputs=np.concatenate([words(x) for x in (*parts, operand_a.raw, operand_b.raw)]),
        expected=words(expected),
    )  # fmt: skip


# --- tensor memory --------------------------------------------------------------------------------


def tensor_metadata(codes: np.ndarray, kind: str) -> np.ndarray:
    """Return [lane, column] words of the metadata of 128 rows, from the selector's column on."""
    rows, chunks = codes.shape
    if FORMATS[kind][0] == 1:  # a lane a row, 8 codes a word
        out = np.zeros((rows, chunks // 8), np.uint32)
        for row in range(rows):
            for n in range(chunks):
                out[row, n // 8] |= np.uint32(int(codes[row, n]) << 4 * (n % 8))
        return out
    out = np.zeros((rows, 1), np.uint32)
    for lane in range(rows):  # rows r and r + 8 of 16 share lanes r (first half of k) and r + 8
        base, inside = lane // 16 * 16, lane % 16
        for half in (0, 1):
            for n in range(4):
                code = int(codes[base + inside % 8 + 8 * half, 4 * (inside // 8) + n])
                out[lane, 0] |= np.uint32(code << 4 * (4 * half + n))
    return out


def descriptor_of(m: int, n: int, kind: str, d: str, extra: int) -> int:
    """Return an instruction descriptor."""
    types = CODE[kind] << 7 | CODE[kind] << 10
    return D_CODE[d] << 4 | types | n >> 3 << 17 | m >> 4 << 24 | extra


def operands_in(a: Operand, b: Operand, start: int) -> str:
    """Copy both operands from byte `start` of `in` to shared memory."""
    text = fill(a.raw.nbytes, "fill_a", start=start)
    text += fill(b.raw.nbytes, "fill_b", start=start + a.raw.nbytes, at=B_AT)
    text += "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
    text += describe(a, "%smem", "%w0") + f"    add.u32 %j, %smem, {B_AT};\n"
    return text + describe(b, "%j", "%w1")


def tensor_products() -> Iterator[BlockCase]:
    """tcgen05.mma.sp of every kind."""
    for number, (kind, d, k, selector) in enumerate((
        ("bf16", "f32", 32, 0), ("f16", "f32", 32, 1), ("tf32", "f32", 16, 0),
        ("tf32", "f32", 16, 1), ("e4m3", "f32", 64, 0), ("s8", "s32", 64, 0),
    )):  # fmt: skip
        rng, n = np.random.default_rng(80 + number), 16
        a = sparse_matrix(rng, 128, k, kind)
        y = draw(rng, (n, k), kind)
        operand_a, operand_b = k_major(encode(a.packed, kind), 32), k_major(encode(y, kind), 64)
        meta = tensor_metadata(a.codes, kind)
        parts = [np.ascontiguousarray(meta.T)]
        body = INIT_BARRIERS + alloc(64) + loads_of(parts, "d", 128)
        body += f"    add.u32 %r29, %r30, {32 + selector};\n    add.u32 %r28, %r31, 32;\n"
        width = meta.shape[1]
        body += f"    tcgen05.st.sync.aligned.32x32b.x{width}.b32 [%r29], "
        body += f"{registers('d', width)};\n{WAIT_ST}"
        body += operands_in(operand_a, operand_b, meta.nbytes)
        body += f"    mov.u32 %r20, {descriptor_of(128, n, kind, d, 4 | selector)};\n"
        body += "    setp.ne.u32 %no, %thread, %thread;\n"
        form = f"tcgen05.mma.sp.cta_group::1.kind::{KIND[kind]}"
        body += f"    @%first {form} [%r31], %w0, %w1, [%r28], %r20, %no;\n" + COMMIT
        body += wait("done") + rows_out(n) + dealloc(64)
        expected = results(a.whole @ y.T, d).T[chosen_columns(n)]
        yield BlockCase(
            name=f"{form} {kind} selector {selector}", group="sparse", source=TCGEN05, threads=128,
            target="sm_100a", ptx=kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768),
            inputs=np.concatenate([words(x) for x in (*parts, operand_a.raw, operand_b.raw)]),
            expected=words(expected),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Fields of a zero-column mask descriptor."""

    starts: tuple[int, ...] = (0, 0, 0, 0)
    first: tuple[int, ...] = (0, 0, 0, 0)
    skip: int = 2
    use: int = 3
    shift: int = 0

    def value(self) -> int:
        """Return the 64 bits."""
        bits = 1 << 39 | self.skip << 40 | self.use << 48 | self.shift << 56
        for n in range(4):
            bits |= self.starts[n] << 8 * n | self.first[n] << 32 + n
        return bits

    def columns(self, parts: int, n: int) -> np.ndarray:
        """Return which of N columns are zeroed: per part a periodic pattern, cut at its start."""
        out: list[bool] = []
        for part in range(parts):
            zeros, ones = [True] * (self.skip + 1), [False] * (self.use + 1)
            pattern = zeros + ones if self.first[part] else ones + zeros
            endless = (pattern * n)[self.starts[part] :]
            out += endless[: n // parts]
        return np.array(out)


def stationary() -> Iterator[BlockCase]:
    """tcgen05.mma.ws: rows of 32, 64 and 128, masks, a shift, and one sparse product."""
    third = Mask(first=(1, 0, 0, 0))
    fourth = Mask(starts=(0, 1, 2, 1), first=(1, 1, 0, 0), shift=2)
    for m, mask, is_sparse in (
        (128, None, False), (64, None, False), (32, None, False), (128, Mask(), False),
        (64, third, False), (32, fourth, False), (64, None, True),
    ):  # fmt: skip
        yield _stationary_case(m, mask, is_sparse=is_sparse)


def _stationary_case(m: int, mask: Mask | None, *, is_sparse: bool) -> BlockCase:
    n, k, kind = 64, 32 if is_sparse else 16, "bf16"
    rng = np.random.default_rng(m)
    shift = mask.shift if mask else 0
    a = sparse_matrix(rng, m, k, kind)
    x = a.whole if is_sparse else draw(rng, (m, k), kind)
    y = draw(rng, (n + 8, k), kind)
    operand_a = k_major(encode(a.packed if is_sparse else x, kind), 32)
    operand_b = k_major(encode(y, kind), 64 if is_sparse else 32)
    body = INIT_BARRIERS + alloc(64)
    parts: list[np.ndarray] = []
    if is_sparse:
        # both halves of the lanes have their own copy, as they would of A
        meta = np.tile(tensor_metadata(a.codes, kind), (128 // m, 1))
        parts = [np.ascontiguousarray(meta.T)]
        body += loads_of(parts, "d", 128) + "    add.u32 %r29, %r30, 32;\n"
        body += f"    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r29], {{%d0}};\n{WAIT_ST}"
    body += "    add.u32 %r28, %r31, 32;\n"
    body += operands_in(operand_a, operand_b, sum(part.nbytes for part in parts))
    extra = (4 if is_sparse else 0) | (1 << 30 if shift else 0)
    body += f"    mov.u32 %r20, {descriptor_of(m, n, kind, 'f32', extra)};\n"
    body += f"    mov.u64 %w2, {mask.value() if mask else 0};\n"
    body += "    setp.ne.u32 %no, %thread, %thread;\n"
    form = f"tcgen05.mma.ws{'.sp' * is_sparse}.cta_group::1.kind::f16.collector::b1::fill"
    body += f"    @%first {form} [%r31], %w0, %w1, {'[%r28], ' * is_sparse}%r20, %no"
    body += f"{', %w2' if mask else ''};\n" + COMMIT + wait("done")
    banks = 128 // m
    width = n // banks
    text, chosen = store_some(width)
    body += f"    tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {registers('d', width)}, [%r30];\n"
    body += WAIT_LD + text + dealloc(64)
    used = y[shift : shift + n].copy()
    if mask:
        used[mask.columns(banks, n)] = 0
    bits = results(x @ used.T, "f32")
    lanes = np.concatenate([bits[:, width * bank : width * bank + width] for bank in range(banks)])
    name = f"{form} M={m}{' masked' if mask else ''}{f' shifted by {shift}' if shift else ''}"
    return BlockCase(
        name=name, group="sparse", source=STATIONARY, threads=128, target="sm_100a",
        ptx=kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768),
        inputs=np.concatenate([words(z) for z in (*parts, operand_a.raw, operand_b.raw)]),
        expected=words(lanes.T[chosen]),
    )  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (warp_products, warpgroup_products, tensor_products, stationary):
        yield from cases()
