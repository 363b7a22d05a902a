"""The roles of a Blackwell forward as simulated processes: load, MMA, softmax, epilogue.

Lives here: the graph of roles as numbers, and who waits for whom in it. It describes our kernel
(`graph_of`) and flash-attn-4's, which has the same roles and one more. Not here: how long a piece
takes (`work.py`), how pieces share units (`engine.py`). Invariant: products of a stream run in the
order S, O, S, O, ..., and the streams take turns, as both kernels issue them.
"""

from dataclasses import dataclass, field

from fovea.costs.calibration import FIRST_PART, Calibration
from fovea.costs.counted import KernelCounts
from fovea.costs.engine import Delay, Gate, Process, Queue, Simulation, Until, Use
from fovea.costs.machine import Machine
from fovea.costs.work import ELEMENT_BYTES, Product, added, copy_work, scaled, warpgroup_work
from fovea.errors import UnsupportedError
from fovea.plan.sm100 import ForwardPlan
from fovea.plan.sm100_tiles import CHUNK_COLUMNS, STREAM_ROWS, STREAMS

_WORD_BYTES = 4
PRODUCTS = 2 * STREAMS  # that the MMA warp issues for a KV tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A kernel for sm_100a as far as its timeline depends on it.

    Attributes:
        parts: parts that a K tile comes in, by columns, and a V tile, by keys; a stage holds one.
        stages: stages of the ring of K and of that of V; one ring for both if `shares_ring`.
        p_parts: columns of P told to the tensor cores at a time.
        pair: CTAs that multiply together, each with a half of K and V.
        seek_maxima: instructions of a warp that find a row's maximum before its first exponential;
            0 where a plain tile needs none.
        corrects: a role of its own decides before each O whether to rescale it.
        looks_ahead: the next query tile's first S is issued behind the last O of its own stream.
        skips_hidden: a stream passes over the KV tile that a causal mask hides from its rows.
        is_persistent: a CTA goes on to another query tile; else each has a CTA of its own.
        epilogue: role that writes O.
    """

    tile_n: int
    head_dim: int
    head_dim_v: int
    stages: tuple[int, int]
    p_parts: tuple[int, ...]
    parts: tuple[int, int] = (1, 1)
    pair: int = 1
    shares_ring: bool = False
    seek_maxima: float = 0.0
    corrects: bool = False
    looks_ahead: bool = True
    skips_hidden: bool = False
    is_persistent: bool = True
    epilogue: str = "epilogue"

    @property
    def tile_rows(self) -> int:
        """Query rows of a query tile, of all CTAs that multiply together."""
        return STREAMS * STREAM_ROWS * self.pair


def graph_of(plan: ForwardPlan) -> Graph:
    """Return the graph of a plan of ours.

    Raises:
        UnsupportedError: streams share their rows, which the simulated roles do not.
    """
    if plan.splits_keys:
        raise UnsupportedError(
            f"the cost model has no roles for {plan.name}, whose streams share their query rows; "
            "it has them for calls of more than 64 queries with head dims up to 192"
        )
    features = plan.features
    return Graph(
        tile_n=plan.tile_n,
        head_dim=plan.head_dim,
        head_dim_v=plan.head_dim_v,
        stages=(plan.k_edge.stages, plan.v_edge.stages),
        parts=(plan.k_parts, plan.v_parts),
        p_parts=plan.p_parts,
        pair=plan.cluster,
        shares_ring=plan.shares_ring,
        skips_hidden=bool(features.limit_left or features.limit_right),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100Model:
    """A graph on a machine, with all that its roles are timed by."""

    graph: Graph
    counts: KernelCounts
    machine: Machine
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class _Tile:
    """A query tile: visits of its walk, its first use of the rings, visits that a stream skips."""

    index: int
    visits: int
    first_use: int
    skips: tuple[int, ...]

    def own(self, stream: int) -> int:
        """Return how many visits a stream makes."""
        return self.visits - self.skips[stream]


@dataclass(slots=True)
class _Run:
    """One CTA under way: gates by name, and how often each product was issued."""

    model: Sm100Model
    simulation: Simulation
    tensor: Queue
    tiles: list[_Tile]
    gates: dict[str, Gate] = field(default_factory=dict[str, Gate])
    issued: dict[str, int] = field(default_factory=dict[str, int])

    def gate(self, name: str) -> Gate:
        """Return a gate, made at its first use."""
        return self.gates.setdefault(name, Gate(name))

    def open(self, name: str) -> None:
        """Count an arrival."""
        self.simulation.open(self.gate(name))

    def count(self, name: str) -> int:
        """Return how often something was done before, and note that it is done again."""
        before = self.issued.get(name, 0)
        self.issued[name] = before + 1
        return before


def simulate(model: Sm100Model, visits: list[int]) -> Simulation:
    """Run one CTA through query tiles of so many KV tiles."""
    simulation = Simulation()
    run = _Run(model, simulation, Queue(simulation, "tensor cores"), _tiles(model.graph, visits))
    simulation.spawn("load", _load(run))
    simulation.spawn("mma", _mma(run))
    for stream in range(STREAMS):
        simulation.spawn(f"softmax {stream}", _softmax(run, stream))
    graph = model.graph
    simulation.spawn(graph.epilogue, _correct(run) if graph.corrects else _epilogue(run))
    simulation.run()
    return simulation


def _tiles(graph: Graph, visits: list[int]) -> list[_Tile]:
    found: list[_Tile] = []
    use = 0
    for index, count in enumerate(visits):
        skips = [0] * STREAMS
        if graph.skips_hidden:
            # The streams' rows lie one below the other; a walk goes from its last tile down.
            hidden = [(STREAMS - 1 - s) * STREAM_ROWS // graph.tile_n for s in range(STREAMS)]
            skips = [min(each, count - 1) for each in hidden]
        found.append(_Tile(index, count, use, tuple(skips)))
        use += count
    return found


# --- load ---------------------------------------------------------------------------------------


def _load(run: _Run) -> Process:
    """Fill the rings; Q of a stream when its last product with the Q before is through."""
    graph, calibration = run.model.graph, run.model.calibration

    def copy(name: str, columns: int, rows: float, more: float = 0.0) -> None:
        work = copy_work(run.model.machine, columns * rows * ELEMENT_BYTES)

        def begin() -> None:
            run.simulation.start("copies", Use(name, work), lambda: run.open(f"{name} full"))

        run.simulation.after(calibration.copy_latency + more, begin)

    loaded = 0
    for tile in run.tiles:
        for stream in range(STREAMS):
            yield Until(run.gate(f"q{stream} empty"), tile.index)
            copy(f"q{stream}", graph.head_dim, STREAM_ROWS, calibration.memory_latency)
        for visit in range(tile.visits):
            for name, columns, stages, parts in (
                ("k", graph.head_dim, graph.stages[0], graph.parts[0]),
                ("v", graph.head_dim_v, graph.stages[1], graph.parts[1]),
            ):
                for part in range(parts):
                    use = (tile.first_use + visit) * parts + part
                    if graph.shares_ring:
                        yield Until(run.gate("kv empty"), loaded - stages + 1)
                    else:
                        yield Until(run.gate(f"{name} empty"), use - stages + 1)
                    copy(name, columns, graph.tile_n // graph.pair / parts)
                    loaded += 1


# --- MMA ----------------------------------------------------------------------------------------


def _mma(run: _Run) -> Process:
    """Issue the products in the order of the kernels."""
    graph = run.model.graph
    is_begun = False
    for tile in run.tiles:
        is_last = tile.index + 1 == len(run.tiles)
        if not is_begun:
            for stream in range(STREAMS):
                yield from _scores(run, tile, 0, stream)
        for visit in range(tile.visits):
            ends = visit + 1 == tile.visits
            for stream in range(STREAMS):
                yield from _output(run, tile, visit, stream)
                if not ends:
                    yield from _scores(run, tile, visit + 1, stream)
                elif graph.looks_ahead and not is_last:
                    yield from _scores(run, run.tiles[tile.index + 1], 0, stream)
        is_begun = graph.looks_ahead


def _issue(run: _Run, name: str, product: Product, *opened: str, ends: bool) -> None:
    """Give the tensor cores a product, or a part of one: only its end has a gap behind it."""
    work = product.work(run.model.machine)
    alone = max(work.values()) + (run.model.calibration.product_gap if ends else 0.0)
    gates = [run.gate(each) for each in opened]
    run.tensor.put(Use(name, work, floor=alone), *gates)


def _issue_time(run: _Run) -> Delay:
    """Return how long the MMA warp's own instructions for one product take."""
    return Delay(run.model.counts.roles["mma"].visit.issue / PRODUCTS)


