"""What a tcgen05 operation may rely on where a kernel fences: tcgen05.fence on both sides.

Synchronisation of threads alone does not order the asynchronous tcgen05 operations of one thread
before those of another: before it stands `tcgen05.fence::before_thread_sync` (a commit implies it),
behind it `tcgen05.fence::after_thread_sync`. CuTe-DSL and Triton emit neither and rely on the
synchronisation; so the rule holds for kernels that contain such a fence at all.

Lives here: what fences of a warp make of what it has seen. Not here: the judgement, by
`Access.tensor` (`machine/grid.py`). Invariant: without a fence in the kernel nothing is kept.

Source: PTX ISA 9.7.16.6.3-4 (tcgen05.fence, canonical patterns). What a warp issued itself it may
rely on as soon as it has seen it complete: more than the manual asks of one thread (inferred).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.emulator.async_engine import Operation
from fovea.emulator.clocks import Clock
from fovea.emulator.isa.instruction import Array

_NEVER_NEEDED = np.iinfo(np.int32).max


def relied_on(warp: Any, after: Sequence[Operation] = ()) -> Clock | None:
    """Return what an operation issued now may rely on in tensor memory (None: all it has seen).

    Args:
        warp: issues it.
        after: operations it comes after in the tensor core's own order.
    """
    cluster = warp.cta.cluster
    if not warp.machine.program.fences_tensor or cluster.engine.shares_agents:
        return None
    fenced: Clock | None = warp.state.get("tcgen05.fenced")
    clock = Clock(cluster.agents) if fenced is None else fenced.copy()
    for agent in warp.state.get("tcgen05.agents", ()):
        clock.seen[agent] = warp.access.clock.seen[agent]
    for operation in after:
        access = operation.access
        if access.tensor is not None:
            clock.join(access.tensor)
        clock.seen[access.agent] = max(int(clock.seen[access.agent]), access.time)
    return clock


def note_issue(warp: Any, operation: Operation, *, needs_fence: bool) -> None:
    """Note an operation as the warp's own.

    Args:
        warp: has issued it.
        operation: that was issued.
        needs_fence: whether its completion is told without a commit, which would be a fence.
    """
    agent = operation.access.agent
    warp.state.setdefault("tcgen05.agents", set()).add(agent)
    if needs_fence:
        released = _released(warp)
        if released[agent] == _NEVER_NEEDED:
            released[agent] = 0


def fence_before(warp: Any) -> None:
    """Let later synchronisation tell of the loads and stores that the warp has waited for."""
    released = _released(warp)
    for agent in warp.state.get("tcgen05.agents", ()):
        if released[agent] != _NEVER_NEEDED:
            released[agent] = warp.access.clock.seen[agent]


def fence_after(warp: Any) -> None:
    """Let later operations of the warp rely on what it has seen now."""
    fenced = warp.state.get("tcgen05.fenced")
    if fenced is None:
        fenced = warp.state["tcgen05.fenced"] = Clock(warp.cta.cluster.agents)
    told = np.minimum(warp.access.clock.seen, _released(warp))
    np.maximum(fenced.seen, told, out=fenced.seen)


def _released(warp: Any) -> Array:
    """Return, for each agent of the cluster, up to which time fences have covered its work."""
    cluster = warp.cta.cluster
    state = cluster.ctas[0].state
    released = state.get("tcgen05.released")
    if released is None:
        released = state["tcgen05.released"] = np.full(cluster.agents, _NEVER_NEEDED, np.int32)
    return released
