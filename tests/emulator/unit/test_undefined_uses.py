"""Uses that the manual leaves undefined and that would look right here: each is a fault.

Every case runs without a report where its one wrong thing is right.
"""

import numpy as np
import pytest

from fovea import emulator

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p)
{
.reg .b64 %a, %g, %l, %s; .reg .b32 %v<4>, %t; .reg .f32 %f<8>; .reg .pred %q;
.shared .align 128 .b8 data[2048]; .shared .align 8 .b64 bar; .local .align 8 .b8 own[64];
ld.param.u64 %a, [p]; mov.u32 %t, %tid.x;
"""


def _launch(body: str, block: int = 32, **options) -> np.ndarray:
    out = np.zeros(2048, np.uint32)
    module = emulator.load_ptx(f"{HEAD}{body}\nret;\n}}\n")
    module.launch("k", 1, block, args=[out], options=emulator.Options(**options))
    return out


# --- generic addresses where an instruction names a state space -----------------------------------

SHARED = "mov.u64 %s, data; cvta.shared.u64 %g, %s;\n"
BARRIER = "mov.u64 %s, bar; cvta.shared.u64 %g, %s;\nsetp.eq.u32 %q, %t, 0;\n"
INIT = "@%q mbarrier.init.shared.b64 [bar], 32; bar.sync 0;\n"
FILL = "st.shared.b32 [data], 1; bar.sync 0;\n"
LOCAL = "mov.u64 %s, own; cvta.local.u64 %g, %s;\nst.local.b32 [own], 1;"


@pytest.mark.parametrize(
    ("before", "use"),
    [
        (SHARED, "st.shared.b32 [{}], 1;"),
        (SHARED, "st.shared::cta.v2.b32 [{}], {{1, 2}};"),
        (SHARED, "st.volatile.shared.b32 [{}], 1;"),
        (SHARED, "st.shared::cluster.b32 [{}], 1;"),
        (SHARED + FILL, "ld.shared.b32 %v0, [{}];"),
        (SHARED + FILL, "ld.relaxed.cta.shared.b32 %v0, [{}];"),
        (SHARED + FILL, "atom.shared.add.u32 %v0, [{}], 1;"),
        (SHARED + FILL, "red.shared::cta.add.u32 [{}], 1;"),
        (SHARED, "@%q cp.async.ca.shared.global [{}], [%a], 4; cp.async.wait_all;"),
        (BARRIER, "@%q mbarrier.init.shared.b64 [{}], 1;"),
        (BARRIER + INIT, "mbarrier.arrive.shared.b64 _, [{}];"),
        (BARRIER + INIT, "mbarrier.test_wait.parity.shared.b64 %q, [{}], 1;"),
        (LOCAL, "st.local.b32 [{}], 1;"),
        (LOCAL, "ld.local.b32 %v0, [{}];"),
    ],
)
def test_generic_address_where_a_state_space_is_named_is_a_fault(before: str, use: str) -> None:
    before = "setp.eq.u32 %q, %t, 0;\n" + before
    _launch(before + use.format("%s"))
    with pytest.raises(
        emulator.Fault, match=r"not one in \.(shared|local).*convert it with cvta\.to"
    ):
        _launch(before + use.format("%g"))


def test_lanes_that_are_left_out_may_hold_any_address() -> None:
    body = SHARED + "setp.eq.u32 %q, %t, 0;\nselp.b64 %g, %s, %g, %q; @%q st.shared.b32 [%g], 1;"
    _launch(body)
    with pytest.raises(emulator.OutOfBounds) as info:
        _launch(body.replace("@%q st", "@!%q st"))
    assert info.value.where.lane == 1


def test_global_address_in_an_access_to_shared_memory_is_a_fault() -> None:
    with pytest.raises(emulator.OutOfBounds, match=r"not one in \.shared"):
        _launch("st.shared.b32 [%a], 1;")


# --- memory that must be read-only ----------------------------------------------------------------


@pytest.mark.parametrize("load", ["ld.global.nc.b32 %v0", "ldu.global.b32 %v0",
                                  "ld.global.nc.v2.b32 {%v0, %v1}", "ld.global.L1::no_allocate.nc"
                                  ".b32 %v0"])  # fmt: skip
@pytest.mark.parametrize("write", ["st.global.b32 [%a], 7;", "red.global.add.u32 [%a], 7;",
                                   "st.global.b8 [%a+1], 7;"])  # fmt: skip
def test_word_that_the_kernel_has_written_is_no_constant(load: str, write: str) -> None:
    write = f"setp.eq.u32 %q, %t, 0; @%q {write} bar.sync 0;"
    _launch(f"{write} {load}, [%a+64];")
    _launch(f"{load}, [%a]; {write}")
    with pytest.raises(emulator.RaceError, match=r"read-only while the kernel runs") as info:
        _launch(f"{write}\n{load}, [%a];", 64)
    assert info.value.line == 10
    assert "PTX line 9" in info.value.other


def test_constants_of_another_cluster_are_judged_too() -> None:
    first = "st.global.b32 [%a], 1; fence.acq_rel.gpu; red.release.gpu.global.add.u32 [%a+8], 1;"
    then = "ld.acquire.gpu.global.b32 %v0, [%a+8];\n{} %v0, [%a];"
    body = (
        f"mov.u32 %v1, %ctaid.x; setp.eq.u32 %q, %v1, 0; @!%q bra L; {first} bra E;\nL: {then}\nE:"
    )
    for seed in range(4):
        for load, is_constant in (("ld.global.b32", False), ("ld.global.nc.b32", True)):
            module = emulator.load_ptx(f"{HEAD}{body.format(load)}\nret;\n}}\n")
            call = {"grid": 2, "block": 1, "args": [np.zeros(4, np.uint32)]}
            options = emulator.Options(seed=seed, num_sms=1)  # one cluster after the other
            if not is_constant:
                module.launch("k", options=options, **call)
                continue
            with pytest.raises(emulator.RaceError, match="read-only while the kernel runs"):
                module.launch("k", options=options, **call)


def test_bytes_beside_those_that_the_kernel_has_written_are_constants() -> None:
    _launch("setp.eq.u32 %q, %t, 0; @%q st.global.b8 [%a+1], 7; ld.global.nc.b8 %v0, [%a];")


# --- arrivals -------------------------------------------------------------------------------------

READY = "setp.eq.u32 %q, %t, 0; @%q mbarrier.init.shared.b64 [bar], {}; bar.sync 0;\n"


@pytest.mark.parametrize("name", ["arrive", "arrive_drop"])
def test_arrival_of_a_count_out_of_range_is_a_fault(name: str) -> None:
    body = READY.format(64) + f"mov.b32 %v0, {{}}; mbarrier.{name}.shared.b64 %s, [bar], %v0;"
    _launch(body.format(2))
    for count in (0, 1 << 20, -1):
        with pytest.raises(emulator.IllegalOperand, match=r"count=\d+ must lie in 1\.\.1048575"):
            _launch(body.format(count))


def test_arrival_that_must_not_complete_a_phase_and_does_is_a_fault() -> None:
    body = "mbarrier.arrive.noComplete.shared.b64 %s, [bar], 1;"
    _launch(READY.format(33) + body)
    with pytest.raises(emulator.IllegalOperand, match=r"completes phase 0 .*\.noComplete") as info:
        _launch(READY.format(32) + body)
    assert info.value.where.lane == 31


# --- cp.async -------------------------------------------------------------------------------------


def test_source_size_above_the_size_is_a_fault_of_a_lane() -> None:
    body = (
        "setp.eq.u32 %q, %t, 3; selp.b32 %v0, {}, 4, %q; shl.b32 %v1, %t, 4; mov.u32 %v2, data;\n"
    )
    body += (
        "add.u32 %v1, %v1, %v2; cp.async.ca.shared.global [%v1], [%a], 16, %v0; cp.async.wait_all;"
    )
    _launch(body.format(16))
    with pytest.raises(emulator.IllegalOperand, match=r"src-size=17 must lie in 0\.\.16") as info:
        _launch(body.format(17))
    where = info.value.where
    assert (where.line, where.cta, where.warp, where.lane) == (10, (0, 0, 0), 0, 3)


def test_arrival_of_copies_at_a_full_mbarrier_is_a_fault() -> None:
    expect = "@%q mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 16; bar.sync 0;\n"
    body = "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];\ncp.async.wait_all; bar.sync 0;"
    _launch(READY.format(32) + expect + body, async_delay="eager")
    with pytest.raises(emulator.IllegalOperand, match="more arrivals than expected") as info:
        _launch(READY.format(1) + expect + body, async_delay="eager")
    assert info.value.where.cta == (0, 0, 0)
    assert info.value.line == 11
