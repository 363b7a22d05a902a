"""Global memory: writers that nothing orders are reported, ordered ones are not."""

from typing import Any

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import Options

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def faults(body: str, grid: int = 2, block: int = 32, seeds: int = 20, **more: Any) -> int:
    """Return in how many seeds a kernel with pointers a and b is reported."""
    text = (
        f"{HEAD}.visible .entry k(.param .u64 a, .param .u64 b)\n{{\n"
        ".shared .align 128 .b8 s[1024]; .shared .align 8 .b8 m[16];\n"
        ".reg .b32 %t, %c, %v, %w, %s, %m; .reg .b64 %a, %b, %o; .reg .pred %p, %q, %first;\n"
        "ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x;\n"
        "mul.wide.u32 %o, %t, 4; mov.u32 %s, s; mov.u32 %m, m;\n"
        "setp.eq.u32 %q, %t, 0; setp.eq.u32 %first, %c, 0; shr.u32 %w, %t, 5;\n"
        f"{body}\nret;\n}}\n"
    )
    module, found = emulator.load_ptx(text), 0
    for seed in range(seeds):
        arrays = [np.zeros(512, np.uint32), np.zeros(512, np.uint32)]
        try:
            module.launch("k", grid, block, args=arrays, options=Options(seed=seed, **more))
        except emulator.RaceError:
            found += 1
    return found


def test_two_ctas_that_write_one_word_race() -> None:
    assert faults("@%q st.global.b32 [%a], %c;") == 20
    assert faults("add.s64 %a, %a, %o; st.global.b32 [%a], %c;") == 20


def test_two_ctas_that_write_their_own_words_do_not_race() -> None:
    assert faults("mul.wide.u32 %o, %c, 4; add.s64 %a, %a, %o; @%q st.global.b32 [%a], %c;") == 0


def test_two_ctas_that_write_halves_of_a_word_do_not_race() -> None:
    body = """.reg .b16 %h; mov.u16 %h, 7; mul.wide.u32 %o, %c, 2; add.s64 %a, %a, %o;
        @%q st.global.b16 [%a], %h;"""
    assert faults(body) == 0


def test_two_ctas_that_write_the_same_value_do_not_race() -> None:
    assert faults("@%q st.global.b32 [%a], 7; @%q ld.global.b32 %v, [%a];") == 0


def test_atomics_of_two_ctas_do_not_race() -> None:
    assert faults("red.global.add.u32 [%a], 1; atom.global.add.u32 %v, [%a+4], 1;") == 0


_SEMAPHORE = """@!%first bra READ;
    @%q st.global.b32 [%a], 5;
    @%q {release};
    bra END;
    READ: {acquire} %v, [%b]; setp.eq.u32 %p, %v, 0; @%p bra READ;
    @%q ld.global.b32 %v, [%a];
    END:"""


def test_word_handed_to_another_cta_through_a_semaphore_does_not_race() -> None:
    body = _SEMAPHORE.format(
        release="red.release.gpu.global.add.u32 [%b], 1", acquire="ld.acquire.gpu.global.u32"
    )
    assert faults(body) == 0


def test_word_written_after_the_semaphore_was_released_races() -> None:
    body = _SEMAPHORE.replace("@%q st.global.b32 [%a], 5;", "").replace(
        "bra END;", "@%q st.global.b32 [%a], 5; bra END;"
    )
    body = body.format(
        release="red.release.gpu.global.add.u32 [%b], 1", acquire="ld.acquire.gpu.global.u32"
    )
    assert faults(body) == 20


@pytest.mark.parametrize(("barrier", "count"), [("bar.sync 0;", 0), ("", 20)])
def test_word_handed_to_another_warp_needs_a_barrier(barrier: str, count: int) -> None:
    body = f"""@%q st.global.b32 [%a], 5;
        {barrier}
        setp.eq.u32 %p, %w, 1; @!%p bra END;
        @%p st.global.b32 [%a], 6;
        END:"""
    assert faults(body, grid=1, block=64) == count


