"""Tensor copies in small kernels: values against numpy, and each rule with and without."""

import re

import numpy as np
import pytest

from fovea.emulator import (
    DeadlockError,
    IllegalOperand,
    Misaligned,
    Options,
    OutOfBounds,
    RaceError,
    UninitialisedRead,
    load_ptx,
)
from fovea.emulator.layout.tensor_map import encode_tensor_map, make_tensor_map

HEADER = """
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""
INIT = """
    mov.u32 %base, smem;
    add.u32 %bar, %base, 16384;
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    @%first mbarrier.init.shared::cta.b64 [%bar], 1;
    @%first fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
REGISTERS = """
    .reg .pred %first, %p, %more;
    .reg .b16 %mask;
    .reg .b32 %base, %bar, %thread, %r<16>, %c<5>;
    .reg .b64 %map, %out, %in, %rd<8>, %state;
"""
WAIT = """
wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra wait;
"""
# Every thread copies its 4-byte words of `bytes` of shared memory to global memory.
DUMP = """
    mov.u32 %r1, %thread;
dump:
    setp.ge.u32 %more, %r1, {words};
    @%more bra dump_end;
    shl.b32 %r2, %r1, 2;
    add.u32 %r3, %base, %r2;
    ld.shared.b32 %r4, [%r3];
    cvt.u64.u32 %rd1, %r2;
    add.u64 %rd2, %out, %rd1;
    st.global.b32 [%rd2], %r4;
    add.u32 %r1, %r1, 32;
    bra dump;
dump_end:
"""
# Every thread copies its words from global to shared memory.
FILL = """
    mov.u32 %r1, %thread;
fill:
    setp.ge.u32 %more, %r1, {words};
    @%more bra fill_end;
    shl.b32 %r2, %r1, 2;
    add.u32 %r3, %base, %r2;
    cvt.u64.u32 %rd1, %r2;
    add.u64 %rd2, %in, %rd1;
    ld.global.b32 %r4, [%rd2];
    st.shared.b32 [%r3], %r4;
    add.u32 %r1, %r1, 32;
    bra fill;
fill_end:
"""


def coordinates(values):
    return "{" + ", ".join(map(str, values)) + "}"


def load_kernel(dim, at, size, *, expect=True, wait=True, instruction=None, announced=None):
    """One warp loads a box to shared memory and dumps it."""
    arrive = "mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], {};"
    text = arrive.format(size if announced is None else announced)
    if not expect:
        text = "mbarrier.arrive.shared::cta.b64 %state, [%bar];"
    instruction = instruction or (
        f"cp.async.bulk.tensor.{dim}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[%base], [%map, {coordinates(at)}], [%bar];"
    )
    return f"""{HEADER}
.visible .entry k(.param .align 64 .b8 tensor[128], .param .u64 out)
{{{REGISTERS}{INIT}
    ld.param.u64 %out, [out];
    mov.b64 %map, tensor;
    cvta.param.u64 %map, %map;
    @%first {text}
    @%first {instruction}
    {WAIT if wait else ""}
    {DUMP.format(words=size // 4)}
    ret;
}}
"""


def store_kernel(dim, at, size, *, fence=True, commit=True, wait="", reuse="", instruction=None):
    """One warp fills shared memory and stores it to a box."""
    instruction = instruction or (
        f"cp.async.bulk.tensor.{dim}d.global.shared::cta.tile.bulk_group "
        f"[%map, {coordinates(at)}], [%base];"
    )
    return f"""{HEADER}
.visible .entry k(.param .align 64 .b8 tensor[128], .param .u64 in)
{{{REGISTERS}{INIT}
    ld.param.u64 %in, [in];
    mov.b64 %map, tensor;
    cvta.param.u64 %map, %map;
    {FILL.format(words=size // 4)}
    {"fence.proxy.async.shared::cta;" if fence else ""}
    bar.sync 0;
    @%first {instruction}
    {"@%first cp.async.bulk.commit_group;" if commit else ""}
    {wait}
    {reuse}
    ret;
}}
"""


