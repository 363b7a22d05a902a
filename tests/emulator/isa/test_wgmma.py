"""wgmma in one-warpgroup kernels: values against numpy, and each rule with and without."""

from string import Template

import numpy as np
import pytest

from fovea.emulator import (
    DeadlockError,
    IllegalOperand,
    Options,
    RaceError,
    UninitialisedRead,
    load_ptx,
)
from fovea.emulator.arithmetic.formats import to_float32

FORMATS = {"bf16": (2, 16), "f16": (2, 16), "tf32": (4, 8), "e4m3": (1, 32), "e5m2": (1, 32)}
A_AT, B_AT, BAR_AT = 0, 16384, 49152
SWIZZLE_BITS = {0: 0, 128: 1, 64: 2, 32: 3}


def place(matrix, width):
    """Bytes of a K-major operand: 8-row groups of `width`-byte rows, chunks XORed by the line."""
    rows, row_bytes = matrix.shape[0], matrix.shape[1] * matrix.itemsize
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, row_bytes)
    pitch = width or 16
    out = np.zeros(rows * row_bytes, np.uint8)
    for row in range(rows):
        for chunk in range(row_bytes // 16):
            if width:
                line = row * width // 128 % (width // 16)
                at = row * pitch + (chunk ^ line) * 16
            else:
                at = row * 16 + chunk * rows * 16
            out[at : at + 16] = raw[row, 16 * chunk : 16 * chunk + 16]
    return out


def descriptor(width, rows):
    """The constant part of a descriptor whose operand `place` made."""
    leading, stride = (16, 8 * width) if width else (rows * 16, 128)
    return leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLE_BITS[width] << 62


def registers(prefix, count):
    return "{" + ", ".join(f"%{prefix}{j}" for j in range(count)) + "}"


TEMPLATE = Template(f"""
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 out, .param .u64 in, .param .u64 inb, .param .u64 fragments,
                  .param .u32 bytes, .param .u32 bytesb)
{{
    .reg .pred %first, %p, %yes;
    .reg .b32 %sa, %sb, %bar, %thread, %bytes, %bytesb, %total, %t<8>, %d<128>, %a<4>;
    .reg .b64 %out, %in, %inb, %frag, %da, %db, %rd<8>, %state;
    mov.u32 %sa, smem;
    add.u32 %sb, %sa, {B_AT};
    add.u32 %bar, %sa, {BAR_AT};
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    setp.eq.u32 %yes, %thread, %thread;
    @%first mbarrier.init.shared::cta.b64 [%bar], 1;
    bar.sync 0;
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    ld.param.u64 %inb, [inb];
    ld.param.u64 %frag, [fragments];
    ld.param.u32 %bytes, [bytes];
    ld.param.u32 %bytesb, [bytesb];
    add.u32 %total, %bytes, %bytesb;
    mul.wide.u32 %rd0, %thread, 4;
    add.u64 %out, %out, %rd0;
    add.u64 %frag, %frag, %rd0;
$copies
$initials
$fragments
    shr.u32 %t0, %sa, 4;
    cvt.u64.u32 %rd1, %t0;
    or.b64 %da, %rd1, $descriptor_a;
    shr.u32 %t0, %sb, 4;
    cvt.u64.u32 %rd1, %t0;
    or.b64 %db, %rd1, $descriptor_b;
    $before
    $fence
$products
    $commit
    $between
    $wait
    $after
$stores
    ret;
}}
""")
BULK_COPIES = """
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], %total;
    @%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%sa], [%in], %bytes, [%bar];
    @%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%sb], [%inb], %bytesb, [%bar];
wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra wait;
"""
# What a kernel is made of unless a test says otherwise; texts are put in as they are.
DEFAULTS = {
    "types": "f32.bf16.bf16",
    "k": 16,
    "width": 128,
    "scale_d": "0",
    "tail": "1, 1, 0, 0",
    "a_registers": False,
    "steps": 1,
    "initial": True,
    "copies": BULK_COPIES,
    "before": "",
    "fence": "wgmma.fence.sync.aligned;",
    "commit": "wgmma.commit_group.sync.aligned;",
    "between": "",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "after": "",
}


def kernel(columns, **changes):
    """One warpgroup multiplies A and B of shared memory, loaded by bulk copies, and stores D."""
    assert changes.keys() <= DEFAULTS.keys()
    use = DEFAULTS | changes
    count = columns // 4 if use["types"].startswith("f16") else columns // 2
    a = registers("a", 4) if use["a_registers"] else "%da"
    tail = f", {use['tail']}" if use["tail"] else ""
    head = f"    wgmma.mma_async.sync.aligned.m64n{columns}k{use['k']}.{use['types']}"
    products = "\n".join(
        f"{head} {registers('d', count)}, {a}, %db, {'1' if step else use['scale_d']}{tail};\n"
        "    add.u64 %da, %da, 2;\n    add.u64 %db, %db, 2;"
        for step in range(use["steps"])
    )
    initials = [f"    ld.global.b32 %d{j}, [%out+{512 * j}];" for j in range(count)]
    fragments = [f"    ld.global.b32 %a{j}, [%frag+{512 * j}];" for j in range(4)]
    return TEMPLATE.substitute(
        use,
        products=products,
        initials="\n".join(initials if use["initial"] else []),
        fragments="\n".join(fragments if use["a_registers"] else []),
        descriptor_a=descriptor(use["width"], 64),
        descriptor_b=descriptor(use["width"], columns),
        stores="\n".join(f"    st.global.b32 [%out+{512 * j}], %d{j};" for j in range(count)),
    )


def accumulators(matrix):
    """What each thread's registers hold: [register, thread]."""
    columns = matrix.shape[1]
    out = np.zeros((columns // 2, 128), matrix.dtype)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for j in range(columns // 2):
            row = 16 * warp + lane // 4 + 8 * (j // 2 % 2)
            out[j, thread] = matrix[row, 8 * (j // 4) + lane % 4 * 2 + j % 2]
    return out


def fragments(a):
    """A in registers: [register, thread] of 32-bit words."""
    raw = np.ascontiguousarray(a).view(np.uint8).reshape(64, 32)
    out = np.zeros((4, 128), np.uint32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for j in range(4):
            row = 16 * warp + lane // 4 + 8 * (j % 2)
            start = 16 * (j // 2) + lane % 4 * 4
            out[j, thread] = raw[row, start : start + 4].view(np.uint32)[0]
    return out


def random_operand(rng, rows, k, name):
    size = FORMATS[name][0]
    if name in ("e4m3", "e5m2"):
        return rng.integers(0, 0x50, (rows, k)).astype(np.uint8) | (
            rng.integers(0, 2, (rows, k)).astype(np.uint8) << 7
        )
    values = rng.standard_normal((rows, k)).astype(np.float32)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32) if size == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)


def launch(text, out, a_bytes, b_bytes, a_fragments=None, *, seed=0, **options):
    module = load_ptx(text)
    a_fragments = np.zeros((4, 128), np.uint32) if a_fragments is None else a_fragments
    args = [out, a_bytes, b_bytes, a_fragments, len(a_bytes), len(b_bytes)]
    return module.launch("k", 1, 128, 1, args, BAR_AT + 64, Options(seed=seed, **options))


def setup(columns=32, name="bf16", width=128, steps=1, seed=0):
    rng = np.random.default_rng(seed)
    k = FORMATS[name][1] * steps
    a, b = random_operand(rng, 64, k, name), random_operand(rng, columns, k, name)
    x, y = to_float32(a, name), to_float32(b, name)
    return a, b, x.astype(np.float64) @ y.T.astype(np.float64), np.abs(x) @ np.abs(y).T


def check(out, expected, scale):
    assert np.all(np.abs(out - accumulators(expected)) <= accumulators(scale) * 2.0**-20 + 1e-30)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
def test_product_of_shared_operands_in_each_layout_and_type(name, width):
    columns = 40
    k = (width or 32) // FORMATS[name][0]
    steps = k // FORMATS[name][1]
    a, b, product, scale = setup(columns, name, width, steps)
    out = np.zeros((columns // 2, 128), np.float32)
    tail = "1, 1, 0, 0" if FORMATS[name][0] == 2 else "1, 1"
    text = kernel(
        columns, types=f"f32.{name}.{name}", k=FORMATS[name][1], width=width, tail=tail, steps=steps
    )
    launch(text, out, place(a, width), place(b, width))
    check(out, product, scale)


@pytest.mark.parametrize("columns", [8, 64, 256])
def test_product_adds_to_the_accumulator_if_scale_d_is_true(columns):
    a, b, product, scale = setup(columns)
    initial = np.random.default_rng(9).standard_normal((64, columns)).astype(np.float32)
    out = accumulators(initial)
    text = kernel(columns, width=32, scale_d="%yes")
    launch(text, out, place(a, 32), place(b, 32))
    check(out, product + initial, scale + np.abs(initial))


@pytest.mark.parametrize(("tail", "sign"), [("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)])
def test_scale_a_and_b_negate_their_operands(tail, sign):
    a, b, product, scale = setup()
    out = np.zeros((16, 128), np.float32)
    launch(kernel(32, width=32, tail=tail + ", 0, 0"), out, place(a, 32), place(b, 32))
    check(out, sign * product, scale)


@pytest.mark.parametrize("name", ["bf16", "tf32", "e4m3"])
def test_a_may_come_from_registers(name):
    a, b, product, scale = setup(name=name)
    out = np.zeros((16, 128), np.float32)
    tail = "1, 1, 0" if FORMATS[name][0] == 2 else "1, 1"
    text = kernel(
        32, types=f"f32.{name}.{name}", k=FORMATS[name][1], width=32, tail=tail, a_registers=True
    )
    launch(text, out, np.zeros(2048, np.uint8), place(b, 32), fragments(a))
    check(out, product, scale)


def test_f16_accumulators_are_packed_in_pairs():
    a, b, product, scale = setup(name="f16")
    out = np.zeros((8, 128), np.uint32)
    text = kernel(32, types="f16.f16.f16", width=32)
    launch(text, out, place(a, 32), place(b, 32))
    halves = out.view(np.float16).reshape(8, 128, 2).astype(np.float64)
    expected, bound = accumulators(product), accumulators(scale)
    for j in range(8):
        for half in range(2):
            # register 2j + h holds columns 8j + 2c and + 1 of row 8h + r
            want, limit = expected[2 * j + half], bound[2 * j + half]
            assert np.all(np.abs(halves[j, :, half] - want) <= limit * 2.0**-9)


@pytest.mark.parametrize("types", ["s32.s8.s8", "s32.u8.s8", "s32.u8.u8"])
def test_integer_product_is_exact(types):
    rng = np.random.default_rng(3)
    kinds = [np.int8 if name == "s8" else np.uint8 for name in types.split(".")[1:]]
    a = rng.integers(0, 256, (64, 32)).astype(np.uint8)
    b = rng.integers(0, 256, (32, 32)).astype(np.uint8)
    out = np.zeros((16, 128), np.int32)
    text = kernel(32, types=types, k=32, width=32, tail="")
    launch(text, out, place(a, 32), place(b, 32))
    product = a.view(kinds[0]).astype(np.int32) @ b.view(kinds[1]).astype(np.int32).T
    assert np.array_equal(out, accumulators(product))


def test_both_modes_truncate_as_the_tensor_core_does():
    # 1 + 2^-13 * 2^-14 in sixteen terms: every term is lost in alignment.
    one = np.float32(1).view(np.uint32) >> 16
    tiny = [int(np.float32(2.0**-e).view(np.uint32) >> 16) for e in (13, 14)]
    a, b = np.full((64, 16), tiny[0], np.uint16), np.full((32, 16), tiny[1], np.uint16)
    a[:, 0] = b[:, 0] = one
    for exact in (False, True):
        out = np.zeros((16, 128), np.float32)
        launch(kernel(32, width=32), out, place(a, 32), place(b, 32), exact_mma=exact)
        assert (out == 1).all()


@pytest.mark.parametrize("name", ["bf16", "f16", "tf32"])
def test_fast_mode_gives_the_bits_of_the_exact_mode(name):
    k = FORMATS[name][1]
    a, b, product, _ = setup(width=128, steps=4, name=name)
    tail = "1, 1, 0, 0" if FORMATS[name][0] == 2 else "1, 1"
    text = kernel(32, types=f"f32.{name}.{name}", k=k, steps=4, tail=tail, scale_d="%yes")
    initial = accumulators(100 * product.astype(np.float32))  # far above what is added
    outs = [initial.copy(), initial.copy()]
    for exact, out in zip((False, True), outs):
        launch(text, out, place(a, 128), place(b, 128), exact_mma=exact)
    assert np.array_equal(outs[0], outs[1])
    plain = accumulators((101 * product).astype(np.float32))
    assert (outs[0] != plain).mean() > 0.1  # truncation shows


@pytest.mark.parametrize("seed", range(5))
def test_chained_products_give_the_same_bits_in_every_schedule(seed):
    a, b, _, _ = setup(width=128, steps=4)
    outs = []
    for number in (seed, 99):
        out = np.zeros((16, 128), np.float32)
        launch(kernel(32, steps=4), out, place(a, 128), place(b, 128), seed=number)
        outs.append(out)
    assert np.array_equal(outs[0], outs[1])


# --- rules, with and without --------------------------------------------------------------------


def attempt(text, *, seed=0, a_fragments=None, **options):
    a, b, product, scale = setup(width=32)
    out = np.zeros((16, 128), np.float32)
    launch(text, out, place(a, 32), place(b, 32), a_fragments, seed=seed, **options)
    check(out, product, scale)


@pytest.mark.parametrize("delay", ["eager", "late", "random"])
@pytest.mark.parametrize("missing", [None, "commit", "wait"])
def test_reading_accumulators_needs_commit_and_wait(missing, delay):
    text = kernel(32, width=32, **({missing: ""} if missing else {}))
    if missing is None:
        attempt(text, async_delay=delay)
        return
    with pytest.raises(RaceError) as caught:
        attempt(text, async_delay=delay)
    assert "st.global.b32" in str(caught.value)
    assert "wgmma.mma_async" in str(caught.value)


def test_wait_group_that_leaves_the_group_pending_is_reported():
    with pytest.raises(RaceError, match="wait_group"):
        attempt(kernel(32, width=32, wait="wgmma.wait_group.sync.aligned 1;"))


def test_product_without_any_fence_is_reported():
    with pytest.raises(RaceError, match=r"wgmma\.fence"):
        attempt(kernel(32, width=32, fence=""))


@pytest.mark.parametrize("is_before", [True, False])
def test_write_of_an_accumulator_must_come_before_the_fence(is_before):
    write = "mov.b32 %d3, 0;"
    fence = "wgmma.fence.sync.aligned;"
    text = kernel(32, width=32, fence=f"{write} {fence}" if is_before else f"{fence} {write}")
    if is_before:
        attempt(text)
    else:
        with pytest.raises(RaceError, match=r"register 3 of D .* wgmma\.fence"):
            attempt(text)


@pytest.mark.parametrize("place_of_write", ["before", "between", "after"])
def test_write_of_an_a_register_must_wait(place_of_write):
    a, b, product, scale = setup(width=32)
    write = {place_of_write: "add.u32 %a1, %a1, 0;"}
    text = kernel(32, width=32, tail="1, 1, 0", a_registers=True, **write)
    out = np.zeros((16, 128), np.float32)

    def go():
        launch(text, out, np.zeros(2048, np.uint8), place(b, 32), fragments(a))

    if place_of_write == "between":
        with pytest.raises(RaceError, match="register with A"):
            go()
    else:
        go()
        check(out, product, scale)


GENERIC_FILL = """
    // every thread writes words of both operands with ordinary stores
    mov.u32 %t1, %thread;
fill:
    shl.b32 %t2, %t1, 2;
    cvt.u64.u32 %rd2, %t2;
    add.u64 %rd3, %in, %rd2;
    ld.global.b32 %t3, [%rd3];
    add.u32 %t4, %sa, %t2;
    st.shared.b32 [%t4], %t3;
    setp.lt.u32 %p, %t2, %bytesb;
    add.u64 %rd3, %inb, %rd2;
    @%p ld.global.b32 %t3, [%rd3];
    add.u32 %t4, %sb, %t2;
    @%p st.shared.b32 [%t4], %t3;
    add.u32 %t1, %t1, 128;
    shl.b32 %t2, %t1, 2;
    setp.lt.u32 %p, %t2, %bytes;
    @%p bra fill;
    {fence}
    {barrier}
"""


@pytest.mark.parametrize(
    ("fence", "barrier", "rule"),
    [
        ("fence.proxy.async.shared::cta;", "bar.sync 0;", None),
        ("", "bar.sync 0;", "fence.proxy.async"),
        ("fence.proxy.async.shared::cta;", "", "not ordered"),
    ],
)
def test_operands_written_by_threads_need_proxy_fence_and_barrier(fence, barrier, rule):
    text = kernel(32, width=32, copies=GENERIC_FILL.format(fence=fence, barrier=barrier))
    for seed in range(3):
        if rule is None:
            attempt(text, seed=seed)
        else:
            with pytest.raises((RaceError, UninitialisedRead)):
                attempt(text, seed=seed)
    if rule == "fence.proxy.async":
        with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
            attempt(text)


@pytest.mark.parametrize("is_waited", [True, False])
def test_overwriting_an_operand_must_wait(is_waited):
    write = "st.shared.b32 [%sb], %thread;"
    text = kernel(32, width=32, **{"after" if is_waited else "between": f"@%first {write}"})
    if is_waited:
        for seed in range(3):
            attempt(text, seed=seed)
        return
    for seed in range(6):
        with pytest.raises(RaceError, match=r"st\.shared\.b32"):
            attempt(text, seed=seed)


@pytest.mark.parametrize("same_shape", [True, False])
def test_chain_on_an_accumulator_in_flight_needs_one_shape(same_shape):
    columns = 32 if same_shape else 16
    more = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        f"{registers('d', columns // 2)}, %da, %db, 1, 1, 1, 0, 0;"
    )
    # The first product moved the descriptors on; step back to read the same operands again.
    again = f"sub.u64 %da, %da, 2; sub.u64 %db, %db, 2; {more}"
    text = kernel(32, width=32, commit=again + " wgmma.commit_group.sync.aligned;")
    if same_shape:
        a, b, product, scale = setup(width=32)
        out = np.zeros((16, 128), np.float32)
        launch(text, out, place(a, 32), place(b, 32))
        check(out, 2 * product, 2 * scale)
    else:
        with pytest.raises(RaceError, match=r"another shape|overlap"):
            attempt(text)


# --- faults -------------------------------------------------------------------------------------


def test_uninitialised_accumulator_is_a_fault_only_if_it_is_read():
    attempt(kernel(32, width=32, initial=False, scale_d="0"))
    with pytest.raises(UninitialisedRead, match="register 0 of D"):
        attempt(kernel(32, width=32, initial=False, scale_d="1"))


def test_descriptor_with_reserved_bits_is_a_fault():
    with pytest.raises(IllegalOperand, match="must be zero"):
        attempt(kernel(32, width=32, before="or.b64 %db, %db, 0x10000000000000;"))


def test_warps_with_other_descriptors_are_a_fault():
    shift = "shr.u32 %t0, %thread, 5; cvt.u64.u32 %rd1, %t0; add.u64 %da, %da, %rd1;"
    with pytest.raises(IllegalOperand, match="descriptor of A"):
        attempt(kernel(32, width=32, before=shift))


def test_a_warp_that_leaves_out_the_product_deadlocks_the_others():
    skip = "setp.ge.u32 %p, %thread, 96; @%p bra leave;"
    text = kernel(32, width=32, before=skip, wait="wgmma.wait_group.sync.aligned 0; leave:")
    text = text.replace("    st.global", "    @!%p st.global")
    with pytest.raises(DeadlockError, match=r"not by warps \[3\]"):
        attempt(text)
