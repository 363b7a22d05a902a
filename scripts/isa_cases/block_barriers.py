"""Block cases of barriers: mbarriers, named barriers, cluster barriers, fences.

Lives here: what each barrier's instructions return and whom they let go on. Not here: what a
missing one leads to (`tests/emulator/unit/test_races.py`). Invariant: a state token never reaches
`out`, for its bits are the hardware's own; only what the manual says of it does.
"""

from collections.abc import Iterator

import numpy as np
from block_table import CLUSTER_SYNC, BlockCase, kernel, wait, words

MBARRIER = "PTX ISA 9.7.13.16"
NAMED = "PTX ISA 9.7.13.1"


def single(body: str) -> str:
    """Return a kernel whose first thread runs `body`, with a zeroed output counter."""
    return kernel(f"    @!%first bra end;\n{body}end:\n")


def note(value: str, word: int) -> str:
    """Store a 32-bit register to a word of `out`."""
    return f"    st.global.b32 [%out+{4 * word}], {value};\n"


def note_predicate(word: int) -> str:
    """Store predicate p to a word of `out`."""
    return "    selp.b32 %t, 1, 0, %p;\n" + note("%t", word)


def probe(word: int, parity: int, at: str = "%bar") -> str:
    """Store whether the phase of this parity is complete."""
    return f"    mbarrier.test_wait.parity.shared.b64 %p, [{at}], {parity};\n" + note_predicate(
        word
    )


def one_case(name: str, body: str, expected: list[int], source: str = MBARRIER) -> BlockCase:
    """Return a case of one thread that writes a few words."""
    return BlockCase(
        name=name, group="mbarrier", source=source, ptx=single(body),
        expected=np.array(expected, np.uint32),
    )  # fmt: skip


def mbarriers() -> Iterator[BlockCase]:
    """Phases and counts of one mbarrier, seen by one thread."""
    init = "    mbarrier.init.shared.b64 [%bar], {count};\n"
    two = init.format(count=2)
    yield one_case("mbarrier.init leaves phase 0 open", two + probe(0, 0) + probe(1, 1), [0, 1])
    arrive = "    mbarrier.arrive.shared.b64 %state, [%bar];\n"
    yield one_case(
        "mbarrier.arrive completes a phase",
        two + arrive + probe(0, 0) + arrive + probe(1, 0) + probe(2, 1), [0, 1, 0],
    )  # fmt: skip
    pending = "    mbarrier.pending_count.b64 %r0, %state;\n"
    yield one_case(
        "mbarrier.pending_count",
        init.format(count=5) + arrive + pending + note("%r0", 0) + arrive + pending + note("%r0", 1)
        + "    mbarrier.arrive.shared.b64 %state, [%bar], 2;\n" + pending + note("%r0", 2)
        + arrive + pending + note("%r0", 3), [5, 4, 3, 1],
    )  # fmt: skip
    yield one_case(
        "mbarrier.arrive with a count",
        init.format(count=7) + "    mbarrier.arrive.shared::cta.b64 %state, [%bar], 6;\n"
        + probe(0, 0) + arrive + probe(1, 0), [0, 1],
    )  # fmt: skip
    yield one_case(
        "mbarrier.arrive.noComplete",
        init.format(count=3) + "    mbarrier.arrive.noComplete.shared.b64 %state, [%bar], 2;\n"
        + pending + note("%r0", 0) + probe(1, 0) + arrive + probe(2, 0), [3, 0, 1],
    )  # fmt: skip
    yield one_case(
        "mbarrier.arrive_drop lowers the next phase's count",
        two + "    mbarrier.arrive_drop.shared.b64 %state, [%bar];\n" + arrive + probe(0, 0)
        + arrive + probe(1, 1), [1, 1],
    )  # fmt: skip
    yield one_case(
        "mbarrier.expect_tx keeps a phase open",
        init.format(count=1) + "    mbarrier.expect_tx.relaxed.cta.shared.b64 [%bar], 48;\n"
        + arrive + probe(0, 0) + "    mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 40;\n"
        + probe(1, 0) + "    mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 8;\n"
        + probe(2, 0), [0, 0, 1],
    )  # fmt: skip
    complete = "    mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%bar], 16;\n"
    yield one_case(
        "mbarrier.arrive.expect_tx",
        init.format(count=1) + "    mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], 16;\n"
        + probe(0, 0) + complete + probe(1, 0), [0, 1],
    )  # fmt: skip
    yield one_case(
        "mbarrier.arrive_drop.expect_tx",
        two + "    mbarrier.arrive_drop.expect_tx.shared.b64 %state, [%bar], 16;\n" + arrive
        + probe(0, 0) + complete + probe(1, 0) + arrive + probe(2, 1), [0, 1, 1],
    )  # fmt: skip
    for op in ("test_wait", "try_wait"):
        hint = "" if op == "test_wait" else ", 100"
        form = f"mbarrier.{op}.acquire.cta.shared::cta.b64"
        yield one_case(
            f"{form} of a state",
            two + arrive + "    mov.b64 %w0, %state;\n"
            + f"    {form} %p, [%bar], %w0;\n" + note_predicate(0) + arrive
            + f"again:\n    {form} %p, [%bar], %w0{hint};\n    @!%p bra again;\n"
            + note_predicate(1) + f"    mbarrier.{op}.shared.b64 %p, [%bar], %state;\n"
            + note_predicate(2), [0, 1, 1],
        )  # fmt: skip
    yield one_case(
        "mbarrier phases alternate",
        init.format(count=1) + "".join(
            arrive + probe(2 * phase, 0) + probe(2 * phase + 1, 1) for phase in range(4)
        ), [1, 0, 0, 1] * 2,
    )  # fmt: skip
    yield one_case(
        "mbarrier.inval lets an object be initialised anew",
        two + arrive + "    mbarrier.inval.shared.b64 [%bar];\n" + init.format(count=1) + arrive
        + probe(0, 0), [1],
    )  # fmt: skip
    yield one_case(
        "mbarrier.arrive without a result",
        two + "    mbarrier.arrive.release.cta.shared::cta.b64 _, [%bar];\n"
        "    mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%bar];\n" + probe(0, 0), [1],
    )  # fmt: skip


