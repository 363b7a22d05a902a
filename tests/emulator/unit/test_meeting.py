"""Lanes of a warp that meet at `.sync` instructions: by member mask, and after they have parted.

Rules: PTX ISA 9.7.9.6 (shfl.sync), 9.7.13.2 (bar.warp.sync), 9.7.13.10-15 (vote, match, redux,
elect): the lanes of a member mask wait for each other, those that have exited apart.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea import emulator
from fovea.emulator import IllegalOperand, Options

SEEDS = range(6)


def run(body: str, *, values=None, block: int = 32, seed: int = 0) -> np.ndarray:
    """Return `%r` of each thread; `%t` is its number, `%l` its lane, `%v` its value."""
    text = f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 values)
{{
    .reg .b64 %o, %i, %a; .reg .b32 %t, %l, %v, %r, %m, %n, %x; .reg .pred %p, %q;
    .shared .b32 lock; .shared .b32 sum;
    ld.param.u64 %o, [out]; ld.param.u64 %a, [values];
    mov.u32 %t, %tid.x; mov.u32 %l, %laneid; mov.u32 %r, 0;
    mul.wide.u32 %i, %t, 4; add.u64 %o, %o, %i; add.u64 %a, %a, %i;
    ld.global.u32 %v, [%a];
    {body}
    st.global.u32 [%o], %r;
    ret;
}}
"""
    out = np.zeros(block, np.uint32)
    values = np.arange(block, dtype=np.uint32) if values is None else values
    options = Options(seed=seed, max_steps=100_000)
    emulator.load_ptx(text).launch("k", 1, block, args=[out, values], options=options)
    return out


# --- several groups in one instruction ------------------------------------------------------------

