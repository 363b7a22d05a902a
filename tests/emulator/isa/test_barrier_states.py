"""Threads that wait with the states of their own arrivals, as cuda::barrier does."""

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import Options

TEXT = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
    .shared .align 8 .b8 bar[8]; .shared .b32 data[64];
    .reg .b32 %t, %m, %a, %v; .reg .b64 %out, %o, %state; .reg .pred %p, %q;
    ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mov.u32 %m, bar;
    setp.eq.u32 %q, %t, 0;
    @%q mbarrier.init.shared.b64 [%m], 64;
    bar.sync 0;
    shl.b32 %a, %t, 2; mov.u32 %v, data; add.u32 %a, %a, %v; st.shared.b32 [%a], %t;
    ARRIVE
    W: mbarrier.WAIT.shared.b64 %p, [%m], %state; @!%p bra W;
    mov.u32 %v, data; sub.u32 %a, 63, %t; shl.b32 %a, %a, 2; add.u32 %a, %a, %v;
    ld.shared.b32 %v, [%a];
    mul.wide.u32 %o, %t, 4; add.u64 %o, %out, %o; st.global.b32 [%o], %v;
    ret;
}
"""


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
def test_each_thread_waits_with_its_own_state(wait: str) -> None:
    arrive = "mbarrier.arrive.shared.b64 %state, [%m];"
    module = emulator.load_ptx(TEXT.replace("ARRIVE", arrive).replace("WAIT", wait))
    for seed in range(20):
        out = np.zeros(64, np.uint32)
        module.launch("k", 1, 64, args=[out], options=Options(seed=seed))
        assert out.tolist() == list(range(63, -1, -1))


def test_data_read_without_the_wait_is_reported() -> None:
    arrive = "mbarrier.arrive.shared.b64 %state, [%m];"
    text = TEXT.replace("ARRIVE", arrive)
    text = text.replace("W: mbarrier.WAIT.shared.b64 %p, [%m], %state; @!%p bra W;", "")
    module = emulator.load_ptx(text)
    for seed in range(20):
        with pytest.raises((emulator.RaceError, emulator.UninitialisedRead)):
            module.launch("k", 1, 64, args=[np.zeros(64, np.uint32)], options=Options(seed=seed))