def cluster_mbarriers() -> Iterator[BlockCase]:
    """Arrivals at the mbarrier of the other CTA."""
    init = "    @%first mbarrier.init.shared::cta.b64 [%bar], {count};\n"
    init += "    @%first fence.mbarrier_init.release.cluster;\n" + CLUSTER_SYNC
    remote = """
    xor.b32 %r0, %rank, 1;
    mapa.shared::cluster.u32 %r1, %bar, %r0;
"""
    store = """
    mad.lo.u32 %r5, %rank, 32, %thread;
    mul.wide.u32 %a, %r5, 4;
    add.u64 %a, %out, %a;
    selp.b32 %t, 1, 0, %p;
    st.global.b32 [%a], %t;
"""
    wait_cluster = wait("arrived").replace("try_wait.parity", "try_wait.parity.acquire.cluster")
    for name, count, arrive in (
        ("mbarrier.arrive.release.cluster.shared::cluster", 32,
         "    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];\n"),
        ("mbarrier.arrive.shared::cluster with a count", 64,
         "    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1], 2;\n"),
        ("mbarrier.arrive.expect_tx.shared::cluster", 1,
         "    @%first mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r1], 8;\n"
         "    @%first mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], 8;\n"),
    ):  # fmt: skip
        body = init.format(count=count) + remote + arrive + wait_cluster + store + CLUSTER_SYNC
        yield BlockCase(
            name=name, group="mbarrier", source=MBARRIER, cluster=2,
            ptx=kernel(body, cluster=2), expected=np.ones(64, np.uint32),
        )  # fmt: skip


