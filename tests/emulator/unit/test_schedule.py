"""Order of warps, lanes and clusters: seeded, fair, and able to wait for each other."""

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import DeadlockError, Options

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def module(body: str) -> emulator.Module:
    """Return a module with one kernel k(out)."""
    return emulator.load_ptx(
        f"{HEAD}.visible .entry k(.param .u64 out)\n{{\n"
        ".shared .align 8 .b8 s[64]; .reg .b32 %t, %c, %v, %n; .reg .b64 %o; .reg .pred %p, %q;\n"
        "ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x;\n"
        f"{body}\nret;\n}}\n"
    )


ORDER = """atom.global.add.u32 %v, [%o], 1;
    bar.sync 0;
    atom.global.add.u32 %n, [%o], 1;"""


def test_equal_seeds_take_equal_steps() -> None:
    runs = [
        module(ORDER).launch("k", 4, 256, args=[np.zeros(1, np.uint32)], options=Options(seed=5))
        for _ in range(2)
    ]
    assert runs[0].steps == runs[1].steps
    assert runs[0].counters == runs[1].counters


def test_seeds_order_warps_differently() -> None:
    body = """setp.ne.u32 %p, %t, 32; @%p bra WAIT;
        st.volatile.global.u32 [%o], 1;
        WAIT: setp.ne.u32 %p, %t, 0; @%p bra END;
        ld.volatile.global.u32 %v, [%o]; st.global.u32 [%o+4], %v;
        END:"""
    seen: set[int] = set()
    for seed in range(20):
        out = np.zeros(2, np.uint32)
        module(body).launch("k", 1, 64, args=[out], options=Options(seed=seed))
        seen.add(int(out[1]))
    assert seen == {0, 1}


def test_parted_lanes_of_a_warp_can_wait_for_each_other() -> None:
    body = """setp.eq.u32 %p, %t, 0;
        @%p bra WAIT;
        setp.eq.u32 %q, %t, 5;
        @%q st.volatile.global.u32 [%o], 9;
        bra END;
        WAIT: ld.volatile.global.u32 %v, [%o]; setp.ne.u32 %q, %v, 9; @%q bra WAIT;
        st.global.u32 [%o+4], %v;
        END: bar.warp.sync -1;"""
    out = np.zeros(2, np.uint32)
    module(body).launch("k", 1, 32, args=[out])
    assert out[1] == 9


def test_cluster_that_polls_for_a_later_one_is_not_a_deadlock() -> None:
    body = """setp.ne.u32 %p, %c, 0; @%p bra SIGNAL;
        WAIT: ld.acquire.gpu.global.u32 %v, [%o]; setp.ne.u32 %q, %v, 3; @%q bra WAIT;
        st.global.u32 [%o+4], 1; bra END;
        SIGNAL: setp.eq.u32 %q, %t, 0;
        @%q red.release.gpu.global.add.u32 [%o], 1;
        END:"""
    out = np.zeros(2, np.uint32)
    module(body).launch("k", 4, 32, args=[out])
    assert out.tolist() == [3, 1]


@pytest.mark.parametrize("delay", ["random", "eager", "late"])
def test_asynchronous_work_is_complete_at_the_end_whatever_its_delay(delay: str) -> None:
    body = """.reg .b32 %a; mov.u32 %a, s; st.shared.u32 [%a], 4; st.shared.u32 [%a+4], 5;
        st.shared.u32 [%a+8], 6; st.shared.u32 [%a+12], 7;
        fence.proxy.async.shared::cta; setp.eq.u32 %p, %t, 0;
        @%p cp.async.bulk.global.shared::cta.bulk_group [%o], [%a], 16;
        @%p cp.async.bulk.commit_group;
        @%p cp.async.bulk.wait_group.read 0;"""
    out = np.zeros(4, np.uint32)
    module(body).launch("k", 1, 32, args=[out], options=Options(async_delay=delay))
    assert out.tolist() == [4, 5, 6, 7]


def test_partial_last_warp_takes_part_in_barriers() -> None:
    body = """bar.sync 0; setp.eq.u32 %p, %t, 39;
        @%p st.global.u32 [%o], %t;"""
    out = np.zeros(1, np.uint32)
    module(body).launch("k", 1, 40, args=[out])
    assert out[0] == 39


def test_barrier_forgets_warps_that_have_exited() -> None:
    body = """setp.ge.u32 %p, %t, 32; @%p exit;
        bar.sync 0; setp.eq.u32 %q, %t, 0; @%q st.global.u32 [%o], 1;"""
    out = np.zeros(1, np.uint32)
    for seed in range(10):
        module(body).launch("k", 1, 96, args=[out], options=Options(seed=seed))
    assert out[0] == 1


def test_barrier_reduction_counts_and_combines() -> None:
    body = """.reg .pred %r; setp.lt.u32 %p, %t, 40;
        bar.red.popc.u32 %v, 0, %p;
        bar.red.and.pred %q, 1, %p; selp.u32 %n, 1, 0, %q;
        setp.eq.u32 %r, %t, 0;
        @%r st.global.u32 [%o], %v; @%r st.global.u32 [%o+4], %n;"""
    out = np.full(2, 9, np.uint32)
    module(body).launch("k", 1, 64, args=[out])
    assert out.tolist() == [40, 0]


