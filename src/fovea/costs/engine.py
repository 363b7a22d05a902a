"""A discrete-event simulation of one SM: processes, gates between them, units that they share.

Lives here: time, processes as generators, counting gates, activities that share units, queues that
run one activity at a time. Not here: what the processes of a kernel do (`sm90.py`, `sm100.py`).
Invariant: a unit never does more than one cycle of work a cycle; activities that ask more of it
together are slowed alike.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

Work = Mapping[str, float]  # cycles that each unit needs
Process = Generator["Delay | Until | Use", None, None]


@dataclass(frozen=True, slots=True)
class Delay:
    """Nothing for some cycles."""

    cycles: float


@dataclass(frozen=True, slots=True)
class Until:
    """Until a gate was opened `count` times."""

    gate: "Gate"
    count: int


@dataclass(frozen=True, slots=True)
class Use:
    """Work on units, at least `floor` cycles long."""

    name: str
    work: Work
    floor: float = 0.0


@dataclass(slots=True)
class Gate:
    """Counts what happened, like the phases of a barrier."""

    name: str
    count: int = 0
    waiting: list[tuple[int, Callable[[], None]]] = field(
        default_factory=list[tuple[int, Callable[[], None]]]
    )


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane of the timeline did from `start` to `end`, in cycles."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(slots=True, eq=False)
class _Activity:
    lane: str
    name: str
    shares: tuple[tuple[str, float], ...]
    remaining: float
    start: float
    done: Callable[[], None]
    speed: float = 1.0


class Queue:
    """A unit that runs what it is given one after the other, such as the tensor cores."""

    def __init__(self, simulation: "Simulation", lane: str) -> None:
        self._simulation = simulation
        self._lane = lane
        self._jobs: deque[tuple[Use, tuple[Gate, ...]]] = deque()
        self._is_busy = False

    def put(self, use: Use, *gates: Gate) -> None:
        """Add a job; `gates` open when it is through."""
        self._jobs.append((use, gates))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._jobs)
        if not self._is_busy:
            return
        use, gates = self._jobs.popleft()

        def done() -> None:
            for gate in gates:
                self._simulation.open(gate)
            self._next()

        self._simulation.start(self._lane, use, done)


class Simulation:
    """Time, what is under way, and what was done when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.busy: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._active: list[_Activity] = []
        self._advanced = 0.0
        self._running = 0
        self._stuck: dict[str, str] = {}

    def after(self, cycles: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + cycles, next(self._order), action))

    def open(self, gate: Gate, times: int = 1) -> None:
        """Count an arrival at a gate and let go who waited for it."""
        gate.count += times
        ready = [wake for count, wake in gate.waiting if count <= gate.count]
        if ready:
            gate.waiting = [each for each in gate.waiting if each[0] > gate.count]
            for wake in ready:
                self.after(0.0, wake)

    def start(self, lane: str, use: Use, done: Callable[[], None]) -> None:
        """Begin an activity; `done` is called when its last unit is through."""
        alone = max(use.floor, *use.work.values()) if use.work else use.floor
        if alone <= 0:
            self.after(0.0, done)
            return
        shares = tuple((unit, cycles / alone) for unit, cycles in use.work.items() if cycles)
        for unit, cycles in use.work.items():
            self.busy[unit] += cycles
        self._active.append(_Activity(lane, use.name, shares, alone, self.now, done))
        self._share()

    def spawn(self, lane: str, process: Process) -> None:
        """Start a process; what it uses shows on a lane of the timeline."""
        self._running += 1
        self.after(0.0, lambda: self._step(lane, process))

    def run(self) -> float:
        """Run until every process is through; return the time.

        Raises:
            RuntimeError: processes wait for what nobody will do.
        """
        while self._running or self._active:
            finish = self._next_finish()
            if self._events and self._events[0][0] <= finish:
                time, _, action = heapq.heappop(self._events)
                self._advance(time)
                action()
            elif self._active:
                self._advance(finish)
                self._finish()
            else:
                waits = "; ".join(f"{lane} for {what}" for lane, what in self._stuck.items())
                raise RuntimeError(f"the simulated roles wait for each other: {waits}")
        return self.now

    def _step(self, lane: str, process: Process) -> None:
        step = next(process, None)
        if step is None:
            self._running -= 1
            self._stuck.pop(lane, None)
            return
        self._stuck[lane] = "nothing"

        def resume() -> None:
            self._step(lane, process)

        if isinstance(step, Delay):
            self.after(step.cycles, resume)
        elif isinstance(step, Use):
            self.start(lane, step, resume)
        elif step.gate.count >= step.count:
            self.after(0.0, resume)
        else:
            self._stuck[lane] = f"{step.gate.name} {step.count} (is {step.gate.count})"
            step.gate.waiting.append((step.count, resume))

    def _next_finish(self) -> float:
        if not self._active:
            return float("inf")
        return self._advanced + min(each.remaining / each.speed for each in self._active)

    def _advance(self, time: float) -> None:
        passed = time - self._advanced
        if passed > 0:
            for each in self._active:
                each.remaining -= passed * each.speed
        self.now = self._advanced = max(time, self._advanced)

    def _finish(self) -> None:
        ended = [each for each in self._active if each.remaining <= 1e-6]
        self._active = [each for each in self._active if each.remaining > 1e-6]
        self._share()
        for each in ended:
            self.spans.append(Span(each.lane, each.name, each.start, self.now))
            each.done()

    def _share(self) -> None:
        load: defaultdict[str, float] = defaultdict(float)
        for each in self._active:
            for unit, share in each.shares:
                load[unit] += share
        for each in self._active:
            fullest = max((load[unit] for unit, _ in each.shares), default=1.0)
            each.speed = 1.0 / max(1.0, fullest)
