"""Synchronisation rules: clean with the fence, wait or barrier, reported without it."""

import numpy as np
import pytest
from race_kernels import check, launch, races

from fovea import emulator


def test_shared_write_then_read_by_another_warp_needs_barrier() -> None:
    check(
        """@%q st.shared.b32 [%s], 7;
        @@
        @%p bra END;
        ld.shared.b32 %v, [%s];
        END:""",
        "bar.sync 0;",
    )


def test_shared_read_then_overwrite_by_another_warp_needs_barrier() -> None:
    check(
        """@%q st.shared.b32 [%s], 7;
        bar.sync 0;
        @%p bra READ;
        @@
        st.shared.b32 [%s], 8;
        bra END;
        READ: ld.shared.b32 %v, [%s];
        bar.arrive 1, 64;
        END:""",
        "bar.sync 1, 64;",
    )


_INIT = """@%q mbarrier.init.shared.b64 [%m], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
_WAIT = "W: mbarrier.try_wait.parity.shared.b64 %e, [%m], 0; @!%e bra W;"
_LOAD = (
    "@%q mbarrier.arrive.expect_tx.shared.b64 %x, [%m], 1024;\n"
    "@%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%s], [%a], 1024, [%m];"
)


def test_bulk_load_then_read_needs_mbarrier_wait() -> None:
    check(f"{_INIT}{_LOAD}\n@@\nld.shared.b32 %v, [%s];", _WAIT)


def test_generic_write_then_bulk_store_needs_proxy_fence() -> None:
    check(
        """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
        st.shared.v4.b32 [%v], {%t, %t, %t, %t};
        @@
        bar.sync 0;
        @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 1024;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;""",
        "fence.proxy.async.shared::cta;",
    )


def test_proxy_fence_before_the_write_it_should_cover_is_reported() -> None:
    body = """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
        @@
        bar.sync 0;
        @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 1024;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    write, fence = "st.shared.v4.b32 [%v], {%t, %t, %t, %t};", "fence.proxy.async.shared::cta;"
    assert races(body.replace("@@", f"{write} {fence}")) == 0
    assert races(body.replace("@@", f"{fence} {write}")) == 20


def test_bulk_store_then_overwrite_needs_read_wait() -> None:
    check(
        """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
        st.shared.v4.b32 [%v], {%t, %t, %t, %t};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 1024;
        @%q cp.async.bulk.commit_group;
        @@
        @%q st.shared.b32 [%s], 1;
        @%q cp.async.bulk.wait_group.read 0;""",
        "@%q cp.async.bulk.wait_group.read 0;",
    )


def test_stage_reused_before_its_readers_released_it_is_reported() -> None:
    check(
        f"""{_INIT}{_LOAD}
        {_WAIT}
        ld.shared.b32 %v, [%s];
        @@
        @%q mbarrier.arrive.expect_tx.shared.b64 %x, [%m], 1024;
        @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
        [%s], [%a], 1024, [%m];
        X: mbarrier.try_wait.parity.shared.b64 %e, [%m], 1; @!%e bra X;""",
        "bar.sync 0;",
    )


def test_exit_before_bulk_store_has_read_is_reported() -> None:
    body = """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
        st.shared.v4.b32 [%v], {%t, %t, %t, %t};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 1024;
        @%q cp.async.bulk.commit_group;
        @@"""
    assert races(body.replace("@@", "@%q cp.async.bulk.wait_group.read 0;")) == 0
    assert races(body.replace("@@", "")) == 20


_STORE = """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
    st.shared.v4.b32 [%v], {%t, %t, %t, %t};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 1024;
    """


def test_exit_after_a_bulk_store_whose_commit_is_missing_is_reported() -> None:
    wait = "@%q cp.async.bulk.wait_group.read 0;"
    assert races(f"{_STORE} @%q cp.async.bulk.commit_group; {wait}") == 0
    assert races(f"{_STORE} {wait}") == 20


def test_exit_after_a_bulk_store_left_to_the_hardware_is_a_warning() -> None:
    out = np.zeros(256, np.uint32)
    result = launch(_STORE, args=(out, out))
    assert len(result.warnings) == 1
    assert "PTX line" in result.warnings[0]
    assert "cp.async.bulk.global" in result.warnings[0]
    assert out[4:8].tolist() == [1, 1, 1, 1]
    assert not launch(f"{_STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;").warnings


