"""Block-scaled products: values against numpy, scale factor IDs, and each rule broken."""

import numpy as np
import pytest
from tcgen05_kernels import (
    BAR_AT,
    COMMIT,
    LOAD,
    WAIT_MMA,
    descriptor,
    kernel,
    place,
    registers,
    store_rows,
)

from fovea.emulator import IllegalOperand, Options, PtxError, UninitialisedRead, load_ptx
from fovea.emulator.arithmetic.formats import to_float32

M, N = 128, 64
SCALE_A, SCALE_B = 64, 72
CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


def idesc(a="e4m3", b="e4m3", *, kind="mxf8f6f4", scale="ue8m0", ids=(0, 0), extra=0):
    """An instruction descriptor of a block-scaled kind."""
    codes = (CODES[a], CODES[b]) if kind == "mxf8f6f4" else (1, 1)
    value = ids[1] << 4 | codes[0] << 7 | codes[1] << 10 | N >> 3 << 17
    return value | (scale == "ue8m0") << 23 | M >> 7 << 27 | ids[0] << 29 | extra


def load_scales(columns, at, base):
    """Every warp puts the same words of scales in its own quarter of the lanes."""
    loads = "\n".join(f"ld.global.b32 %d{j}, [%rd3+{base + 4 * j}];" for j in range(columns))
    return f"""and.b32 %t0, %thread, 31; mul.wide.u32 %rd2, %t0, {4 * columns};
    add.u64 %rd3, %in, %rd2;
    {loads}
    add.u32 %t1, %lane, {at};
    tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%t1], {registers(columns)};
    tcgen05.wait::st.sync.aligned;
"""


def body(descriptor_value, *, kind="mxf8f6f4", vec="", quarters=4):
    """Load operands, store the scales, multiply, store D."""
    scales = load_scales(M // 32, SCALE_A, 4096) + load_scales(N // 32, SCALE_B, 4096 + 512)
    if quarters < 4:
        scales = f"setp.lt.u32 %p, %warp, {quarters}; @!%p bra skip;\n{scales}\nskip:\n"
    return (
        LOAD
        + scales
        + f"""bar.sync 0;
    shr.u32 %t0, %sa, 4; cvt.u64.u32 %rd1, %t0; or.b64 %da, %rd1, {descriptor(32, M)};
    shr.u32 %t0, %sb, 4; cvt.u64.u32 %rd1, %t0; or.b64 %db, %rd1, {descriptor(32, N)};
    add.u32 %t2, %base, {SCALE_A}; add.u32 %t3, %base, {SCALE_B};
    @%first tcgen05.mma.cta_group::1.kind::{kind}.block_scale{vec}
        [%base], %da, %db, {descriptor_value}, [%t2], [%t3], %no;
"""
        + COMMIT
        + WAIT_MMA
        + store_rows(N)
    )


def words_of(codes):
    """Scale bytes [rows, 4] as the words of 32 lanes and rows / 32 columns."""
    return np.ascontiguousarray(
        codes.reshape(-1, 32, 4).transpose(1, 0, 2)
    ).reshape(-1).view(np.uint8)  # fmt: skip


def run(text, a_bytes, b_bytes, scale_a, scale_b, seed=0, **options):
    """Return D of a launch; scales are bytes [rows, 4]."""
    a = np.concatenate([a_bytes, words_of(scale_a), words_of(scale_b)])
    out = np.zeros((M, N), np.float32)
    load_ptx(kernel(text)).launch(
        "k", 1, 128, 1, [out, a, b_bytes, len(a_bytes), len(b_bytes)], BAR_AT + 64,
        Options(seed=seed, **options),
    )  # fmt: skip
    return out


def random_scales(rng, scale, rows):
    low, high = (120, 134) if scale == "ue8m0" else (0x20, 0x60)
    return rng.integers(low, high, (rows, 4)).astype(np.uint8)


def value_of(codes, scale):
    if scale == "ue8m0":
        return np.ldexp(1.0, codes.astype(int) - 127)
    return to_float32(codes, "e4m3").astype(np.float64)


def check(out, a, b, scale_a, scale_b):
    """Compare with float64; the values [rows, K] and scales [rows, blocks] are exact."""
    x = (a.reshape(M, scale_a.shape[1], -1) * scale_a[:, :, None]).reshape(M, -1)
    y = (b.reshape(N, scale_b.shape[1], -1) * scale_b[:, :, None]).reshape(N, -1)
    assert np.all(np.abs(out - x @ y.T) <= np.abs(x) @ np.abs(y).T * 2.0**-23)


@pytest.mark.parametrize("ids", [(0, 0), (1, 3), (3, 2)])
@pytest.mark.parametrize("names", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_mxf8_product_scales_rows_by_the_byte_of_the_id(names, ids):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 0x50, (rows, 32)).astype(np.uint8) for rows in (M, N))
    scales = [random_scales(rng, "ue8m0", rows) for rows in (M, N)]
    text = body(idesc(*names, ids=ids), vec=".block32")
    out = run(text, place(a, 32), place(b, 32), *scales)
    values = [to_float32(raw, name).astype(np.float64) for raw, name in zip((a, b), names)]
    used = [value_of(codes[:, [n]], "ue8m0") for codes, n in zip(scales, ids)]
    check(out, *values, *used)