def named() -> Iterator[BlockCase]:
    """Named barriers: counts, arrival without waiting, reductions."""
    store = "    mul.wide.u32 %a, %thread, 4;\n    add.u64 %a, %out, %a;\n"
    store += "    st.global.b32 [%a], %r1;\n"
    share = """
    shl.b32 %r3, %thread, 2;
    add.u32 %r3, %smem, %r3;
    xor.b32 %r4, %r3, 128;
    st.shared.b32 [%r3], %thread;
    {sync}
    ld.shared.b32 %r1, [%r4];
"""
    thread = np.arange(64)
    for sync in (
        "bar.sync 0;", "bar.cta.sync 1, 64;", "barrier.sync 2;", "barrier.cta.sync 3, 64;",
        "barrier.sync.aligned 4, 64;", "mov.u32 %r9, 5;\n    bar.sync %r9, 64;",
    ):  # fmt: skip
        yield BlockCase(
            name=sync.partition(";")[0] if "mov" not in sync else "bar.sync of a register",
            group="barrier", source=NAMED, threads=64, ptx=kernel(share.format(sync=sync) + store),
            expected=(thread ^ 32).astype(np.uint32),
        )  # fmt: skip
    for arrive, sync in (("bar.arrive 1, 64;", "bar.sync 1, 64;"),
                         ("barrier.cta.arrive 2, 64;", "barrier.cta.sync 2, 64;"),
        ("bar.cta.arrive 3, 64;", "bar.cta.sync 3, 64;"),
        ("barrier.arrive.aligned 4, 64;", "barrier.sync.aligned 4, 64;")):  # fmt: skip
        body = f"""
    shl.b32 %r3, %thread, 2;
    add.u32 %r3, %smem, %r3;
    setp.lt.u32 %p, %thread, 32;
    @%p bra producer;
    {sync}
    ld.shared.b32 %r1, [%r3+-128];
    mul.wide.u32 %a, %thread, 4;
    add.u64 %a, %out, %a;
    st.global.b32 [%a+-128], %r1;
    bra end;
producer:
    mad.lo.u32 %r1, %thread, 3, 1;
    st.shared.b32 [%r3], %r1;
    {arrive}
end:
"""
        yield BlockCase(
            name=arrive.rstrip(";"), group="barrier", source=NAMED, threads=64, ptx=kernel(body),
            expected=(3 * np.arange(32) + 1).astype(np.uint32),
        )  # fmt: skip
    condition = "    and.b32 %r0, %thread, 3;\n    setp.eq.u32 %p, %r0, 1;\n"
    all_below = "    setp.lt.u32 %p, %thread, 64;\n"
    chosen = "    selp.b32 %r1, 7, 9, %q;\n"
    for name, set_p, red, value in (
        ("bar.red.popc.u32", condition, "    bar.red.popc.u32 %r1, 0, %p;\n", 16),
        ("bar.cta.red.popc.u32", condition, "    bar.cta.red.popc.u32 %r1, 1, %p;\n", 16),
        ("barrier.red.popc.aligned.u32", condition,
         "    barrier.red.popc.aligned.u32 %r1, 2, 64, !%p;\n", 48),
        ("bar.red.popc.u32 with a count", condition,
         "    bar.red.popc.u32 %r1, 4, 64, %p;\n", 16),
        ("barrier.red.popc.u32", condition, "    barrier.red.popc.u32 %r1, 5, %p;\n", 16),
        ("barrier.cta.red.popc.u32", condition, "    barrier.cta.red.popc.u32 %r1, 6, %p;\n", 16),
        ("barrier.cta.red.popc.aligned.u32", condition,
         "    barrier.cta.red.popc.aligned.u32 %r1, 7, 64, %p;\n", 16),
        ("bar.cta.red.or.pred", condition, "    bar.cta.red.or.pred %q, 8, %p;\n" + chosen, 7),
        ("barrier.red.and.pred", condition, "    barrier.red.and.pred %q, 9, %p;\n" + chosen, 9),
        ("barrier.red.or.aligned.pred", condition,
         "    barrier.red.or.aligned.pred %q, 10, 64, %p;\n" + chosen, 7),
        ("barrier.cta.red.and.pred", condition,
         "    barrier.cta.red.and.pred %q, 11, %p;\n" + chosen, 9),
        ("bar.red.and.pred", condition, "    bar.red.and.pred %q, 0, %p;\n" + chosen, 9),
        ("bar.red.and.pred of all", all_below, "    bar.red.and.pred %q, 0, 64, %p;\n" + chosen, 7),
        ("bar.red.or.pred", condition, "    bar.red.or.pred %q, 3, %p;\n" + chosen, 7),
        ("barrier.cta.red.or.pred of none", all_below,
         "    barrier.cta.red.or.pred %q, 3, 64, !%p;\n" + chosen, 9),
    ):  # fmt: skip
        yield BlockCase(
            name=name, group="barrier", source=NAMED, threads=64, ptx=kernel(set_p + red + store),
            expected=np.full(64, value, np.uint32),
        )  # fmt: skip