def test_try_wait_that_is_no_loop_times_out_where_nobody_arrives() -> None:
    body = """.shared .align 8 .b8 bar[8]; .reg .b32 %bar; .reg .pred %done;
        mov.u32 %bar, bar; setp.eq.u32 %p, %t, 0;
        @%p mbarrier.init.shared.b64 [%bar], 1;
        bar.sync 0;
        mov.u32 %v, 0;
        LOOK: mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
        @%done trap;
        add.u32 %v, %v, 1; setp.lt.u32 %q, %v, 9; @%q bra LOOK;
        @%p st.global.u32 [%o], %v;"""
    for seed in range(10):
        out = np.zeros(1, np.uint32)
        module(body).launch("k", 1, 64, args=[out], options=Options(seed=seed))
        assert out[0] == 9


LOCK = """TRY: atom.global.acquire.gpu.cas.b32 %v, [%o], 0, 1;
    setp.ne.u32 %p, %v, 0; @%p bra TRY;
    ld.global.u32 %n, [%o+4]; add.u32 %n, %n, 1; st.global.u32 [%o+4], %n;
    atom.global.release.gpu.exch.b32 %v, [%o], 0;"""


@pytest.mark.parametrize(("grid", "block"), [(1, 32), (2, 8)])
def test_lanes_that_spin_for_a_lock_of_their_own_warp_get_it(grid: int, block: int) -> None:
    # the holder stands where the lanes of the loop meet, and the others loop until it goes on
    out = np.zeros(2, np.uint32)
    module(LOCK).launch("k", grid, block, args=[out], options=Options(max_steps=50_000))
    assert out.tolist() == [0, grid * block]


def test_lane_that_waits_for_a_later_cluster_does_not_part_from_its_warp() -> None:
    # lane 0 of the first cluster polls until the second has come; then all have to converge
    body = """setp.ne.u32 %q, %c, 0; @%q bra SIGNAL;
        setp.ne.u32 %p, %t, 0; @%p bra MEET;
        POLL: ld.acquire.gpu.global.u32 %v, [%o]; setp.eq.u32 %p, %v, 0; @%p bra POLL;
        MEET: redux.sync.add.u32 %n, %t, -1; st.global.u32 [%o+4], %n; bra END;
        SIGNAL: setp.ne.u32 %p, %t, 0; @%p bra END; st.release.gpu.global.u32 [%o], 1;
        END:"""
    out = np.zeros(2, np.uint32)
    module(body).launch("k", 2, 32, args=[out], options=Options(max_steps=50_000))
    assert out.tolist() == [1, 496]


POLL = "WAIT: ld.acquire.gpu.global.u32 %v, [%o]; setp.eq.u32 %q, %v, 0; @%q bra WAIT;"


@pytest.mark.parametrize("seed", range(4))
def test_clusters_that_poll_for_one_that_cannot_start_are_a_deadlock(seed: int) -> None:
    body = f"""setp.eq.u32 %p, %c, 3; @%p bra SIGNAL; {POLL} bra END;
        SIGNAL: st.release.gpu.global.u32 [%o], 1; END:"""
    out = np.zeros(1, np.uint32)
    module(body).launch("k", 4, 64, args=[out], options=Options(seed=seed))
    options = Options(seed=seed, num_sms=2, max_steps=20_000)
    with pytest.raises(DeadlockError) as caught:
        module(body).launch("k", 4, 64, args=[np.zeros(1, np.uint32)], options=options)
    waiting = caught.value.waiting
    assert len(waiting) == 5
    assert "loops at PTX line" in waiting[0]
    assert waiting[4].startswith("2 clusters have not been started: 2 are resident")


@pytest.mark.parametrize(
    "body",
    [
        "L: bra L;",
        POLL,
        "WAIT: atom.global.cas.b32 %v, [%o], 1, 2; setp.ne.u32 %q, %v, 1; @%q bra WAIT;",
        # lane 0 polls, the others wait for it where they meet, and the other warp for a barrier
        f"setp.ge.u32 %p, %t, 32; @%p bra END; setp.ne.u32 %p, %t, 0; @%p bra END; {POLL}"
        " END: bar.sync 0;",
    ],
)
def test_loops_that_nothing_ends_are_a_deadlock(body: str) -> None:
    with pytest.raises(DeadlockError, match="loops at PTX line"):
        module(body).launch(
            "k", 1, 64, args=[np.zeros(1, np.uint32)], options=Options(max_steps=20_000)
        )


@pytest.mark.parametrize(
    "body",
    [
        # a limit in a register, one in memory that nobody else sees, one in time
        "mov.u32 %v, 0; L: ld.acquire.gpu.global.u32 %n, [%o]; add.u32 %v, %v, 1;"
        "setp.lt.u32 %q, %v, 9000; @%q bra L;",
        "L: ld.global.u32 %v, [%a]; add.u32 %v, %v, 1; st.global.u32 [%a], %v;"
        "setp.lt.u32 %q, %v, 4000; mov.u32 %v, 0; @%q bra L;",
        "L: mov.u32 %v, %clock; setp.lt.u32 %q, %v, 4000; mov.u32 %v, 0; @%q bra L;",
    ],
)
def test_loops_that_end_by_themselves_are_no_deadlock(body: str) -> None:
    out = np.zeros(64, np.uint32)
    head = ".reg .b64 %a; mul.wide.u32 %a, %t, 4; add.u64 %a, %o, %a;"
    module(head + body).launch("k", 1, 64, args=[out], options=Options(max_steps=200_000))
