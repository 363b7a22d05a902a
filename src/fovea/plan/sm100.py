"""Plans for Blackwell (sm_100a, sm_103a): tiles, roles, tensor memory, hand-offs and registers.

Lives here: `ForwardPlan`. Not here: tile shapes (`plan/sm100_tiles.py`), which plan a call gets
(`plan/select.py`), and any device code. Invariant: a plan that exists fits one SM; the kernel reads
every size, column and arrival count from it.
"""

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Literal

from fovea.plan import mod_weight
from fovea.plan.combine import CombinePlan
from fovea.plan.features import ForwardFeatures
from fovea.plan.pipeline import BARRIER_BYTES, Edge
from fovea.plan.roles import WARP_SIZE, WARPS_PER_WARPGROUP, Role, check_roles
from fovea.plan.sequences import SEQUENCE_WORDS
from fovea.plan.sm100_tiles import (
    CHUNK_COLUMNS,
    ELEMENT_BYTES,
    SHARED_ALIGNMENT,
    SHARED_BYTES_PER_CTA,
    STREAM_ROWS,
    STREAMS,
    forward_tile,
    software_columns,
    tensor_regions,
)
from fovea.plan.tensor_memory import TensorRegion, check_regions

TILE_M = STREAMS * STREAM_ROWS
WORK_WORDS_LIMIT = 32  # 32-bit words of an announcement, at most
LAUNCH_RESPONSE_BYTES = 16  # of cluster launch control, also their alignment
WORK_STAGES = 2  # query tiles announced ahead: one being computed, one being loaded