def _freed(run: _Run, name: str, stream: int) -> tuple[str, ...]:
    """Return the gates that a product of a stream opens for the load role."""
    if stream < STREAMS - 1:
        return ()
    return ("kv empty",) if run.model.graph.shares_ring else (f"{name} empty",)


def _scores(run: _Run, tile: _Tile, visit: int, stream: int) -> Process:
    """S = Q K^T, part by part as K comes."""
    graph = run.model.graph
    parts = graph.parts[0]
    if visit == 0:
        yield Until(run.gate(f"q{stream} full"), tile.index + 1)
        yield Delay(run.model.calibration.handoff)
    for part in range(parts):
        yield Until(run.gate("k full"), (tile.first_use + visit) * parts + part + 1)
        if visit < tile.skips[stream]:
            for name in _freed(run, "k", stream):
                run.open(name)
            continue
        if part == 0:
            yield _issue_time(run)
        product = Product(
            m=STREAM_ROWS,
            n=graph.tile_n,
            k=graph.head_dim // parts,
            a_is_shared=True,
            b_share=1 / graph.pair,
        )
        opened = [*_freed(run, "k", stream)]
        is_whole = part + 1 == parts
        if is_whole:
            opened.append(f"s{stream}")
            if visit + 1 == tile.visits:
                opened.append(f"q{stream} empty")
        _issue(run, f"S{stream}", product, *opened, ends=is_whole)


