"""Which KV tiles of a walk a stream takes: all of them, or every other one.

Lives here: the arithmetic that the softmax and the MMA role share. Not here: the walk itself
(`device/kv_walk.py`). Invariant: every visit of a walk belongs to one stream if the streams split
the keys, else to both.
"""

import cutlass

from fovea.plan.sm100 import STREAMS, ForwardPlan


def stream_visits(
    plan: ForwardPlan, visits: cutlass.Int32, stream: cutlass.Int32 | int
) -> cutlass.Int32:
    """Return how many visits of a walk are a stream's."""
    return (visits + (STREAMS - 1) - stream) // STREAMS if plan.splits_keys else visits


def stream_visit(
    plan: ForwardPlan, index: cutlass.Int32, stream: cutlass.Int32 | int
) -> cutlass.Int32:
    """Return which visit of a walk is a stream's index-th; it may lie past the end."""
    return STREAMS * index + stream if plan.splits_keys else index
