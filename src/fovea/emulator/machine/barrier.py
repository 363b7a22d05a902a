"""State of mbarriers, named barriers and cluster barriers.

Lives here: counts, phases, and the clocks that travel with them. Not here: the instructions
(`isa/barrier.py`). Invariant: a phase completes at the moment its last arrival or last byte
comes in, never later, and hands on the clocks of everything that came in.
"""

from typing import Any

import numpy as np

from fovea.emulator.clocks import Clock
from fovea.emulator.races import Access

TX_LIMIT = (1 << 20) - 1  # PTX ISA 9.7.13.15.1: valid range of tx-count
COUNT_LIMIT = (1 << 20) - 1  # PTX ISA 9.7.13.15.1: valid range of the expected arrival count
STATE_SHIFT = np.uint64(32)
_PHASE_MASK = (1 << 32) - 1


class MBarrier:
    """One mbarrier object in shared memory."""

    __slots__ = (
        "_agents",
        "_clock",
        "arrivals",
        "expected",
        "known_to",
        "name",
        "origin",
        "pending",
        "phase",
        "previous",
        "released",
        "tx",
        "users",
    )  # fmt: skip

    def __init__(self, name: str, expected: int, agents: int):
        self.name = name
        self.expected = expected
        self.pending = expected
        self.tx = 0
        self.phase = 0
        self._agents = agents
        self._clock = Clock(agents)
        self.released = Clock(agents)
        # access of the initialisation and its time: what uses the barrier must have seen it, or
        # be among the agents that a fence.mbarrier_init has told of it
        self.origin: tuple[Access, int] | None = None
        self.known_to: set[int] = set()
        # agent -> its time when it last used the object, and the instruction
        self.users: dict[int, tuple[int, Any]] = {}
        # (what, warp, instruction): made into text only for a report
        self.arrivals: list[tuple[str, Any, Any]] = []
        self.previous: list[tuple[str, Any, Any]] = []

    def arrive(self, count: int, access: Access, is_relaxed: bool = False) -> str:
        """Count arrivals of an agent (`.relaxed`: without its clock).

        Return what is wrong with them ("" if nothing).
        """
        if count > self.pending:
            return (
                f"arrival of {count} at {self.name} with {self.pending} pending of "
                f"{self.expected} (phase {self.phase}): more arrivals than expected"
            )
        self.pending -= count
        self._take(access, f"{count} by", is_relaxed)
        return ""

    def expect_tx(self, size: int) -> str:
        """Raise the tx-count; return what is wrong ("" if nothing)."""
        self.tx += size
        return self._check_tx()

    def complete_tx(self, size: int, access: Access) -> str:
        """Lower the tx-count by bytes that arrived; return what is wrong ("" if nothing)."""
        self.tx -= size
        problem = self._check_tx()
        self._take(access, f"{size} bytes by")
        return problem

    def initialised_by(self, access: Access) -> None:
        """Note the warp that has initialised the object, at its time."""
        instruction = access.instruction
        origin = Access(access.warp, instruction, access.agent, access.clock, time=access.time)
        self.origin = origin, access.time

    def check_known(self, access: Access) -> str:
        """Return what is wrong ("" if nothing) unless `access` comes after the initialisation."""
        if self.origin is None:
            return ""
        origin, time = self.origin
        agent = access.warp.access.agent
        if agent == origin.agent or access.clock.seen[origin.agent] >= time:
            return ""
        if agent in self.known_to:
            return ""
        needs = "a barrier of the CTA (bar.sync)"
        if access.warp.cta is not origin.warp.cta:
            needs = "fence.mbarrier_init (or a release) and a barrier of the cluster"
        return (
            f"{self.name} was initialised at {origin.describe()}, and nothing orders that before "
            f"this use: {needs} must come between"
        )

    def check_unused(self, access: Access) -> str:
        """Return what is wrong ("" if nothing) unless every other use comes before `access`."""
        for agent, (time, instruction) in self.users.items():
            if agent != access.agent and access.clock.seen[agent] < time:
                return (
                    f"{self.name} is used at PTX line {instruction.line} `{instruction.text}`, and "
                    "nothing orders that before it is made invalid"
                )
        return ""

    def drop(self) -> None:
        """Lower the expected count of the phases to come (`arrive_drop`)."""
        self.expected -= 1

    def is_complete(self, parity: int) -> bool:
        """Return whether the phase of this parity has completed (the manual's `.parity` test)."""
        return (self.phase & 1) != parity

    def is_state_complete(self, state: int) -> bool:
        """Return whether the phase a `state` token belongs to has completed."""
        return self.phase & _PHASE_MASK != state & _PHASE_MASK

    @property
    def state(self) -> int:
        """The token that an arrival now returns: the phase, and above it the pending count."""
        return self.phase & _PHASE_MASK | self.pending << int(STATE_SHIFT)

    def describe(self) -> str:
        """Return counts and phase, and who has and who might still arrive."""
        text = (
            f"{self.name}: phase {self.phase} (parity {self.phase & 1}), "
            f"{self.pending} of {self.expected} arrivals pending, tx-count {self.tx}"
        )
        if self.arrivals:
            text += f"; arrived: {_names(self.arrivals[-4:])}"
        missing = [arrival for arrival in self.previous if arrival not in self.arrivals]
        if missing:
            text += f"; arrived in the phase before but not in this one: {_names(missing[:4])}"
        elif self.tx > 0:
            text += f"; {self.tx} bytes announced by expect_tx never arrived"
        elif not self.arrivals and not self.previous:
            text += "; nobody has ever arrived"
        return text

    def _take(self, access: Access, what: str, is_relaxed: bool = False) -> None:
        if not is_relaxed:
            access.release(self._clock)
            if access is access.warp.access:
                access.tick()
        elif access.fenced is not None:
            self._clock.join(access.fenced)
        self.arrivals.append((what, access.warp, access.instruction))
        self._settle()

    def _check_tx(self) -> str:
        if not -TX_LIMIT <= self.tx <= TX_LIMIT:
            return f"tx-count {self.tx} of {self.name} leaves its range of +-{TX_LIMIT}"
        return ""

    def _settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.released = self._clock
            self._clock = Clock(self._agents)
            self.previous, self.arrivals = self.arrivals, []


