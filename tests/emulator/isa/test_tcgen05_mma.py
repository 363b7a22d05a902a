"""Products of tcgen05: values against numpy, and each rule with and without."""

import numpy as np
import pytest
from tcgen05_kernels import (
    ALLOC,
    COMMIT,
    DEALLOC,
    KIND,
    LOAD,
    SWIZZLE_CODE,
    WAIT,
    WAIT_LD,
    WAIT_MMA,
    close,
    describe,
    instruction_descriptor,
    kernel,
    launch,
    mma,
    operands,
    place,
    registers,
    run_bf16,
    store_rows,
)

from fovea.emulator import DeadlockError, PtxError, RaceError, UninitialisedRead

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


def test_product_of_64_rows_uses_16_lanes_of_each_warp():
    a, b, product, scale = operands(64, 32, "bf16", 32)
    # The other lanes hold no value, so each half warp is loaded by its own shape.
    body = mma() + COMMIT + WAIT_MMA
    stores = "\n".join(f"    st.global.b32 [%rd3+{4 * j}], %d{j};" for j in range(16))
    body += f"""
    tcgen05.ld.sync.aligned.16x32bx2.x16.b32 {registers(16)}, [%lane], 16;
    {WAIT_LD}
    mul.wide.u32 %rd2, %thread, 64;
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
    mul.wide.u32 %rd2, %thread, 32;
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
    other = "setp.eq.u32 %p, %thread, 32;\n" + COMMIT.replace("@%first", "@%p")
    with pytest.raises((RaceError, UninitialisedRead)):
        run_bf16(mma() + other + WAIT_MMA + store_rows(32), async_delay="late")


def test_load_that_is_never_waited_for_is_reported():
    with pytest.raises(RaceError, match=r"tcgen05\.ld .* was never waited for"):
        run_bf16(mma() + COMMIT + WAIT_MMA + store_rows(32, wait=""))


def test_loaded_registers_may_be_used_before_the_wait():
    # A register dependency orders the use (PTX ISA 9.7.16.6.4.5); freeing needs the wait.
    body = mma() + COMMIT + WAIT_MMA + store_rows(32, wait="") + WAIT_LD
    out, product, scale = run_bf16(body)
    close(out, product, scale)


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
    write = "@%first st.shared.b32 [%sb], %thread;\n"
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
    other = "setp.eq.u32 %p, %thread, 64;\n" + mma(enable="%no", issuer="%p")
    for seed in range(4):
        with pytest.raises(RaceError, match=r"tcgen05\.mma"):
            run_bf16(mma() + other + COMMIT + WAIT_MMA + store_rows(32), seed=seed)


def test_copy_then_product_of_another_thread_needs_only_a_barrier():
    copy = "@%first tcgen05.cp.cta_group::1.128x256b [%base+64], %da;\n"
    sync = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;\n"
    use = "setp.eq.u32 %p, %thread, 64;\n" + mma(a="[%base+64]", issuer="%p")
    commit = COMMIT.replace("%first", "%p")
    wait = WAIT_MMA.replace("%p,", "%lead,").replace("!%p", "!%lead")
    tail = commit + wait + "tcgen05.fence::after_thread_sync;\n" + store_rows(32)
    for seed in range(4):
        out, product, scale = run_bf16(copy + sync + use + tail, seed=seed)
        close(out, product, scale)
    for seed in range(4):
        with pytest.raises((RaceError, UninitialisedRead)):
            run_bf16(copy + use + tail, seed=seed)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("seed", range(3))
def test_tcgen05_fence_is_needed_on_both_sides_if_a_kernel_uses_it(side, seed):
    # warps 0 and 2 store 0 to their rows of D, which a product of warp 2 overwrites
    before, after = (f"tcgen05.fence::{name}_thread_sync;" for name in ("before", "after"))
    body = (
        "mov.u32 %d0, 0; shl.b32 %t5, %warp, 21; add.u32 %t6, %base, %t5;\n"
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%t6], {%d0};\n"
        "tcgen05.wait::st.sync.aligned;\n"
        f"{before} bar.sync 0; {after}\n"
        "setp.eq.u32 %p, %thread, 64;\n" + mma(issuer="%p") + COMMIT.replace("%first", "%p")
        + WAIT_MMA.replace("%p,", "%lead,").replace("!%p", "!%lead")
        + f"{after}\n" + store_rows(32)
    )  # fmt: skip
    out, product, scale = run_bf16(body, seed=seed)
    close(out, product, scale)
    lacking = body.replace(before if side == "before" else after, "", 1)
    with pytest.raises(RaceError, match=r"tcgen05.fence::before_thread_sync") as caught:
        run_bf16(lacking, seed=seed)
    assert "tcgen05.fence" in caught.value.rule
    run_bf16(body.replace(before, "").replace(after, ""), seed=seed)  # as compilers do it: silent


@pytest.mark.parametrize("name", ["bf16", "s8"])
def test_family_target_has_every_kind_but_integers(name):
    a, b, product, _ = operands(128, 32, name, 32)
    shape = instruction_descriptor(128, 32, name, d=2 if name == "s8" else 1)
    body = LOAD + describe(32, 128, 32, shape) + mma(KIND[name]) + COMMIT + WAIT_MMA
    text = kernel(body + store_rows(32), target="sm_100f")
    out = np.zeros((128, 32), np.int32 if name == "s8" else np.float32)
    if name == "s8":
        with pytest.raises(PtxError, match="not available on sm_100f"):
            launch(text, out, place(a, 32), place(b, 32))
        return
    launch(text, out, place(a, 32), place(b, 32))
    assert np.allclose(out, product, atol=1e-4)