def run(text, tensor, buffer, memory, *, seed=0, cluster=1, **options):
    module = load_ptx(text)
    from fovea.emulator.machine.memory import GlobalMemory

    known = GlobalMemory()
    known.register(memory, "tensor")
    return module.launch(
        "k",
        cluster,
        32,
        cluster,
        [encode_tensor_map(tensor), buffer],
        16384 + 64,
        Options(seed=seed, **options),
        memory=known,
    )


def map_of(array, box, *, element="bf16", **more):
    sizes = tuple(reversed(array.shape))
    strides = tuple(reversed(array.strides[:-1]))
    return make_tensor_map(array.ctypes.data, element, sizes, strides, box, **more)


def aligned(shape, dtype):
    """A numpy array whose data is 16-byte aligned, numbered from 1."""
    count = int(np.prod(shape))
    raw = np.zeros(count * np.dtype(dtype).itemsize + 16, np.uint8)
    start = -raw.ctypes.data % 16
    array = raw[start : start + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    array[...] = np.arange(1, count + 1).reshape(shape)
    return array


def chunk_permutation(width, rows):
    """Where the 16-byte chunk c of row r of a swizzled tile lies, as chunk numbers."""
    per_row = width // 16
    table = np.arange(rows * per_row).reshape(rows, per_row)
    for row in range(rows):
        line = row * width // 128
        for chunk in range(per_row):
            table[row, chunk] = row * per_row + (chunk ^ (line % per_row if width else 0))
    return table


@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_tensor_load_places_chunks_by_the_swizzle(width):
    columns = (width or 48) // 2
    array = aligned((40, 128), np.uint16)
    tensor = map_of(array, (columns, 16), swizzle=width)
    size = 16 * columns * 2
    out = np.zeros(size // 2, np.uint16)
    run(load_kernel(2, (columns, 5), size), tensor, out, array)
    tile = np.ascontiguousarray(array[5:21, columns : 2 * columns])
    chunks = tile.view(np.uint8).reshape(-1, 16)
    expected = np.zeros_like(chunks)
    table = chunk_permutation(width, 16) if width else np.arange(len(chunks))
    expected[table.ravel()] = chunks
    assert np.array_equal(out.view(np.uint8), expected.ravel())


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("corner", ["inside", "before", "beyond"])
def test_tensor_load_fills_out_of_bounds_with_zero(dim, corner):
    shape = (3, 4, 5, 6, 24)[5 - dim :]
    box = (8, 4, 3, 2, 2)[:dim]
    array = aligned(shape, np.uint16)
    start = {"inside": 1, "before": -2, "beyond": 2}[corner]
    at = (start * 8, *[start] * (dim - 1))
    size = int(np.prod(box)) * 2
    out = np.zeros(size // 2, np.uint16)
    run(load_kernel(dim, at, size), map_of(array, box), out, array)
    pads = [(4, 4)] * (dim - 1) + [(16, 24)]
    padded = np.pad(array, pads)
    slices = tuple(
        slice(pad + a, pad + a + b)
        for (pad, _), a, b in zip(pads, reversed(at), reversed(box), strict=True)
    )
    assert np.array_equal(out, padded[slices].ravel())


def test_tensor_load_can_fill_with_nan():
    array = aligned((4, 8), np.float32)
    tensor = map_of(array, (8, 8), element="f32", fills_nan=True)
    out = np.zeros((8, 8), np.float32)
    run(load_kernel(2, (4, 2), 256), tensor, out, array)
    assert np.array_equal(out[:2, :4], array[2:, 4:])
    assert np.isnan(out[2:]).all()
    assert np.isnan(out[:, 4:]).all()


def test_tensor_load_samples_at_the_element_strides():
    array = aligned((16, 32), np.uint16)
    tensor = map_of(array, (16, 8), element_strides=(2, 3))  # dimension 0's is ignored
    out = np.zeros((3, 16), np.uint16)
    run(load_kernel(2, (8, 1), 96), tensor, out, array)
    assert np.array_equal(out, array[1:9:3, 8:24])


@pytest.mark.parametrize("column", [-4, 1, 12])
def test_box_that_begins_between_16_byte_chunks_is_a_fault(column):
    tensor = map_of(array := aligned((16, 32), np.uint16), (16, 8))
    fault(IllegalOperand, load_kernel(2, (column, 0), 256), tensor, array, "multiple of 16")


def test_tensor_load_of_overlapping_and_strided_rows_follows_the_strides():
    storage = aligned((64,), np.uint32)
    tensor = make_tensor_map(storage.ctypes.data, "u32", (8, 6), (16,), (8, 6))
    out = np.zeros((6, 8), np.uint32)
    run(load_kernel(2, (0, 0), 192), tensor, out, storage)
    expected = np.lib.stride_tricks.as_strided(storage, (6, 8), (16, 4))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("width", [0, 128])
@pytest.mark.parametrize("at", [(0, 0), (96, 30)])
def test_tensor_store_writes_only_inside_the_bounds(width, at):
    columns = 64 if width else 24
    array = aligned((40, 128), np.uint16)
    before = array.copy()
    tile = np.random.default_rng(0).integers(1, 1 << 16, (16, columns)).astype(np.uint16)
    chunks = tile.view(np.uint8).reshape(-1, 16)
    placed = np.zeros_like(chunks)
    table = chunk_permutation(width, 16) if width else np.arange(len(chunks))
    placed[table.ravel()] = chunks
    text = store_kernel(2, at, tile.nbytes, wait="@%first cp.async.bulk.wait_group 0;")
    run(text, map_of(array, (columns, 16), swizzle=width), placed.view(np.uint32), array)
    expected = before
    region = expected[at[1] : at[1] + 16, at[0] : at[0] + columns]
    region[...] = tile[: region.shape[0], : region.shape[1]]
    assert np.array_equal(array, expected)


@pytest.mark.parametrize(
    ("op", "element", "dtype"),
    [("add", "f32", np.float32), ("add", "f16", np.float16), ("min", "f16", np.float16),
     ("max", "s32", np.int32), ("add", "u32", np.uint32), ("xor", "u32", np.uint32)],
)  # fmt: skip
def test_tensor_reduction_combines_with_what_is_there(op, element, dtype):
    rng = np.random.default_rng(2)
    array = aligned((6, 16), dtype)
    array[...] = rng.integers(0, 100, array.shape)
    box = rng.integers(0, 100, (4, 16)).astype(dtype)
    before = array.copy()
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor}[op]
    text = store_kernel(
        2,
        (0, 3),
        box.nbytes,
        wait="@%first cp.async.bulk.wait_group 0;",
        instruction=f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group "
        "[%map, {0, 3}], [%base];",
    )
    run(text, map_of(array, (16, 4), element=element), box.view(np.uint32), array)
    before[3:6] = ufunc(before[3:6], box[:3])
    assert np.array_equal(array, before)


def test_tensor_multicast_fills_and_signals_every_cta_of_the_mask():
    array = aligned((8, 32), np.uint16)
    text = load_kernel(
        2,
        (0, 0),
        512,
        instruction="cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::"
        "bytes.multicast::cluster [%base], [%map, {0, %c0}], [%bar], %mask;",
    )
    # Both CTAs wait; only CTA 1 issues, after both have initialised their barriers.
    setup = """
    mov.u32 %c0, 0;
    mov.u16 %mask, 3;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r5, %cluster_ctarank;
    cvt.u64.u32 %rd3, %r5;
    mul.lo.u64 %rd3, %rd3, 512;
    add.u64 %out, %out, %rd3;
    setp.eq.and.u32 %more, %r5, 1, %first;
    """
    text = text.replace("cvta.param.u64 %map, %map;", "cvta.param.u64 %map, %map;" + setup)
    text = text.replace("@%first cp.async", "@%more cp.async")
    # A CTA must not leave while the other may still write to it.
    text = text.replace(
        "    ret;", "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n    ret;"
    )
    out = np.zeros((2, 256), np.uint16)
    run(text, map_of(array, (32, 8)), out, array, cluster=2)
    assert np.array_equal(out[0], array.ravel())
    assert np.array_equal(out[1], array.ravel())


# --- rules, with and without --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_tensor_load_read_after_the_phase_is_clean(seed):
    array, out = aligned((8, 32), np.uint16), np.zeros(256, np.uint16)
    run(load_kernel(2, (0, 0), 512), map_of(array, (32, 8)), out, array, seed=seed)
    assert np.array_equal(out, array.ravel())


@pytest.mark.parametrize("delay", ["eager", "late", "random"])
def test_tensor_load_read_before_the_phase_is_reported(delay):
    array, text = aligned((8, 32), np.uint16), load_kernel(2, (0, 0), 512, wait=False)
    with pytest.raises((RaceError, UninitialisedRead)) as caught:
        run(text, map_of(array, (32, 8)), np.zeros(256, np.uint16), array, async_delay=delay)
    assert "ld.shared.b32" in str(caught.value)


def test_tensor_load_that_arrives_after_its_cta_is_reported():
    array, out = aligned((8, 32), np.uint16), np.zeros(256, np.uint16)
    text = load_kernel(2, (0, 0), 0, announced=512, wait=False).replace(DUMP.format(words=0), "")
    with pytest.raises(RaceError, match="has exited"):
        run(text, map_of(array, (32, 8)), out, array, async_delay="late")


def test_tensor_load_without_expect_tx_is_reported():
    array = aligned((8, 32), np.uint16)
    text = load_kernel(2, (0, 0), 512, expect=False)
    with pytest.raises((RaceError, UninitialisedRead, IllegalOperand)):
        run(text, map_of(array, (32, 8)), np.zeros(256, np.uint16), array, async_delay="late")


@pytest.mark.parametrize("announced", [496, 528])
def test_tensor_load_with_another_byte_count_deadlocks(announced):
    array = aligned((8, 32), np.uint16)
    text = load_kernel(2, (0, 0), 512, announced=announced)
    with pytest.raises(DeadlockError, match="mbarrier at shared"):
        run(text, map_of(array, (32, 8)), np.zeros(256, np.uint16), array)


@pytest.mark.parametrize("fence", [True, False])
def test_tensor_store_of_generic_writes_needs_the_proxy_fence(fence):
    array = aligned((8, 32), np.uint16)
    box = np.arange(128, dtype=np.uint32)
    text = store_kernel(2, (0, 0), 512, fence=fence, wait="@%first cp.async.bulk.wait_group 0;")
    if fence:
        run(text, map_of(array, (32, 8)), box, array)
        assert np.array_equal(array.view(np.uint32).ravel(), box)
    else:
        with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
            run(text, map_of(array, (32, 8)), box, array)


REUSE = "bar.sync 0;\n    st.shared.b32 [%base], %thread;"


@pytest.mark.parametrize(
    ("commit", "wait", "is_clean"),
    [
        (True, "@%first cp.async.bulk.wait_group.read 0;", True),
        (True, "@%first cp.async.bulk.wait_group 0;", True),
        (True, "", False),
        (True, "@%first cp.async.bulk.wait_group.read 1;", False),
        (False, "@%first cp.async.bulk.wait_group.read 0;", False),
    ],
)
def test_reuse_of_a_stores_source_needs_commit_and_wait(commit, wait, is_clean):
    array = aligned((8, 32), np.uint16)
    text = store_kernel(2, (0, 0), 512, commit=commit, wait=wait, reuse=REUSE)
    box = np.arange(128, dtype=np.uint32)
    if is_clean:
        for seed in range(3):
            run(text, map_of(array, (32, 8)), box, array, seed=seed)
    else:
        with pytest.raises(RaceError) as caught:
            run(text, map_of(array, (32, 8)), box, array, async_delay="eager")
        assert "st.shared.b32" in str(caught.value)


# --- faults -------------------------------------------------------------------------------------


def fault(kind, text, tensor, array, message):
    with pytest.raises(kind, match=message) as caught:
        run(text, tensor, np.zeros(4096, np.uint16), array)
    line = caught.value.line
    assert re.search(r"bulk|tensor|mbarrier", text.splitlines()[line - 1])


def test_misaligned_destination_is_a_fault():
    array = aligned((8, 32), np.uint16)
    text = load_kernel(2, (0, 0), 512).replace("[%base], [%map", "[%base+16], [%map")
    fault(Misaligned, text, map_of(array, (32, 8)), array, "multiple of 128")


def test_missing_mbarrier_is_a_fault():
    array = aligned((8, 32), np.uint16)
    text = load_kernel(2, (0, 0), 512).replace("}], [%bar];", "}], [%bar+8];")
    fault(IllegalOperand, text, map_of(array, (32, 8)), array, "no initialised mbarrier")


def test_tensor_map_of_another_rank_is_a_fault():
    array = aligned((8, 32), np.uint16)
    fault(
        IllegalOperand,
        load_kernel(3, (0, 0, 0), 512),
        map_of(array, (32, 8)),
        array,
        "3 coordinates for a tensor map of rank 2",
    )


def test_tensor_larger_than_its_allocation_is_a_fault():
    array = aligned((8, 32), np.uint16)
    tensor = make_tensor_map(array.ctypes.data, "bf16", (32, 4096), (64,), (32, 8))
    fault(OutOfBounds, load_kernel(2, (0, 4000), 512), tensor, array, "leaves its allocation")


def test_destination_beyond_shared_memory_is_a_fault():
    array = aligned((8, 32), np.uint16)
    text = load_kernel(2, (0, 0), 512).replace("[%base], [%map", "[%base+16384], [%map")
    with pytest.raises(OutOfBounds):
        run(text, map_of(array, (32, 8)), np.zeros(4096, np.uint16), array)


# --- tensormap.replace --------------------------------------------------------------------------


def test_replaced_tensor_map_in_shared_memory_is_copied_out_and_used():
    array = aligned((16, 32), np.uint16)
    tensor = map_of(array, (32, 8))
    text = load_kernel(2, (0, 8), 512)
    edit = """
    // the map travels: parameter -> shared memory -> global memory -> use
    ld.param.u64 %in, [scratch];
    shl.b32 %r2, %thread, 2;
    add.u32 %r3, %base, %r2;
    cvt.u64.u32 %rd1, %r2;
    add.u64 %rd2, %map, %rd1;
    ld.b32 %r4, [%rd2];
    st.shared.b32 [%r3], %r4;
    bar.sync 0;
    @%first tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%base], 1, 12;
    bar.sync 0;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned \
[%in], [%base], 128;
    mov.b64 %map, %in;
    bar.sync 0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    """
    text = text.replace(".param .u64 out)", ".param .u64 out, .param .u64 scratch)")
    text = text.replace("cvta.param.u64 %map, %map;", "cvta.param.u64 %map, %map;" + edit)
    scratch = np.zeros(256, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 64 :][:128]
    out = np.zeros((8, 32), np.uint16)
    from fovea.emulator.machine.memory import GlobalMemory

    known = GlobalMemory()
    known.register(array, "tensor")
    load_ptx(text).launch(
        "k", 1, 32, 1, [encode_tensor_map(tensor), out, scratch], 16448, memory=known
    )
    assert np.array_equal(out[:4], array[8:12])
    assert not out[4:].any()


def test_replace_of_a_field_with_the_wrong_width_is_refused():
    from fovea.emulator import PtxError

    text = load_kernel(2, (0, 0), 512).replace(
        "cvta.param.u64 %map, %map;",
        "tensormap.replace.tile.global_stride.shared::cta.b1024.b32 [%base], 0, 12;",
    )
    array = aligned((8, 32), np.uint16)
    with pytest.raises(PtxError, match=r"takes \.b64"):
        run(text, map_of(array, (32, 8)), np.zeros(256, np.uint16), array)
