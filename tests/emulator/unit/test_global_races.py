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
