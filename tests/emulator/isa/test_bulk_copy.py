"""Bulk copies without a tensor map: values against numpy, and each rule with and without."""

import numpy as np
import pytest

from fovea.emulator import (
    IllegalOperand,
    Misaligned,
    Options,
    OutOfBounds,
    PtxError,
    RaceError,
    UninitialisedRead,
    UnsupportedForm,
    load_ptx,
)


def kernel(body, *, cluster=False, target="sm_90a"):
    """One warp per CTA; `%src` is loaded to `%base` (the wait is part of it), then `body` runs."""
    sync = "barrier.cluster.arrive; barrier.cluster.wait;" if cluster else "bar.sync 0;"
    return f"""
.version 8.6
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 out, .param .u64 in, .param .u32 bytes)
{{
    .reg .pred %first, %p, %more, %lead;
    .reg .b16 %mask;
    .reg .b32 %base, %bar, %thread, %bytes, %rank, %peer, %r<16>;
    .reg .b64 %out, %src, %rd<8>, %state;
    mov.u32 %base, smem;
    add.u32 %bar, %base, 8192;
    mov.u32 %thread, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    setp.eq.u32 %first, %thread, 0;
    setp.eq.and.u32 %lead, %rank, 0, %first;
    @%first mbarrier.init.shared::cta.b64 [%bar], 1;
    @%first mbarrier.init.shared::cta.b64 [%bar+8], 1;
    @%first fence.mbarrier_init.release.cluster;
    {sync}
    ld.param.u64 %out, [out];
    ld.param.u64 %src, [in];
    ld.param.u32 %bytes, [bytes];
    {body}
    {sync}
    ret;
}}
"""


LOAD = """
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], %bytes;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%base], [%src], %bytes, [%bar];
load_wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra load_wait;
"""
STORE = """
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%base], %bytes;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""


def run(text, out, array, *, cluster=1, size=None, seed=0, **options):
    size = array.nbytes if size is None else size
    return load_ptx(text).launch(
        "k", cluster, 32, cluster, [out, array, size], 8192 + 64, Options(seed=seed, **options)
    )


@pytest.mark.parametrize("seed", range(3))
def test_bytes_travel_to_shared_memory_and_back(seed):
    array = np.random.default_rng(0).integers(0, 256, 1040).astype(np.uint8)
    out = np.zeros_like(array)
    run(kernel(LOAD + STORE), out, array, seed=seed)
    assert np.array_equal(out, array)


def test_byte_mask_keeps_the_other_bytes():
    array = np.arange(1, 65, dtype=np.uint8)
    out = np.full(64, 200, np.uint8)
    text = kernel(
        LOAD
        + "mov.u16 %mask, 0x00f1;\n"
        + STORE.replace("bulk_group [", "bulk_group.cp_mask [").replace(
            "%bytes;", "%bytes, %mask;"
        ),
        target="sm_100a",
    )
    run(text, out, array)
    chosen = np.tile([True, False, False, False, True, True, True, True] + [False] * 8, 4)
    assert np.array_equal(out, np.where(chosen, array, 200))
    with pytest.raises(UnsupportedForm, match="sm_100a"):
        run(text.replace("sm_100a", "sm_90a"), out, array)


@pytest.mark.parametrize(
    ("form", "dtype", "ufunc"),
    [("add.f32", np.float32, np.add), ("add.noftz.f16", np.float16, np.add),
     ("min.s32", np.int32, np.minimum), ("max.u64", np.uint64, np.maximum),
     ("or.b32", np.uint32, np.bitwise_or)],
)  # fmt: skip
def test_reduction_to_global_memory_combines_with_what_is_there(form, dtype, ufunc):
    rng = np.random.default_rng(1)
    array, out = rng.integers(0, 50, (2, 64)).astype(dtype)
    expected = ufunc(out, array)
    store = STORE.replace(
        "cp.async.bulk.global.shared::cta.bulk_group",
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{form}",
    )
    run(kernel(LOAD + store), out, array)
    assert np.array_equal(out, expected)


def test_multicast_load_reaches_every_cta_of_the_mask():
    array = np.arange(64, dtype=np.uint32)
    text = kernel(
        """
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], %bytes;
    mov.u16 %mask, 5;
    setp.eq.u32 %more, %rank, 1;
    @%more mov.u32 %bytes, 0;
    @%lead cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%base], [%src], %bytes, [%bar], %mask;
    @%more bra done;
wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra wait;
    cvt.u64.u32 %rd0, %rank;
    mul.lo.u64 %rd0, %rd0, 256;
    add.u64 %out, %out, %rd0;
"""
        + STORE
        + "\ndone:",
        cluster=True,
    )
    out = np.zeros((3, 64), np.uint32)
    # CTA 1 is not in the mask: it neither waits nor stores.
    run(text, out, array, cluster=3)
    assert np.array_equal(out[0], array)
    assert not out[1].any()
    assert np.array_equal(out[2], array)


TO_PEER = """
    xor.b32 %peer, %rank, 1;
    mapa.shared::cluster.u32 %r1, %base, %peer;
    mapa.shared::cluster.u32 %r2, %bar, %peer;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar+8], %bytes;
    @%first {copy} [%r1+1024], [%base], %bytes, [%r2+8];
peer_wait:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [%bar+8], 0;
    @!%p bra peer_wait;
    mul.lo.u32 %r3, %rank, %bytes;
    cvt.u64.u32 %rd0, %r3;
    add.u64 %out, %out, %rd0;
    add.u32 %base, %base, 1024;
"""
COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


def test_shared_memory_travels_to_the_peer_cta():
    array = np.arange(128, dtype=np.uint32)
    source = "\n    cvt.u64.u32 %rd1, %rank; mul.lo.u64 %rd1, %rd1, 256; add.u64 %src, %src, %rd1;"
    text = kernel(source + LOAD + TO_PEER.format(copy=COPY) + STORE, cluster=True)
    out = np.zeros(128, np.uint32)
    run(text, out, array, cluster=2, size=256)
    assert np.array_equal(out, np.concatenate((array[64:], array[:64])))


@pytest.mark.parametrize(
    ("commit", "wait", "is_clean"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_reuse_of_a_stores_source_needs_commit_and_wait(commit, wait, is_clean):
    store = STORE
    if not commit:
        store = store.replace("@%first cp.async.bulk.commit_group;", "")
    if not wait:
        store = store.replace("@%first cp.async.bulk.wait_group 0;", "")
    text = kernel(LOAD + store + "@%first st.shared.b32 [%base], %thread;")
    array, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    if is_clean:
        run(text, out, array)
        return
    with pytest.raises(RaceError, match=r"st\.shared"):
        run(text, out, array, async_delay="eager")


def test_wait_by_another_thread_does_not_cover_the_group():
    store = STORE.replace("@%first cp.async.bulk.wait_group 0;", "")
    text = kernel(
        LOAD
        + store
        + "setp.eq.u32 %more, %thread, 1; @%more cp.async.bulk.wait_group 0; bar.sync 0;"
        + "@%first st.shared.b32 [%base], %thread;"
    )
    with pytest.raises(RaceError):
        run(text, np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32), async_delay="late")


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("[%base], [%src], %bytes", "[%base+8], [%src], %bytes", Misaligned, "multiple of 16"),
        ("[%base], [%src], %bytes", "[%base], [%src+4], %bytes", Misaligned, "multiple of 16"),
        ("[%base], [%src], %bytes", "[%base], [%src], 24", IllegalOperand, "multiple of 16"),
        ("[%base], [%src], %bytes", "[%base], [%src], 4096", OutOfBounds, "leave every alloc"),
        ("%bytes, [%bar];", "%bytes, [%bar+16];", IllegalOperand, "no initialised mbarrier"),
    ],
)
def test_wrong_operand_is_a_fault(old, new, kind, message):
    text = kernel(LOAD).replace(old, new)
    assert text != kernel(LOAD)
    with pytest.raises(kind, match=message) as caught:
        run(text, np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32))
    assert "cp.async.bulk" in str(caught.value)


@pytest.mark.parametrize("form", ["add.f16", "min.f32", "min.noftz.f16", "inc.s32"])
def test_reduction_the_engine_lacks_is_refused(form):
    store = STORE.replace(
        "cp.async.bulk.global.shared::cta.bulk_group",
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{form}",
    )
    with pytest.raises(PtxError):
        run(kernel(LOAD + store), np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32))


def test_read_only_memory_cannot_be_stored_to():
    out = np.zeros(64, np.uint32)
    out.flags.writeable = False
    with pytest.raises(OutOfBounds, match="a read-only array: it is not writeable"):
        run(kernel(LOAD + STORE), out, np.arange(64, dtype=np.uint32))


# --- st.async and red.async -----------------------------------------------------------------------

ASYNC_TO_PEER = """
    xor.b32 %peer, %rank, 1;
    mapa.shared::cluster.u32 %r1, %base, %peer;
    mapa.shared::cluster.u32 %r2, %bar, %peer;
    st.shared.b32 [%base+2048], %rank;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], {bytes};
    barrier.cluster.arrive;
    barrier.cluster.wait;
    shl.b32 %r3, %thread, 4;
    add.u32 %r4, %r1, %r3;
    mul.lo.u32 %r5, %rank, 100;
    add.u32 %r5, %r5, %thread;
    {store}
{wait}
    shl.b32 %r6, %rank, 7;
    shl.b32 %r7, %thread, 2;
    add.u32 %r8, %r6, %r7;
    cvt.u64.u32 %rd0, %r8;
    add.u64 %out, %out, %rd0;
    {load}
    st.global.b32 [%out], %r9;