# Registers per thread by role; four warpgroups of 128 on average. A softmax thread holds a whole
# row of S (128) where it looks for the maximum, the epilogue two chunks of O.
_REGISTERS = {"softmax": 200, "epilogue": 80, "issue": 32}
# Where streams share their rows, a chunk of O of each is joined.
_REGISTERS_OF_SHARED_ROWS = {"softmax": 192, "epilogue": 96, "issue": 32}
# Columns of 32 whose exponentials go to the FMA pipe: on sm_100a the exponential unit takes as long
# as the products at head_dim 128 (16 results a clock and SM); sm_103a's is twice as fast.
SOFTWARE_COLUMNS = {"sm100": 6, "sm103": 0}
LOAD_WARP, MMA_WARP = 0, 1  # of the issue role's warps
FIRST_QUERY_WARP, QUERY_WARPS = 2, 2  # the others: idle, or loading Q where heads are packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Barriers on which one role tells another something, a stage each.

    `arrivals` is what completes a phase: a warp of the producer arrives once, and so does a commit
    of the tensor cores.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    arrivals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """A forward kernel for sm_100a as data.

    A CTA has two streams of products, each with 128 rows in tensor memory. A thread of a softmax
    warpgroup owns one row of S and P, an epilogue thread the same row of O.

    With `splits_keys` the streams share 128 query rows and take their KV tiles in turn, where a
    query tile of 256 rows would not do; else each has 128 rows and every KV tile. With
    `splits_columns`, too, they add to one O, which has no room beside another: then a softmax
    warpgroup owns half of each row, in the KV tiles of both streams.

    In a pair of CTAs (`cluster`) a stream has 256 rows, 128 in each CTA, and each CTA holds half of
    every K and V tile, of which the tensor cores of both read. The first one issues the products.

    With `packs_heads`, for few queries, the rows of a tile are (query, head of a group) pairs and
    the keys of a tile may be cut into parts, as many as each launch says, which `combine` merges.
    Two warps load those rows, and each epilogue thread writes its own.
    """

    dtype: Literal["bfloat16", "float16"]
    tile_n: int
    head_dim: int  # columns of the Q and K tiles, the tensors' own head_dim rounded up
    head_dim_v: int
    # A stage holds a tile, or one of the parts that it comes in: K by columns, V by keys.
    k_parts: int
    v_parts: int
    k_stages: int
    v_stages: int
    # Parts of K and V take the stages of one ring in turn, `k_stages` of them, in the order in
    # which the products use them: K of a tile, then V.
    shares_ring: bool
    # Columns of each chunk of S whose exponential is a polynomial; by position alone, so that a
    # row's bits never depend on what kind of tile it meets.
    software_columns: int
    p_parts: tuple[int, ...]  # columns of P handed to the tensor cores at a time
    stages_o: bool  # O leaves through shared memory, else from registers
    cluster: int = 1  # CTAs that multiply together: 2 make a product of 256 rows
    splits_keys: bool = False
    splits_columns: bool = False
    packs_heads: bool = False
    page_box: int = 0  # rows of K that one copy takes from a page; 0: keys are not paged
    # Mods are evaluated in a loop over chunks of S, not all spelled out: what many columns need at
    # a time does not fit in registers.
    loops_over_chunks: bool = False
    features: ForwardFeatures = field(default_factory=ForwardFeatures)

    def __post_init__(self) -> None:
        """Check that the plan fits the machine."""
        assert self.tile_n % CHUNK_COLUMNS == 0 and self.tile_n <= 256, self.tile_n
        assert self.head_dim % (64 * self.k_parts) == 0 and self.head_dim_v % 64 == 0
        assert self.tile_n % (16 * self.v_parts) == 0, self.v_parts
        assert self.k_stages >= self.k_parts and self.v_stages >= self.v_parts
        if self.shares_ring:
            # K of a tile is loaded while V of the one before is still in use.
            assert not self.splits_keys and self.v_stages == self.k_stages >= self.tile_parts
            assert self.k_rows * self.head_dim // self.k_parts == (
                self.tile_n * self.v_columns // self.v_parts
            )
        assert sum(self.p_parts) == self.tile_n, self.p_parts
        assert all(part % CHUNK_COLUMNS == 0 for part in self.p_parts), self.p_parts
        # Both warpgroups may rescale O, so no part of P may be multiplied before all is there.
        assert not self.splits_columns or (self.splits_keys and len(self.p_parts) == 1)
        assert not self.loops_over_chunks or len(self.p_parts) == 1, self.p_parts
        assert self.cluster in (1, 2), self.cluster
        if self.cluster > 1:
            # Its half of V is whole blocks of 64 columns. Block lists belong to 128 rows.
            assert self.head_dim_v % 128 == 0 and not self.features.block_lists
            assert self.splits_columns or not self.splits_keys
        # Rows of a packed sequence end anywhere, and pairs of CTAs are untried with them.
        assert not self.features.varlen or (self.cluster == 1 and not self.stages_o)
        if self.page_box:
            assert self.features.varlen and self.tile_n % self.page_box == 0, self.page_box
        # A block list belongs to one head; packed rows take no box of the copy engine.
        if self.packs_heads:
            assert self.splits_keys and self.cluster == 1 and not self.stages_o
            assert not self.features.block_lists
        assert self.software_columns % 2 == 0 and self.software_columns <= CHUNK_COLUMNS
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, self.shared_bytes
        check_roles(self.roles)
        check_regions(self.tensor_regions)

    @property
    def tile_m(self) -> int:
        """Query rows of one walk through the keys: of the CTA, or of the pair."""
        return self.cta_rows * self.cluster

    @property
    def cta_rows(self) -> int:
        """Query rows of the CTA."""
        return STREAM_ROWS if self.splits_keys else TILE_M

    @property
    def stream_rows(self) -> int:
        """Query rows of a product."""
        return STREAM_ROWS * self.cluster

    @property
    def k_rows(self) -> int:
        """Keys of a K tile that this CTA holds."""
        return self.tile_n // self.cluster

    @property
    def v_columns(self) -> int:
        """Columns of a V tile that this CTA holds."""
        return self.head_dim_v // self.cluster

    @property
    def v_page_box(self) -> int:
        """Rows of V that one copy takes from a page, inside one part of a tile."""
        return gcd(self.page_box, self.tile_n // self.v_parts)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Softmax, a warpgroup a stream; the epilogue; and the warps that issue asynchronous work.

        Tensor memory is split among the warps of a warpgroup by lanes, so those that read it come
        in whole warpgroups.
        """
        registers = _REGISTERS_OF_SHARED_ROWS if self.splits_keys else _REGISTERS
        places = {"softmax": (0, STREAMS), "epilogue": (STREAMS, 1), "issue": (STREAMS + 1, 1)}
        return tuple(
            Role(
                name=name,
                first_warpgroup=first,
                num_warpgroups=count,
                registers=registers[name],
            )
            for name, (first, count) in places.items()
        )

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def q_edge(self) -> Edge:
        """Q, a stage a stream (or, if they share it, a query tile); its last product frees it."""
        # Where rows have more numbers that warps tell each other, shared memory is short.
        stages = 1 if self.joins_maxima or self.splits_columns else STREAMS
        edge = self._tma_edge("q", stages, STREAM_ROWS * self.head_dim)
        return replace(edge, producer_warps=QUERY_WARPS) if self.packs_heads else edge

    @property
    def k_edge(self) -> Edge:
        """K tiles, read by the products of both streams; V tiles, too, if they share the ring."""
        name = "kv" if self.shares_ring else "k"
        return self._tma_edge(name, self.k_stages, self.k_rows * self.head_dim // self.k_parts)

    @property
    def v_edge(self) -> Edge:
        """V tiles, read by the products of both streams."""
        if self.shares_ring:
            return self.k_edge
        return self._tma_edge("v", self.v_stages, self.tile_n * self.v_columns // self.v_parts)

    @property
    def kv_stages(self) -> int:
        """Whole tiles of K and V that shared memory holds."""
        if self.shares_ring:
            return self.k_stages // self.tile_parts
        return min(self.k_stages // self.k_parts, self.v_stages // self.v_parts)

    @property
    def tile_parts(self) -> int:
        """Parts that K and V of a tile come in."""
        return self.k_parts + self.v_parts

    def k_use(self, tile: int, part: int) -> int:
        """Return which use of its ring a part of the tile-th K tile is."""
        return tile * (self.tile_parts if self.shares_ring else self.k_parts) + part

    def v_use(self, tile: int, part: int) -> int:
        """Return which use of its ring a part of the tile-th V tile is: in one of both behind K."""
        if self.shares_ring:
            return self.k_use(tile, self.k_parts + part)
        return tile * self.v_parts + part

    def _tma_edge(self, name: str, stages: int, elements: int) -> Edge:
        # The only consumer is the tensor cores, whose commit arrives once.
        return Edge(
            name=name, stages=stages, consumer_warps=1, stage_bytes=elements * ELEMENT_BYTES
        )

    @property
    def work_edge(self) -> Edge:
        """Announcements of the next query tile, from the load warp to every other working warp."""
        return Edge(
            name="work",
            stages=WORK_STAGES,
            consumer_warps=(STREAMS + 1) * WARPS_PER_WARPGROUP + 1 + QUERY_WARPS * self.packs_heads,
            stage_bytes=0,
        )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Rings in shared memory, in the order of their barriers."""
        kv = (self.k_edge,) if self.shares_ring else (self.k_edge, self.v_edge)
        return (self.q_edge, *kv, self.work_edge)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What the roles tell each other of tensor memory and row statistics.

        In a pair the tensor cores tell both CTAs, and both tell the one that issues products.

        Where each stream has an O, `s_full` also says that all earlier products of its stream are
        done, since a commit covers everything issued before it: O may then be rescaled without a
        barrier of its own. Where they share it, `o_rests` says so.
        """

        def signal(name: str, producer: str, consumer: str, stages: int, warps: int = 4) -> Signal:
            arrivals = 1 if producer == "mma" else warps
            return Signal(
                name=name,
                producer=producer,
                consumer=consumer,
                stages=stages,
                arrivals=arrivals * (self.cluster if consumer == "mma" else 1),
            )

        softmax_warps = WARPS_PER_WARPGROUP * (STREAMS if self.splits_columns else 1)
        signals = (
            signal("s_full", "mma", "softmax", STREAMS),
            signal("p_full", "softmax", "mma", STREAMS * len(self.p_parts), softmax_warps),
            signal("o_full", "mma", "epilogue", self.num_outputs),
            signal("o_empty", "epilogue", "mma", self.num_outputs),
            signal("statistics_full", "softmax", "epilogue", STREAMS),
            signal("statistics_empty", "epilogue", "softmax", STREAMS),
        )
        return (
            (*signals, signal("o_rests", "mma", "softmax", 1)) if self.splits_columns else signals
        )

    @property
    def num_barriers(self) -> int:
        """mbarriers of the kernel; the mailbox of a pair and requests of a launch have one each."""
        rings = sum(edge.num_barriers for edge in self.edges)
        single = (self.cluster > 1) + self.is_dynamic
        return rings + sum(signal.stages for signal in self.signals) + single

    @property
    def tensor_regions(self) -> tuple[TensorRegion, ...]:
        """The map of tensor memory."""
        return tensor_regions(
            self.tile_n, self.softmax_columns, self.head_dim_v, num_outputs=self.num_outputs
        )

    def column(self, region: str, stream: int = 0) -> int:
        """Return the first column of a stream's region: "s", "p" or "o"."""
        name = f"{region}{stream % self.num_outputs if region == 'o' else stream}"
        return next(found.first for found in self.tensor_regions if found.name == name)

    def p_offset(self, key: int) -> int:
        """Return how many columns behind the first of a P its probabilities from a key on lie."""
        half, rest = divmod(key, self.softmax_columns)
        return half * self.softmax_columns + rest * ELEMENT_BYTES // 4

    def stride(self, region: str) -> int:
        """Return how many columns lie between the regions of two streams."""
        return self.column(region, 1) - self.column(region, 0)

    @property
    def num_outputs(self) -> int:
        """O in tensor memory: one for each stream, or one for both."""
        return 1 if self.splits_columns else STREAMS

    @property
    def softmax_columns(self) -> int:
        """Columns of a row of S that one thread exponentiates."""
        return self.tile_n // STREAMS if self.splits_columns else self.tile_n

    @property
    def joins_maxima(self) -> bool:
        """True where the epilogue writes a row's maximum: the larger one of two streams, or a part.

        Elsewhere a softmax thread knows it alone.
        """
        has_parts = self.packs_heads or not self.splits_columns
        return self.splits_keys and has_parts and self.features.max_score

    @property
    def statistics(self) -> int:
        """Numbers of a row that the softmax hands to the epilogue: sum, reference, maximum."""
        return 3 if self.joins_maxima else 2

    @property
    def control_bytes(self) -> int:
        """Shared memory of barriers, announcements, row statistics, flags and one address."""
        return (
            self.num_barriers * BARRIER_BYTES
            + WORK_STAGES * WORK_WORDS_LIMIT * 4
            + self.statistics * TILE_M * 4
            + STREAMS
            * TILE_M
            * 4
            * self.splits_columns  # maxima that two threads of a row exchange
            + WORK_STAGES * self.flag_words * 4
            + 16  # where the allocator of tensor memory writes
            + 16 * (self.cluster > 1)  # the mailbox, aligned
            + 2 * LAUNCH_RESPONSE_BYTES * self.is_dynamic  # one, aligned
            + WORK_STAGES * SEQUENCE_WORDS * 4 * self.features.varlen
        )

    @property
    def flag_words(self) -> int:
        """Words in which a bit says of each row of the CTA whether to redo it."""
        return self.cta_rows // WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the CTA: the control region, then Q, K, V and O, each aligned."""
        control = -(-self.control_bytes // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        return control + self.o_bytes + sum(edge.stages * edge.stage_bytes for edge in self.edges)

    @property
    def o_bytes(self) -> int:
        """Shared memory in which the epilogue stages 128 rows of output."""
        return STREAM_ROWS * self.head_dim_v * ELEMENT_BYTES * self.stages_o

    @property
    def is_optimistic(self) -> bool:
        """True where a row keeps its first maximum as its reference; see `sm90.ForwardPlan`."""
        return self.dtype == "bfloat16" and not (self.features.max_score or self.packs_heads)

    @property
    def combine(self) -> CombinePlan | None:
        """The plan of the kernel that merges parts of the keys; None where there are none."""
        if not self.packs_heads:
            return None
        return CombinePlan(
            dtype=self.dtype,
            head_dim_v=self.head_dim_v,
            sink=self.features.sink,
            max_score=self.features.max_score,
            has_idle_rows=self.features.varlen,
        )

    @property
    def passes_uses(self) -> bool:
        """True where a CTA passes over uses of the rings; no cluster, no need."""
        return False

    @property
    def is_banded(self) -> bool:
        """True where tiles beside a query tile's first may hold hidden positions."""
        return self.features.limit_left or self.features.limit_right or self.features.block_lists

    @property
    def is_dynamic(self) -> bool:
        """True where tiles differ in work, and a CTA (or pair) is launched for each.

        Running ones take over what has not started, by cluster launch control. Elsewhere as many as
        the SMs hold take every so-manieth tile: few queries see about the same keys.
        """
        return (self.is_banded and not self.packs_heads) or self.features.varlen

    @property
    def needs_counter(self) -> bool:
        """False: no launch needs a zeroed counter in global memory."""
        return False

    @property
    def name(self) -> str:
        """Kernel name, also in profiles: no two variants have the same."""
        return f"{self.family}{self.features.tag}"

    @property
    def family(self) -> str:
        """What the name says of shapes and tiles; variants share it."""
        kind = "bf16" if self.dtype == "bfloat16" else "f16"
        return (
            f"fovea_sm100_forward_{kind}_d{self.head_dim}x{self.head_dim_v}"
            f"_m{self.tile_m}n{self.tile_n}e{self.software_columns}"
            f"{'_pair' if self.cluster > 1 else ''}{'_packed' if self.packs_heads else ''}"
            f"{f'_pages{self.page_box}' if self.page_box else ''}"
        )

    def key_text(self) -> str:
        """Return the canonical text of plan and features."""
        return (
            f"sm100 forward {self.dtype} tile {self.tile_m}x{self.tile_n} head_dim {self.head_dim} "
            f"head_dim_v {self.head_dim_v} stages {self.k_stages} {self.v_stages} "
            f"shares_ring {self.shares_ring} parts {self.k_parts} {self.v_parts} {self.p_parts} "
            f"stages_o {self.stages_o} software_columns {self.software_columns} "
            f"splits_keys {self.splits_keys} splits_columns {self.splits_columns} "
            f"cluster {self.cluster} packs_heads {self.packs_heads} "
            f"page_box {self.page_box} loops_over_chunks {self.loops_over_chunks}\n"
            f"{self.features.key_text()}"
        )


def make_forward_plan(
    dtype: Literal["bfloat16", "float16"],
    head_dims: tuple[int, int],
    features: ForwardFeatures,
    *,
    arch: Literal["sm100", "sm103"],
    splits_keys: bool = False,
    packs_heads: bool = False,
    is_pair: bool = False,
    page_size: int | None = None,
) -> ForwardPlan:
    """Return the plan of a variant; `head_dims` are (head_dim, head_dim_v), already rounded up.

    One copy takes from a page the rows that both a page and a tile divide into.
    """
    cluster = 2 if is_pair else 1
    shape = forward_tile(
        head_dims,
        splits_keys=splits_keys,
        joins_maxima=splits_keys and features.max_score,
        writes_rows=packs_heads or features.varlen,
        cluster=cluster,
    )
    # A soft cap, two functions in one, finds no registers beside 128 scores, either.
    loops_over_chunks = mod_weight.fill_registers(features) or features.softcap
    num_software = software_columns(head_dims, SOFTWARE_COLUMNS[arch])
    if loops_over_chunks:
        shape = shape._replace(p_parts=(shape.tile_n,))  # P is told once
    if loops_over_chunks or features.explicit_scale:
        num_software = 0  # scores keep the FMA pipe and the registers busy enough
    return ForwardPlan(
        dtype=dtype,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        software_columns=num_software,
        splits_keys=splits_keys or shape.splits_columns,
        packs_heads=packs_heads,
        page_box=0 if page_size is None else gcd(page_size, shape.tile_n),
        loops_over_chunks=loops_over_chunks,
        cluster=cluster,
        features=features,
        **shape._asdict(),
    )
