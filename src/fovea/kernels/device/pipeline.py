"""Device side of a pipeline edge: waits and arrivals on its full and empty barriers.

Lives here: `Ring`, the pair of barrier arrays of one edge, and the counter arithmetic that turns
"the n-th use" into a stage and a phase. Not here: how many arrivals a barrier expects
(`plan/pipeline.py`). Invariant: producer and consumer count the same uses, so one Int32 per edge is
all the state there is.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.plan.pipeline import Edge


class Ring(NamedTuple):
    """The barriers of one edge in shared memory.

    `parities`, where a consumer has them, are a bit for every stage: what its full barrier shows
    once it has been filled again. A consumer without takes it from the number of the use.
    """

    full: cute.Pointer
    empty: cute.Pointer
    parities: cute.Tensor | None = None


def make_ring(barriers: cute.Pointer, offset: int, edge: Edge) -> Ring:
    """Return the ring whose barriers start at `offset` in the kernel's barrier array."""
    return Ring(full=barriers + offset, empty=barriers + offset + edge.stages)


@cute.jit
def init_ring(ring: Ring, edge: cutlass.Constexpr):
    """Initialise the barriers of an edge. Run by one thread, before the CTA's first barrier."""
    for stage in cutlass.range_constexpr(edge.stages):
        cute.arch.mbarrier_init(ring.full + stage, edge.full_arrivals)
        cute.arch.mbarrier_init(ring.empty + stage, edge.empty_arrivals)


def stage_of(use: cutlass.Int32, edge: Edge) -> cutlass.Int32:
    """Return the stage of the n-th use of an edge."""
    return use % edge.stages


def phase_of(use: cutlass.Int32, edge: Edge) -> cutlass.Int32:
    """Return the parity that the full barrier shows once the n-th use has been filled."""
    return (use // edge.stages) & 1


def wait_full(ring: Ring, use: cutlass.Int32, edge: Edge) -> None:
    """Wait until the n-th use has been filled. Run by every consumer thread, once a use."""
    stage = stage_of(use, edge)
    if ring.parities is None:
        cute.arch.mbarrier_wait(ring.full + stage, phase_of(use, edge))
    else:
        cute.arch.mbarrier_wait(ring.full + stage, (ring.parities[0] >> stage) & 1)
        ring.parities[0] = ring.parities[0] ^ (cutlass.Int32(1) << stage)


def count_own_fills(ring: Ring) -> Ring:
    """Return a ring for a consumer that passes over uses, whose full barriers do not turn.

    Run before the first use: every first fill completes phase 0.
    """
    parities = cute.make_rmem_tensor(1, cutlass.Int32)
    parities[0] = cutlass.Int32(0)
    return ring._replace(parities=parities)


def wait_empty(ring: Ring, use: cutlass.Int32, edge: Edge) -> None:
    """Wait until the stage of the n-th use is free. Run by the producer.

    The first pass over the ring waits for the parity of the phase before the first, which a fresh
    barrier reports as complete.
    """
    cute.arch.mbarrier_wait(ring.empty + stage_of(use, edge), phase_of(use, edge) ^ 1)


def expect_bytes(ring: Ring, use: cutlass.Int32, edge: Edge) -> None:
    """Arrive for the producer and announce the stage's bytes. Run by one thread."""
    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage_of(use, edge), edge.stage_bytes)


@cute.jit
def release(ring: Ring, use: cutlass.Int32, edge: cutlass.Constexpr):
    """Free the stage of the n-th use. Run by whole warps; one lane of each arrives, in each CTA."""
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(edge.ctas == 1):
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.empty + stage_of(use, edge))
    elif lane < edge.ctas:
        cute.arch.mbarrier_arrive(ring.empty + stage_of(use, edge), lane)
