"""Guards of jumps: lanes whose guard is false go on after them, and meet the others."""

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import Options

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
LANE = np.arange(32, dtype=np.uint32)


def run(body: str, functions: str = "", seed: int = 0) -> list[int]:
    """Return the `%r` of each lane at the end, whose number is `%t`."""
    text = f"""{HEAD}{functions}.visible .entry k(.param .u64 out)
{{
    .reg .b64 %o, %i; .reg .b32 %t, %n, %r; .reg .pred %p;
    ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %i, %t, 4; add.u64 %o, %o, %i;
    {body}
    shfl.sync.idx.b32 %r, %r, %t, 31, -1;
    st.global.u32 [%o], %r;
    ret;
}}
"""
    out = np.zeros(32, np.uint32)
    emulator.load_ptx(text).launch("k", 1, 32, args=[out], options=Options(seed=seed))
    return out.tolist()


TARGETS = """TB: .branchtargets A, B, C;
    {guard} brx.idx %n, TB;
    bra E;
    A: mov.u32 %r, 1; bra E;
    B: mov.u32 %r, 2; bra E;
    C: mov.u32 %r, 3;
    E:"""


@pytest.mark.parametrize(("guard", "value"), [("@%p", 9), ("@!%p", 2)])
def test_brx_of_a_uniform_guard_jumps_if_it_is_true(guard, value):
    body = "mov.u32 %n, 1; mov.u32 %r, 9; setp.eq.u32 %p, %n, 2;" + TARGETS.format(guard=guard)
    assert run(body) == [value] * 32


def test_brx_of_a_divergent_guard_takes_the_lanes_of_it_and_no_index_of_others():
    body = "rem.u32 %n, %t, 5; mov.u32 %r, 9; setp.lt.u32 %p, %n, 3;"
    expected = np.array([1, 2, 3, 9, 9], np.uint32)[LANE % 5]
    for seed in range(4):
        assert run(body + TARGETS.format(guard="@%p"), seed=seed) == expected.tolist()


def test_brx_past_its_list_is_a_fault_where_its_guard_is_true():
    body = "rem.u32 %n, %t, 5; mov.u32 %r, 9; setp.lt.u32 %p, %n, 4;"
    with pytest.raises(emulator.IllegalOperand, match="index 3 of 3 targets") as caught:
        run(body + TARGETS.format(guard="@%p"))
    assert caught.value.where.line == 9


SMALL = """
.func (.param .b32 q) small(.param .b32 a)
{
    .reg .b32 %x; .reg .pred %p;
    ld.param.b32 %x, [a];
    setp.gt.u32 %p, %x, 20;
    @%p bra B;
    add.u32 %x, %x, 100;
    st.param.b32 [q], %x;
    ret;
    B: st.param.b32 [q], 7;
    ret;
}
.func (.param .b32 q) outer(.param .b32 a)
{
    .param .b32 r; .reg .b32 %x; .reg .pred %p;
    ld.param.b32 %x, [a]; st.param.b32 [r], %x;
    and.b32 %x, %x, 2; setp.ne.b32 %p, %x, 0;
    @%p call (r), small, (a);
    ld.param.b32 %x, [r];
    st.param.b32 [q], %x;
    ret;
}
"""
CALL = """.param .b32 p; .param .b32 q; st.param.b32 [p], %t; st.param.b32 [q], 1;
    {setp}
    {call}
    ld.param.b32 %r, [q];"""


@pytest.mark.parametrize("seed", range(3))
def test_guarded_call_runs_for_the_lanes_of_its_guard(seed):
    setp = "and.b32 %n, %t, 1; setp.eq.u32 %p, %n, 1;"
    small = np.where(LANE > 20, 7, LANE + 100)
    body = CALL.format(setp=setp, call="@%p call (q), small, (p);")
    assert run(body, SMALL, seed) == np.where(LANE & 1, small, 1).tolist()
    body = CALL.format(setp=setp, call="@!%p call (q), outer, (p);")
    outer = np.where(LANE & 2, small, LANE)
    assert run(body, SMALL, seed) == np.where(LANE & 1, 1, outer).tolist()


@pytest.mark.parametrize(("guard", "is_taken"), [("@%p", False), ("@!%p", True)])
def test_guarded_call_with_a_uniform_guard(guard, is_taken):
    body = CALL.format(setp="setp.gt.u32 %p, %t, 99;", call=f"{guard} call (q), small, (p);")
    small = np.where(LANE > 20, 7, LANE + 100) if is_taken else np.ones(32)
    assert run(body, SMALL) == small.tolist()
