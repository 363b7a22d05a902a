"""tcgen05 in small kernels: values against numpy, and each rule with and without."""

import numpy as np
import pytest

from fovea.emulator import (
    DeadlockError,
    Fault,
    IllegalOperand,
    Options,
    OutOfBounds,
    PtxError,
    RaceError,
    UninitialisedRead,
    UnsupportedForm,
    load_ptx,
)
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
    .reg .b32 %sa, %sb, %bar, %tid, %warp, %bytes, %bytesb, %total, %base, %lane, %t<8>, %d<256>;
    .reg .b32 %idesc, %zero, %red, %rank;
    .reg .b64 %out, %in, %inb, %da, %db, %rd<8>, %state;
    mov.u32 %sa, smem;
    add.u32 %sb, %sa, {B_AT};
    add.u32 %bar, %sa, {BAR_AT};
    mov.u32 %tid, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %zero, 0;
    shr.u32 %warp, %tid, 5;
    shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
    setp.eq.u32 %first, %tid, 0;
    setp.eq.u32 %w0, %warp, 0;
    setp.eq.u32 %yes, %tid, %tid;
    setp.ne.u32 %no, %tid, %tid;
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
    mul.wide.u32 %rd2, %tid, {4 * columns};
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


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
def test_product_of_each_kind_and_layout(name, width):
    m, n, k_bytes = 128, 32, width or 32
    a, b, product, scale = operands(m, n, name, k_bytes)
    text = LOAD + describe(width, m, n, instruction_descriptor(m, n, name))
    for step in range(k_bytes // 32):
        text += mma(KIND[name], enable="%yes" if step else "%no")
        text += "add.u64 %da, %da, 2; add.u64 %db, %db, 2;\n"
    out = np.zeros((128, n), np.float32)
    launch(kernel(text + COMMIT + WAIT_MMA + store_rows(n)), out, place(a, width), place(b, width))
    close(out, product, scale)


def test_integer_product_is_exact():
    a, b, product, _ = operands(128, 32, "s8", 32)
    text = LOAD + describe(32, 128, 32, instruction_descriptor(128, 32, "s8", d=2)) + mma("i8")
    out = np.zeros((128, 32), np.int32)
    launch(kernel(text + COMMIT + WAIT_MMA + store_rows(32)), out, place(a, 32), place(b, 32))
    assert np.array_equal(out, product)


def run_bf16(body, *, m=128, n=32, out=None, a_rows=None, idesc=None, **options):
    a, b, product, scale = operands(a_rows or m, n, "bf16", 32)
    text = LOAD + describe(32, m, n, idesc or instruction_descriptor(m, n)) + body
    out = np.zeros((128, n), np.float32) if out is None else out
    launch(kernel(text), out, place(a, 32), place(b, 32), **options)
    return out, product, scale


def test_product_of_64_rows_uses_16_lanes_of_each_warp():
    a, b, product, scale = operands(64, 32, "bf16", 32)
    # The other lanes hold no value, so each half warp is loaded by its own shape.
    body = mma() + COMMIT + WAIT_MMA
    stores = "\n".join(f"    st.global.b32 [%rd3+{4 * j}], %d{j};" for j in range(16))
    body += f"""
    tcgen05.ld.sync.aligned.16x32bx2.x16.b32 {registers(16)}, [%lane], 16;
    {WAIT_LD}
    mul.wide.u32 %rd2, %tid, 64;
    add.u64 %rd3, %out, %rd2;
{stores}
"""
    text = LOAD + describe(32, 64, 32, instruction_descriptor(64, 32)) + body
    out = np.zeros((128, 16), np.float32)
    launch(kernel(text), out, place(a, 32), place(b, 32))
    got = out.reshape(4, 2, 16, 16).transpose(0, 2, 1, 3).reshape(64, 32)
    close(got, product, scale)


def test_a_may_come_from_tensor_memory():
    a, b, product, scale = operands(128, 32, "bf16", 32)
    words = np.ascontiguousarray(a).view(np.uint32)
    loads = "\n".join(f"    ld.global.b32 %d{j}, [%rd3+{4 * j}];" for j in range(8))
    body = f"""
    mul.wide.u32 %rd2, %tid, 32;
    add.u64 %rd3, %out, %rd2;
{loads}
    add.u32 %t1, %lane, 64;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%t1], {registers(8)};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    """
    text = LOAD + describe(32, 128, 32, instruction_descriptor(128, 32)) + body
    text += mma(a="[%base+64]") + COMMIT + WAIT_MMA + store_rows(32)
    out = np.zeros((128, 32), np.float32)
    out.view(np.uint32).ravel()[:1024] = words.ravel()
    launch(kernel(text), out, np.zeros(4096, np.uint8), place(b, 32))
    close(out, product, scale)


@pytest.mark.parametrize(("bits", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_negate_bits_negate_their_operands(bits, sign):
    idesc = instruction_descriptor(128, 32, extra=bits)
    out, product, scale = run_bf16(mma() + COMMIT + WAIT_MMA + store_rows(32), idesc=idesc)
    close(out, sign * product, scale)


def test_enable_input_d_adds_and_scale_input_d_scales():
    body = mma() + mma(enable="%yes") + mma(enable="%yes, 1") + COMMIT + WAIT_MMA + store_rows(32)
    out, product, scale = run_bf16(body)
    close(out, 2 * product, 4 * scale)


def test_disabled_output_lanes_keep_their_values():
    lanes = "{%zero, 0xffffffff, 0x80000001, %zero}, "
    body = mma() + mma(enable="%yes", extra=lanes) + COMMIT + WAIT_MMA + store_rows(32)
    out, product, scale = run_bf16(body)
    kept = np.zeros(128, bool)
    kept[32:65] = kept[95] = True
    close(out, np.where(kept[:, None], product, 2 * product), 4 * scale)


def test_f16_results_are_one_to_a_column():
    a, b, product, scale = operands(128, 32, "f16", 32)
    text = LOAD + describe(32, 128, 32, instruction_descriptor(128, 32, "f16", d=0))
    text += mma() + COMMIT + WAIT_MMA + store_rows(32)
    out = np.zeros((128, 32), np.uint32)
    launch(kernel(text), out, place(a, 32), place(b, 32))
    got = out.astype(np.uint16).view(np.float16).astype(np.float64)
    assert np.all(np.abs(got - product) <= scale * 2.0**-10)


def test_mn_major_operand_is_read_across_rows():
    a, b, product, scale = operands(128, 64, "bf16", 32)
    text = LOAD + describe(32, 128, 64, instruction_descriptor(128, 64, extra=1 << 16))
    # B^T: 16 rows (k) of 64 columns: one 128-byte swizzle atom per 8 rows.
    fields = 1024 >> 4 << 16 | 1024 >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[128] << 61
    text += f"cvt.u64.u32 %rd1, %t0; or.b64 %db, %rd1, {fields};"
    text += mma() + COMMIT + WAIT_MMA + store_rows(64)
    out = np.zeros((128, 64), np.float32)
    launch(kernel(text), out, place(a, 32), place(np.ascontiguousarray(b.T), 128))
    close(out, product, scale)


def test_exact_mode_truncates_as_the_tensor_core_does():
    one, tiny = (int(np.float32(x).view(np.uint32) >> 16) for x in (1, 2.0**-13))
    small = int(np.float32(2.0**-14).view(np.uint32) >> 16)
    a, b = np.full((128, 16), tiny, np.uint16), np.full((32, 16), small, np.uint16)
    a[:, 0] = b[:, 0] = one
    text = LOAD + describe(32, 128, 32, instruction_descriptor(128, 32)) + mma()
    out = np.zeros((128, 32), np.float32)
    text = kernel(text + COMMIT + WAIT_MMA + store_rows(32))
    launch(text, out, place(a, 32), place(b, 32), exact_mma=True)
    assert (out == 1).all()


CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("m", [256, 128])
def test_pair_of_ctas_shares_one_product(m):
    n = 64
    a, b, product, scale = operands(m, n, "bf16", 32)
    body = f"""
    mul.wide.u32 %rd5, %rank, %bytes; add.u64 %in, %in, %rd5;
    mul.wide.u32 %rd5, %rank, %bytesb; add.u64 %inb, %inb, %rd5;
    mul.wide.u32 %rd5, %rank, {128 * n * 4 if m == 256 else 128 * n * 2}; add.u64 %out, %out, %rd5;
    {LOAD}
    {CLUSTER}
    {describe(32, m // 2, n // 2, instruction_descriptor(m, n), both_ctas=True)}
    {mma(group=2, issuer="%lead")}
    mov.u16 %mask, 3;
    @%lead tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64\
 [%bar+8], %mask;
    {WAIT_MMA}
    {store_rows(n if m == 256 else n // 2)}
    """
    text = kernel(
        body,
        alloc=ALLOC.replace("group::1", "group::2"),
        dealloc=DEALLOC.replace("group::1", "group::2"),
        sync=CLUSTER,
    )
    out = np.zeros((256, n) if m == 256 else (2, 128, n // 2), np.float32)
    a_bytes = np.concatenate([place(part, 32) for part in np.split(a, 2)])
    b_bytes = np.concatenate([place(part, 32) for part in np.split(b, 2)])
    launch(text, out, a_bytes, b_bytes, cluster=2)
    if m == 128:
        # Lanes 0-63 hold the first half of the columns, lanes 64-127 the second.
        out = out.reshape(2, 2, 64, n // 2).transpose(0, 2, 1, 3).reshape(128, n)
    close(out, product, scale)


# --- loads, stores and copies ---------------------------------------------------------------------

# Shape -> registers and columns of one repeat.
SHAPES = {"16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "32x32b": (1, 1)}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_store_in_a_shape_is_undone_by_a_load_in_it(shape):
    per_repeat, columns = SHAPES[shape]
    repeat = 16 // columns
    count = per_repeat * repeat
    moves = "\n".join(
        f"    mul.lo.u32 %d{j}, %tid, 1000; add.u32 %d{j}, %d{j}, {j};" for j in range(count)
    )
    loads = "\n".join(f"    st.global.b32 [%rd3+{4 * j}], %d{64 + j};" for j in range(count))
    body = f"""
{moves}
    tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%lane], {registers(count)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {registers(count, 64)}, [%lane];
    {WAIT_LD}
    mul.wide.u32 %rd2, %tid, {4 * count};
    add.u64 %rd3, %out, %rd2;
{loads}
    """
    out = np.zeros((128, count), np.uint32)
    launch(kernel(body), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    assert np.array_equal(out, np.arange(128)[:, None] * 1000 + np.arange(count))


def test_pack_and_unpack_move_halves_of_neighbouring_columns():
    body = f"""
    mul.lo.u32 %d0, %tid, 0x10001;
    add.u32 %d0, %d0, 0x70000;
    tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%lane], {{%d0}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%d1, %d2}}, [%lane];
    tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {{%d3}}, [%lane];
    {WAIT_LD}
    mul.wide.u32 %rd2, %tid, 16;
    add.u64 %rd3, %out, %rd2;
    st.global.b32 [%rd3], %d0;
    st.global.b32 [%rd3+4], %d1;
    st.global.b32 [%rd3+8], %d2;
    st.global.b32 [%rd3+12], %d3;
    """
    out = np.zeros((128, 4), np.uint32)
    launch(kernel(body), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    thread = np.arange(128)
    assert np.array_equal(out[:, 0], out[:, 3])
    assert np.array_equal(out[:, 1], thread)
    assert np.array_equal(out[:, 2], thread + 7)


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "groups"),
    [("128x256b", 128, 8, [0, 1, 2, 3]), ("128x128b", 128, 4, [0, 1, 2, 3]),
     ("64x128b.warpx2::02_13", 64, 4, [0, 1, 0, 1]), ("64x128b.warpx2::01_23", 64, 4, [0, 0, 1, 1]),
     ("32x128b.warpx4", 32, 4, [0, 0, 0, 0])],
)  # fmt: skip
def test_copy_from_shared_memory_fills_lanes(shape, rows, columns, groups):
    matrix = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    body = LOAD + describe(0, rows, rows, 0)
    body += f"@%first tcgen05.cp.cta_group::1.{shape} [%base], %da;\n"
    body += COMMIT + WAIT_MMA + store_rows(columns)
    out = np.zeros((128, columns), np.uint32)
    launch(kernel(body), out, place(matrix, 0), np.zeros(16, np.uint8))
    expected = np.concatenate([matrix[32 * group : 32 * group + 32] for group in groups])
    assert np.array_equal(out, expected)


def test_shift_moves_rows_down_by_one():
    body = f"""
    mov.u32 %d0, %tid;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%lane], {{{", ".join(["%d0"] * 8)}}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    add.u32 %t1, %base, 0x200000;
    @%first tcgen05.shift.cta_group::1.down [%t1];
    {COMMIT}
    {WAIT_MMA}
    {store_rows(8)}
    """
    out = np.zeros((128, 8), np.uint32)
    launch(kernel(body), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    expected = np.arange(128)
    expected[33:64] = np.arange(32, 63)
    assert np.array_equal(out, np.repeat(expected[:, None], 8, axis=1))


def test_load_with_reduction_exists_on_sm_103_only():
    body = f"""
    mov.u32 %d0, %tid;
    neg.s32 %d1, %d0;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%lane], {{%d0, %d1}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x2.min.s32 {{%d2, %d3}}, %red, [%lane];
    {WAIT_LD}
    mul.wide.u32 %rd2, %tid, 4;
    add.u64 %rd3, %out, %rd2;
    st.global.b32 [%rd3], %red;
    """
    out = np.zeros(128, np.int32)
    launch(kernel(body, target="sm_103a"), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    assert np.array_equal(out, -np.arange(128))
    with pytest.raises(UnsupportedForm, match="sm_103a"):
        launch(kernel(body), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))


# --- rules, with and without ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_product_with_commit_and_wait_is_clean(seed):
    out, product, scale = run_bf16(mma() + COMMIT + WAIT_MMA + store_rows(32), seed=seed)
    close(out, product, scale)


@pytest.mark.parametrize("delay", ["eager", "late"])
def test_load_of_a_product_without_waiting_for_commit_is_reported(delay):
    with pytest.raises((RaceError, UninitialisedRead)) as caught:
        run_bf16(mma() + COMMIT + store_rows(32), async_delay=delay)
    assert "tcgen05.ld" in str(caught.value)


def test_wait_without_commit_deadlocks():
    with pytest.raises(DeadlockError, match="mbarrier"):
        run_bf16(mma() + WAIT_MMA + store_rows(32))


def test_commit_by_another_thread_does_not_cover_the_product():
    other = "setp.eq.u32 %p, %tid, 32;\n" + COMMIT.replace("@%first", "@%p")
    with pytest.raises((RaceError, UninitialisedRead)):
        run_bf16(mma() + other + WAIT_MMA + store_rows(32), async_delay="late")


@pytest.mark.parametrize("delay", ["eager", "late", "random"])
def test_loaded_register_needs_wait_ld(delay):
    with pytest.raises(RaceError, match=r"tcgen05\.ld"):
        run_bf16(mma() + COMMIT + WAIT_MMA + store_rows(32, wait=""), async_delay=delay)


STORE = """
    mov.u32 %d40, 0;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane], {%d40};
"""


@pytest.mark.parametrize("is_waited", [True, False])
def test_load_after_store_needs_wait_st(is_waited):
    body = STORE + ("tcgen05.wait::st.sync.aligned;" if is_waited else "") + store_rows(1)
    out = np.ones((128, 1), np.uint32)
    empty = np.zeros(16, np.uint8)
    if is_waited:
        launch(kernel(body), out, empty, empty)
        assert not out.any()
    else:
        with pytest.raises((RaceError, UninitialisedRead)):
            launch(kernel(body), out, empty, empty)


@pytest.mark.parametrize(("is_waited", "has_barrier"), [(True, True), (False, True), (True, False)])
def test_product_after_a_load_needs_wait_ld_and_a_barrier(is_waited, has_barrier):
    read = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(32)}, [%lane];"
    body = mma() + COMMIT + WAIT_MMA + read
    body += WAIT_LD if is_waited else ""
    body += "bar.sync 0;" if has_barrier else ""
    body += mma(enable="%yes") + COMMIT
    body += WAIT.replace(", 0;", ", 1;").format(name="again", at="+8")
    if is_waited and has_barrier:
        for seed in range(3):
            run_bf16(body, seed=seed)
    else:
        with pytest.raises(RaceError, match=r"tcgen05\.(ld|mma)"):
            run_bf16(body)


@pytest.mark.parametrize("is_waited", [True, False])
def test_overwriting_an_operand_must_wait_for_the_product(is_waited):
    write = "@%first st.shared.b32 [%sb], %tid;\n"
    body = mma() + COMMIT + (WAIT_MMA + write if is_waited else write + WAIT_MMA)
    if is_waited:
        run_bf16(body + store_rows(32))
    else:
        for seed in range(4):
            with pytest.raises(RaceError):
                run_bf16(body + store_rows(32), seed=seed)


@pytest.mark.parametrize("has_fence", [True, False])
def test_operand_written_by_threads_needs_the_proxy_fence(has_fence):
    write = "@%first st.shared.b32 [%sb], %zero;\n"
    fence = "fence.proxy.async.shared::cta;\n" if has_fence else ""
    body = write + fence + "bar.sync 0;" + mma() + COMMIT + WAIT_MMA + store_rows(32)
    if has_fence:
        run_bf16(body)
    else:
        with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
            run_bf16(body)


def test_products_of_one_thread_are_pipelined():
    body = "".join(mma(enable="%yes" if step else "%no") for step in range(4))
    results = []
    for seed in range(6):
        out, product, scale = run_bf16(body + COMMIT + WAIT_MMA + store_rows(32), seed=seed)
        close(out, 4 * product, 8 * scale)
        results.append(out)
    assert all(np.array_equal(results[0], other) for other in results)


def test_products_of_two_threads_without_order_are_a_race():
    other = "setp.eq.u32 %p, %tid, 64;\n" + mma(enable="%no", issuer="%p")
    for seed in range(4):
        with pytest.raises(RaceError, match=r"tcgen05\.mma"):
            run_bf16(mma() + other + COMMIT + WAIT_MMA + store_rows(32), seed=seed)


def test_copy_then_product_of_another_thread_needs_only_a_barrier():
    copy = "@%first tcgen05.cp.cta_group::1.128x256b [%base+64], %da;\n"
    sync = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;\n"
    use = "setp.eq.u32 %p, %tid, 64;\n" + mma(a="[%base+64]", issuer="%p")
    commit = COMMIT.replace("%first", "%p")
    tail = commit + WAIT_MMA.replace("%p,", "%lead,").replace("!%p", "!%lead") + store_rows(32)
    for seed in range(4):
        out, product, scale = run_bf16(copy + sync + use + tail, seed=seed)
        close(out, product, scale)
    for seed in range(4):
        with pytest.raises((RaceError, UninitialisedRead)):
            run_bf16(copy + use + tail, seed=seed)


# --- faults ---------------------------------------------------------------------------------------


def test_memory_that_was_not_freed_is_reported():
    empty = np.zeros(16, np.uint8)
    with pytest.raises(Fault, match="tensor memory"):
        launch(kernel("", dealloc=""), np.zeros(4), empty, empty)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%base];",
            IllegalOperand,
            "may access lanes",
        ),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%lane+200];", OutOfBounds, "not allocated"),
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%tid];",
            IllegalOperand,
            "differs between lanes",
        ),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%lane];", UninitialisedRead, "before it"),
        ("@%first tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 32;", IllegalOperand, "all"),
        (
            "@%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 64;",
            IllegalOperand,
            "no such allocation",
        ),
        (
            "@%w0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+16], 48;",
            IllegalOperand,
            "allowed: 32",
        ),
    ],
)
def test_wrong_use_of_tensor_memory_is_a_fault(body, kind, message):
    empty = np.zeros(16, np.uint8)
    with pytest.raises(kind, match=message):
        launch(kernel(body + WAIT_LD), np.zeros(4), empty, empty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("%db, %idesc", "%da, %idesc"), None),
        (("[%base]", "[%lane+65536]"), "starts at lane"),
        (("mov.u32 %idesc, ", "mov.u32 %idesc, 1; //"), "does not exist|M=0"),
        (("or.b64 %db, %rd1,", "or.b64 %db, %rd1, 0; //"), "bits 46-47"),
    ],
)
def test_wrong_operand_of_a_product_is_a_fault(change, message):
    a, b, _, _ = operands(128, 32, "bf16", 32)
    body = LOAD + describe(32, 128, 32, instruction_descriptor(128, 32)) + mma()
    changed = body.replace(*change)
    assert changed != body
    text = kernel(changed + COMMIT + WAIT_MMA)
    out = np.zeros((128, 32), np.float32)
    if message is None:
        launch(text, out, place(a, 32), place(b, 32))
        return
    with pytest.raises(IllegalOperand, match=message):
        launch(text, out, place(a, 32), place(b, 32))


def test_wrong_number_of_registers_is_refused():
    empty = np.zeros(16, np.uint8)
    body = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%d0, %d1}, [%lane];"
    with pytest.raises(PtxError, match="takes 4"):
        launch(kernel(body), np.zeros(4), empty, empty)


def test_allocation_waits_until_another_one_is_freed():
    second = "@%w0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+20], 512;"
    empty = np.zeros(16, np.uint8)
    with pytest.raises(DeadlockError, match=r"tcgen05\.alloc of 512"):
        launch(kernel(second), np.zeros(4), empty, empty)
