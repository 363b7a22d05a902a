"""Plans for Blackwell (sm_100a, sm_103a): tiles, roles, tensor memory, hand-offs and registers.

Lives here: `ForwardPlan` and its table of shapes. Not here: which plan a call gets
(`plan/select.py`), and any device code. Invariant: a plan that exists fits one SM; the kernel reads
every size, column and arrival count from it.
"""

import itertools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fovea.plan.features import ForwardFeatures
from fovea.plan.pipeline import BARRIER_BYTES, Edge
from fovea.plan.roles import Role, check_roles

SHARED_BYTES_PER_CTA = 232448  # 227 KiB, the opt-in limit of compute capability 10.0
SHARED_ALIGNMENT = 1024  # a 128-byte swizzle atom spans 8 rows of 128 bytes
TENSOR_COLUMNS = 512  # 32-bit columns of tensor memory, all taken: one CTA an SM
STREAMS = 2  # products in ping-pong: while one stream exponentiates, the other multiplies
STREAM_ROWS = 128  # rows of a product, lanes of tensor memory, threads of a warpgroup
TILE_M = STREAMS * STREAM_ROWS
WARPS_PER_WARPGROUP = 4
ELEMENT_BYTES = 2
CHUNK_COLUMNS = 32  # columns of S that a thread holds at a time
WORK_WORDS_LIMIT = 32  # 32-bit words of an announcement, at most
WORK_STAGES = 2  # query tiles announced ahead: one being computed, one being loaded

