"""Faults: what a kernel does wrong is reported with line, warp, lane and address."""

from typing import Any

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import Options

HEAD = """.version 8.7
.target sm_90a
.address_size 64
"""


def run(body: str, *args: Any, block: int = 32, signature: str = "", **more: Any) -> Any:
    """Run a one-kernel module; `signature` declares its parameters."""
    text = f"{HEAD}.visible .entry k({signature})\n{{\n{body}\nret;\n}}\n"
    return emulator.load_ptx(text).launch("k", 1, block, args=args, **more)


def test_uninitialised_register_names_register_and_line() -> None:
    with pytest.raises(emulator.UninitialisedRead, match="register %a was never written") as info:
        run(
            ".reg .b32 %a, %b; .reg .b64 %p;\nadd.u32 %b, %a, 1;"
            "ld.param.u64 %p, [a]; st.global.b32 [%p], %b;",
            np.zeros(1, np.uint32),
            signature=".param .u64 a",
        )
    assert info.value.line == 7
    assert info.value.where.warp == 0


def test_uninitialised_source_in_first_place_is_named() -> None:
    with pytest.raises(emulator.UninitialisedRead, match="register %a was never written"):
        run(".reg .b32 %a;\nbar.sync %a;")


def test_uninitialised_shared_read_names_lane_and_address() -> None:
    body = """.shared .align 4 .b8 s[128];
    .reg .b32 %a, %b; .reg .pred %p;
    mov.u32 %a, %tid.x; setp.lt.u32 %p, %a, 7; shl.b32 %a, %a, 2;
    .reg .b32 %base; mov.u32 %base, s; add.u32 %a, %a, %base;
    @%p st.shared.b32 [%a], 1;
    ld.shared.b32 %b, [%a];
    .reg .b64 %out; ld.param.u64 %out, [out]; st.global.b32 [%out], %b;"""
    with pytest.raises(emulator.UninitialisedRead) as info:
        run(body, np.zeros(1, np.uint32), signature=".param .u64 out")
    assert info.value.where.lane == 7
    assert info.value.where.address == 0x400 + 28


def test_uninitialised_shared_read_is_allowed_when_detection_is_off() -> None:
    body = ".shared .align 4 .b8 s[4];\n.reg .b32 %b;\nld.shared.b32 %b, [s];"
    run(body, options=Options(detect_uninitialised=False))


@pytest.mark.parametrize(
    ("offset", "error"),
    [(32 * 4, emulator.OutOfBounds), (2, emulator.Misaligned), (-4, emulator.OutOfBounds)],
)
def test_bad_global_address_is_reported(offset: int, error: type[emulator.Fault]) -> None:
    data = np.zeros(32, np.uint32)
    body = f".reg .b64 %p; .reg .b32 %v;\nld.param.u64 %p, [a];\nld.global.b32 %v, [%p+{offset}];"
    with pytest.raises(error) as info:
        run(body, data, signature=".param .u64 a")
    assert info.value.line == 8


def test_store_outside_a_vector_reports_the_first_lane_outside() -> None:
    data = np.zeros(20, np.float32)
    body = """.reg .b64 %p, %o; .reg .b32 %t;
    ld.param.u64 %p, [a]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.u64 %p, %p, %o;
    st.global.b32 [%p], %t;"""
    with pytest.raises(emulator.OutOfBounds) as info:
        run(body, data, signature=".param .u64 a")
    assert info.value.where.lane == 20


def test_shared_access_past_the_end_is_out_of_bounds() -> None:
    body = ".shared .align 16 .b8 s[64];\nst.shared.b32 [s+64], 1;"
    with pytest.raises(emulator.OutOfBounds, match="shared memory"):
        run(body)


def test_trap_raises() -> None:
    with pytest.raises(emulator.Trap) as info:
        run("trap;")
    assert info.value.line == 6


