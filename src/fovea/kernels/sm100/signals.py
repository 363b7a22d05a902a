"""Device side of a plan's signals: one-way barriers between two roles.

Lives here: waiting for the n-th time and telling. Not here: rings with both directions
(`device/pipeline.py`), arrival counts (`plan/sm100.py`). Invariant: producer and consumer count the
same times, so a parity is all there is to know.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.sm100 import tmem

_ISSUING_RANK = 0  # in a pair


class Signals(NamedTuple):
    """The first barrier of each signal, in the order of `ForwardPlan.signals`."""

    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    o_empty: cute.Pointer
    statistics_full: cute.Pointer
    statistics_empty: cute.Pointer
    o_rests: cute.Pointer | None = None


@cute.jit
def init_signals(signals: Signals, plan: cutlass.Constexpr):
    """Initialise every barrier. Run by one thread, before the CTA's first barrier."""
    for index in cutlass.range_constexpr(len(plan.signals)):
        for stage in cutlass.range_constexpr(plan.signals[index].stages):
            cute.arch.mbarrier_init(signals[index] + stage, plan.signals[index].arrivals)


def wait(barrier: cute.Pointer, time: cutlass.Int32) -> None:
    """Wait until a barrier has been told for the time-th time, counted from 0."""
    cute.arch.mbarrier_wait(barrier, time & 1)


def wait_before(barrier: cute.Pointer, time: cutlass.Int32) -> None:
    """Wait until a barrier has been told for the time before; at time 0 nothing is waited for."""
    cute.arch.mbarrier_wait(barrier, (time & 1) ^ 1)


@cute.jit
def tell_products(barrier: cute.Pointer, plan: cutlass.Constexpr):
    """Arrive for a warp where products are issued: here, or in the first CTA of a pair."""
    if cutlass.const_expr(plan.cluster == 1):
        tell(barrier)
    else:
        tmem.before_arrival()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier, _ISSUING_RANK)


@cute.jit
def tell(barrier: cute.Pointer):
    """Arrive for a warp, after all that its lanes did in tensor and shared memory."""
    tmem.before_arrival()
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)
