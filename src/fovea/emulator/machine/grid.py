"""Grid, clusters and CTAs of one launch.

Lives here: what exists per launch, cluster and CTA, and the special registers. Not here: the
schedule (`schedule.py`) and the interface (`run.py`). Invariant: agents of a cluster are numbered
warps first (`rank * warps + warp`), then the slots of asynchronous work.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.emulator.async_engine import AsyncEngine
from fovea.emulator.clocks import Clock
from fovea.emulator.counters import Counters
from fovea.emulator.errors import LaunchError, PtxError, RaceError
from fovea.emulator.global_races import GlobalRaces
from fovea.emulator.machine.barrier import ClusterBarrier, MBarrier, NamedBarrier
from fovea.emulator.machine.memory import (
    CONST_WINDOW,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_RESERVED_BYTES,
    SHARED_WINDOW,
    WINDOW_SHIFT,
    GlobalMemory,
    Segment,
)
from fovea.emulator.machine.tmem import (
    LANES_PER_CELL,
    TMEM_COLUMNS,
    TMEM_LANES,
    TensorMemory,
)
from fovea.emulator.machine.unwritten import unwritten_bytes
from fovea.emulator.machine.warp import Warp
from fovea.emulator.options import Options
from fovea.emulator.ptx.types import LANES
from fovea.emulator.races import Access, AccessNotes, Shadow

Array = NDArray[Any]
Dim = tuple[int, int, int]

ASYNC_SLOTS_PER_CTA = 64  # channels told apart by the clocks; more share a time
RANK_MASK = (1 << RANK_SHIFT) - 1


class Machine:
    """One launch: program, memories, options, and the clusters in flight."""

    def __init__(
        self,
        program: Any,
        memory: GlobalMemory,
        options: Options,
        grid: Dim,
        block: Dim,
        cluster: Dim,
        parameters: Array,
        shared_bytes: int,
    ):
        self.program = program
        self.memory = memory
        self.options = options
        self.grid, self.block, self.cluster_shape = grid, block, cluster
        self.shared_bytes = shared_bytes
        self.parameters = Segment("the kernel parameters", "param", parameters, PARAM_WINDOW)
        self.constants: Segment | None = None
        self.random = Random(options.seed)
        self.counters = Counters(program)
        self.trace: Any = None
        self.junk: int | None = None  # which content of what nobody wrote, see `junk.py`
        self.step = 0
        self.time = 0
        self.events = 0
        self.global_races = GlobalRaces()
        self.printed: list[str] = []
        self.warnings: dict[str, None] = {}  # in the order of their first appearance
        self.cancelled: set[int] = set()
        self.next_cluster = 0
        self.cluster_grid = tuple(g // c for g, c in zip(grid, cluster))
        self.num_clusters = math.prod(self.cluster_grid)

    def notify(self) -> None:
        """Note that something changed that a waiting warp may be waiting for."""
        self.events += 1

    def warn(self, message: str) -> None:
        """Note something doubtful that is no fault; `Result.warnings` has each once."""
        self.warnings[message] = None

    def segment(self, warp: Warp, address: int) -> tuple[Segment, int] | None:
        """Return (segment, offset) of a generic address, or None if nothing lies there."""
        window = address >> WINDOW_SHIFT
        if window == 0:
            found = self.memory.find(address)
            return None if found is None else (found, address - found.base)
        offset = address & ((1 << WINDOW_SHIFT) - 1)
        if window == SHARED_WINDOW >> WINDOW_SHIFT:
            cta = warp.cta.cluster.cta_of(offset)
            return None if cta is None else (cta.shared, offset & RANK_MASK)
        if window == PARAM_WINDOW >> WINDOW_SHIFT:
            return self.parameters, offset
        if window == CONST_WINDOW >> WINDOW_SHIFT and self.constants is not None:
            return self.constants, offset
        return None


class Cluster:
    """CTAs that run together, their barrier and their asynchronous work."""

    def __init__(self, machine: Machine, number: int):
        self.machine = machine
        self.number = number
        gx, gy, _ = machine.cluster_grid
        self.index = (number % gx, number // gx % gy, number // (gx * gy))
        self.shape = machine.cluster_shape
        size = math.prod(self.shape)
        threads = math.prod(machine.block)
        self.warps_per_cta = -(-threads // LANES)
        generic = self.warps_per_cta * size
        slots = ASYNC_SLOTS_PER_CTA * size
        self.agents = generic + slots
        self.notes = AccessNotes(generic, self.agents)
        self.engine = AsyncEngine(machine.options, machine.random, generic, slots)
        self.barrier = ClusterBarrier(self.warps_per_cta * LANES * size, self.agents)
        self.ctas = [Cta(self, rank) for rank in range(size)]
        self.warps = [warp for cta in self.ctas for warp in cta.warps]

    def cta_of(self, shared_address: int) -> "Cta | None":
        """Return the CTA a 32-bit shared address points into."""
        rank = shared_address >> RANK_SHIFT
        return self.ctas[rank] if rank < len(self.ctas) else None

    def on_lanes_exit(self, warp: Warp) -> None:
        """Count lanes that exit as arrived where another part of their warp has arrived."""
        for barrier in (self.barrier, *warp.cta.barriers.values()):
            if barrier.exit_part(warp):
                self.machine.notify()

    def on_warp_exit(self, warp: Warp) -> None:
        """Take an exited warp out of the barriers that count all threads."""
        self.barrier.exit(LANES)
        for barrier in warp.cta.barriers.values():
            barrier.settle(warp.cta.live_warps * LANES)


class Cta:
    """One CTA: shared and tensor memory, barriers, warps."""

    def __init__(self, cluster: Cluster, rank: int):
        machine = cluster.machine
        self.cluster = cluster
        self.rank = rank
        cx, cy, _ = cluster.shape
        self.rank_index = (rank % cx, rank // cx % cy, rank // (cx * cy))
        self.index: Dim = tuple(  # type: ignore[assignment]
            cluster.index[d] * cluster.shape[d] + self.rank_index[d] for d in range(3)
        )
        self.shared = self._make_shared(machine)
        self.shared_base = rank << RANK_SHIFT
        self.tmem = TensorMemory(machine.options.detect_uninitialised)
        if machine.options.detect_races:
            cells = TMEM_LANES // LANES_PER_CELL * TMEM_COLUMNS
            self._tmem_cells = cells
            self.tmem.shadow = TensorShadow(cells, cluster.notes)
        self.barriers: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self.state: dict[Any, Any] = {}
        self.is_exited = False
        # the last access of each warp of another CTA: its time, the warp, the instruction
        self.visits: dict[int, tuple[int, Warp, Any]] = {}
        self.has_seen_decline = False  # of a request to take over a cluster
        self.warps = self._make_warps(machine)

    def mbarrier(self, offset: int, count: int) -> MBarrier:
        """Initialise an mbarrier object at an offset of shared memory."""
        name = f"mbarrier at shared {offset:#x} of CTA {self.index}"
        barrier = self.mbarriers[offset] = MBarrier(name, count, self.cluster.agents)
        return barrier

    def named_barrier(self, number: int) -> NamedBarrier:
        """Return barrier `number` of this CTA."""
        barrier = self.barriers.get(number)
        if barrier is None:
            barrier = self.barriers[number] = NamedBarrier(number, self.cluster.agents)
        return barrier

    def visit(self, warp: Warp, instruction: Any) -> bool:
        """Note an access of a warp to this CTA's memory; return whether the CTA is still there."""
        if warp.cta is not self:
            self.visits[warp.access.agent] = (warp.access.time, warp, instruction)
        return not self.is_exited

    def check_visits(self) -> None:
        """Check, once all of the cluster has exited, that no access might have come after the exit.

        Raises:
            RaceError: no warp of this CTA knew of one when it exited.
        """
        for agent, (time, warp, instruction) in self.visits.items():
            if any(own.access.clock.seen[agent] >= time for own in self.warps):
                continue
            raise RaceError(
                f"race: an access to shared memory of CTA {self.index}, which might have exited",
                warp.where(instruction),
                rule="a cluster barrier, or a wait for the access, must come before the exit",
            )

    @property
    def live_warps(self) -> int:
        """Number of warps that have not exited."""
        return sum(not warp.is_finished for warp in self.warps)

    def special(self, warp: Warp, name: str) -> Array:
        """Return (and cache, where it is constant) 32 lanes of a special register."""
        value, is_constant = special_register(warp, name)
        if is_constant:
            warp.specials[name] = value
        return value

    def _make_shared(self, machine: Machine) -> Segment:
        size = SHARED_RESERVED_BYTES + machine.shared_bytes
        size = -(-size // 16) * 16
        name = f"shared memory of CTA {self.index}"
        data = unwritten_bytes(machine.junk or 0, size)
        shared = Segment(name, "shared", data, 0, SHARED_RESERVED_BYTES)
        if machine.options.detect_uninitialised and machine.junk is None:
            shared.track_initialised()
        if machine.options.detect_races:
            shared.shadow = Shadow(size // 4, self.cluster.notes)
        return shared

    def _make_warps(self, machine: Machine) -> list[Warp]:
        threads = math.prod(machine.block)
        warps: list[Warp] = []
        for index in range(self.cluster.warps_per_cta):
            mask = np.arange(index * LANES, (index + 1) * LANES) < threads
            agent = self.rank * self.cluster.warps_per_cta + index
            warps.append(Warp(self, index, mask, machine.program, agent, self.cluster.agents))
        return warps


class TensorShadow(Shadow):
    """The shadow of tensor memory, made at the first access (most kernels use none).

    It judges by `Access.tensor` where there is one.
    """

    __slots__ = ("_cells", "_is_made")

    def __init__(self, cells: int, notes: AccessNotes):
        self._cells = cells
        self._is_made = False
        self.notes = notes

    def on_read(self, cells: Any, access: Any, byte_mask: Any = 15) -> None:
        self._judge(super().on_read, cells, access, byte_mask)

    def on_write(self, cells: Any, access: Any, byte_mask: Any = 15, changed: Any = None) -> None:
        self._judge(super().on_write, cells, access, byte_mask, changed)

    def place(self, cell: int) -> tuple[int, str]:
        group, column = divmod(cell, TMEM_COLUMNS)
        return group * LANES_PER_CELL << 16 | column, "tensor memory"

    def _judge(self, judge: Callable[..., None], cells: Any, access: Access, *more: Any) -> None:
        self._make()
        if access.tensor is None:
            judge(cells, access, *more)
            return
        try:
            judge(cells, replace(access, clock=access.tensor), *more)
        except RaceError as error:
            judge(cells, access, *more)  # raises if nothing else orders the two either
            rule = (
                "tcgen05.fence::before_thread_sync before and tcgen05.fence::after_thread_sync "
                "after the synchronisation must order the two"
            )
            message = error.message.rpartition("; ")[0] + "; " + rule
            raise RaceError(message, error.where, error.other, rule, error.last_writer) from None

    def _make(self) -> None:
        if not self._is_made:
            super().__init__(self._cells, self.notes)
            self._is_made = True


def special_register(warp: Warp, name: str) -> tuple[Array, bool]:
    """Return (32 lanes, whether they never change) of a special register.

    Raises:
        PtxError: the emulator does not know the register.
    """
    head, _, component = name.partition(".")
    if component == "w":
        return np.zeros(LANES, np.uint32), True
    if component in ("x", "y", "z"):
        value = _vector_register(warp, head, "xyz".index(component))
        if value is not None:
            return value, True
    scalar = _scalar_register(warp, name)
    if scalar is not None:
        return np.full(LANES, scalar, np.uint32), True
    lane = np.arange(LANES, dtype=np.uint32)
    one = np.uint32(1)
    lanes: dict[str, Array] = {
        "%laneid": lane,
        "%lanemask_eq": one << lane,
        "%lanemask_lt": (one << lane) - one,
        "%lanemask_le": ((one << lane) - one) | (one << lane),
        "%lanemask_gt": ~(((one << lane) - one) | (one << lane)),
        "%lanemask_ge": ~((one << lane) - one),
    }
    if name in lanes:
        return lanes[name], True
    if name.startswith(("%clock", "%globaltimer")):
        return _time_register(warp.cta.cluster.machine, name), False
    raise PtxError(f"special register {name} is not implemented")


def _vector_register(warp: Warp, head: str, dimension: int) -> Array | None:
    cta = warp.cta
    machine = cta.cluster.machine
    if head == "%tid":
        nx, ny, _ = machine.block
        tid = np.arange(LANES, dtype=np.uint32) + np.uint32(warp.index * LANES)
        return (tid % nx, tid // nx % ny, tid // (nx * ny))[dimension].astype(np.uint32)
    vectors: dict[str, tuple[int, ...]] = {
        "%ntid": machine.block,
        "%ctaid": cta.index,
        "%nctaid": machine.grid,
        "%clusterid": cta.cluster.index,
        "%nclusterid": machine.cluster_grid,
        "%cluster_ctaid": cta.rank_index,
        "%cluster_nctaid": cta.cluster.shape,
    }
    return np.full(LANES, vectors[head][dimension], np.uint32) if head in vectors else None


def _scalar_register(warp: Warp, name: str) -> int | None:
    cta = warp.cta
    cluster = cta.cluster
    machine = cluster.machine
    size = len(cluster.ctas)
    return {
        "%warpid": warp.index,
        "%nwarpid": 64,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": size,
        "%is_explicit_cluster": int(size > 1),
        "%smid": (cluster.number * size + cta.rank) % machine.options.num_sms,
        "%nsmid": machine.options.num_sms,
        "%gridid": 0,
        "%dynamic_smem_size": machine.program.dynamic_bytes(machine.shared_bytes),
        "%total_smem_size": machine.shared_bytes,
        "%aggr_smem_size": machine.shared_bytes + SHARED_RESERVED_BYTES,
        "%reserved_smem_offset_begin": 0,
        # 0 on an H200; what the library of a kernel keeps there starts at the beginning
        "%reserved_smem_offset_0": 0,
        "%reserved_smem_offset_1": 0,
        "%current_graph_exec": 0,  # no graph runs
        "%reserved_smem_offset_end": SHARED_RESERVED_BYTES,
        "%reserved_smem_offset_cap": SHARED_RESERVED_BYTES,
    }.get(name)


def _time_register(machine: Machine, name: str) -> Array:
    """Return a time that grows with scheduler steps and with every reading."""
    machine.time += 1
    now = machine.step * 16 + machine.time
    if name.endswith("_hi"):
        now >>= 32
    is_wide = name in ("%clock64", "%globaltimer")
    return np.full(LANES, now if is_wide else now & 0xFFFFFFFF, np.uint64 if is_wide else np.uint32)


def check_geometry(grid: Dim, block: Dim, cluster: Dim) -> None:
    """Raise LaunchError unless grid, block and cluster are legal together."""
    for label, dim, limits in (
        ("grid", grid, (2**31 - 1, 65535, 65535)),
        ("block", block, (1024, 1024, 64)),
        ("cluster", cluster, (16, 16, 16)),
    ):
        if any(not 1 <= size <= limit for size, limit in zip(dim, limits)):
            raise LaunchError(
                f"{label}={dim} must lie in 1..{limits} along x, y and z; choose other sizes"
            )
    if math.prod(block) > 1024:
        raise LaunchError(
            f"block={block} has {math.prod(block)} threads (at most 1024); launch more CTAs of "
            "fewer threads"
        )
    if math.prod(cluster) > 16:
        raise LaunchError(
            f"cluster={cluster} has {math.prod(cluster)} CTAs (at most 16); choose a smaller one"
        )
    if any(g % c for g, c in zip(grid, cluster)):
        raise LaunchError(
            f"grid={grid} is not a multiple of cluster={cluster} along each axis (it counts CTAs, "
            "not clusters); round it up"
        )


__all__ = ["Clock", "Cluster", "Cta", "Machine", "check_geometry", "special_register"]
