"""PTX of small tcgen05 kernels, shared by the test modules of this folder."""

import numpy as np

from fovea.emulator import Options, load_ptx
from fovea.emulator.arithmetic.formats import to_float32

A_AT, B_AT, BAR_AT = 0, 32768, 65536
SWIZZLE_CODE = {0: 0, 128: 2, 64: 4, 32: 6}
TYPE_CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "u8": 1, "s8": 1}
KIND = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4",
        "u8": "i8", "s8": "i8"}  # fmt: skip


def place(matrix, width):
    """Bytes of a K-major operand: 8-row groups of `width`-byte rows, chunks XORed by the line."""
    rows, row_bytes = matrix.shape[0], matrix.shape[1] * matrix.itemsize
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, row_bytes)
    out = np.zeros(rows * row_bytes, np.uint8)
    for row in range(rows):
        for chunk in range(row_bytes // 16):
            if width:
                line = row * width // 128 % (width // 16)
                at = row * width + (chunk ^ line) * 16
            else:
                at = row * 16 + chunk * rows * 16
            out[at : at + 16] = raw[row, 16 * chunk : 16 * chunk + 16]
    return out


def descriptor(width, rows):
    leading, stride = (16, 8 * width) if width else (rows * 16, 128)
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[width] << 61


def instruction_descriptor(m, n, a="bf16", b=None, d=1, *, extra=0):
    b = b or a
    return d << 4 | TYPE_CODE[a] << 7 | TYPE_CODE[b] << 10 | n >> 3 << 17 | m >> 4 << 24 | extra


WAIT = """
{name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar{at}], 0;
    @!%p bra {name};
"""
LOAD = """
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], %total;
    @%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%sa], [%in], %bytes, [%bar];
    @%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%sb], [%inb], %bytesb, [%bar];
""" + WAIT.format(name="loaded", at="")
COMMIT = "@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar+8];"
WAIT_MMA = WAIT.format(name="done", at="+8")
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"
ALLOC = "@%w0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+16], {columns};"
DEALLOC = "@%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, {columns};"


def kernel(
    body, *, columns=128, alloc=ALLOC, dealloc=DEALLOC, target="sm_100a", sync="bar.sync 0;"
):
    return f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 out, .param .u64 in, .param .u64 inb, .param .u32 bytes,
                  .param .u32 bytesb)
{{
    .reg .pred %first, %p, %w0, %yes, %no, %lead;
    .reg .b16 %mask;
    .reg .b32 %sa, %sb, %bar, %thread, %warp, %bytes, %bytesb, %total, %base, %lane, %t<8>, %d<256>;
    .reg .b32 %idesc, %zero, %red, %rank;
    .reg .b64 %out, %in, %inb, %da, %db, %rd<8>, %state;
    mov.u32 %sa, smem;
    add.u32 %sb, %sa, {B_AT};
    add.u32 %bar, %sa, {BAR_AT};
    mov.u32 %thread, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %zero, 0;
    shr.u32 %warp, %thread, 5;
    shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
    setp.eq.u32 %first, %thread, 0;
    setp.eq.u32 %w0, %warp, 0;
    setp.eq.u32 %yes, %thread, %thread;
    setp.ne.u32 %no, %thread, %thread;
    setp.eq.and.u32 %lead, %rank, 0, %first;
    @%first mbarrier.init.shared::cta.b64 [%bar], 1;
    @%first mbarrier.init.shared::cta.b64 [%bar+8], 1;
    @%first fence.mbarrier_init.release.cluster;
    {alloc.format(columns=columns)}
    {sync}
    ld.shared.b32 %base, [%bar+16];
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    ld.param.u64 %inb, [inb];
    ld.param.u32 %bytes, [bytes];
    ld.param.u32 %bytesb, [bytesb];
    add.u32 %total, %bytes, %bytesb;
    shl.b32 %lane, %warp, 21;
    add.u32 %lane, %lane, %base;
    {body}
    {sync}
    {dealloc.format(columns=columns)}
    ret;
}}
"""


def registers(count, first=0):
    return "{" + ", ".join(f"%d{first + j}" for j in range(count)) + "}"


def describe(width, rows_a, rows_b, idesc, *, both_ctas=False):
    return f"""
    shr.u32 %t0, %sa, 4;
    {"and.b32 %t0, %t0, 0x3fff;" if both_ctas else ""}
    cvt.u64.u32 %rd1, %t0;
    or.b64 %da, %rd1, {descriptor(width, rows_a)};
    shr.u32 %t0, %sb, 4;
    {"and.b32 %t0, %t0, 0x3fff;" if both_ctas else ""}
    cvt.u64.u32 %rd1, %t0;
    or.b64 %db, %rd1, {descriptor(width, rows_b)};
    mov.u32 %idesc, {idesc};
"""


def store_rows(columns, *, shape="32x32b", wait=WAIT_LD, lane="%lane"):
    """Every thread loads its lane of D and stores it as a row of `out`."""
    stores = "\n".join(f"    st.global.b32 [%rd3+{4 * j}], %d{j};" for j in range(columns))
    return f"""
    tcgen05.ld.sync.aligned.{shape}.x{columns}.b32 {registers(columns)}, [{lane}];
    {wait}
    mul.wide.u32 %rd2, %thread, {4 * columns};
    add.u64 %rd3, %out, %rd2;
{stores}
"""


def mma(kind="f16", a="%da", enable="%no", *, group=1, issuer="%first", extra="", d="%base"):
    return (
        f"@{issuer} tcgen05.mma.cta_group::{group}.kind::{kind} [{d}], {a}, %db, %idesc, "
        f"{extra}{enable};\n"
    )


def random_operand(rng, rows, k, name):
    if name in ("e4m3", "e5m2"):
        return rng.integers(0, 0x50, (rows, k)).astype(np.uint8)
    if name in ("s8", "u8"):
        return rng.integers(0, 256, (rows, k)).astype(np.uint8)
    values = rng.standard_normal((rows, k)).astype(np.float32)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    if name == "tf32":
        return values.view(np.uint32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def operands(m, n, name, k_bytes, seed=0):
    rng = np.random.default_rng(seed)
    k = k_bytes // SIZE[name]
    a, b = random_operand(rng, m, k, name), random_operand(rng, n, k, name)
    if name in ("s8", "u8"):
        kinds = {"s8": np.int8, "u8": np.uint8}[name]
        return a, b, a.view(kinds).astype(np.int64) @ b.view(kinds).astype(np.int64).T, None
    x, y = to_float32(a, name).astype(np.float64), to_float32(b, name).astype(np.float64)
    return a, b, x @ y.T, np.abs(x) @ np.abs(y).T


def launch(text, out, a_bytes, b_bytes, *, seed=0, cluster=1, threads=128, **options):
    sizes = [len(a_bytes) // cluster, len(b_bytes) // cluster]
    return load_ptx(text).launch(
        "k", cluster, threads, cluster, [out, a_bytes, b_bytes, *sizes], BAR_AT + 64,
        Options(seed=seed, **options),
    )  # fmt: skip


def close(got, expected, scale):
    assert np.all(np.abs(got - expected) <= scale * 2.0**-20 + 1e-30)


def run_bf16(body, *, m=128, n=32, out=None, a_rows=None, idesc=None, **options):
    a, b, product, scale = operands(a_rows or m, n, "bf16", 32)
    text = LOAD + describe(32, m, n, idesc or instruction_descriptor(m, n)) + body
    out = np.zeros((128, n), np.float32) if out is None else out
    launch(kernel(text), out, place(a, 32), place(b, 32), **options)
    return out, product, scale