_LOAD = """@%q mbarrier.init.shared.b64 [%m], 1;
    bar.sync 0;
    add.s64 %o, %a, %o; st.global.b32 [%o], %t;
    {fence}
    bar.sync 0;
    @%q mbarrier.arrive.expect_tx.shared.b64 _, [%m], 128;
    @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%a], 128, [%m];
    W: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @!%p bra W;"""


@pytest.mark.parametrize(("fence", "count"), [("fence.proxy.async;", 0), ("", 20)])
def test_generic_write_then_bulk_load_of_it_needs_a_proxy_fence(fence: str, count: int) -> None:
    assert faults(_LOAD.format(fence=fence), grid=1) == count


@pytest.mark.parametrize(
    ("wait", "is_clean"),
    [
        ("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", True),
        ("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;", False),
    ],
)
def test_bulk_store_released_to_another_cta_must_be_complete(wait: str, is_clean: bool) -> None:
    body = f"""mul.wide.u32 %o, %t, 4; cvt.u32.u64 %v, %o; add.u32 %v, %v, %s;
        st.shared.b32 [%v], 9; fence.proxy.async; bar.sync 0;
        @!%first bra READ;
        @%q cp.async.bulk.global.shared::cta.bulk_group [%a], [%s], 128;
        {wait}
        @%q red.release.gpu.global.add.u32 [%b], 1;
        bra END;
        READ: ld.acquire.gpu.global.u32 %v, [%b]; setp.eq.u32 %p, %v, 0; @%p bra READ;
        @%q ld.global.b32 %v, [%a];
        END:"""
    assert (faults(body) == 0) == is_clean


def test_report_names_both_accesses() -> None:
    text = f"{HEAD}.visible .entry k(.param .u64 a)\n{{\n.reg .b64 %a; .reg .b32 %c;\n"
    text += "ld.param.u64 %a, [a]; mov.u32 %c, %ctaid.x;\nst.global.b32 [%a+8], %c;\nret;\n}\n"
    module = emulator.load_ptx(text)
    with pytest.raises(emulator.RaceError, match="no release and acquire") as info:
        module.launch("k", 2, 1, args=[np.zeros(4, np.uint32)])
    assert info.value.line == 8
    assert "PTX line 8" in info.value.other
    assert info.value.where.address == 8


def test_lanes_of_a_store_that_disagree_are_a_warning() -> None:
    text = f"{HEAD}.visible .entry k(.param .u64 a)\n{{\n.reg .b64 %a; .reg .b32 %t;\n"
    text += "ld.param.u64 %a, [a]; mov.u32 %t, %tid.x;\nst.global.b32 [%a], %t;\nret;\n}\n"
    same = text.replace("%tid.x", "%ntid.x")
    out = np.zeros(1, np.uint32)
    assert (
        "lanes of one store" in emulator.load_ptx(text).launch("k", 1, 32, args=[out]).warnings[0]
    )
    assert not emulator.load_ptx(same).launch("k", 1, 32, args=[out]).warnings


def test_rows_that_two_ctas_share_may_hold_the_same_values() -> None:
    # CTA 0 writes words 0..31, CTA 1 words 16..47: the shared half is equal, the rest new
    body = """mul.wide.u32 %o, %c, 64; mul.wide.u32 %x, %t, 4; add.s64 %a, %a, %o;
        add.s64 %a, %a, %x; mad.lo.u32 %v, %c, 16, %t; {value} st.global.b32 [%a], %v;"""
    body = ".reg .b64 %x; " + body
    assert faults(body.format(value="")) == 0
    assert faults(body.format(value="mad.lo.u32 %v, %c, 1000, %v;")) == 20


# --- a write that overtakes a read ----------------------------------------------------------------

_READ_THEN_WRITE = """@!%first bra WRITE;
    {before}
    @%q red.release.gpu.global.add.u32 [%b], 1;
    {after}
    bra END;
    WRITE: {wait}
    @%q st.global.b32 [%a], 5;
    END:"""
