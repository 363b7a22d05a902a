"""The roles of the Hopper forward as simulated processes: load, and the consumer warpgroups.

Lives here: who waits for whom in `kernels/sm90/forward`, in the plan's numbers. Not here: how long
a piece takes (`work.py`) and how pieces share units (`engine.py`). Invariant: the same waits and
releases, in the same order, as the kernel's roles.
"""

from dataclasses import dataclass

from fovea.costs.calibration import FIRST_PART, Calibration
from fovea.costs.counted import KernelCounts
from fovea.costs.engine import Delay, Gate, Process, Queue, Simulation, Until, Use
from fovea.costs.machine import Machine
from fovea.costs.work import Product, added, copy_work, scaled, warpgroup_work
from fovea.plan.sm90 import ELEMENT_BYTES, WARPGROUP_ROWS, ForwardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Model:
    """A plan on a machine, with all that its roles are timed by."""

    plan: ForwardPlan
    counts: KernelCounts
    machine: Machine
    calibration: Calibration


@dataclass(slots=True)
class _Gates:
    q_full: list[Gate]
    q_empty: list[Gate]
    k_full: Gate
    k_empty: Gate
    v_full: Gate
    v_empty: Gate
    turns: list[Gate]
    verdicts: Gate
    announced: Gate


@dataclass(slots=True)
class _Tile:
    """A query tile: the visits of its walk, and how many each consumer skips before its own."""

    visits: int
    before: tuple[int, ...]
    first_use: int


@dataclass(slots=True)
class _Run:
    model: Sm90Model
    simulation: Simulation
    gates: _Gates
    tensor: Queue
    tiles: list[_Tile]


def simulate(model: Sm90Model, visits: list[int]) -> Simulation:
    """Run one CTA through query tiles of so many KV tiles."""
    plan, simulation = model.plan, Simulation()
    consumers = range(plan.num_consumers)
    gates = _Gates(
        q_full=[Gate(f"q_full{c}") for c in consumers],
        q_empty=[Gate(f"q_empty{c}") for c in consumers],
        k_full=Gate("k_full"),
        k_empty=Gate("k_empty"),
        v_full=Gate("v_full"),
        v_empty=Gate("v_empty"),
        turns=[Gate(f"turn{c}") for c in consumers],
        verdicts=Gate("verdict"),
        announced=Gate("announced"),
    )
    run = _Run(model, simulation, gates, Queue(simulation, "tensor cores"), _tiles(plan, visits))
    simulation.spawn("load", _load(run))
    for consumer in consumers:
        simulation.spawn(f"compute {consumer}", _Consumer(run, consumer).process())
    simulation.run()
    return simulation


def _tiles(plan: ForwardPlan, visits: list[int]) -> list[_Tile]:
    found: list[_Tile] = []
    use = 0
    for count in visits:
        before = [0] * plan.num_consumers
        if plan.skips_hidden:
            for consumer in range(plan.num_consumers):
                hidden = (plan.num_consumers - 1 - consumer) * WARPGROUP_ROWS // plan.tile_n
                before[consumer] = min(hidden, count - 1)
        found.append(_Tile(count, tuple(before), use))
        use += count
    return found


def _load(run: _Run) -> Process:
    """Fill the rings; a query tile is announced when the one two before it was judged."""
    plan, gates, machine = run.model.plan, run.gates, run.model.machine
    calibration = run.model.calibration

    def copy(name: str, num_bytes: float, gate: Gate, more: float = 0.0) -> None:
        work = copy_work(machine, num_bytes)

        def begin() -> None:
            run.simulation.start("copies", Use(name, work), lambda: run.simulation.open(gate))

        run.simulation.after(calibration.copy_latency + more, begin)

    consumers = plan.num_consumers
    for index, tile in enumerate(run.tiles):
        yield Until(gates.verdicts, (index - 1) * consumers)
        run.simulation.open(gates.announced)
        for consumer in range(consumers):
            yield Until(gates.q_empty[consumer], index - plan.q_buffers + 1)
            copy(
                "Q",
                plan.q_edge.stage_bytes,
                gates.q_full[consumer],
                calibration.memory_latency,
            )
        for visit in range(tile.visits + 1):
            use = tile.first_use + visit
            if visit < tile.visits:
                yield Until(gates.k_empty, (use - plan.kv_stages + 1) * consumers)
                copy("K", plan.k_edge.stage_bytes, gates.k_full)
            if visit:
                yield Until(gates.v_empty, (use - plan.kv_stages) * consumers)
                copy("V", plan.v_edge.stage_bytes, gates.v_full)