def test_remote_shared_store_needs_cluster_barrier() -> None:
    check(
        """.reg .b32 %c, %d; mov.u32 %c, %cluster_ctarank; xor.b32 %d, %c, 1;
        mapa.shared::cluster.u32 %v, %s, %d;
        @%q st.shared::cluster.b32 [%v], 5;
        @@
        ld.shared.b32 %v, [%s];
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""",
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        cluster=2,
    )


def test_remote_access_after_the_other_cta_exited_is_reported() -> None:
    check(
        """.reg .b32 %c, %d; mov.u32 %c, %cluster_ctarank; xor.b32 %d, %c, 1;
        mapa.shared::cluster.u32 %v, %s, %d; add.u32 %v, %v, 512;
        setp.eq.u32 %e, %c, 1; @%e bra END;
        mov.u32 %r, 0;
        SLOW: add.u32 %r, %r, 1; setp.lt.u32 %e, %r, 200; @%e bra SLOW;
        @%q st.shared::cluster.b32 [%v], 5;
        END: @@""",
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        cluster=2,
    )


_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
_ARRIVE_AT_THE_OTHER = f"""@%q mbarrier.init.shared.b64 [%m], 1;
    {_SYNC}
    .reg .b32 %c, %d; mov.u32 %c, %cluster_ctarank; xor.b32 %d, %c, 1;
    mapa.shared::cluster.u32 %v, %m, %d;
    @%q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%v];
    @@"""


@pytest.mark.parametrize(
    "wait",
    [_SYNC, "W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %e, [%m], 0; @!%e bra W;"],
)
def test_remote_arrival_needs_an_exit_that_knows_of_it(wait: str) -> None:
    assert races(_ARRIVE_AT_THE_OTHER.replace("@@", wait), cluster=2) == 0
    assert races(_ARRIVE_AT_THE_OTHER.replace("@@", ""), cluster=2) == 20


def test_remote_read_needs_an_exit_that_knows_of_it() -> None:
    body = f"""@%q st.shared.b32 [%s], 5;
        {_SYNC}
        .reg .b32 %c, %d; mov.u32 %c, %cluster_ctarank; xor.b32 %d, %c, 1;
        mapa.shared::cluster.u32 %v, %s, %d;
        @%q ld.shared::cluster.b32 %r, [%v];
        @@"""
    assert races(body.replace("@@", _SYNC), cluster=2) == 0
    assert races(body.replace("@@", ""), cluster=2) == 20


def test_mbarrier_used_by_another_warp_needs_a_barrier_after_its_initialisation() -> None:
    check(
        f"""@%q mbarrier.init.shared.b64 [%m], 1;
        @@
        setp.eq.u32 %q, %t, 32;
        {_LOAD}
        {_WAIT}""",
        "bar.sync 0;",
    )


def test_mbarrier_of_the_same_cta_needs_no_fence_of_its_initialisation() -> None:
    body = f"@%q mbarrier.init.shared.b64 [%m], 1;\nbar.sync 0;\n{_LOAD}\n{_WAIT}"
    assert races(f"{body}\nfence.proxy.async.shared::cta;") == 0