def _output(run: _Run, tile: _Tile, visit: int, stream: int) -> Process:
    """O += P V, part by part as P and V come."""
    graph = run.model.graph
    parts = graph.parts[1]
    is_hidden = visit < tile.skips[stream]
    if visit == tile.skips[stream]:
        yield Until(run.gate(f"o{stream} empty"), tile.index)
    done = 0 if is_hidden else run.count(f"outputs{stream}")
    if graph.corrects:
        yield Until(run.gate(f"corrected{stream}"), done + 1)
    p_ends = [sum(graph.p_parts[: index + 1]) for index in range(len(graph.p_parts))]
    v_ends = [graph.tile_n // parts * (index + 1) for index in range(parts)]
    first, told, loaded = 0, 0, 0
    for end in sorted({*p_ends, *v_ends}):
        if loaded * graph.tile_n // parts <= first:
            loaded += 1
            yield Until(run.gate("v full"), (tile.first_use + visit) * parts + loaded)
        frees = _freed(run, "v", stream) if end in v_ends else ()
        if is_hidden:
            for name in frees:
                run.open(name)
            first = end
            continue
        if told == 0 or p_ends[told - 1] <= first:
            yield Until(run.gate(f"p{stream} {told}"), done + 1)
            yield Delay(run.model.calibration.handoff)
            told += 1
        if first == 0:
            yield _issue_time(run)
        product = Product(
            m=STREAM_ROWS,
            n=graph.head_dim_v,
            k=end - first,
            a_is_shared=False,
            b_share=1 / graph.pair,
        )
        opened = [*frees]
        is_whole = end == graph.tile_n
        if is_whole and visit + 1 == tile.visits:
            opened.append(f"o{stream} full")
        _issue(run, f"O{stream}", product, *opened, ends=is_whole)
        first = end


# --- softmax and epilogue -------------------------------------------------------------------------


def _tensor_columns(run: _Run, unit: str, columns: float) -> dict[str, float]:
    """Return the cycles of moving columns of tensor memory from or to registers."""
    machine = run.model.machine
    rate = machine.tensor_load_bytes if unit == "tensor load" else machine.tensor_store_bytes
    return {unit: STREAM_ROWS * columns * _WORD_BYTES / rate}


def _softmax(run: _Run, stream: int) -> Process:
    """S to P, part by part; where the kernel wants it, the row's maximum first."""
    model, graph = run.model, run.model.graph
    calibration = model.calibration
    counts = model.counts.roles["softmax"]
    visit_work = warpgroup_work(model.machine, counts.visit, calibration.serial_share)
    ends_work = warpgroup_work(model.machine, counts.ends, calibration.serial_share)
    # Half-rate instructions: two cycles of the ALU pipe each.
    maxima = graph.seek_maxima
    seek = {
        "issue": maxima,
        "alu": 2 * maxima,
        "vector": 2 * maxima * calibration.serial_share,
    }
    rest = {unit: max(0.0, cycles - seek.get(unit, 0.0)) for unit, cycles in visit_work.items()}
    for tile in run.tiles:
        for index in range(tile.own(stream)):
            yield Until(run.gate(f"s{stream}"), run.count(f"softmax{stream}") + 1)
            yield Delay(calibration.handoff)
            first = graph.tile_n if graph.seek_maxima else CHUNK_COLUMNS
            yield Use("load S", _tensor_columns(run, "tensor load", first))
            if index == 0:
                yield Use("first tile", ends_work)
                yield Delay(FIRST_PART * calibration.ends)
            if graph.seek_maxima:
                yield Use("maximum", seek)
            if graph.corrects:
                run.open(f"statistics{stream}")
            yield Delay(calibration.softmax_stall)
            loaded = first
            for part, columns in enumerate(graph.p_parts):
                share = columns / graph.tile_n
                more = min(graph.tile_n, loaded + columns) - loaded
                loaded += more
                yield Use(
                    "exponentials",
                    added(
                        scaled(rest, share),
                        _tensor_columns(run, "tensor load", more),
                        _tensor_columns(run, "tensor store", columns / 2),
                    ),
                )
                run.open(f"p{stream} {part}")
        run.open(f"sums{stream}")


def _write(run: _Run, tile: _Tile, stream: int) -> Process:
    """O of one stream out of tensor memory, scaled, through shared memory."""
    model, graph = run.model, run.model.graph
    calibration = model.calibration
    counts = model.counts.roles[graph.epilogue]
    work = warpgroup_work(model.machine, counts.ends, calibration.serial_share)
    yield Until(run.gate(f"sums{stream}"), tile.index + 1)
    yield Until(run.gate(f"o{stream} full"), tile.index + 1)
    yield Delay(calibration.handoff)
    load = _tensor_columns(run, "tensor load", graph.head_dim_v)
    yield Use("epilogue", added(scaled(work, 1 / STREAMS), load))
    run.open(f"o{stream} empty")
    yield Delay((1 - FIRST_PART) * calibration.ends)
    bytes_out = STREAM_ROWS * graph.head_dim_v * ELEMENT_BYTES
    yield Use("store O", {"shared": 2 * bytes_out / model.machine.shared_bytes})


def _epilogue(run: _Run) -> Process:
    for tile in run.tiles:
        for stream in range(STREAMS):
            yield from _write(run, tile, stream)


def _correct(run: _Run) -> Process:
    """Flash-attn-4's correction role: look at each tile's maxima, then write O."""
    model, graph = run.model, run.model.graph
    visit = model.counts.roles[graph.epilogue].visit
    work = warpgroup_work(model.machine, visit, model.calibration.serial_share)
    for tile in run.tiles:
        for _ in range(tile.visits):
            for stream in range(STREAMS):
                yield Until(run.gate(f"statistics{stream}"), run.count(f"seen{stream}") + 1)
                yield Delay(model.calibration.handoff)
                yield Use("correction", scaled(work, 1 / STREAMS))
                run.open(f"corrected{stream}")
        for stream in range(STREAMS):
            yield from _write(run, tile, stream)
