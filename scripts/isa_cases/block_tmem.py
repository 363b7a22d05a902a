"""Block cases of tensor memory: allocation, loads and stores of every shape, copies, shifts.

Lives here: the manual's data movement shapes, written down anew (the place of every register was
compared with CUTLASS's traits for sm_100). Not here: products (`block_tcgen05.py`).
"""

from collections.abc import Callable, Iterator

import numpy as np
from block_operands import k_major
from block_table import INIT_BARRIERS, BlockCase, fill, kernel, registers, wait, words

LOAD, STORE, COPY = "PTX ISA 9.7.16.8.3", "PTX ISA 9.7.16.8.4", "PTX ISA 9.7.16.9.2"
WAIT_LD = "    tcgen05.wait::ld.sync.aligned;\n"
WAIT_ST = "    tcgen05.wait::st.sync.aligned;\n"
COMMIT = (
    "    @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];\n"
)
BASE = """
    ld.shared.b32 %r31, [%bar+16];
    shl.b32 %r30, %warp, 21;
    add.u32 %r30, %r30, %r31;
"""  # r31: the allocation, r30: the lanes of this warp in it


def alloc(columns: int, group: int = 1) -> str:
    """Warp 0 allocates; every thread gets the address."""
    return f"""
    setp.eq.u32 %q, %warp, 0;
    @%q tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%bar+16], {columns};
    bar.sync 0;
{BASE}"""


def dealloc(columns: int, group: int = 1) -> str:
    """Warp 0 frees it again."""
    return f"""
    bar.sync 0;
    setp.eq.u32 %q, %warp, 0;
    @%q tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
    @%q tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r31, {columns};
"""


def number_cells(columns: int) -> str:
    """Every cell becomes 1024 * lane + column."""
    values = "".join(f"    add.u32 %d{j}, %t, {j};\n" for j in range(8))
    return f"""
    mov.u32 %i, 0;
    mov.u32 %j, %r30;
number:
    mad.lo.u32 %t, %thread, 1024, %i;
{values}    tcgen05.st.sync.aligned.32x32b.x8.b32 [%j], {registers("d", 8)};
    add.u32 %i, %i, 8;
    add.u32 %j, %j, 8;
    setp.lt.u32 %q, %i, {columns};
    @%q bra number;
{WAIT_ST}"""


def store_some(count: int) -> tuple[str, list[int]]:
    """Store at most eight of the registers, spread out; return which."""
    chosen = sorted({round(j * (count - 1) / 7) for j in range(8)})
    lines = ["    mul.wide.u32 %a, %thread, 4;", "    add.u64 %a, %out, %a;"]
    lines += [f"    st.global.b32 [%a+{512 * at}], %d{j};" for at, j in enumerate(chosen)]
    return "\n".join(lines) + "\n", chosen


Cell = Callable[[int, int], tuple[int, int]]  # (register, thread of the warp) -> lane, column

# Shape -> registers and columns of one repeat, and where a register lies.
SHAPES: dict[str, tuple[int, int, Cell]] = {
    "32x32b": (1, 1, lambda r, t: (t, r)),
    "16x64b": (1, 2, lambda r, t: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2)),
    "16x128b": (2, 4, lambda r, t: (t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4)),
    "16x256b": (
        4,
        8,
        lambda r, t: (t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + t % 4 * 2 + r % 2),
    ),
}


def launch(name: str, body: str, expected: np.ndarray, source: str, **more: object) -> BlockCase:
    """Return a case of 128 threads on sm_100a."""
    text = kernel(body, target="sm_100a", wide=(("d", 256),), shared=32768)
    return BlockCase(
        name=name, group="tmem", source=source, ptx=text, threads=128, target="sm_100a",
        expected=words(expected), **more,
    )  # fmt: skip