GROUPS = st.lists(st.integers(0, 3), min_size=32, max_size=32).map(
    lambda labels: np.array(labels, np.uint32)
)
# the body of each exchange, and what the lanes of one group get: of their numbers and all masks
EXCHANGES = {
    "bar.warp.sync": ("bar.warp.sync %m; mov.u32 %r, %m;", lambda lanes: sum(1 << lanes)),
    "vote.ballot": (
        "and.b32 %n, %l, 1; setp.ne.u32 %p, %n, 0; vote.sync.ballot.b32 %r, %p, %m;",
        lambda lanes: sum(1 << lanes[lanes % 2 == 1]),
    ),
    "vote.all": (
        "setp.lt.u32 %p, %l, 20; vote.sync.all.pred %q, %p, %m; selp.u32 %r, 1, 0, %q;",
        lambda lanes: (lanes < 20).all(),
    ),
    "redux": ("redux.sync.add.u32 %r, %l, %m;", sum),
    "match.any": (
        "and.b32 %n, %l, 1; match.any.sync.b32 %r, %n, %m;",
        lambda lanes: [sum(1 << lanes[lanes % 2 == lane % 2]) for lane in lanes],
    ),
    "match.all": (
        "setp.gt.u32 %p, %l, 7; selp.u32 %n, 1, 0, %p; match.all.sync.b32 %r, %n, %m;",
        lambda lanes: sum(1 << lanes) * bool((lanes > 7).all() or (lanes <= 7).all()),
    ),
    "elect": ("elect.sync %r|%p, %m;", lambda lanes: lanes[0]),
    "shfl": (
        "bfind.u32 %n, %m; shfl.sync.idx.b32 %r, %l, %n, 31, %m;",
        lambda lanes: lanes[-1],
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
@settings(max_examples=15, deadline=None)
@given(labels=GROUPS)
def test_lanes_of_one_instruction_form_a_group_for_each_member_mask(name, labels):
    body, value = EXCHANGES[name]
    expected = np.zeros(32, np.uint32)
    for label in set(labels.tolist()):
        lanes = np.flatnonzero(labels == label)
        expected[lanes] = value(lanes)
    got = run(f"match.any.sync.b32 %m, %v, -1; {body}", values=labels)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("first", ["-1", "0x3", "1"])
@pytest.mark.parametrize("others", ["-1", "0xfffffffe", "0xfffffffc"])
def test_masks_of_one_instruction_must_agree(first, others):
    # lane 0 has one mask, the others have another
    body = f"setp.eq.u32 %p, %l, 0; selp.b32 %m, {first}, {others}, %p; bar.warp.sync %m;"
    if (first, others) in [("-1", "-1"), ("1", "0xfffffffe")]:
        run(body)
        return
    with pytest.raises(IllegalOperand, match=r"execute it with that mask|leaves out"):
        run(body)


def test_mask_that_only_the_first_lane_has_right_is_reported():
    body = "setp.eq.u32 %p, %l, 0; selp.b32 %m, -1, 1, %p; vote.sync.ballot.b32 %r, %p, %m;"
    with pytest.raises(IllegalOperand, match="lane 31, which member mask 0x00000001 leaves out"):
        run(body)


# --- lanes that have parted -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_branches_meet_at_two_instructions(seed):
    body = """setp.lt.u32 %p, %l, 12; mov.u32 %x, 31; sub.u32 %x, %x, %l;
        @%p bra LESS;
        bar.warp.sync -1; mul.lo.u32 %n, %l, 3; shfl.sync.idx.b32 %r, %n, %x, 31, -1; bra END;
        LESS: mul.lo.u32 %m, %l, 5; bar.warp.sync -1; shfl.sync.idx.b32 %r, %m, %x, 31, -1;
        END: redux.sync.add.u32 %n, %l, -1; add.u32 %r, %r, %n;"""
    lane = np.arange(32)
    gave = np.where(lane < 12, lane * 5, lane * 3)
    assert run(body, seed=seed).tolist() == (gave[::-1] + 496).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_halves_of_a_group_meet_while_another_goes_on(seed):
    # lanes 8-15 come by one branch; the others in two groups by the other, of which one is whole
    body = """shr.u32 %n, %l, 3; setp.eq.u32 %p, %n, 1;
        setp.lt.u32 %q, %l, 16; selp.b32 %m, 0xffff, 0xffff0000, %q;
        @%p bra SOME;
        redux.sync.add.u32 %r, %l, %m; bra END;
        SOME: redux.sync.add.u32 %r, %l, 0xffff;
        END: redux.sync.max.u32 %n, %r, -1; add.u32 %r, %r, %n; bar.sync 0;"""
    assert run(body, seed=seed).tolist() == [120 + 376] * 16 + [376 + 376] * 16


LOCK = """setp.eq.u32 %p, %t, 0; @%p st.shared.b32 [lock], 0; @%p st.shared.b32 [sum], 0;
    bar.sync 0;
    TRY: atom.shared.acquire.cta.cas.b32 %x, [lock], 0, 1;
    setp.ne.u32 %p, %x, 0; @%p bra TRY;
    ld.shared.b32 %n, [sum]; add.u32 %n, %n, 1; st.shared.b32 [sum], %n;
    atom.shared.release.cta.exch.b32 %x, [lock], 0;
    {0};
    redux.sync.add.u32 %m, %l, -1;
    bar.sync 0;
    ld.shared.b32 %r, [sum]; add.u32 %r, %r, %m;"""


MEETINGS = (
    "bar.warp.sync -1",
    "bar.sync 0",
    "vote.sync.all.pred %q, %p, -1",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%x}, [tile]",
)


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("seed", range(2))
def test_lanes_meet_again_after_a_lock_that_each_has_taken(meeting, seed):
    body = LOCK.format(meeting)
    if "tile" in meeting:
        fill = "mad.lo.u32 %x, %t, 8, %x; st.shared.v2.b32 [%x], {%t, %t};"
        body = f".shared .align 16 .b8 tile[512]; mov.u32 %x, tile; {fill} {body}"
    assert run(body, block=64, seed=seed).tolist() == [64 + 496] * 64


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_a_guard_meet_those_of_its_opposite(seed):
    body = """setp.lt.u32 %p, %l, 5; @%p bar.warp.sync -1; @!%p bar.warp.sync -1;
        redux.sync.add.u32 %r, %l, -1;"""
    assert run(body, seed=seed).tolist() == [496] * 32


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_skip_one_barrier_of_a_warp_may_come_to_the_next(seed):
    # the manual counts executions with one mask, wherever they are
    body = """setp.lt.u32 %p, %l, 5; @!%p bra SKIP; bar.warp.sync -1; bra END;
        SKIP: add.u32 %r, %r, 1; bar.warp.sync -1;
        END: add.u32 %r, %r, 1;"""
    assert run(body, seed=seed).tolist() == [1] * 5 + [2] * 27
    body = """setp.lt.u32 %p, %l, 5; @!%p bra SKIP; bar.warp.sync -1; mov.u32 %r, 7;
        SKIP: setp.ge.u32 %q, %l, 5; @!%q bra END; bar.warp.sync -1;
        END: add.u32 %r, %r, 1;"""
    assert run(body, seed=seed).tolist() == [8] * 5 + [1] * 27


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_exit_are_not_waited_for(seed):
    body = """setp.lt.u32 %p, %l, 5; @%p bra LEAVE; redux.sync.add.u32 %r, %l, -1; bra END;
        LEAVE: mov.u32 %r, 3; st.global.u32 [%o], %r; ret;
        END: bar.sync 0;"""
    assert run(body, seed=seed).tolist() == [3] * 5 + [486] * 27


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "body",
    [
        "setp.gt.u32 %p, %l, 4; @%p bra END; redux.sync.add.u32 %r, %l, -1; END:",
        "setp.lt.u32 %p, %l, 5; @%p redux.sync.add.u32 %r, %l, -1;",
        "setp.gt.u32 %p, %l, 4; @%p bra END; redux.sync.add.u32 %r, %l, -1; END: bar.sync 0;",
    ],
    ids=["branch", "guard", "barrier"],
)
def test_lanes_that_skip_an_exchange_for_good_are_reported(seed, body):
    message = (
        r"redux\.sync\.add\.u32 has member mask 0xffffffff but only lanes 0x0000001f|is aligned"
    )
    with pytest.raises(IllegalOperand, match=message):
        run(body, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_wait_for_each_other_at_two_exchanges_are_reported(seed):
    body = """setp.lt.u32 %p, %l, 5; @%p bra A; vote.sync.any.pred %q, %p, -1; bra END;
        A: redux.sync.add.u32 %r, %l, -1; END:"""
    with pytest.raises(IllegalOperand, match=r"lanes 0x\w+ wait for 0x\w+ at PTX line"):
        run(body, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_come_to_a_block_from_two_places_meet_at_its_barrier(seed):
    # BLOCK is where lanes 0-7 and 16-23 come together; where all meet is END
    body = """setp.lt.u32 %p, %l, 8; @%p bra BLOCK;
        setp.ge.u32 %p, %l, 16; setp.lt.and.u32 %p, %l, 24, %p; @%p bra BLOCK;
        mov.u32 %r, 1; bra END;
        BLOCK: redux.sync.add.u32 %r, %l, 0x00ff00ff;
        END: bar.sync 0;"""
    got = run(body, seed=seed)
    assert got.tolist() == ([28 + 156] * 8 + [1] * 8) * 2