def _names(arrivals: list[tuple[str, Any, Any]]) -> str:
    return ", ".join(
        f"{what} PTX line {instruction.line} of CTA {warp.cta.index} warp {warp.index}"
        for what, warp, instruction in arrivals
    )


def count_part(parts: dict[int, Any], warp: Any, mask: Any) -> int:
    """Return how many threads of a warp arrive: lanes that have exited count as arrived.

    Args:
        parts: of each warp (by agent) that arrives in parts, the lanes that count in this phase.
        warp: the warp.
        mask: the lanes that arrive.
    """
    before = parts.get(warp.access.agent)
    if before is None:
        if (mask | warp.exited).all():
            return len(mask)
        before = np.zeros(len(mask), np.bool_)
    parts[warp.access.agent] = before | mask | warp.exited
    return int(np.count_nonzero(mask | warp.exited & ~before))


class NamedBarrier:
    """One of the 16 barriers of a CTA (`bar.sync`, `bar.arrive`, `bar.red`)."""

    __slots__ = ("_agents", "arrived", "clock", "counts_all", "expected", "generation",
                 "number", "parts", "released", "result", "values", "warps")  # fmt: skip

    def __init__(self, number: int, agents: int):
        self.number = number
        self._agents = agents
        self.expected = 0
        self.arrived = 0
        self.counts_all = False
        self.parts: dict[int, Any] = {}  # warps (agents) that arrive in parts: the lanes counted
        self.generation = 0
        self.warps: list[int] = []
        self.values: list[Any] = []
        self.result: list[Any] = []
        self.clock = Clock(agents)
        self.released = Clock(agents)

    def arrive(self, threads: int, expected: int, access: Access, value: Any = None) -> str:
        """Count an arriving warp; return what is wrong ("" if nothing)."""
        if self.arrived and expected != self.expected:
            return (
                f"barrier {self.number} is used with {expected} threads while "
                f"{self.expected} were named by an earlier arrival"
            )
        if self.arrived + threads > expected:
            return (
                f"barrier {self.number} gets {self.arrived + threads} threads but expects "
                f"{expected}"
            )
        self.expected = expected
        self.arrived += threads
        self.warps.append(access.warp.index)
        if value is not None:
            self.values.append(value)
        access.release(self.clock)
        access.tick()
        self._settle()
        return ""

    def exit_part(self, warp: Any) -> bool:
        """Count lanes that have exited beside some that arrived; return whether there were any."""
        if warp.access.agent not in self.parts:
            return False
        self.arrived += count_part(self.parts, warp, np.zeros_like(warp.exited))
        self._settle()
        return True

    def settle(self, live_threads: int) -> None:
        """Adjust a barrier that counts all threads after a warp has exited."""
        if self.arrived and self.counts_all:
            self.expected = live_threads
            self._settle()

    def _settle(self) -> None:
        if self.arrived >= self.expected:
            self.generation += 1
            self.arrived = 0
            self.parts = {}
            self.warps = []
            self.result, self.values = self.values, []
            self.released = self.clock
            self.clock = Clock(self._agents)

    def describe(self) -> str:
        """Return how many threads have arrived, and from which warps."""
        return (
            f"barrier {self.number}: {self.arrived} of {self.expected} threads arrived, of "
            f"{'warp' if len(self.warps) == 1 else 'warps'} "
            f"{', '.join(map(str, sorted(self.warps)))}"
        )


