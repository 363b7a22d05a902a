"""The turnstile: consumer warpgroups issue their products one after the other.

Lives here: waiting for a turn and passing it on, on named barriers; nothing where the plan has no
turns. Not here: what is done in a turn (`steps.py`). Invariant: all consumers take the same number
of turns.
"""

import cutlass
import cutlass.cute as cute

from fovea.plan.roles import WARPGROUP_THREADS

_TURNSTILE_BARRIER = 1  # named barriers 1..num_consumers; 0 is the CTA's own


def wait_turn(plan, consumer: cutlass.Int32) -> None:
    """Wait until the warpgroup before this one has issued its products."""
    if plan.is_pingpong:
        cute.arch.barrier(
            barrier_id=_TURNSTILE_BARRIER + consumer, number_of_threads=2 * WARPGROUP_THREADS
        )


def pass_turn(plan, consumer: cutlass.Int32) -> None:
    """Let the next warpgroup issue its products."""
    if plan.is_pingpong:
        cute.arch.barrier_arrive(
            barrier_id=_TURNSTILE_BARRIER + (consumer + 1) % plan.num_consumers,
            number_of_threads=2 * WARPGROUP_THREADS,
        )
