"""Accumulators that `mov` copies in flight: as compilers emit it, and read too early."""

import numpy as np
import pytest
from test_wgmma import BAR_AT, check, kernel, launch, place, registers, setup

from fovea.emulator import RaceError, load_ptx

AGAIN = f"""sub.u64 %da, %da, 2; sub.u64 %db, %db, 2;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {registers("d", 16)}, %da, %db, 1, 1, 1,
        0, 0;
    wgmma.commit_group.sync.aligned;"""


def run(times=1, **changes):
    a, b, product, scale = setup(width=32)
    out = np.zeros((16, 128), np.float32)
    launch(kernel(32, width=32, **changes), out, place(a, 32), place(b, 32))
    check(out, times * product, times * scale)


def test_copy_taken_before_the_wait_holds_the_result_after_it():
    run(between="mov.b32 %t5, %d3;", after="mov.b32 %d3, 0; mov.b32 %d3, %t5;")


def test_pair_packed_before_the_wait_holds_the_results_after_it():
    run(between="mov.b64 %rd7, {%d0, %d1};", after="mov.b64 {%d0, %d1}, %rd7;")


def test_copy_read_before_the_wait_is_a_race():
    with pytest.raises(RaceError, match=r"no wgmma\.wait_group has waited for"):
        run(between="mov.b32 %t5, %d3; add.u32 %t5, %t5, 0;")


def test_stale_copies_of_a_chain_are_no_fault():
    run(times=2, commit=f"mov.b32 %t5, %d3; {AGAIN}")


def test_stale_copy_of_a_chain_that_is_read_is_a_race():
    with pytest.raises(RaceError, match=r"copied from an accumulator in flight"):
        run(times=2, commit=f"mov.b32 %t5, %d3; {AGAIN}", after="add.u32 %d3, %t5, 0;")


@pytest.mark.parametrize(
    ("write", "is_clean"), [("mov.b32 %d3, 0;", True), ("add.u32 %d3, %thread, 0;", False)]
)
def test_constant_behind_the_fence_is_left_to_ptxas_in_kernels_of_cute(write, is_clean):
    a, b, product, scale = setup(width=32)
    out = np.zeros((16, 128), np.float32)
    text = kernel(32, width=32, fence=f"wgmma.fence.sync.aligned; {write}")
    text = text.replace(".entry k(", ".entry kernel_cutlass_k(")
    args = [out, place(a, 32), place(b, 32), out, 64 * 32, 32 * 32]
    module = load_ptx(text)
    if is_clean:
        module.launch("kernel_cutlass_k", 1, 128, 1, args, BAR_AT + 64)
        check(out, product, scale)
        return
    with pytest.raises(RaceError, match=r"written after the last wgmma\.fence"):
        module.launch("kernel_cutlass_k", 1, 128, 1, args, BAR_AT + 64)


SPLIT = ".reg .b16 %lo, %hi; mov.b32 {%lo, %hi}, %d3;"


def test_halves_unpacked_before_the_wait_hold_the_result_after_it():
    run(between=SPLIT, after="mov.b32 %d3, 0; mov.b32 %d3, {%lo, %hi};")


def test_half_read_before_the_wait_is_a_race():
    with pytest.raises(RaceError, match=r"no wgmma\.wait_group has waited for"):
        run(between=f"{SPLIT} add.u16 %lo, %lo, 0;")


def test_stale_half_of_a_chain_that_is_read_is_a_race():
    with pytest.raises(RaceError, match=r"copied from an accumulator in flight"):
        run(times=2, commit=f"{SPLIT} {AGAIN}", after="add.u16 %lo, %lo, 0;")
