"""clusterlaunchcontrol: every CTA's work is done once, by whoever runs or takes it over."""

import numpy as np
import pytest

from fovea.emulator import Fault, Options, RaceError, load_ptx

FIRST = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %x, %handle;"
FENCE = "fence.proxy.async.shared::cta;"
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, _, _}, %handle;"


def kernel(
    *,
    cluster=1,
    first=FIRST,
    wait="@!%p bra wait;",
    stop="@!%p bra end;",
    before="",
    after=FENCE,
    ask="",
):
    """Each CTA adds 1 at its index, then asks for the index of a cluster that has not started.

    `before` and `after` stand around the reading of the response, `ask` before a request.
    """
    multicast = ".multicast::cluster::all" if cluster > 1 else ""
    return f"""
.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .shared .align 16 .b8 response[16]; .shared .align 8 .b8 mbar[8];
    .reg .b64 %out, %at, %h<2>; .reg .b128 %handle; .reg .pred %p, %one, %lead;
    .reg .b32 %x, %y, %t, %rank, %m, %r, %phase, %v;
    ld.param.u64 %out, [out];
    mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %x, %clusterid.x;
    mul.lo.u32 %x, %x, {cluster};
    mov.u32 %m, mbar; mov.u32 %r, response; mov.u32 %phase, 0;
    setp.eq.u32 %one, %t, 0; setp.eq.and.u32 %lead, %rank, 0, %one;
    @%one mbarrier.init.shared.b64 [%m], 1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
next:
    @%one mbarrier.arrive.expect_tx.shared.b64 _, [%m], 16;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    {ask}
    @%{"lead" if cluster > 1 else "one"} clusterlaunchcontrol.try_cancel.async.shared::cta\
.mbarrier::complete_tx::bytes{multicast}.b128 [%r], [%m];
    add.u32 %v, %x, %rank; mul.wide.u32 %at, %v, 4; add.u64 %at, %out, %at;
    @%one red.global.add.u32 [%at], 1;
wait:
    mbarrier.try_wait.parity.shared.b64 %p, [%m], %phase;
    {wait}
    {before}
    ld.shared.v2.b64 {{%h0, %h1}}, [%r]; mov.b128 %handle, {{%h0, %h1}};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %handle;
    {after}
    xor.b32 %phase, %phase, 1;
    {stop}
    {first}
    bra next;
end:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ret;
}}
"""


@pytest.mark.parametrize("first", [FIRST, VECTOR])
@pytest.mark.parametrize(("cluster", "num_sms"), [(1, 1), (1, 3), (2, 2), (2, 6)])
def test_every_cta_is_worked_on_once(cluster, num_sms, first):
    module = load_ptx(kernel(cluster=cluster, first=first))
    for seed in range(5):
        out = np.zeros(12, np.uint32)
        options = Options(seed=seed, num_sms=num_sms)
        module.launch("k", 12, 32, cluster, args=[out], options=options)
        assert out.tolist() == [1] * 12


def test_response_read_before_its_wait_is_reported():
    module = load_ptx(kernel(wait=""))
    for seed in range(10):
        with pytest.raises(Fault):
            module.launch("k", 12, 32, args=[np.zeros(12, np.uint32)], options=Options(seed=seed))


ONE_WAY = "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;"


@pytest.mark.parametrize(
    ("places", "is_clean"),
    [
        ({"after": FENCE}, True),
        ({"after": ONE_WAY}, True),
        ({"after": "", "ask": FENCE}, True),  # the one who asks knows of all reads
        ({"after": ""}, False),
        ({"after": "", "before": FENCE}, False),  # covers the reads before, not this one
    ],
)
@pytest.mark.parametrize(("cluster", "threads"), [(1, 32), (1, 64), (2, 32)])
def test_response_read_before_the_next_request_needs_a_proxy_fence(
    cluster, threads, places, is_clean
):
    module = load_ptx(kernel(cluster=cluster, **places))
    for seed in range(3):
        out = np.zeros(12, np.uint32)
        options = Options(seed=seed, async_delay="eager")
        if is_clean:
            module.launch("k", 12, threads, cluster, args=[out], options=options)
            assert out.tolist() == [1] * 12
            continue
        with pytest.raises(RaceError, match=r"read needs fence\.proxy\.async") as found:
            module.launch("k", 12, threads, cluster, args=[out], options=options)
        assert "ld.shared.v2.b64" in found.value.other
        assert "try_cancel" in str(found.value)


def test_requests_are_declined_and_taken_out_of_order_by_some_seeds():
    source = kernel(first="mov.u32 %x, %clusterid.x;")  # counts its own requests that succeeded
    module = load_ptx(source)
    outcomes = set()
    for seed in range(8):
        out = np.zeros(12, np.uint32)
        module.launch("k", 12, 32, args=[out], options=Options(seed=seed))
        assert out.sum() == 12
        outcomes.add(tuple(out.tolist()))
    assert len(outcomes) > 4
    assert any(np.count_nonzero(outcome) > 1 for outcome in outcomes)  # another one had to start


def test_eager_requests_take_every_cluster_there_is():
    module = load_ptx(kernel(first="mov.u32 %x, %clusterid.x;"))
    for seed in range(3):
        out = np.zeros(12, np.uint32)
        options = Options(seed=seed, async_delay="eager")
        module.launch("k", 12, 32, args=[out], options=options)
        assert out.tolist() == [12] + [0] * 11


def test_request_after_one_seen_to_fail_is_reported():
    module = load_ptx(kernel(stop="@!%p bra next;"))
    with pytest.raises(Fault, match="stop asking once is_canceled is false"):
        module.launch("k", 3, 32, args=[np.zeros(3, np.uint32)])
