"""Asynchronous work: operations whose effects happen at a seeded random legal moment.

An `Operation` is what one `cp.async.bulk`, `wgmma.mma_async`, `tcgen05.mma` ... sets going: a list
of effects (functions), the operations it must come after, and what to do when all effects are
done. `GroupQueue` holds commit groups.
Lives here: order and moment of effects, the clocks of asynchronous agents. Not here: what an
effect does (`isa/`). Invariant: effects of one operation run in order; an operation starts only
when every operation in `after` is complete.

The agent of an operation is its channel: the one thing whose completion tells of it (an mbarrier,
the bulk groups of a thread, the products of a warpgroup, ...). Operations of a channel complete
in issue order as far as anybody can observe, so one time per channel says exactly which of them
an observer knows to be complete.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from fovea.emulator.clocks import Clock
from fovea.emulator.options import Options
from fovea.emulator.races import Access

Effect = Callable[["Operation"], None]


class Operation:
    """Asynchronous work under way.

    Attributes:
        kind: for reports and traces, e.g. "tma load".
        access: identity for memory calls made by the effects (its clock is the issue's clock).
        written: identity of the last effect of a bulk store: a `.read` wait tells nothing of it.
        read_effects: number of leading effects after which all sources have been read; 0 (all)
            unless the issuing instruction sets it.
        is_complete: whether every effect has happened.
        is_observed: whether a wait of the issuing warp has covered it.
        is_passed: whether its thread has waited for groups while it was in none.
        results: scratch for the instruction (e.g. values for in-flight registers).
    """

    __slots__ = ("_done", "_effects", "access", "after", "is_complete", "is_observed",
                 "is_passed", "kind", "read_effects", "results", "written")  # fmt: skip

    def __init__(
        self, kind: str, access: Access, effects: Sequence[Effect], after: Sequence["Operation"]
    ):
        self.kind = kind
        self.access = access
        self.written: Access | None = None
        self.after = [operation for operation in after if not operation.is_complete]
        self.read_effects = 0
        self.results: dict[Any, Any] = {}
        self.is_complete = False
        self.is_observed = False
        self.is_passed = False
        self._effects = list(effects)
        self._done = 0

    @property
    def is_read(self) -> bool:
        """Whether all sources have been read."""
        return self._done >= self.read_effects if self.read_effects else self.is_complete

    @property
    def is_ready(self) -> bool:
        """Whether the next effect may happen now."""
        if self.after:
            self.after = [operation for operation in self.after if not operation.is_complete]
        return not self.after

    def advance(self) -> None:
        """Let the next effect happen; after the last one, complete."""
        if self._done < len(self._effects):
            self._effects[self._done](self)
            self._done += 1
        if self._done == len(self._effects):
            self.is_complete = True

    def describe(self) -> str:
        """Return kind and place of issue."""
        return f"{self.kind} issued at {self.access.describe()}"


class GroupQueue:
    """Commit groups of threads (copies) or of a warpgroup member (wgmma)."""

    __slots__ = ("committed", "open")

    def __init__(self) -> None:
        self.open: list[Operation] = []
        self.committed: list[list[Operation]] = []

    def add(self, operation: Operation) -> None:
        """Put an operation in the group that the next commit closes."""
        self.open.append(operation)

    def commit(self) -> None:
        """Close the open group (an empty group is legal)."""
        self.committed.append(self.open)
        self.open = []

    def copy(self) -> "GroupQueue":
        """Return an independent queue of the same operations."""
        twin = GroupQueue()
        twin.open, twin.committed = list(self.open), list(map(list, self.committed))
        return twin

    def covered(self, newest: int) -> list[Operation]:
        """Return the operations of all groups but the `newest` most recent ones."""
        keep = len(self.committed) - newest
        return [operation for group in self.committed[: max(keep, 0)] for operation in group]

    def unretired(self) -> list[Operation]:
        """Return every operation that is not retired, the open group's included."""
        return [operation for group in self.committed for operation in group] + self.open

    def retire(self, newest: int) -> None:
        """Forget all groups but the `newest` most recent ones."""
        keep = len(self.committed) - newest
        if keep > 0:
            del self.committed[:keep]


class AsyncEngine:
    """All asynchronous operations of one cluster."""

    __slots__ = ("_channels", "_delay", "_first_agent", "_random", "_slots", "_ticks",
                 "current", "events", "pending")  # fmt: skip

    def __init__(self, options: Options, random: Random, first_agent: int, slots: int):
        self.pending: list[Operation] = []
        self.events = 0
        self.current: Operation | None = None  # for reports of what failed
        self._random = random
        self._delay = options.async_delay
        self._first_agent = first_agent
        self._slots = slots
        self._channels: dict[Hashable, int] = {}
        self._ticks = [0] * slots

    def submit(
        self,
        warp: Any,
        instruction: Any,
        effects: Sequence[Effect],
        *,
        kind: str,
        channel: Hashable = None,
        after: Sequence[Operation] = (),
        is_async_proxy: bool = True,
        tensor: Clock | None = None,
    ) -> Operation:
        """Start an operation issued by `warp`.

        The operation hands on what the warp had done until now (through whatever it signals), so
        the warp's own time advances: what it does next is not covered by the completion.

        Args:
            warp: the issuing warp; its clock at this moment becomes the operation's.
            instruction: the static instruction.
            effects: functions of the operation, applied in order at random moments.
            kind: for reports.
            channel: what tells of its completion, see above; None: the operation alone. Past
                `slots` channels of a cluster some share their time, and an early operation may
                count as seen with a later one.
            after: operations that must be complete first (their clocks are joined).
            is_async_proxy: False for work of the generic proxy (`cp.async`).
            tensor: `Access.tensor` of the operation.
        """
        clock = warp.access.clock.copy()
        for operation in after:
            operation.access.release(clock)
        if channel is None:
            channel = ("operation", len(self._channels))
        agent, time = self._next_time(channel)
        if self.shares_agents:  # with work of the other proxy, perhaps
            warp.cta.cluster.notes.needs_fence[agent] = False
        access = Access(warp, instruction, agent, clock, is_async_proxy, time=time, tensor=tensor)
        operation = Operation(kind, access, effects, after)
        if kind.endswith("store"):  # to global memory: two moments, of which waits tell apart
            agent, time = self._next_time(("written", channel))
            operation.written = replace(access, agent=agent, time=time)
        warp.access.tick()
        self.pending.append(operation)
        self.events += 1
        if self._delay == "eager":
            self._run_eagerly(operation)
        return operation

    def _next_time(self, channel: Hashable) -> tuple[int, int]:
        """Return the agent of a channel and the time of its next operation."""
        slot = self._channels.get(channel)
        if slot is None:
            slot = self._channels[channel] = len(self._channels) % self._slots
        self._ticks[slot] += 1
        return self._first_agent + slot, self._ticks[slot]

    @property
    def shares_agents(self) -> bool:
        """Whether more channels than slots are in use, so that agents are not told apart."""
        return len(self._channels) > self._slots

    def step(self) -> bool:
        """Let one effect of a random operation happen; return whether there was one."""
        ready = [operation for operation in self.pending if operation.is_ready]
        if not ready:
            return False
        operation = ready[int(self._random.random() * len(ready))]
        self.current = operation
        operation.advance()
        self.events += 1
        if operation.is_complete:
            self.pending.remove(operation)
        return True

    def finish(self, operation: Operation) -> None:
        """Let everything an operation depends on, and then the operation, happen now."""
        for earlier in list(operation.after):
            self.finish(earlier)
        while not operation.is_complete:
            operation.advance()
        self.events += 1
        if operation in self.pending:
            self.pending.remove(operation)

    def _run_eagerly(self, operation: Operation) -> None:
        if operation.is_ready:
            self.finish(operation)
