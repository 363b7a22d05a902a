"""Named barriers that ask a whole warp: `bar` and `barrier.aligned`, against plain `barrier.sync`.

Rule (PTX ISA 9.7.13.1): all threads of a warp execute the same aligned barrier instruction.
"""

import pytest

from fovea.emulator import IllegalOperand, Options, load_ptx

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel()
{{
    .reg .pred %p;
    .reg .b32 %lane;
    mov.u32 %lane, %laneid;
    setp.eq.u32 %p, %lane, 0;
    {body}
    ret;
}}
"""
APART = "@%p bra A; {0}; bra S; A: {0}; S:"


def _launch(body, seed=0):
    module = load_ptx(KERNEL.format(body=body))
    return module.launch("kernel", 1, 64, options=Options(seed=seed))


@pytest.mark.parametrize("barrier", ["bar.sync 0", "barrier.sync.aligned 0", "bar.arrive 1, 64"])
@pytest.mark.parametrize("body", [APART, "@%p {0};"])
def test_aligned_barrier_that_lanes_reach_apart_is_reported(barrier, body):
    with pytest.raises(IllegalOperand, match=r"is aligned.*that have not exited.*barrier\.sync"):
        _launch(body.format(barrier))


@pytest.mark.parametrize(
    "body",
    [
        APART.format("barrier.sync 0"),
        "@%p bra S; S: bar.sync 0;",
        "@%p exit; bar.sync 0;",
    ],
    ids=["not aligned", "met again", "the others have exited"],
)
def test_barrier_that_its_warp_may_reach_so_is_silent(body):
    _launch(body)


PARTS = """setp.lt.u32 %p, %lane, 12; @%p exit; setp.lt.u32 %p, %lane, 22; @%p bra A;
    {0}; bra S; A: {0}; S: {0}; {0};"""


@pytest.mark.parametrize(
    "barrier",
    [
        "barrier.sync 0",
        "barrier.sync 0, 64",
        "barrier.cluster.arrive; barrier.cluster.wait",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned",
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_warp_count_its_exited_lanes_once(barrier, seed):
    body = PARTS.format(barrier)
    if "aligned" in barrier:
        with pytest.raises(IllegalOperand, match="is aligned"):
            _launch(body, seed)
    else:
        _launch(body, seed)


@pytest.mark.parametrize("seed", range(4))
def test_part_that_has_arrived_and_exited_is_counted_once(seed):
    _launch(
        "setp.lt.u32 %p, %lane, 12; @%p bra A; barrier.sync 1, 64; bra S;"
        "A: barrier.arrive 1, 64; exit; S: barrier.sync 1, 64;",
        seed,
    )


@pytest.mark.parametrize("seed", range(4))
def test_part_that_exits_after_the_other_has_arrived_is_counted(seed):
    # 64 threads of the cluster and of the CTA, 40 of which never arrive
    _launch(
        "setp.lt.u32 %p, %lane, 20; @%p bra A; barrier.cluster.arrive; barrier.cluster.wait;"
        "barrier.sync 0; barrier.sync 0; ret; A: exit;",
        seed,
    )


@pytest.mark.parametrize("barrier", ["bar.sync %n", "barrier.sync %n", "barrier.sync 0, %n"])
def test_barrier_operand_that_differs_between_lanes_is_reported(barrier):
    body = ".reg .b32 %n; shr.u32 %n, %lane, 4; {0} shl.b32 %n, %n, 5; add.u32 %n, %n, 64; {1};"
    with pytest.raises(IllegalOperand, match=r"operand [ab] is \d+ in the first .* in lane 16"):
        _launch(body.format("", barrier))
    _launch(body.format("mov.u32 %n, 0;", barrier.replace("sync %n", "sync 0")))
