"""Block cases of tcgen05.mma: kinds, formats, layouts, signs, masks, pairs of CTAs.

Lives here: the cases and the instruction descriptor's fields. Not here: tensor memory's own
instructions (`block_tmem.py`). Invariant: operands are small whole numbers, so that the results are
exact in every order of accumulation.
"""

from collections.abc import Iterator

import numpy as np
from block_numbers import FORMATS, draw, encode, results
from block_operands import Operand, k_major, mn_major
from block_table import CLUSTER_SYNC, INIT_BARRIERS, BlockCase, fill, kernel, registers, wait, words
from block_tmem import COMMIT, WAIT_LD, WAIT_ST, alloc, dealloc, store_some

MMA = "PTX ISA 9.7.16.10.9.1"
B_AT = 16384
KIND = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4",
        "s8": "i8", "u8": "i8"}  # fmt: skip
CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
D_CODE = {"f16": 0, "f32": 1, "s32": 2}


def instruction_descriptor(m: int, n: int, kinds: tuple[str, str, str], extra: int = 0) -> int:
    """Return the 32 bits of the manual's table for dense products (9.7.16.4.2)."""
    d, a, b = kinds
    return D_CODE[d] << 4 | CODE[a] << 7 | CODE[b] << 10 | n >> 3 << 17 | m >> 4 << 24 | extra


def describe(operand: Operand, at: str, name: str, *, is_pair: bool = False) -> str:
    """Compute a matrix descriptor; in a pair the address is that within each CTA."""
    mask = "    and.b32 %t, %t, 0x3fff;\n" if is_pair else ""
    return f"""
    shr.u32 %t, {at}, 4;
{mask}    cvt.u64.u32 %a, %t;
    or.b64 {name}, %a, {operand.tcgen05_fields()};
"""


def copy_in(a: Operand, b: Operand) -> str:
    """Both operands to shared memory."""
    text = fill(a.raw.nbytes, "fill_a")
    text += fill(b.raw.nbytes, "fill_b", start=a.raw.nbytes, at=B_AT)
    return text + "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"


def rows_out(n: int) -> str:
    """Store lane t of D as words t, t + 128, ... of `out`."""
    text, chosen = store_some(n)
    assert len(chosen) == min(n, 8)
    load = f"    tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {registers('d', n)}, [%r30];\n"
    return load + WAIT_LD + text


def product(kinds: tuple[str, str, str], k_bytes: int, m: int, n: int, seed: int = 0):
    """Return operands as codes and their product."""
    d, a, b = kinds
    rng = np.random.default_rng(seed)
    k = k_bytes // FORMATS[a][0]
    if d == "f16":
        x, y = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (n, k))
    else:
        x, y = draw(rng, (m, k), a), draw(rng, (n, k), b)
    return encode(x, a), encode(y, b), x @ y.T


def chosen_columns(n: int) -> list[int]:
    """Return which columns `rows_out` stores."""
    return store_some(n)[1]


def mma_case(
    name: str, kinds: tuple[str, str, str] = ("f32", "bf16", "bf16"), *, swizzle: int = 32,
    n: int = 16, extra: int = 0, sign: int = 1, transposed: tuple[bool, bool] = (False, False),
    middle: str = "", more: str = "", times: float = 1.0, keep: np.ndarray | None = None,
    collector: str = "",
) -> BlockCase:  # fmt: skip
    """Return a product of 128 rows.

    Args:
        middle, more: operands before enable-input-d, and further instructions after the first.
        times: what `more` makes of the product; `keep`: lanes that it leaves alone.
    """
    d, a, _b = kinds
    steps = 1 if any(transposed) else max(swizzle, 32) // 32
    code_a, code_b, total = product(kinds, 32 * steps, 128, n)
    lay_a, lay_b = (mn_major if is_t else k_major for is_t in transposed)
    narrow = 0 if swizzle == 0 else 32
    operand_a = lay_a(code_a, swizzle if transposed[0] or steps > 1 or swizzle == 0 else narrow)
    operand_b = lay_b(code_b, swizzle if transposed[1] or steps > 1 or swizzle == 0 else narrow)
    extra |= int(transposed[0]) << 15 | int(transposed[1]) << 16
    idesc = instruction_descriptor(128, n, kinds, extra)
    columns = max(32, n)
    body = INIT_BARRIERS + alloc(columns) + copy_in(operand_a, operand_b)
    body += describe(operand_a, "%smem", "%w0")
    body += f"    add.u32 %j, %smem, {B_AT};\n" + describe(operand_b, "%j", "%w1")
    body += f"    mov.u32 %r20, {idesc};\n    mov.u32 %r21, 0;\n"
    body += "    setp.eq.u32 %yes, %thread, %thread;\n    setp.ne.u32 %no, %thread, %thread;\n"
    form = f"tcgen05.mma.cta_group::1.kind::{KIND[a]}{collector}"
    for step in range(steps):
        body += f"    @%first {form} [%r31], %w0, %w1, %r20, {middle if not more else ''}"
        body += f"{'%yes' if step else '%no'};\n"
        body += "    add.u64 %w0, %w0, 2;\n    add.u64 %w1, %w1, 2;\n"
    if more:
        body += "    sub.u64 %w0, %w0, 2;\n    sub.u64 %w1, %w1, 2;\n"
        body += f"    @%first {form} [%r31], %w0, %w1, %r20, {middle}{more};\n"
    body += COMMIT + wait("done") + rows_out(n) + dealloc(columns)
    after = sign * total * times
    if keep is not None:
        after = np.where(keep[:, None], sign * total, after)
    bits = results(after, d).astype(np.uint32)
    text = kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768)
    return BlockCase(
        name=name, group="tcgen05", source=MMA, ptx=text, threads=128, target="sm_100a",
        inputs=np.concatenate([words(operand_a.raw), words(operand_b.raw)]),
        expected=words(bits.T[chosen_columns(n)]),
    )  # fmt: skip