@pytest.mark.parametrize(
    ("kind", "vec", "scale", "blocks", "ids"),
    [
        ("mxf4", "", "ue8m0", 2, (0, 2)),
        ("mxf4", ".scale_vec::2X", "ue8m0", 2, (2, 0)),
        ("mxf4nvf4", ".block32", "ue8m0", 2, (2, 2)),
        ("mxf4nvf4", ".scale_vec::4X", "ue8m0", 4, (0, 0)),
        ("mxf4nvf4", ".block16", "ue4m3", 4, (0, 0)),
    ],
)
def test_packed_4_bit_product_scales_blocks_of_each_row(kind, vec, scale, blocks, ids):
    rng = np.random.default_rng(2)
    packed = [rng.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (M, N)]
    nibbles = [np.stack((p & 15, p >> 4), axis=-1).reshape(len(p), 64) for p in packed]
    values = [to_float32(n, "e2m1").astype(np.float64) for n in nibbles]
    scales = [random_scales(rng, scale, rows) for rows in (M, N)]
    text = body(idesc(kind=kind, scale=scale, ids=ids), kind=kind, vec=vec)
    out = run(text, *(place(p, 32) for p in packed), *scales)
    used = [value_of(codes[:, n : n + blocks], scale) for codes, n in zip(scales, ids)]
    check(out, *values, *used)


def zeros():
    return np.zeros(M * 32, np.uint8), np.zeros(N * 32, np.uint8)


def ones():
    return np.full((M, 4), 127, np.uint8), np.full((N, 4), 127, np.uint8)


def test_scale_of_255_makes_its_row_nan():
    scale_a, scale_b = ones()
    scale_a[5] = 255
    out = run(body(idesc()), *zeros(), scale_a, scale_b)
    assert np.isnan(out[5]).all()
    assert not np.isnan(np.delete(out, 5, axis=0)).any()


def test_scales_must_be_in_every_quarter_of_the_lanes():
    with pytest.raises(UninitialisedRead, match="tensor memory lane 96"):
        run(body(idesc(), quarters=3), *zeros(), *ones())


@pytest.mark.parametrize(
    ("value", "kind", "vec", "message"),
    [
        (idesc(scale="ue4m3"), "mxf8f6f4", "", "ue8m0 only"),
        (idesc(extra=1 << 2), "mxf8f6f4", "", "sparse"),
        (idesc(extra=1 << 25), "mxf8f6f4", "", "reserved bit"),
        (idesc(kind="mxf4", ids=(1, 0)), "mxf4", "", "scale factor ID 1 of A"),
        (idesc(kind="mxf4", extra=1 << 31), "mxf4", "", "K=96"),
        (idesc(kind="mxf4", extra=1 << 15), "mxf4", "", "cannot transpose"),
        (idesc(kind="mxf4nvf4", scale="ue4m3"), "mxf4nvf4", ".block32", "need .scale_vec::4X"),
        (idesc(extra=1 << 28), "mxf8f6f4", "", "M="),
    ],
)
def test_wrong_descriptor_is_a_fault(value, kind, vec, message):
    with pytest.raises(IllegalOperand, match=message):
        run(body(value, kind=kind, vec=vec), *zeros(), *ones())


@pytest.mark.parametrize(
    ("kind", "vec"), [("mxf8f6f4", ".scale_vec::2X"), ("mxf4", ".block16"), ("mxf4nvf4", "")]
)
def test_scale_vector_size_that_the_kind_lacks_is_an_error(kind, vec):
    with pytest.raises(PtxError, match="allowed"):
        load_ptx(kernel(body(idesc(kind=kind), kind=kind, vec=vec))).launch("k", 1, 128)


def test_exact_mode_is_refused():
    with pytest.raises(IllegalOperand, match="exact_mma has no rule"):
        run(body(idesc()), *zeros(), *ones(), exact_mma=True)
