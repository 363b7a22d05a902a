"""Tensor memory: loads, stores, copies and allocation, and what is refused."""

import numpy as np
import pytest
from tcgen05_kernels import (
    BAR_AT,
    COMMIT,
    LOAD,
    WAIT,
    WAIT_LD,
    WAIT_MMA,
    describe,
    instruction_descriptor,
    kernel,
    launch,
    mma,
    operands,
    place,
    registers,
    store_rows,
)

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

# --- loads, stores and copies ---------------------------------------------------------------------

# Shape -> registers and columns of one repeat.
SHAPES = {"16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "32x32b": (1, 1)}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_store_in_a_shape_is_undone_by_a_load_in_it(shape):
    per_repeat, columns = SHAPES[shape]
    repeat = 16 // columns
    count = per_repeat * repeat
    moves = "\n".join(
        f"    mul.lo.u32 %d{j}, %thread, 1000; add.u32 %d{j}, %d{j}, {j};" for j in range(count)
    )
    loads = "\n".join(f"    st.global.b32 [%rd3+{4 * j}], %d{64 + j};" for j in range(count))
    body = f"""
{moves}
    tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%lane], {registers(count)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {registers(count, 64)}, [%lane];
    {WAIT_LD}
    mul.wide.u32 %rd2, %thread, {4 * count};
    add.u64 %rd3, %out, %rd2;
{loads}
    """
    out = np.zeros((128, count), np.uint32)
    launch(kernel(body), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    assert np.array_equal(out, np.arange(128)[:, None] * 1000 + np.arange(count))


def test_pack_and_unpack_move_halves_of_neighbouring_columns():
    body = f"""
    mul.lo.u32 %d0, %thread, 0x10001;
    add.u32 %d0, %d0, 0x70000;
    tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%lane], {{%d0}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%d1, %d2}}, [%lane];
    tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {{%d3}}, [%lane];
    {WAIT_LD}
    mul.wide.u32 %rd2, %thread, 16;
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
    mov.u32 %d0, %thread;
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
    mov.u32 %d0, %thread;
    neg.s32 %d1, %d0;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%lane], {{%d0, %d1}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x2.min.s32 {{%d2, %d3}}, %red, [%lane];
    {WAIT_LD}
    mul.wide.u32 %rd2, %thread, 4;
    add.u64 %rd3, %out, %rd2;
    st.global.b32 [%rd3], %red;
    """
    out = np.zeros(128, np.int32)
    launch(kernel(body, target="sm_103a"), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    assert np.array_equal(out, -np.arange(128))
    with pytest.raises(UnsupportedForm, match="sm_103a"):
        launch(kernel(body), out, np.zeros(16, np.uint8), np.zeros(16, np.uint8))


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
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%thread];",
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
        (("or.b64 %db, %rd1,", "or.b64 %db, %rd1, 0x800000000000; //"), "bits 46-47"),
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


OVERWRITE = """
    bar.sync 0;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], 16;
    @%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%bar+16], [%in], 16, [%bar];
""" + WAIT.format(name="overwritten", at="")


def test_copy_over_the_result_of_an_allocation_needs_no_proxy_fence():
    # PTX ISA 9.7.16.6.1: allocation keeps the order of accesses to one address
    empty = np.zeros(16, np.uint8)
    for seed in range(5):
        launch(kernel(OVERWRITE), np.zeros(4), empty, empty, seed=seed)


def test_copy_over_the_result_of_an_allocation_needs_its_barrier():
    empty = np.zeros(16, np.uint8)
    with pytest.raises(RaceError):
        launch(kernel(OVERWRITE.replace("bar.sync 0;", "")), np.zeros(4), empty, empty)


def test_copy_over_a_result_that_was_written_again_needs_a_proxy_fence():
    empty = np.zeros(16, np.uint8)
    store = "bar.sync 0; @%first st.shared.b32 [%bar+16], 5;"
    launch(kernel(f"{store} fence.proxy.async; {OVERWRITE}"), np.zeros(4), empty, empty)
    with pytest.raises(RaceError, match=r"needs fence\.proxy\.async"):
        launch(kernel(store + OVERWRITE), np.zeros(4), empty, empty)


def launch_named(name, wait, **options):
    """Store cells, load them, and leave them to the end of the kernel called `name`."""
    body = f"""tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane], {{%thread}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%d0}}, [%lane];
    {wait}
    mul.wide.u32 %rd2, %thread, 4; add.u64 %rd3, %out, %rd2; st.global.b32 [%rd3], %d0;
    """
    text = kernel(body).replace(".entry k(", f".entry {name}(")
    out = np.zeros(128, np.uint32)
    empty = np.zeros(16, np.uint8)
    result = load_ptx(text).launch(
        name, 1, 128, 1, [out, empty, empty, 16, 16], BAR_AT + 64, Options(**options)
    )
    assert out.tolist() == list(range(128))
    return result


def test_load_without_a_wait_is_left_to_its_registers_in_kernels_of_cute():
    launch_named("kernel_cutlass_k", "")
    launch_named("k", WAIT_LD)
    with pytest.raises(RaceError, match="freed while"):
        launch_named("k", "")


def test_load_that_cute_frees_before_its_wait_is_a_warning():
    result = launch_named("kernel_cutlass_k", "", tensor_load_wait="explicit")
    assert len(result.warnings) == 1
    assert "tcgen05.ld" in result.warnings[0]
    with pytest.raises(RaceError, match="freed while"):
        launch_named("k", "", tensor_load_wait="explicit")


def test_load_without_a_wait_may_have_a_guard():
    body = """tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane], {%thread};
    tcgen05.wait::st.sync.aligned;
    @%yes tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%lane];
    @%no tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%lane];
    mul.wide.u32 %rd2, %thread, 4; add.u64 %rd3, %out, %rd2; st.global.b32 [%rd3], %d0;
    """
    out, empty = np.zeros(128, np.uint32), np.zeros(16, np.uint8)
    launch(kernel(body), out, empty, empty, tensor_load_wait="implicit")
    assert out.tolist() == list(range(128))