class ClusterBarrier:
    """The barrier of a cluster (`barrier.cluster.arrive` / `wait`)."""

    __slots__ = ("_agents", "arrived", "clock", "expected", "generation", "inits", "parts",
                 "released", "released_inits")  # fmt: skip

    def __init__(self, threads: int, agents: int):
        self._agents = agents
        # mbarriers whose initialisation a fence.mbarrier_init has covered
        self.inits: list[MBarrier] = []
        self.released_inits: list[MBarrier] = []
        self.expected = threads
        self.arrived = 0
        self.parts: dict[int, Any] = {}  # warps (agents) that arrive in parts: the lanes counted
        self.generation = 0
        self.clock = Clock(agents)
        self.released = Clock(agents)

    def arrive(self, threads: int, access: Access, is_release: bool = True) -> None:
        """Count arriving threads; `.relaxed` arrivals hand on what a fence before them covers."""
        self.arrived += threads
        self.inits += access.warp.state.pop("fence.mbarrier_init", ())
        if is_release:
            access.release(self.clock)
            access.tick()
        elif access.fenced is not None:
            self.clock.join(access.fenced)
        self.settle()

    def acquire(self, access: Access) -> None:
        """Let a warp that has waited know what the arrivals of the phase handed on."""
        access.clock.join(self.released)
        for barrier in self.released_inits:
            barrier.known_to.add(access.agent)

    def exit_part(self, warp: Any) -> bool:
        """Count lanes that have exited beside some that arrived; return whether there were any."""
        if warp.access.agent not in self.parts:
            return False
        self.arrived += count_part(self.parts, warp, np.zeros_like(warp.exited))
        self.settle()
        return True

    def exit(self, threads: int) -> None:
        """Take exited threads out of the expected count."""
        self.expected -= threads
        self.settle()

    def settle(self) -> None:
        """Complete the phase if everybody has arrived."""
        if self.expected and self.arrived >= self.expected:
            self.arrived -= self.expected
            self.parts = {}
            self.generation += 1
            self.released = self.clock
            self.clock = Clock(self._agents)
            self.released_inits, self.inits = self.inits, []

    def describe(self) -> str:
        """Return how many threads have arrived."""
        return f"cluster barrier: {self.arrived} of {self.expected} threads arrived"