# Registers per thread by role; four warpgroups of 128 on average. A softmax thread holds a whole
# row of S (128) where it looks for the maximum, the epilogue two chunks of O.
_REGISTERS = {"softmax": 192, "epilogue": 80, "issue": 48}
# Where streams share their rows, a chunk of O of each is joined.
_REGISTERS_OF_SHARED_ROWS = {"softmax": 184, "epilogue": 96, "issue": 48}
# Columns of 32 whose exponentials go to the FMA pipe: on sm_100a the exponential unit takes as long
# as the products at head_dim 128 (16 results a clock and SM); sm_103a's is twice as fast.
SOFTWARE_COLUMNS = {"sm100": 4, "sm103": 0}
LOAD_WARP, MMA_WARP = 0, 1  # of the issue role's warps; two are idle


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
class TensorRegion:
    """Columns of tensor memory; with `aliases` they are part of another region, by intent."""

    name: str
    first: int
    columns: int
    aliases: str = ""

    @property
    def end(self) -> int:
        """The column past the last."""
        return self.first + self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """A forward kernel for sm_100a as data.

    A CTA has two streams of products, each with 128 rows in tensor memory. A thread of a softmax
    warpgroup owns one row of S and P, an epilogue thread the same row of O.
    """

    dtype: Literal["bfloat16", "float16"]
    tile_n: int
    head_dim: int  # columns of the Q and K tiles, the tensors' own head_dim rounded up
    head_dim_v: int
    kv_stages: int
    # Columns of each chunk of S whose exponential is a polynomial; by position alone, so that a
    # row's bits never depend on what kind of tile it meets.
    software_columns: int
    p_parts: tuple[int, ...]  # columns of P handed to the tensor cores at a time
    # The streams share 128 query rows and take their KV tiles in turn, where a query tile of 256
    # rows would not do; else each has 128 rows and every KV tile.
    splits_keys: bool = False
    features: ForwardFeatures = field(default_factory=ForwardFeatures)

    def __post_init__(self) -> None:
        """Check that the plan fits the machine."""
        assert self.tile_n % CHUNK_COLUMNS == 0 and self.tile_n <= 256, self.tile_n
        assert self.head_dim % 64 == 0 and self.head_dim_v % 64 == 0
        assert sum(self.p_parts) == self.tile_n, self.p_parts
        assert all(part % CHUNK_COLUMNS == 0 for part in self.p_parts), self.p_parts
        assert self.software_columns % 2 == 0 and self.software_columns <= CHUNK_COLUMNS
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, self.shared_bytes
        check_roles(self.roles)
        check_regions(self.tensor_regions)

    @property
    def tile_m(self) -> int:
        """Query rows of the CTA."""
        return STREAM_ROWS if self.splits_keys else TILE_M

    @property
    def roles(self) -> tuple[Role, ...]:
        """Softmax, a warpgroup a stream; the epilogue; and the warps that issue asynchronous work.

        Tensor memory is split among the warps of a warpgroup by lanes, so those that read it come
        in whole warpgroups.
        """
        registers = _REGISTERS_OF_SHARED_ROWS if self.splits_keys else _REGISTERS
        return (
            Role(
                name="softmax",
                first_warpgroup=0,
                num_warpgroups=STREAMS,
                registers=registers["softmax"],
            ),
            Role(
                name="epilogue",
                first_warpgroup=STREAMS,
                num_warpgroups=1,
                registers=registers["epilogue"],
            ),
            Role(
                name="issue",
                first_warpgroup=STREAMS + 1,
                num_warpgroups=1,
                registers=registers["issue"],
            ),
        )

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def q_edge(self) -> Edge:
        """Q, a stage a stream (or, if they share it, a query tile); its last product frees it."""
        # Where the streams' maxima have to meet in the epilogue, shared memory is short.
        stages = 1 if self.joins_maxima else STREAMS
        return self._tma_edge("q", stages, STREAM_ROWS * self.head_dim)

    @property
    def k_edge(self) -> Edge:
        """K tiles, read by the products of both streams."""
        return self._tma_edge("k", self.kv_stages, self.tile_n * self.head_dim)

    @property
    def v_edge(self) -> Edge:
        """V tiles, read by the products of both streams."""
        return self._tma_edge("v", self.kv_stages, self.tile_n * self.head_dim_v)

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
            consumer_warps=(STREAMS + 1) * WARPS_PER_WARPGROUP + 1,
            stage_bytes=0,
        )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Rings in shared memory, in the order of their barriers."""
        return (self.q_edge, self.k_edge, self.v_edge, self.work_edge)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What the roles tell each other of tensor memory and row statistics.

        `s_full` also says that all earlier products of its stream are done, since a commit covers
        everything issued before it: O may then be rescaled without a barrier of its own.
        """

        def signal(name: str, producer: str, consumer: str, parts: int = 1) -> Signal:
            arrivals = 1 if producer == "mma" else WARPS_PER_WARPGROUP
            return Signal(
                name=name,
                producer=producer,
                consumer=consumer,
                stages=STREAMS * parts,
                arrivals=arrivals,
            )

        return (
            signal("s_full", "mma", "softmax"),
            signal("p_full", "softmax", "mma", len(self.p_parts)),
            signal("o_full", "mma", "epilogue"),
            signal("o_empty", "epilogue", "mma"),
            signal("statistics_full", "softmax", "epilogue"),
            signal("statistics_empty", "epilogue", "softmax"),
        )

    @property
    def num_barriers(self) -> int:
        """mbarriers of the kernel."""
        return sum(edge.num_barriers for edge in self.edges) + sum(
            signal.stages for signal in self.signals
        )

    @property
    def tensor_regions(self) -> tuple[TensorRegion, ...]:
        """The map of tensor memory.

        P takes the lower half of its S: a thread that has read a chunk of S may write P of that
        chunk, which lies in columns already read.
        """
        p_columns = self.tile_n * ELEMENT_BYTES // 4
        first_o = STREAMS * self.tile_n
        regions: list[TensorRegion] = []
        for stream in range(STREAMS):
            first_s = stream * self.tile_n
            regions += [
                TensorRegion(name=f"s{stream}", first=first_s, columns=self.tile_n),
                TensorRegion(
                    name=f"p{stream}", first=first_s, columns=p_columns, aliases=f"s{stream}"
                ),
                TensorRegion(
                    name=f"o{stream}",
                    first=first_o + stream * self.head_dim_v,
                    columns=self.head_dim_v,
                ),
            ]
        return tuple(regions)

    def column(self, region: str, stream: int = 0) -> int:
        """Return the first column of a stream's region: "s", "p" or "o"."""
        name = f"{region}{stream}"
        return next(found.first for found in self.tensor_regions if found.name == name)

    def stride(self, region: str) -> int:
        """Return how many columns lie between the regions of two streams."""
        return self.column(region, 1) - self.column(region, 0)

    @property
    def joins_maxima(self) -> bool:
        """True where a row's maximum is the larger one of two streams."""
        return self.splits_keys and self.features.max_score

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
            + WORK_STAGES * self.tile_m  # one flag per row: redo it
            + 16  # where the allocator of tensor memory writes
        )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the CTA: the control region, then Q, K, V and O, each aligned."""
        control = -(-self.control_bytes // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        return control + self.o_bytes + sum(edge.stages * edge.stage_bytes for edge in self.edges)

    @property
    def o_bytes(self) -> int:
        """Shared memory in which the epilogue stages one stream's output."""
        return STREAM_ROWS * self.head_dim_v * ELEMENT_BYTES

    @property
    def is_optimistic(self) -> bool:
        """True where a row keeps its first maximum as its reference; see `sm90.ForwardPlan`."""
        return self.dtype == "bfloat16" and not self.features.max_score

    @property
    def cluster(self) -> int:
        """CTAs that share what they load."""
        return 1

    @property
    def packs_heads(self) -> bool:
        """True where rows are (query, head of a group) pairs: not on this architecture yet."""
        return False

    @property
    def combine(self) -> None:
        """The plan of a merge of parts of the keys: without parts there is none."""
        return

    @property
    def passes_uses(self) -> bool:
        """True where a CTA passes over uses of the rings; no cluster, no need."""
        return False

    @property
    def is_dynamic(self) -> bool:
        """True where CTAs draw query tiles from a counter, since tiles differ in work."""
        features = self.features
        return features.limit_left or features.limit_right or features.block_lists

    @property
    def name(self) -> str:
        """Kernel name, also in profiles."""
        kind = "bf16" if self.dtype == "bfloat16" else "f16"
        return (
            f"fovea_sm100_forward_{kind}_d{self.head_dim}x{self.head_dim_v}"
            f"_m{self.tile_m}n{self.tile_n}e{self.software_columns}"
        )

    def key_text(self) -> str:
        """Return the canonical text of plan and features."""
        return (
            f"sm100 forward {self.dtype} tile {self.tile_m}x{self.tile_n} head_dim {self.head_dim} "
            f"head_dim_v {self.head_dim_v} kv_stages {self.kv_stages} "
            f"software_columns {self.software_columns} p_parts {self.p_parts} "
            f"splits_keys {self.splits_keys}\n"
            f"{self.features.key_text()}"
        )


