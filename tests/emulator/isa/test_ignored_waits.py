"""Waits on an mbarrier whose result nothing looks at: they may come back with false at any time.

PTX ISA 9.7.13.16.16: test_wait does not block; try_wait gives up after some time.
"""

import numpy as np
import pytest

from fovea.emulator import Options, RaceError, UninitialisedRead, load_ptx
from fovea.emulator.planting import plant_faults

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 in, .param .u64 out)
{{
    .reg .b32 %t, %v, %r; .reg .pred %p, %q; .reg .b64 %a, %o;
    .shared .align 8 .b64 bar; .shared .align 128 .b8 data[128];
    ld.param.u64 %a, [in]; ld.param.u64 %o, [out]; mov.u32 %t, %tid.x;
    setp.eq.u32 %q, %t, 0;
    @%q mbarrier.init.shared.b64 [bar], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    @%q mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [data], [%a], 128, [bar];
    {delay}
    {wait}
    mov.u32 %v, data; mad.lo.u32 %v, %t, 4, %v; ld.shared.b32 %v, [%v];
    mul.wide.u32 %a, %t, 4; add.u64 %o, %o, %a; st.global.b32 [%o], %v;
    ret;
}}
"""
LOOP = "W: mbarrier.try_wait.parity.shared.b64 %p, [bar], 0; @!%p bra W;"
SELECTED = """W: mbarrier.try_wait.parity.shared.b64 %p, [bar], 0; selp.b32 %r, 1, 0, %p;
    setp.eq.b32 %p, %r, 0; @%p bra W;"""
INDEX = """TARGETS: .branchtargets W, DONE;
    W: mbarrier.try_wait.parity.shared.b64 %p, [bar], 0; selp.b32 %r, 1, 0, %p;
    brx.idx %r, TARGETS; DONE:"""
IGNORED = "mbarrier.{}_wait.parity.shared.b64 %p, [bar], 0;"
TWENTY_BARRIERS = "bar.sync 0; " * 20  # by when the copy is done in most schedules


def _launch(wait, seed, delay="", text=""):
    data, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    module = load_ptx(text or KERNEL.format(wait=wait, delay=delay))
    result = module.launch("kernel", 1, 32, args=[data, out], options=Options(seed=seed))
    assert (out == data).all()
    return result


@pytest.mark.parametrize("delay", ["", TWENTY_BARRIERS])
@pytest.mark.parametrize("which", ["try", "test"])
def test_wait_whose_result_is_ignored_is_reported_in_every_schedule(which, delay):
    for seed in range(20):
        with pytest.raises((RaceError, UninitialisedRead), match="the wait at PTX line 17 decides"):
            _launch(IGNORED.format(which), seed, delay)


@pytest.mark.parametrize("delay", ["", TWENTY_BARRIERS])
@pytest.mark.parametrize("wait", [LOOP, SELECTED, INDEX])
def test_wait_whose_result_is_looked_at_is_silent(wait, delay):
    for seed in range(20):
        assert not _launch(wait, seed, delay).warnings


def test_ignored_wait_before_one_that_is_not_is_a_warning_alone():
    for seed in range(20):
        warnings = _launch(f"{IGNORED.format('try')} {LOOP}", seed).warnings
        assert all("PTX line 17" in text and "decides nothing" in text for text in warnings)


def test_planted_fault_that_forgets_the_result_is_reported_in_every_schedule():
    text = KERNEL.format(wait=LOOP, delay=TWENTY_BARRIERS)
    (fault,) = [fault for fault in plant_faults(text) if fault.kind == "result"]
    assert fault.line == 17
    for seed in range(20):
        with pytest.raises((RaceError, UninitialisedRead)):
            _launch("", seed, text=fault.text)


def test_wait_that_goes_on_either_way_is_found_by_some_schedule_however_late_the_read_comes():
    both = "mbarrier.try_wait.parity.shared.b64 %p, [bar], 0; @!%p bra NEXT; NEXT:"
    found = 0
    for seed in range(20):
        try:
            _launch(both, seed, TWENTY_BARRIERS)
        except RaceError:
            found += 1
    assert 0 < found < 20  # a schedule in which it is complete knows nothing of the others


def test_completion_that_is_known_already_is_never_late():
    arrived = "bar.warp.sync -1; @%q mbarrier.init.shared.b64 [bar], 1; bar.sync 0;"
    own = (
        "@%q mbarrier.arrive.shared.b64 _, [bar]; mbarrier.try_wait.parity.shared.b64 %p, [bar], 0;"
    )
    text = KERNEL.format(wait="", delay="")
    start, end = text.index("@%q mbarrier.init"), text.index("mov.u32 %v, data;")
    body = f"{arrived} {own} selp.u32 %v, 1, 0, %p; "
    store = "mul.wide.u32 %a, %t, 4; add.u64 %o, %o, %a; st.global.b32 [%o], %v;"
    module = load_ptx(text[:start] + body + store + text[text.index("    ret;") :])
    assert end > start
    for seed in range(20):
        out = np.zeros(32, np.uint32)
        module.launch("kernel", 1, 32, args=[out, out], options=Options(seed=seed))
        assert out.all()
