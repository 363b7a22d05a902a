"""Cluster launch control: a running cluster takes over the work of one that has not started.

Lives here: asking for such a cluster, and reading the answer. Not here: what is done with it
(`forward/load.py`). Invariant: one request is on its way at a time, and none is made once one has
been declined, which the manual leaves undefined.

A launch then has a cluster for every tile, in the order of their numbers. What a running one does
not take over, the hardware starts, as it does where a request is declined for a kernel of higher
priority.

Source: PTX ISA, "clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.plan.sm100 import LAUNCH_RESPONSE_BYTES

DECLINED = 2**31 - 1  # in place of a tile number: behind every tile


class Launches(NamedTuple):
    """Where the answer comes to in shared memory, and the barrier that says so.

    In a cluster only the first CTA asks; it tells the other one what comes next.
    """

    response: cute.Tensor
    barrier: cute.Pointer


def init_launches(launches: Launches) -> None:
    """Initialise the barrier. Run by one thread."""
    cute.arch.mbarrier_init(launches.barrier, 1)


@cute.jit
def request_cluster(launches: Launches):
    """Ask for a cluster that has not started. Run by one warp, which has read the answer before.

    Signals: the barrier, once the answer is there.
    """
    # Reads of the last answer come before the hardware writes the next one.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(launches.barrier, LAUNCH_RESPONSE_BYTES)
        cute.arch.issue_clc_query(launches.barrier, launches.response.iterator, multicast=False)


@cute.jit
def await_cluster(
    launches: Launches, request: cutlass.Int32, ctas: cutlass.Constexpr
) -> cutlass.Int32:
    """Return the number of the cluster that the request-th request has taken over, or DECLINED.

    Run by one warp, all lanes alike. `ctas` are those of a cluster; the grid has one axis.
    """
    cute.arch.mbarrier_wait(launches.barrier, request & 1)
    first_cta, _, _, is_taken = cute.arch.clc_response(launches.response.iterator)
    number = cutlass.Int32(DECLINED)
    if is_taken != 0:
        number = first_cta // ctas
    return number