def check_regions(regions: tuple[TensorRegion, ...]) -> None:
    """Check that regions of tensor memory lie inside it, and overlap only where they say so.

    Raises:
        AssertionError: they do not.
    """
    named = {region.name: region for region in regions}
    for region in regions:
        assert region.first >= 0 and region.end <= TENSOR_COLUMNS, region
        if region.aliases:
            whole = named[region.aliases]
            assert whole.first <= region.first and region.end <= whole.end, region
    own = sorted((r for r in regions if not r.aliases), key=lambda region: region.first)
    for before, after in itertools.pairwise(own):
        assert before.end <= after.first, (before, after)


class TileShape(NamedTuple):
    """Tile sizes and stages of a plan."""

    tile_n: int
    kv_stages: int
    p_parts: tuple[int, ...]


# By head dimension: as many stages as shared memory holds. The last part of P is one chunk: what
# the tensor cores still have to do once the softmax is through with a tile.
_SHAPES = {
    64: TileShape(128, 5, (96, 32)),
    128: TileShape(128, 2, (96, 32)),
}
TILE_HEAD_DIMS = tuple(_SHAPES)


def forward_tile(head_dim: int) -> TileShape:
    """Return the tile shape of a head dimension already rounded up."""
    return _SHAPES[head_dim]


def make_forward_plan(
    dtype: Literal["bfloat16", "float16"],
    head_dim: int,
    features: ForwardFeatures,
    *,
    software_columns: int,
    splits_keys: bool = False,
) -> ForwardPlan:
    """Return the plan of a variant."""
    return ForwardPlan(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        software_columns=software_columns,
        splits_keys=splits_keys,
        features=features,
        **forward_tile(head_dim)._asdict(),
    )