"""
ASYNC_WAIT = """
peer_wait:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [%bar], 0;
    @!%p bra peer_wait;
"""


def run_to_peer(store, load, count, **changes):
    body = ASYNC_TO_PEER.format(
        bytes=count, store=store, load=load, wait=changes.get("wait", ASYNC_WAIT)
    )
    out = np.zeros((2, 32), np.uint32)
    run(kernel(body, cluster=True), out, np.zeros(16, np.uint8), cluster=2)
    return out


def test_st_async_stores_to_the_peer_and_signals_its_bytes():
    store = (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        "[%r4], {%r5, %thread, %thread, %thread}, [%r2];"
    )
    out = run_to_peer(store, "add.u32 %r10, %base, %r3; ld.shared.b32 %r9, [%r10];", 512)
    assert np.array_equal(out, np.arange(32) + np.array([[100], [0]]))


def test_red_async_adds_at_the_peer():
    store = (
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
        "[%r1+2048], %r5, [%r2];"
    )
    out = run_to_peer(store, "ld.shared.b32 %r9, [%base+2048];", 128)
    total = sum(range(32))
    assert (out[0] == 3200 + total).all()
    assert (out[1] == total + 1).all()


def test_st_async_read_before_the_phase_is_reported():
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r5, [%r2];"
    with pytest.raises((RaceError, UninitialisedRead)):
        run_to_peer(store, "add.u32 %r10, %base, %r3; ld.shared.b32 %r9, [%r10];", 128, wait="")


@pytest.mark.parametrize("seed", range(3))
def test_write_after_a_bulk_store_to_the_same_place_needs_more_than_its_read_wait(seed):
    text = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
    .shared .align 128 .b32 stage[64]; .reg .b32 %t, %s; .reg .b64 %out; .reg .pred %first;
    ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mov.u32 %s, stage;
    mad.lo.u32 %s, %t, 4, %s; st.shared.u32 [%s], 7;
    fence.proxy.async.shared::cta; bar.sync 0;
    setp.eq.u32 %first, %t, 0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 256;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_groupREAD 0;
    bar.sync 0;
    setp.eq.u32 %first, %t, 32;
    @%first st.global.u32 [%out], 9;
    ret;
}"""
    out = np.zeros(64, np.uint32)
    launch = {"grid": 1, "block": 64, "args": [out], "options": Options(seed=seed)}
    load_ptx(text.replace("READ", "")).launch("k", **launch)
    assert out.tolist() == [9] + [7] * 63
    out[:] = 0
    with pytest.raises(RaceError, match="global memory last written by"):
        load_ptx(text.replace("READ", ".read")).launch("k", **launch)
