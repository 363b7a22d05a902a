"""Every synchronisation of an sm_100a kernel left out or made wrong is found."""

import numpy as np
import pytest
import tcgen05_pipeline

from fovea.emulator import EmulatorError, load_ptx
from fovea.emulator.planting import plant_faults

# What may be left out of this kernel, and why that is no fault. Everything else is found at once.
HARMLESS = {
    "fence.mbarrier_init": "only other CTAs of a cluster need it",
    "bar.sync 2, 128": "P of the next tile is ready only after thread 0 has waited for its store",
    "[%bar+40], %tq": "the product warp has waited for P, which was made from S",
    "[%bar+64], %tq": "the product warp has waited for P, made after O of the tile before was read",
    "bar.sync 0": "the last one: the barriers of the epilogue cover every access to tensor memory",
}
# Fences by the line that follows them.
HARMLESS_FENCES = {
    "mbarrier.arrive.shared::cta.b64 _, [%bar+40];":
        "the fence before P is announced, in the same warp, covers the load of S too, and the "
        "product warp waits for P before it overwrites S",
    "mbarrier.arrive.shared::cta.b64 _, [%bar+64];":
        "the fence before P of the next tile covers the load of O, and no earlier product writes O",
    "mov.u32 %k, 0;": "the fence behind the wait for P of the tile before covers the loads of S",
}  # fmt: skip
FAULTS = plant_faults(tcgen05_pipeline.TEXT)


@pytest.fixture(scope="module")
def problem():
    return tcgen05_pipeline.Problem()


@pytest.fixture(scope="module")
def expected(problem):
    out = problem.run(tcgen05_pipeline.loaded(), 0)
    problem.check(out)
    return out


def why_harmless(fault):
    if fault.kind in ("phase", "count"):
        return None
    if "tcgen05.fence" in fault.statement:
        following = tcgen05_pipeline.TEXT.split("\n")[fault.line].strip()
        return HARMLESS_FENCES.get(following)
    last_barrier = max(other.line for other in FAULTS if other.statement == "bar.sync 0;")
    for words, reason in HARMLESS.items():
        if words in fault.statement and (words != "bar.sync 0" or fault.line == last_barrier):
            return reason
    return None


def named(faults):
    return [pytest.param(fault, id=f"{fault.kind}-{fault.line}") for fault in faults]


@pytest.mark.parametrize("delay", ["random", "eager", "late"])
def test_correct_kernel_is_silent_and_gives_the_same_bits_under_20_seeds(problem, expected, delay):
    module = tcgen05_pipeline.loaded()
    for seed in range(20):
        assert np.array_equal(problem.run(module, seed, async_delay=delay), expected)


@pytest.mark.parametrize("fault", named(f for f in FAULTS if why_harmless(f) is None))
def test_planted_fault_is_reported_by_the_first_seed(problem, fault):
    with pytest.raises(EmulatorError) as caught:
        problem.run(load_ptx(fault.text), 0)
    assert type(caught.value) is not EmulatorError  # the bare class stands for an internal error


@pytest.mark.parametrize("fault", named(f for f in FAULTS if why_harmless(f) is not None))
def test_what_may_be_left_out_changes_no_bit(problem, expected, fault):
    module = load_ptx(fault.text)
    for seed in range(3):
        assert np.array_equal(problem.run(module, seed), expected)


def test_every_kind_of_fault_is_planted():
    kinds = {fault.kind for fault in FAULTS if why_harmless(fault) is None}
    assert kinds == {
        "arrive", "barrier", "commit", "count", "expect_tx", "fence", "phase", "result", "wait",
    }  # fmt: skip