def loads() -> Iterator[BlockCase]:
    """Every shape and repetition loads numbered cells."""
    for shape, (per_repeat, width, cell) in SHAPES.items():
        for repeat in (1, 2, 4, 8, 16, 32, 64, 128):
            count, columns = per_repeat * repeat, width * repeat
            if count > 128:
                continue
            columns = max(32, columns)
            text, chosen = store_some(count)
            form = f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32"
            body = alloc(columns) + number_cells(columns)
            body += f"    {form} {registers('d', count)}, [%r30];\n{WAIT_LD}{text}"
            expected = [
                [1024 * (32 * (t // 32) + cell(r, t % 32)[0]) + cell(r, t % 32)[1]
                 for t in range(128)]
                for r in chosen
            ]  # fmt: skip
            yield launch(form, body + dealloc(columns), np.array(expected, np.uint32), LOAD)
    for repeat in (1, 4):
        form = f"tcgen05.ld.sync.aligned.16x32bx2.x{repeat}.b32"
        text, chosen = store_some(repeat)
        body = alloc(32) + number_cells(32)
        body += f"    {form} {registers('d', repeat)}, [%r30], 16;\n{WAIT_LD}{text}"
        expected = [
            [1024 * (32 * (t // 32) + t % 16) + r + 16 * (t // 16 % 2) for t in range(128)]
            for r in chosen
        ]
        yield launch(form, body + dealloc(32), np.array(expected, np.uint32), LOAD)
    form = "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32"
    text, chosen = store_some(2)
    body = alloc(32) + number_cells(32)
    body += f"    {form} {registers('d', 2)}, [%r30+4];\n{WAIT_LD}{text}"
    cells = 1024 * np.arange(128)[:, None] + np.arange(4, 8)
    halves = (cells & 0xFFFF).astype(np.uint32)
    packed = np.stack([halves[:, 0] | halves[:, 1] << 16, halves[:, 2] | halves[:, 3] << 16])
    yield launch(form, body + dealloc(32), packed, LOAD)
    for lane in (0, 16):
        form = "tcgen05.ld.sync.aligned.16x64b.x1.b32"
        text, chosen = store_some(1)
        body = alloc(32) + number_cells(32) + f"    add.u32 %r29, %r30, {lane << 16 | 3};\n"
        body += f"    {form} {registers('d', 1)}, [%r29];\n{WAIT_LD}{text}"
        cell = SHAPES["16x64b"][2]
        expected = [
            1024 * (32 * (t // 32) + lane + cell(0, t % 32)[0]) + 3 + cell(0, t % 32)[1]
            for t in range(128)
        ]
        name = f"{form} from lane {lane}"
        yield launch(name, body + dealloc(32), np.array(expected, np.uint32), LOAD)


def stores() -> Iterator[BlockCase]:
    """Every shape stores numbered registers; lanes are read back whole."""
    for shape, (per_repeat, width, cell) in SHAPES.items():
        for repeat in (1, 2, 4):
            count, columns = per_repeat * repeat, width * repeat
            form = f"tcgen05.st.sync.aligned.{shape}.x{repeat}.b32"
            body = alloc(32) + number_cells(32)
            body += "".join(
                f"    mad.lo.u32 %d{32 + j}, %thread, 100, {7000000 + j};\n" for j in range(count)
            )
            body += f"    {form} [%r30], {registers('d', count, 32)};\n{WAIT_ST}"
            text, chosen = store_some(columns)
            body += f"    tcgen05.ld.sync.aligned.32x32b.x{_power(columns)}.b32 "
            body += f"{registers('d', _power(columns))}, [%r30];\n{WAIT_LD}{text}"
            cells = 1024 * np.arange(128)[:, None] + np.arange(32)
            for thread in range(128):
                for register in range(count):
                    lane, column = cell(register, thread % 32)
                    cells[32 * (thread // 32) + lane, column] = 7000000 + 100 * thread + register
            expected = cells[:, chosen].T.astype(np.uint32)
            yield launch(form, body + dealloc(32), expected, STORE)
    form = "tcgen05.st.sync.aligned.16x32bx2.x2.b32"
    body = alloc(32) + number_cells(32)
    body += "    mad.lo.u32 %d32, %thread, 100, 7;\n    add.u32 %d33, %d32, 1;\n"
    body += f"    {form} [%r30], 4, {registers('d', 2, 32)};\n{WAIT_ST}"
    text, chosen = store_some(8)
    body += f"    tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers('d', 8)}, [%r30];\n"
    cells = 1024 * np.arange(128)[:, None] + np.arange(8)
    for thread in range(128):
        for register in range(2):
            at = register + 4 * (thread // 16 % 2)
            cells[32 * (thread // 32) + thread % 16, at] = 100 * thread + 7 + register
    yield launch(form, body + WAIT_LD + text + dealloc(32), cells.T.astype(np.uint32), STORE)
    form = "tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32"
    body = alloc(32) + number_cells(32) + "    mad.lo.u32 %d32, %thread, 65537, 196608;\n"
    body += f"    {form} [%r30], {{%d32}};\n{WAIT_ST}"
    text, chosen = store_some(2)
    body += f"    tcgen05.ld.sync.aligned.32x32b.x2.b32 {registers('d', 2)}, [%r30];\n"
    thread = np.arange(128, dtype=np.uint32)
    body += WAIT_LD + text + dealloc(32)
    yield launch(form, body, np.stack([thread, thread + 3]), STORE)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def allocations() -> Iterator[BlockCase]:
    """Allocations of every size; two at a time do not overlap."""
    for columns in (32, 64, 128, 256, 512):
        text, _ = store_some(1)
        body = alloc(columns) + number_cells(columns)
        body += f"    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%d0}}, [%r30+{columns - 1}];\n"
        body += WAIT_LD + text + dealloc(columns)
        expected = 1024 * np.arange(128, dtype=np.uint32) + np.uint32(columns - 1)
        yield launch(f"tcgen05.alloc of {columns}", body, expected, "PTX ISA 9.7.16.7.1")
    body = alloc(32) + number_cells(32) + "    mov.u32 %r28, %r31;\n    mov.u32 %r27, %r30;\n"
    body += (
        "    bar.sync 0;\n"
        + alloc(64)
        + number_cells(64)
        .replace("number", "again")
        .replace("mad.lo.u32 %t, %thread, 1024, %i;", "mad.lo.u32 %t, %thread, 1024, 500000;")
    )
    body += f"    tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers('d', 8)}, [%r27+8];\n{WAIT_LD}"
    text, _ = store_some(8)
    body += text + "    bar.sync 0;\n" + dealloc(64).replace("relinquish", "relinquish")
    body += "    @%q tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r28, 32;\n"
    expected = 1024 * np.arange(128, dtype=np.uint32) + np.arange(8, 16, dtype=np.uint32)[:, None]
    yield launch("tcgen05.alloc twice", body, expected, "PTX ISA 9.7.16.7.1")


def copies() -> Iterator[BlockCase]:
    """tcgen05.cp of every shape, and a shift."""
    for shape, rows, columns, groups in (
        ("128x256b", 128, 8, (0, 1, 2, 3)), ("128x128b", 128, 4, (0, 1, 2, 3)),
        ("64x128b.warpx2::02_13", 64, 4, (0, 1, 0, 1)),
        ("64x128b.warpx2::01_23", 64, 4, (0, 0, 1, 1)), ("32x128b.warpx4", 32, 4, (0, 0, 0, 0)),
    ):  # fmt: skip
        form = f"tcgen05.cp.cta_group::1.{shape}"
        matrix = np.random.default_rng(3).integers(0, 1 << 32, (rows, columns), np.uint32)
        operand = k_major(matrix, 0)
        body = INIT_BARRIERS + alloc(32) + fill(operand.raw.nbytes)
        body += "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
        body += "    shr.u32 %t, %smem, 4;\n    cvt.u64.u32 %a, %t;\n"
        body += f"    or.b64 %w0, %a, {operand.tcgen05_fields()};\n"
        body += f"    @%first {form} [%r31], %w0;\n{COMMIT}" + wait("copied")
        text, _ = store_some(columns)
        body += f"    tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 "
        body += f"{registers('d', columns)}, [%r30];\n{WAIT_LD}{text}" + dealloc(32)
        whole = np.concatenate([matrix[32 * g : 32 * g + 32] for g in groups])
        yield launch(form, body, whole.T, COPY, inputs=words(operand.raw))
    yield from narrow_copies()
    body = INIT_BARRIERS + alloc(32) + number_cells(32)
    body += "    bar.sync 0;\n    add.u32 %r29, %r31, 2097152;\n"
    body += f"    @%first tcgen05.shift.cta_group::1.down [%r29];\n{COMMIT}" + wait("shifted")
    text, _ = store_some(8)
    body += f"    tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers('d', 8)}, [%r30];\n{WAIT_LD}"
    lanes = np.arange(128)
    lanes[33:64] = np.arange(32, 63)
    expected = (1024 * lanes + np.arange(8)[:, None]).astype(np.uint32)
    name = "tcgen05.shift.cta_group::1.down"
    source = "PTX ISA 9.7.16.9.3 (which rows move is inferred)"
    yield launch(name, body + text + dealloc(32), expected, source)


def narrow_copies() -> Iterator[BlockCase]:
    """tcgen05.cp of four rows, one a warp, and with decompression."""
    rng = np.random.default_rng(5)
    for shape, rows, source, bits in (
        ("4x256b", 4, "", 8), ("128x128b", 128, ".b8x16.b6x16_p32", 6),
        ("128x256b", 128, ".b8x16.b4x16_p64", 4),
    ):  # fmt: skip
        form = f"tcgen05.cp.cta_group::1.{shape}{source}"
        width = 16 if "x128b" in shape else 32
        codes = rng.integers(0, 1 << bits, (rows, width))
        raw = np.zeros((rows, width), np.uint8)
        for row in range(rows):
            for chunk in range(width // 16):
                packed = 0
                for n in range(16):
                    packed |= int(codes[row, 16 * chunk + n]) << bits * n
                packed |= int(rng.integers(1 << 8)) << 120 if bits < 8 else 0  # padding: anything
                raw[row, 16 * chunk : 16 * chunk + 16] = np.frombuffer(
                    packed.to_bytes(16, "little"), np.uint8
                )
        stored = np.zeros((8, width), np.uint8)
        operand = k_major(np.concatenate([raw, stored])[: max(rows, 8)], 0)
        body = INIT_BARRIERS + alloc(32) + number_cells(32) + fill(operand.raw.nbytes)
        body += "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
        body += "    shr.u32 %t, %smem, 4;\n    cvt.u64.u32 %a, %t;\n"
        body += f"    or.b64 %w0, %a, {operand.tcgen05_fields()};\n"
        body += f"    @%first {form} [%r31], %w0;\n{COMMIT}" + wait("copied")
        columns = width // 4
        text, _ = store_some(columns)
        body += f"    tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 "
        body += f"{registers('d', columns)}, [%r30];\n{WAIT_LD}{text}" + dealloc(32)
        cells = (1024 * np.arange(128)[:, None] + np.arange(columns)).astype(np.uint32)
        octets = (codes << (2 if bits == 4 else 0)).astype(np.uint8)
        cells[:: 128 // rows] = octets.view(np.uint32)
        yield launch(form, body, cells.T, f"{COPY} and .9.1 (lanes and bits inferred)",
                     inputs=words(operand.raw))  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (loads, stores, allocations, copies):
        yield from cases()