def clusters() -> Iterator[BlockCase]:
    """Cluster barriers, special registers of a cluster, fences that order nothing here."""
    own = "    mad.lo.u32 %r5, %rank, 32, %thread;\n    mul.wide.u32 %a, %r5, 4;\n"
    own += "    add.u64 %a, %out, %a;\n"
    for arrive, wait_form in (
        ("barrier.cluster.arrive", "barrier.cluster.wait"),
        ("barrier.cluster.arrive.aligned", "barrier.cluster.wait.aligned"),
        ("barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"),
    ):
        body = f"""
    mad.lo.u32 %r1, %rank, 100, %thread;
    shl.b32 %r3, %thread, 2;
    add.u32 %r3, %smem, %r3;
    st.shared.b32 [%r3], %r1;
    {arrive};
    {wait_form};
    xor.b32 %r0, %rank, 1;
    mapa.shared::cluster.u32 %r4, %r3, %r0;
    ld.shared::cluster.b32 %r2, [%r4];
    {own}    st.global.b32 [%a], %r2;
    {CLUSTER_SYNC}
"""
        yield BlockCase(
            name=arrive, group="cluster", source="PTX ISA 9.7.13.4", cluster=2,
            ptx=kernel(body, cluster=2),
            expected=words(np.stack([100 + np.arange(32), np.arange(32)]).astype(np.uint32)),
        )  # fmt: skip
    for name, values in (
        ("%cluster_ctaid.x", (0, 1)), ("%cluster_nctaid.x", (2, 2)), ("%cluster_nctarank", (2, 2)),
        ("%clusterid.x", (0, 0)), ("%nclusterid.x", (1, 1)), ("%ctaid.x", (0, 1)),
    ):  # fmt: skip
        body = f"    mov.u32 %r1, {name};\n{own}    st.global.b32 [%a], %r1;\n"
        yield BlockCase(
            name=f"register {name}", group="cluster", source="PTX ISA 10", cluster=2,
            ptx=kernel(body, cluster=2), expected=np.repeat(np.array(values, np.uint32), 32),
        )  # fmt: skip
    for fence in (
        "fence.proxy.async;", "fence.proxy.async.global;", "fence.proxy.async.shared::cta;",
        "fence.acq_rel.gpu;", "fence.sc.sys;", "membar.cta;", "fence.proxy.alias;",
        "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "nanosleep.u32 20;",
        "fence.mbarrier_init.release.cluster;", "fence.proxy.tensormap::generic.release.gpu;",
    ):  # fmt: skip
        body = f"    {fence}\n{own}    st.global.b32 [%a], %thread;\n"
        yield BlockCase(
            name=fence.rstrip(";"), group="fence", source="PTX ISA 9.7.13.5", ptx=kernel(body),
            expected=np.arange(32, dtype=np.uint32),
        )  # fmt: skip
    body = f"""
    setmaxnreg.dec.sync.aligned.u32 40;
    setmaxnreg.inc.sync.aligned.u32 64;
{own}    st.global.b32 [%a], %thread;
"""
    # the register budget is only defined where the block's size is known
    text = kernel(body).replace(".param .u64 out)", ".param .u64 out)\n.maxntid 128, 1, 1")
    text = text.replace(".maxntid 128, 1, 1", ".maxntid 128, 1, 1\n.minnctapersm 1")
    yield BlockCase(
        name="setmaxnreg", group="fence", source="PTX ISA 9.7.19.5", threads=128, ptx=text,
        expected=np.arange(128, dtype=np.uint32),
    )  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (mbarriers, cluster_mbarriers, named, clusters):
        yield from cases()