_REMOTE_ARRIVE = """@%q mbarrier.init.shared.b64 [%m], 1;
    @@
    barrier.cluster.arrive{sem}.aligned; barrier.cluster.wait.acquire.aligned;
    .reg .b32 %c, %d; mov.u32 %c, %cluster_ctarank; xor.b32 %d, %c, 1;
    mapa.shared::cluster.u32 %v, %m, %d;
    @%q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%v];
    W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %e, [%m], 0; @!%e bra W;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


def test_mbarrier_of_another_cta_needs_fence_before_a_relaxed_cluster_barrier() -> None:
    body = _REMOTE_ARRIVE.replace("{sem}", ".relaxed")
    check(body, "@%q fence.mbarrier_init.release.cluster;", cluster=2)
    assert races(body.replace("@@", "fence.acq_rel.cluster;"), cluster=2) == 0


def test_mbarrier_of_another_cta_needs_no_fence_before_a_releasing_cluster_barrier() -> None:
    body = _REMOTE_ARRIVE.replace("{sem}", ".release").replace("@@", "")
    assert races(body, cluster=2) == 0


def test_sub_word_accesses_of_neighbours_do_not_race() -> None:
    body = """.reg .b16 %h; cvt.u16.u32 %h, %t; shl.b32 %v, %w, 1; add.u32 %v, %v, %s;
        @%q st.shared.b16 [%v], %h;
        setp.eq.u32 %q, %t, 32;
        @%q st.shared.b16 [%v], %h; @%q ld.shared.b16 %h, [%v]; @%q st.shared.b16 [%v], %h;"""
    assert races(body) == 0
    assert races(body.replace("shl.b32 %v, %w, 1;", "mov.b32 %v, 0;")) == 20


def test_old_asynchronous_work_is_told_from_newer_work_of_other_barriers() -> None:
    # 40 loads on a second mbarrier, each waited for, must not hide that the first was not
    body = f"""{_INIT.replace("fence", "@%q mbarrier.init.shared.b64 [%m+8], 1; fence")}
        {_LOAD}
        setp.eq.u32 %e, %w, 1; @%e bra READ;
        .reg .b32 %n, %ph; mov.u32 %n, 0;
        AGAIN: and.b32 %ph, %n, 1;
        @%q mbarrier.arrive.expect_tx.shared.b64 %x, [%m+8], 16;
        @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%s+512], [%a], 16, [%m+8];
        V: mbarrier.try_wait.parity.shared.b64 %e, [%m+8], %ph; @!%e bra V;
        add.u32 %n, %n, 1; setp.lt.u32 %e, %n, 40; @%e bra AGAIN;
        @@
        @%q ld.shared.b32 %v, [%s];
        READ:"""
    body = body.replace("1024", "512")
    assert races(body.replace("@@", _WAIT)) == 0
    assert races(body.replace("@@", "")) == 20


def test_work_after_a_copy_is_not_covered_by_its_arrival() -> None:
    store = "@%q st.shared.b32 [%s+768], 1;"
    body = """@%q mbarrier.init.shared.b64 [%m], 32;
        bar.sync 0;
        @!%p bra OTHER;
        shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
        @BEFORE@
        cp.async.cg.shared.global [%v], [%a], 16;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%m];
        @AFTER@
        bra END;
        OTHER: mbarrier.try_wait.parity.shared.b64 %e, [%m], 0; @!%e bra OTHER;
        ld.shared.b32 %v, [%s+768];
        END:"""
    assert races(body.replace("@BEFORE@", store).replace("@AFTER@", "")) == 0
    assert races(body.replace("@BEFORE@", "").replace("@AFTER@", store)) == 20


def test_cp_async_then_read_needs_wait() -> None:
    check(
        """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
        cp.async.cg.shared.global [%v], [%a], 16; cp.async.commit_group;
        @@
        ld.shared.b32 %r, [%v];""",
        "cp.async.wait_group 0;",
    )


def test_atomics_of_two_warps_do_not_race() -> None:
    assert (
        races(
            """@%q st.shared.b32 [%s], 0;
            bar.sync 0;
            red.shared.add.u32 [%s], 1;
            bar.sync 0;
            ld.shared.b32 %v, [%s];"""
        )
        == 0
    )


def test_report_names_both_accesses() -> None:
    body = """@%q st.shared.b32 [%s], 7;
        @%p bra END;
        ld.shared.b32 %v, [%s];
        END:"""
    reports = []
    for seed in range(20):
        try:
            launch(body, seed=seed, detect_uninitialised=False)
        except emulator.RaceError as error:
            reports.append(error)
    assert reports
    assert {error.line for error in reports} <= {10, 12}
    assert all("PTX line" in error.other and error.rule for error in reports)


# every warp writes `value` before a barrier, then all read it
_EQUAL = """.reg .b32 %u; mov.u32 %u, {value};
    setp.eq.u32 %e, %t, 0; setp.eq.u32 %q, %t, 32; or.pred %q, %q, %e;
    @%q st.shared.b32 [%s], %u;
    @@
    ld.shared.b32 %v, [%s];"""


def test_warps_that_write_the_same_value_do_not_race() -> None:
    equal = _EQUAL.format(value="7")
    assert races(equal.replace("@@", "bar.sync 0;")) == 0
    assert races(_EQUAL.format(value="%t").replace("@@", "bar.sync 0;")) == 20


def test_reader_needs_to_know_of_one_of_the_equal_writers() -> None:
    # each warp knows of its own write, so that no barrier is needed; a third warp needs one
    equal = _EQUAL.format(value="7")
    assert races(equal.replace("@@", "")) == 0
    third = equal.replace("ld.shared", "setp.eq.u32 %e, %w, 2; @%e ld.shared")
    assert races(third.replace("@@", "bar.sync 0;"), block=96) == 0
    assert races(third.replace("@@", ""), block=96, detect_uninitialised=False) >= 18


def test_writer_of_other_bytes_needs_to_know_of_all_equal_writers() -> None:
    # warp 2 hears of warp 0 by barrier 1 and of warp 1 by barrier 2
    body = """setp.eq.u32 %e, %w, 2; @%e bra LAST;
        and.b32 %r, %t, 31; setp.eq.u32 %q, %r, 0; @%q st.shared.b32 [%s], 7;
        @%p bar.arrive 1, 64;
        @!%p bar.arrive 2, 64;
        bra END;
        LAST: {waits}
        setp.eq.u32 %q, %t, 64; @%q st.shared.b32 [%s], {value};
        END:"""
    both = "bar.sync 1, 64; bar.sync 2, 64;"
    assert races(body.format(waits=both, value="8"), block=96) == 0
    for one in ("bar.sync 1, 64;", "bar.sync 2, 64;"):
        assert races(body.format(waits=one, value="8"), block=96) == 20
        assert races(body.format(waits=one, value="7"), block=96) == 0


def test_write_of_equal_bytes_that_no_earlier_reader_waited_for_is_no_race() -> None:
    body = """@%q st.shared.b32 [%s], 7;
        bar.sync 0;
        @%p bra READ;
        mov.u32 %r, 0;
        SLOW: add.u32 %r, %r, 1; setp.lt.u32 %e, %r, 500; @%e bra SLOW;
        st.shared.b32 [%s], {value};
        bra END;
        READ: ld.shared.b32 %v, [%s];
        END:"""
    assert races(body.format(value="7")) == 0
    assert races(body.format(value="8")) == 20


def test_equal_bytes_excuse_no_missing_wait_for_a_copy() -> None:
    source = np.full(256, 7, np.uint32)
    body = f"{_INIT}{_LOAD}\n@@\n@%q st.shared.b32 [%s], 7;"
    arrays = (source, np.zeros(256, np.uint32))
    assert races(body.replace("@@", _WAIT), args=arrays) == 0
    assert races(body.replace("@@", ""), args=arrays) >= 18


def test_report_gives_the_address_in_bytes() -> None:
    body = "@%q st.shared.b32 [%s+256], 7; @!%p st.shared.b32 [%s+256], 8;"
    with pytest.raises(emulator.RaceError) as info:
        launch(body)
    # the system's 1 KiB comes first
    assert info.value.where.address == 1024 + 256
    assert info.value.where.space == "shared"
    assert "shared address 0x500" in str(info.value)


# --- a load of which only some bytes are used -----------------------------------------------------

_PRAGMA = '.pragma "used_bytes_mask 0xf0f";'


def test_unused_bytes_of_a_load_neither_race_nor_need_a_value() -> None:
    # words 0 and 2 are this warp's own; word 1 is written by the other warp, word 3 by nobody
    body = """@%p st.shared.b32 [%s+4], 9;
        @%p bra END;
        st.shared.b32 [%s], 1; st.shared.b32 [%s+8], 3;
        {pragma}
        ld.shared.v4.b32 {{%v, %r, %w, %t}}, [%s{at}];
        setp.eq.u32 %e, %v, 1; @!%e trap; setp.eq.u32 %e, %w, 3; @!%e trap;
        END:"""
    assert races(body.format(pragma=_PRAGMA, at="")) == 0
    assert races(body.format(pragma="", at="")) == 20
    assert races(body.format(pragma='.pragma "used_bytes_mask 0xfff";', at="")) == 20
    assert races(body.format(pragma='.pragma "nounroll";', at="")) == 20
    assert races(body.format(pragma=_PRAGMA, at="+16")) == 20


def test_unused_bytes_of_a_load_may_lie_past_an_array() -> None:
    arrays = (np.arange(3, dtype=np.uint32), np.zeros(256, np.uint32))
    body = "{pragma} ld.global.v4.b32 {{%v, %r, %w, %t}}, [%a]; st.global.b32 [%b], %w;"
    launch(body.format(pragma=_PRAGMA), args=arrays)
    assert arrays[1][0] == 2
    with pytest.raises(emulator.OutOfBounds):
        launch(body.format(pragma='.pragma "used_bytes_mask 0xffff";'), args=arrays)


def test_used_bytes_belong_to_the_next_instruction_alone() -> None:
    body = f"{_PRAGMA}\nmov.u32 %v, 0;\nld.shared.v4.b32 {{%v, %r, %w, %t}}, [%s];"
    body += "st.global.b32 [%b], %v;"
    with pytest.raises(emulator.UninitialisedRead):
        launch(body)


def test_used_bytes_mask_that_is_no_number_is_an_error_at_its_line() -> None:
    with pytest.raises(emulator.PtxError, match="used_bytes_mask 'all'") as info:
        launch('\n.pragma "used_bytes_mask all";')
    assert info.value.line == 11