def test_endless_loop_hits_the_step_limit() -> None:
    with pytest.raises(emulator.StepLimitExceeded, match="max_steps=500"):
        run("L: bra L;", options=Options(max_steps=500))


def test_deadlock_names_barrier_and_missing_warps() -> None:
    body = """.reg .pred %p; .reg .b32 %t; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 32;
    @%p bra SKIP;
    bar.sync 1, 64;
    SKIP:"""
    with pytest.raises(emulator.DeadlockError) as info:
        run(body, block=64)
    assert "barrier 1: 32 of 64 threads arrived, of warp 1" in info.value.waiting[0]


def test_deadlock_counts_the_threads_that_wait_and_those_a_guard_leaves_out() -> None:
    body = """.reg .pred %p; .reg .b32 %t; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 4;
    @%p barrier.sync 1, 64;"""
    with pytest.raises(emulator.DeadlockError) as info:
        run(body, block=64)
    assert info.value.waiting == (
        "CTA (0, 0, 0) warp 0 (4 threads; the guard leaves out 28, which go on with them) waits "
        "for barrier 1: 4 of 64 threads arrived, of warp 0",
    )


def test_mbarrier_deadlock_names_phase_and_counts() -> None:
    body = """.shared .align 8 .b8 b[8]; .reg .pred %p; .reg .b64 %s; .reg .b32 %a;
    mov.u32 %a, b; elect.sync _|%p, -1;
    @%p mbarrier.init.shared.b64 [%a], 2;
    @%p mbarrier.arrive.shared.b64 %s, [%a];
    W: mbarrier.try_wait.parity.shared.b64 %p, [%a], 0; @!%p bra W;"""
    with pytest.raises(emulator.DeadlockError) as info:
        run(body)
    assert "phase 0 (parity 0), 1 of 2 arrivals pending" in info.value.waiting[0]
    assert "PTX line 9" in info.value.waiting[0]


def test_too_many_arrivals_are_reported() -> None:
    body = """.shared .align 8 .b8 b[8]; .reg .b32 %a; .reg .b64 %s; .reg .pred %p;
    mov.u32 %a, b; elect.sync _|%p, -1;
    @%p mbarrier.init.shared.b64 [%a], 3;
    mbarrier.arrive.shared.b64 %s, [%a], 4;"""
    with pytest.raises(emulator.IllegalOperand, match="more arrivals than expected"):
        run(body)


def test_sync_with_lanes_missing_is_reported() -> None:
    body = """.reg .b32 %t, %v; .reg .pred %p; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 8;
    @%p shfl.sync.idx.b32 %v, %t, 0, 31, -1;"""
    with pytest.raises(emulator.IllegalOperand, match="member mask 0xffffffff"):
        run(body)


def test_atomic_from_all_lanes_adds_each() -> None:
    data = np.zeros(1, np.uint32)
    body = ".reg .b64 %p; .reg .b32 %o;\nld.param.u64 %p, [a]; atom.global.add.u32 %o, [%p], 3;"
    run(body, data, signature=".param .u64 a", block=96)
    assert data[0] == 3 * 96


@pytest.mark.parametrize(
    "head", ["acq_rel.gpu.global", "global.gpu.acq_rel", "gpu.global.acq_rel", "global.acq_rel.gpu"]
)
def test_atomic_takes_order_scope_and_space_in_any_order(head: str) -> None:
    data = np.zeros(2, np.uint32)
    body = f""".reg .b64 %p; .reg .b32 %o;
    ld.param.u64 %p, [a]; atom.{head}.add.u32 %o, [%p], 3;
    red.{head.replace("acq_rel", "relaxed")}.add.u32 [%p+4], 2;"""
    run(body, data, signature=".param .u64 a", block=32)
    assert data.tolist() == [96, 64]


def test_atomic_with_two_scopes_is_refused() -> None:
    body = ".reg .b64 %p; ld.param.u64 %p, [a]; red.gpu.global.cta.add.u32 [%p], 2;"
    with pytest.raises(emulator.UnsupportedForm):
        run(body, np.zeros(2, np.uint32), signature=".param .u64 a")