def kinds() -> Iterator[BlockCase]:
    """Every kind and combination of formats."""
    floats = [("f32", "bf16", "bf16"), ("f32", "f16", "f16"), ("f16", "f16", "f16"),
              ("f32", "tf32", "tf32")]  # fmt: skip
    for d in ("f32", "f16"):
        floats += [(d, a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    integers = [("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")]
    for d, a, b in floats + integers:
        yield mma_case(f"kind {KIND[a]} {a} {b} to {d}", (d, a, b))


def layouts() -> Iterator[BlockCase]:
    """Swizzles, majorness, widths."""
    for name in ("bf16", "tf32", "e4m3"):
        for swizzle in (0, 64, 128):
            yield mma_case(f"{name} swizzle {swizzle}", ("f32", name, name), swizzle=swizzle)
    for swizzle in (0, 32, 64, 128):
        for is_a, is_b in ((True, False), (False, True), (True, True)):
            n = max(swizzle // 2, 16) if is_b else 16
            yield mma_case(
                f"MN-major {'A' * is_a}{'B' * is_b} swizzle {swizzle}", swizzle=swizzle, n=n,
                transposed=(is_a, is_b),
            )  # fmt: skip
    yield mma_case("width 32", n=32)


def signs_and_sums() -> Iterator[BlockCase]:
    """Negation, accumulation, scaling of D, masked lanes, collector hints."""
    yield mma_case("negate A", extra=1 << 13, sign=-1)
    yield mma_case("negate B", extra=1 << 14, sign=-1)
    yield mma_case("negate A and B", extra=3 << 13)
    yield mma_case("enable input d", more="%yes", times=2)
    yield mma_case("disable input d", more="%no", times=1)
    yield mma_case("scale input d", more="%yes, 1", times=1.5)
    keep = np.zeros(128, bool)
    keep[32:65] = keep[95] = True
    lanes = "{%r21, 0xffffffff, 0x80000001, %r21}, "
    yield mma_case("disable output lane", middle=lanes, more="%yes", times=2, keep=keep)
    for hint in ("fill", "use", "lastuse", "discard"):
        yield mma_case(f"collector a {hint}", collector=f".collector::a::{hint}")


def other_places() -> Iterator[BlockCase]:
    """64 rows; A in tensor memory; a pair of CTAs."""
    kinds_of = ("f32", "bf16", "bf16")
    code_a, code_b, total = product(kinds_of, 32, 64, 8)
    a, b = k_major(code_a, 32), k_major(code_b, 32)
    head = INIT_BARRIERS + alloc(32)
    head += "    setp.ne.u32 %no, %thread, %thread;\n"
    describe_both = describe(a, "%smem", "%w0") + f"    add.u32 %j, %smem, {B_AT};\n"
    describe_both += describe(b, "%j", "%w1")
    form = "tcgen05.mma.cta_group::1.kind::f16"
    body = head + copy_in(a, b) + describe_both
    body += f"    mov.u32 %r20, {instruction_descriptor(64, 8, kinds_of)};\n"
    body += f"    @%first {form} [%r31], %w0, %w1, %r20, %no;\n" + COMMIT + wait("done")
    body += f"    tcgen05.ld.sync.aligned.16x256b.x1.b32 {registers('d', 4)}, [%r30];\n{WAIT_LD}"
    body += store_some(4)[0] + dealloc(32)
    bits = results(total, "f32")
    out = np.zeros((4, 128), np.uint32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for j in range(4):
            out[j, thread] = bits[16 * warp + lane // 4 + 8 * (j // 2), lane % 4 * 2 + j % 2]
    yield BlockCase(
        name="64 rows", group="tcgen05", source=MMA, threads=128, target="sm_100a",
        ptx=kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768),
        inputs=np.concatenate([words(a.raw), words(b.raw)]), expected=words(out),
    )  # fmt: skip
    yield _a_in_tensor_memory(head, form)
    for m in (256, 128):
        yield _pair(m)


def _a_in_tensor_memory(head: str, form: str) -> BlockCase:
    kinds_of = ("f32", "bf16", "bf16")
    code_a, code_b, total = product(kinds_of, 32, 128, 16)
    b = k_major(code_b, 32)
    lanes = np.ascontiguousarray(code_a).view(np.uint32)  # a lane holds a row, two k a column
    body = head.replace(alloc(32), alloc(64)) + fill(b.raw.nbytes, "fill_b", at=B_AT)
    body += "    fence.proxy.async.shared::cta;\n    mul.wide.u32 %a, %thread, 4;\n"
    body += "    add.u64 %a, %in, %a;\n"
    at = b.raw.nbytes
    body += "".join(f"    ld.global.b32 %d{j}, [%a+{at + 512 * j}];\n" for j in range(8))
    body += "    add.u32 %r29, %r30, 32;\n    add.u32 %r28, %r31, 32;\n"
    body += f"    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r29], {registers('d', 8)};\n{WAIT_ST}"
    body += "    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n"
    body += "    tcgen05.fence::after_thread_sync;\n"
    body += f"    add.u32 %j, %smem, {B_AT};\n" + describe(b, "%j", "%w1")
    body += f"    mov.u32 %r20, {instruction_descriptor(128, 16, kinds_of)};\n"
    body += f"    @%first {form} [%r31], [%r28], %w1, %r20, %no;\n" + COMMIT + wait("done")
    body += "    tcgen05.fence::after_thread_sync;\n" + rows_out(16) + dealloc(64)
    return BlockCase(
        name="A in tensor memory", group="tcgen05", source=MMA, threads=128, target="sm_100a",
        ptx=kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768),
        inputs=np.concatenate([words(b.raw), words(lanes.T)]),
        expected=words(results(total, "f32").T[chosen_columns(16)]),
    )  # fmt: skip


def _pair(m: int) -> BlockCase:
    n, kinds_of = 32, ("f32", "bf16", "bf16")
    code_a, code_b, total = product(kinds_of, 32, m, n)
    parts = [
        (k_major(code_a[r * m // 2 : (r + 1) * m // 2], 32),
         k_major(code_b[r * n // 2 : (r + 1) * n // 2], 32))
        for r in range(2)
    ]  # fmt: skip
    a, b = parts[0]
    size = a.raw.nbytes + b.raw.nbytes
    columns = n if m == 256 else n // 2
    body = f"    mul.wide.u32 %b, %rank, {size};\n    add.u64 %in, %in, %b;\n"
    body += f"    mul.wide.u32 %b, %rank, {512 * min(8, columns)};\n    add.u64 %out, %out, %b;\n"
    body += INIT_BARRIERS + copy_in(a, b)
    body += alloc(32, 2).replace("bar.sync 0;", CLUSTER_SYNC)
    body += describe(a, "%smem", "%w0", is_pair=True) + f"    add.u32 %j, %smem, {B_AT};\n"
    body += describe(b, "%j", "%w1", is_pair=True)
    body += f"    mov.u32 %r20, {instruction_descriptor(m, n, kinds_of)};\n    mov.u16 %mask, 3;\n"
    body += "    setp.ne.u32 %no, %thread, %thread;\n"
    body += "    @%lead tcgen05.mma.cta_group::2.kind::f16 [%r31], %w0, %w1, %r20, %no;\n"
    body += "    @%lead tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    body += ".multicast::cluster.b64 [%bar], %mask;\n" + wait("done")
    body += rows_out(columns) + dealloc(32, 2).replace("bar.sync 0;", CLUSTER_SYNC)
    bits = results(total, "f32")
    if m == 256:
        halves = [bits[:128], bits[128:]]
    else:  # lanes 0-63 hold the first half of the columns, lanes 64-127 the second
        halves = [
            np.concatenate([bits[64 * r : 64 * r + 64, :16], bits[64 * r : 64 * r + 64, 16:]])
            for r in range(2)
        ]
    out = [half.T[chosen_columns(columns)] for half in halves]
    return BlockCase(
        name=f"pair of CTAs, {m} rows", group="tcgen05", source=MMA, threads=128, cluster=2,
        target="sm_100a",
        ptx=kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768, cluster=2),
        inputs=np.concatenate([words(x.raw) for pair in parts for x in pair]),
        expected=words(np.stack(out)),
    )  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (kinds, layouts, signs_and_sums, other_places):
        yield from cases()