_WAIT = "ld.acquire.gpu.global.u32 %v, [%b]; setp.eq.u32 %p, %v, 0; @%p bra WRITE;"
_READ = "@%q ld.global.b32 %w, [%a];"


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ({"before": _READ, "after": "", "wait": _WAIT}, 0),
        ({"before": _READ, "after": "", "wait": ""}, 20),
        ({"before": "", "after": _READ, "wait": _WAIT}, 20),
    ],
    ids=["released after the read", "not waited for", "released before the read"],
)
def test_write_that_another_cta_s_read_must_precede(parts: dict[str, str], count: int) -> None:
    assert faults(_READ_THEN_WRITE.format(**parts)) == count


@pytest.mark.parametrize(("barrier", "count"), [("bar.sync 0;", 0), ("", 20)])
def test_word_that_another_warp_reads_is_overwritten_behind_a_barrier(
    barrier: str, count: int
) -> None:
    body = f"""@%q ld.global.b32 %v, [%a];
        {barrier}
        setp.eq.u32 %p, %w, 1; @!%p bra END;
        @%p st.global.b32 [%a], 6;
        END:"""
    assert faults(body, grid=1, block=64) == count


def test_thread_that_reads_and_overwrites_its_own_word_does_not_race() -> None:
    body = """mul.wide.u32 %o, %c, 128; add.s64 %a, %a, %o; mul.wide.u32 %o, %t, 4;
        add.s64 %a, %a, %o; ld.global.b32 %v, [%a]; add.u32 %v, %v, 1; st.global.b32 [%a], %v;"""
    assert faults(body) == 0


def test_halves_of_a_word_read_and_written_by_two_ctas_do_not_race() -> None:
    body = """.reg .b16 %h; mul.wide.u32 %o, %c, 2; add.s64 %a, %a, %o;
        @%q ld.global.b16 %h, [%a]; add.u16 %h, %h, 1; @%q st.global.b16 [%a], %h;"""
    assert faults(body) == 0


def test_write_that_leaves_a_word_as_it_is_overtakes_no_read() -> None:
    # where it comes first, the reader does not know of it: that is reported, the other order is not
    body = """@%q ld.global.b32 %v, [%a];
        setp.eq.u32 %p, %w, 1; @!%p bra END;
        @%p st.global.b32 [%a], {value};
        END:"""
    same, other = (faults(body.format(value=value), grid=1, block=64) for value in (0, 5))
    assert 0 < same < other == 20


@pytest.mark.parametrize(
    ("wait", "count"), [("W: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @!%p bra W;", 0),
                        ("", 20)],
)  # fmt: skip
def test_word_that_a_bulk_load_reads_is_overwritten_behind_its_barrier(
    wait: str, count: int
) -> None:
    body = f"""@%q mbarrier.init.shared.b64 [%m], 1;
        bar.sync 0;
        @%q mbarrier.arrive.expect_tx.shared.b64 _, [%m], 128;
        @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%s], [%a], 128, [%m];
        {wait}
        add.s64 %o, %a, %o; st.global.b32 [%o], 7;
        END: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @!%p bra END;"""
    assert faults(body, grid=1, async_delay="eager") == count


def test_report_of_an_overtaken_read_names_both_accesses() -> None:
    text = f"{HEAD}.visible .entry k(.param .u64 a)\n{{\n.reg .b64 %a; .reg .b32 %t, %v;\n"
    text += ".reg .pred %p; ld.param.u64 %a, [a]; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 32;\n"
    text += (
        "@%p bra READ;\nst.global.b32 [%a+8], 5;\nret;\nREAD: ld.global.b32 %v, [%a+8];\nret;}\n"
    )
    module = emulator.load_ptx(text)
    found: set[tuple[int, str]] = set()
    for seed in range(8):
        with pytest.raises(emulator.RaceError) as info:
            module.launch("k", 1, 64, args=[np.zeros(4, np.uint32)], options=Options(seed=seed))
        assert info.value.where.address == 8
        found.add((info.value.line, info.value.other))
    # whichever comes second is reported, and names the other one
    assert {line for line, _ in found} == {9, 11}
    assert any(line == 9 and "PTX line 11" in other and "warp 0" in other for line, other in found)