class _Consumer:
    """A consumer warpgroup: 64 rows."""

    def __init__(self, run: _Run, consumer: int) -> None:
        plan, machine = run.model.plan, run.model.machine
        counts = run.model.counts.roles["compute"]
        self.run, self.consumer = run, consumer
        self.scores = Product(
            m=WARPGROUP_ROWS, n=plan.tile_n, k=plan.head_dim, a_is_shared=True
        ).work(machine)
        self.output = Product(
            m=WARPGROUP_ROWS, n=plan.head_dim_v, k=plan.tile_n, a_is_shared=False
        ).work(machine)
        self.visit = warpgroup_work(machine, counts.visit, self._calibration.serial_share)
        self.late = run.model.counts.late_share
        self.ends = warpgroup_work(machine, counts.ends, self._calibration.serial_share)
        self.scores_done = Gate(f"s{consumer}")
        self.output_done = Gate(f"o{consumer}")
        self.num_scores = self.num_outputs = self.num_turns = 0

    def process(self) -> Process:
        plan, gates, handoff = self.run.model.plan, self.run.gates, self._handoff
        open_gate = self.run.simulation.open
        if self.consumer == plan.num_consumers - 1:
            self._pass_turn()
        is_started = False
        for index, tile in enumerate(self.run.tiles):
            own = tile.first_use + tile.before[self.consumer]
            last = tile.first_use + tile.visits - 1
            if not is_started:
                yield from self._start(index, tile)
            yield from self._release_v(tile.first_use, own)
            # The first tile: its maximum, its exponentials.
            yield Until(self.scores_done, self.num_scores)
            yield handoff
            open_gate(gates.k_empty)
            yield Use("first softmax", added(self.visit, scaled(self.ends, FIRST_PART)))
            yield Delay(self._calibration.softmax_stall + FIRST_PART * self._calibration.ends)
            for use in range(own + 1, last + 1):
                yield from self._step(use)
            yield from self._end(index, last)
            is_started = plan.looks_ahead

    @property
    def _calibration(self) -> Calibration:
        return self.run.model.calibration

    @property
    def _handoff(self) -> Delay:
        return Delay(self._calibration.handoff)

    def _start(self, index: int, tile: _Tile) -> Process:
        """Issue the first S of a query tile, past the KV tiles hidden from these rows."""
        gates = self.run.gates
        own = tile.first_use + tile.before[self.consumer]
        yield Until(gates.announced, index + 1)
        for use in range(tile.first_use, own):
            yield Until(gates.k_full, use + 1)
            self.run.simulation.open(gates.k_empty)
            yield from self._wait_turn()
            self._pass_turn()
        yield Until(gates.q_full[self.consumer], index + 1)
        yield Until(gates.k_full, own + 1)
        yield self._handoff
        self._issue_scores()

    def _release_v(self, first: int, end: int) -> Process:
        for use in range(first, end):
            yield Until(self.run.gates.v_full, use + 1)
            self.run.simulation.open(self.run.gates.v_empty)

    def _step(self, use: int) -> Process:
        """S of a KV tile and O of the one before; softmax while the second runs."""
        gates = self.run.gates
        open_gate = self.run.simulation.open
        yield Until(gates.k_full, use + 1)
        yield from self._wait_turn()
        self._issue_scores()
        yield Until(gates.v_full, use)
        self._issue_output()
        self._pass_turn()
        yield Until(self.scores_done, self.num_scores)
        yield self._handoff
        open_gate(gates.k_empty)
        yield Use("softmax", scaled(self.visit, 1 - self.late))
        yield Delay(self._calibration.softmax_stall)
        yield Until(self.output_done, self.num_outputs)
        open_gate(gates.v_empty)
        yield Use("softmax, late part", scaled(self.visit, self.late))

    def _end(self, index: int, last: int) -> Process:
        """The last O, the next tile's first S where Q has a second buffer, the way out."""
        gates, plan, run = self.run.gates, self.run.model.plan, self.run
        is_last = index + 1 == len(run.tiles)
        if plan.looks_ahead:
            yield from self._wait_turn()
        yield Until(gates.v_full, last + 1)
        self._issue_output()
        if plan.looks_ahead:
            if plan.skips_hidden:
                self._pass_turn()
            if not is_last:
                yield from self._start(index + 1, run.tiles[index + 1])
            if not plan.skips_hidden:
                self._pass_turn()
        yield Until(self.output_done, self.num_outputs)
        yield self._handoff
        run.simulation.open(gates.v_empty)
        yield Use("epilogue", scaled(self.ends, 1 - FIRST_PART))
        yield Delay((1 - FIRST_PART) * self._calibration.ends)
        store = WARPGROUP_ROWS * plan.head_dim_v * ELEMENT_BYTES / run.model.machine.shared_bytes
        yield Use("store O", {"shared": 2 * store})
        run.simulation.open(gates.q_empty[self.consumer])
        run.simulation.open(gates.verdicts)

    def _issue_scores(self) -> None:
        self._issue("S", self.scores, self.scores_done)
        self.num_scores += 1

    def _issue_output(self) -> None:
        self._issue("O", self.output, self.output_done)
        self.num_outputs += 1

    def _issue(self, name: str, work: dict[str, float], gate: Gate) -> None:
        alone = max(work.values()) + self._calibration.product_gap
        self.run.tensor.put(Use(f"{name}{self.consumer}", work, floor=alone), gate)

    def _wait_turn(self) -> Process:
        if self.run.model.plan.is_pingpong:
            self.num_turns += 1
            yield Until(self.run.gates.turns[self.consumer], self.num_turns)

    def _pass_turn(self) -> None:
        following = (self.consumer + 1) % self.run.model.plan.num_consumers
        self.run.simulation.open(self.run.gates.turns[following])
