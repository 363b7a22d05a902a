"""Two CTAs of a cluster that walk one range of KV tiles, each K and V read from L2 once for both.

Lives here: what one CTA says to the other: which work comes next, and that a use of a ring is not
for it. Not here: the loads (`sm90/forward/tile_loads.py`), which tiles are shared
(`shared_walk.py`). Invariant: both CTAs count the same uses of the shared rings, so a stage and its
phase mean the same on both sides; a use that one of them has no need of is passed over there.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.pipeline import Ring, stage_of

_MESSAGE_WORDS = 2
_MESSAGE_BYTES = 4 * _MESSAGE_WORDS


class Mailbox(NamedTuple):
    """A CTA's letter box: two words and the barrier that says they came.

    One is enough for each side: nobody writes again before the answer to the letter before.
    """

    words: cute.Tensor
    barrier: cute.Pointer


class Rank(NamedTuple):
    """A CTA's place in its cluster of two; `is_first` decides what both work on."""

    own: cutlass.Int32
    other: cutlass.Int32
    is_first: cutlass.Boolean


def cluster_rank() -> Rank:
    """Return this CTA's place in its cluster."""
    own = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return Rank(own, own ^ 1, own == 0)


def init_mailbox(mailbox: Mailbox) -> None:
    """Initialise the barrier. Run by one thread."""
    cute.arch.mbarrier_init(mailbox.barrier, 1)


@cute.jit
def send(mailbox: Mailbox, rank: Rank, first: cutlass.Int32, second: cutlass.Int32):
    """Write two words into the other CTA's mailbox. Run by one warp."""
    with cute.arch.elect_one():
        cute.arch.store_async_dsmem(
            mailbox.words.iterator, (first, second), mailbox.barrier, rank.other
        )


@cute.jit
def receive(mailbox: Mailbox, use: cutlass.Int32) -> Any:
    """Return the two words of the use-th letter. Run by one warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(mailbox.barrier, _MESSAGE_BYTES)
    cute.arch.mbarrier_wait(mailbox.barrier, use & 1)
    return mailbox.words[0], mailbox.words[1]


@cute.jit
def pass_over(ring: Ring, use: cutlass.Int32, edge: cutlass.Constexpr):
    """Let a use of a shared ring go by that the other CTA alone fills and reads.

    Run by the producer warp once the stage is free. It stands in for its consumers, whose arrivals
    are due in both CTAs. The full barrier stays as it is: nobody here waits for this use.
    """
    stage = stage_of(use, edge)
    lane = cute.arch.lane_idx()
    if lane < edge.ctas:
        cute.arch.mbarrier_arrive(ring.empty + stage, lane, edge.consumer_warps)


def sync_cluster() -> None:
    """Wait for every thread of the cluster; what it wrote before is visible after."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