def budget(producer: int, consumers: int, directives: str = ".reqntid 384") -> Any:
    """Run 12 warps: the first four give registers back, the others ask for more."""
    body = f""".reg .pred %p; .reg .b32 %t; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 128;
    @%p bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {consumers};
    bra END;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 {producer};
    END:"""
    text = f"{HEAD}.visible .entry k()\n{directives}\n{{\n{body}\nbar.sync 0;\nret;\n}}\n"
    return emulator.load_ptx(text).launch("k", 1, 384)


def test_register_pool_grants_what_the_cta_was_launched_with() -> None:
    budget(24, 240)  # 3 x 168 = 504 = 24 + 2 x 240


def test_register_pool_never_grants_more_than_the_cta_was_launched_with() -> None:
    with pytest.raises(emulator.DeadlockError) as info:
        budget(32, 240)
    report = "\n".join(info.value.waiting)
    assert "setmaxnreg.inc 240" in report
    assert "launched with 168 registers a thread in 12 warps" in report


def test_register_pool_starts_from_maxnreg_where_it_is_given() -> None:
    budget(24, 88, ".reqntid 384 .maxnreg 80")
    with pytest.raises(emulator.DeadlockError):
        budget(24, 112, ".reqntid 384 .maxnreg 80")


def test_register_increase_below_what_the_warp_has_is_reported() -> None:
    with pytest.raises(emulator.IllegalOperand, match="160 with 168 registers now"):
        budget(24, 160)


def test_register_budgets_of_a_kernel_without_bounds_are_ignored_as_ptxas_does() -> None:
    budget(24, 240, "")


def test_try_wait_whose_result_is_ignored_is_found() -> None:
    body = """.shared .align 8 .b8 b[8]; .shared .align 4 .b8 s[4];
    .reg .pred %p, %q; .reg .b32 %a, %t, %v;
    mov.u32 %a, b; mov.u32 %t, %tid.x; setp.eq.u32 %q, %t, 0;
    @%q mbarrier.init.shared.b64 [%a], 1;
    bar.sync 0;
    setp.lt.u32 %p, %t, 32; @!%p bra READ;
    @%q st.shared.b32 [s], 1;
    @%q mbarrier.arrive.shared.b64 _, [%a];
    bra END;
    READ: mbarrier.try_wait.parity.shared.b64 %p, [%a], 0;
    @@
    ld.shared.b32 %v, [s];
    END:"""

    def faults(body: str) -> int:
        found = 0
        for seed in range(20):
            try:
                run(body, block=64, options=Options(seed=seed))
            except emulator.Fault:
                found += 1
        return found

    assert faults(body.replace("@@", "@!%p bra READ;")) == 0
    assert faults(body.replace("@@", "")) > 0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("mov.b64 %d, 0; applypriority.global.L2::evict_normal [%d], 64;", emulator.PtxError),
        ("mov.b64 %d, 128; discard.global.L2 [%d], 64;", emulator.PtxError),
        ("createpolicy.fractional.L2::evict_first.b64 %d, 1.5;", emulator.PtxError),
        ("st.bulk.shared::cta [s], 12, 0;", emulator.IllegalOperand),
        ("st.bulk.shared::cta [s], 4096, 0;", emulator.OutOfBounds),
        ("st.bulk.shared::cta [s], 8, 1;", emulator.PtxError),
    ],
)
def test_hint_or_bulk_store_with_a_wrong_operand_is_an_error_at_its_line(body, error):
    text = ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n"
    text += f".shared .align 8 .b8 s[64]; .reg .b64 %d;\n{body}\nret;\n}}\n"
    with pytest.raises(error) as info:
        emulator.load_ptx(text).launch("k", 1, 1)
    assert info.value.line == 7
