"""Plans for Hopper (sm_90a): tile shapes, shared memory, roles and registers of each kernel.

Lives here: `ForwardPlan`. Not here: tile shapes (`sm90_tiles.py`), which plan a call gets
(`select.py`), and any device code. Invariant: a plan that exists fits one SM; the kernel reads
every size from it.
"""

from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from fovea.plan.combine import CombinePlan
from fovea.plan.features import ForwardFeatures
from fovea.plan.pipeline import BARRIER_BYTES, Edge
from fovea.plan.roles import WARPGROUP_THREADS, WARPS_PER_WARPGROUP, Role, check_roles
from fovea.plan.sequences import SEQUENCE_WORDS
from fovea.plan.sm90_tiles import (
    ELEMENT_BYTES,
    SHARED_ALIGNMENT,
    SHARED_BYTES_PER_CTA,
    WARPGROUP_ROWS,
    WIDEST_SLICE,
    Length,
    TileShape,
    forward_tile,
    packed_tile,
    v_slices_of,
)

# Registers per thread of (producer, consumers) by number of consumer warpgroups: what a CTA gets at
# launch, moved from the producer, whose TMA loop needs few, to the consumers.
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160), 4: (32, 112)}
# Walking block lists takes the producer more registers than a plain range, and so do slices of V;
# with packed sequences and block lists the consumers need them more.
_REGISTERS_MORE_LOADS = {1: (56, 256), 2: (40, 232), 3: (56, 152)}
WORK_WORDS_LIMIT = 32  # 32-bit words of an announcement, at most
WORK_STAGES = 2  # query tiles announced ahead: one being computed, one being loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """A forward kernel for sm_90a as data.

    Each consumer warpgroup owns 64 query rows of the CTA's tile and reads every K and V stage; a
    producer warp fills Q, K and V through the copy engine.

    With `packs_heads`, for few queries, the rows of a tile are (query, head of a group) pairs and
    the keys of a tile may be cut into parts, as many as each launch says, which `combine` merges.
    The consumers then load their own rows.

    With several `v_slices` a query tile of one head is as many tiles, each of which makes all
    scores and the output of its own columns of V.
    """

    dtype: Literal["bfloat16", "float16"]
    tile_m: int
    tile_n: int
    head_dim: int  # columns of the Q and K tiles, the tensors' own head_dim rounded up
    head_dim_v: int  # columns of the V and O tiles: of one slice
    kv_stages: int
    q_buffers: int  # query tiles in shared memory: with 2, the next one is there when one ends
    cluster: int = 1  # CTAs that read K and V from the L2 cache together, on query tiles in a row
    skips_idle: bool = False  # a warpgroup whose rows lie past the queries skips the walk
    spare_q: bool = False  # room for Q of one more warpgroup: who is done first finds its next one
    packs_heads: bool = False
    page_box: int = 0  # rows of K and V that one copy takes from a page; 0: keys are not paged
    v_slices: int = 1  # a warpgroup has registers for 256 columns of O
    features: ForwardFeatures = field(default_factory=ForwardFeatures)

    def __post_init__(self) -> None:
        """Check that the plan fits the machine."""
        assert self.tile_m % WARPGROUP_ROWS == 0, self.tile_m
        assert self.tile_n % 16 == 0 and self.tile_n <= 256, self.tile_n
        assert self.cluster in (1, 2), self.cluster
        assert self.head_dim % 16 == 0 and self.head_dim_v % 16 == 0
        assert self.head_dim_v == self.head_dim or not self.packs_heads
        assert self.head_dim_v <= WIDEST_SLICE, self.head_dim_v
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, self.shared_bytes
        # A block list belongs to one head, and packed rows are loaded by the warps that read them.
        if self.packs_heads:
            assert not (self.features.block_lists or self.looks_ahead or self.cluster > 1)
            assert self.v_slices == 1, "parts of the keys and slices of V share one number"
        has_map = self.features.block_lists or self.features.key_ranges
        assert self.cluster == 1 or not has_map, "two CTAs share one range of keys"
        if self.skips_hidden and self.looks_ahead and not self.ends_first:
            # K of the next query tile comes behind the V tiles that a warpgroup skips, while it
            # still holds its last one.
            skipped = -(-(self.tile_m - WARPGROUP_ROWS) // self.tile_n)
            assert self.kv_stages > skipped, (self.kv_stages, skipped)
        if self.spare_q:
            # The last Q of a query tile waits until the first warpgroup has done its first softmax,
            # which therefore has to be on one of the first two K.
            assert self.q_buffers == 1 and self.num_consumers == 2, self.q_buffers
            assert self.tile_n >= WARPGROUP_ROWS, self.tile_n
            assert not (self.skips_far or self.passes_uses), "a first softmax far down the ring"
        check_roles(self.roles, self.register_threads)

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup first, then the consumers."""
        is_listed = self.features.block_lists and not self.features.varlen
        table = _REGISTERS_MORE_LOADS if is_listed or self.v_slices > 1 else _REGISTERS
        producer, consumer = table[self.num_consumers]
        return (
            Role(name="load", first_warpgroup=0, num_warpgroups=1, registers=producer),
            Role(
                name="compute",
                first_warpgroup=1,
                num_warpgroups=self.num_consumers,
                registers=consumer,
            ),
        )

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def register_threads(self) -> int:
        """Threads among which a launch divides the registers of an SM.

        With few queries one warpgroup more than the CTA has: what it would get is room for CTAs of
        the merge, which then come up beside those whose parts they merge.
        """
        return self.threads + WARPGROUP_THREADS * self.packs_heads

    @property
    def q_edge(self) -> Edge:
        """Q of one consumer warpgroup; the same shared memory stages O on its way out."""
        return Edge(
            name="q",
            stages=self.num_consumers * self.q_buffers + self.spare_q,
            consumer_warps=1,  # the warp that stored O frees the memory for the next tile
            stage_bytes=WARPGROUP_ROWS * self.head_dim * ELEMENT_BYTES,
        )

    @property
    def q_stage_elements(self) -> int:
        """Elements of shared memory from one Q stage to the next, where O is staged too."""
        return WARPGROUP_ROWS * max(self.head_dim, self.head_dim_v)

    @property
    def k_edge(self) -> Edge:
        """K tiles, read by every consumer."""
        return self._kv_edge("k", self.head_dim)

    @property
    def v_edge(self) -> Edge:
        """V tiles, read by every consumer."""
        return self._kv_edge("v", self.head_dim_v)

    def _kv_edge(self, name: str, columns: int) -> Edge:
        return Edge(
            name=name,
            stages=self.kv_stages,
            consumer_warps=self.num_consumers * WARPS_PER_WARPGROUP,
            stage_bytes=self.tile_n * columns * ELEMENT_BYTES,
            ctas=self.cluster,
        )

    @property
    def work_edge(self) -> Edge:
        """Announcements of the next query tile, from the load role to every consumer warp."""
        return Edge(
            name="work",
            stages=WORK_STAGES,
            consumer_warps=self.num_consumers * WARPS_PER_WARPGROUP,
            stage_bytes=0,
        )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All pipeline edges, in the order of their barriers in shared memory."""
        return (self.q_edge, self.k_edge, self.v_edge, self.work_edge)

    @property
    def num_barriers(self) -> int:
        """mbarriers of the kernel: those of the edges, and that of a cluster's mailbox."""
        return sum(edge.num_barriers for edge in self.edges) + (self.cluster > 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the CTA: the control region, then Q, K and V, each aligned."""
        control = (
            self.num_barriers * BARRIER_BYTES
            + WORK_STAGES * WORK_WORDS_LIMIT * 4
            + self.kv_stages * 8  # which tile a K stage holds, and which partial block
            + WORK_STAGES * self.tile_m  # one flag per row: redo it
            + 16 * (self.cluster > 1)  # the mailbox, aligned
            + WORK_STAGES * SEQUENCE_WORDS * 4 * self.features.varlen
            + WORK_STAGES * self.num_consumers * 16 * self.features.key_ranges
        )
        kv_bytes = self.kv_stages * (self.k_edge.stage_bytes + self.v_edge.stage_bytes)
        q_bytes = self.q_edge.stages * self.q_stage_elements * ELEMENT_BYTES
        return -(-control // SHARED_ALIGNMENT) * SHARED_ALIGNMENT + q_bytes + kv_bytes

    @property
    def is_pingpong(self) -> bool:
        """True where consumers take turns: one multiplies while another exponentiates.

        With limits their walks differ in length, and each does better to run on as far as the ring
        lets it, so that one multiplies while another is at the ends of a query tile; but where the
        softmax takes as long as the products (no optimistic reference, a soft cap) turns win.
        """
        runs_free = self.is_banded and self.is_optimistic and not self.features.softcap
        return self.num_consumers > 1 and not runs_free

    @property
    def looks_ahead(self) -> bool:
        """True where the next query tile's first product overlaps the end of the one before.

        Its Q has to be in shared memory while the tile before stages its output.
        """
        return self.q_buffers > 1

    @property
    def frees_q_late(self) -> bool:
        """True where nobody waits yet for the memory of Q when O has been staged there."""
        return self.q_buffers > 1 or self.spare_q

    @property
    def skips_hidden(self) -> bool:
        """True where a warpgroup skips KV tiles of the CTA's walk that hold no key for its rows."""
        features = self.features
        has_limits = features.limit_left or features.limit_right
        has_band = has_limits or features.key_ranges or self.skips_idle
        is_plain = not (features.block_lists or self.packs_heads)
        return has_band and is_plain and self.num_consumers > 1

    @property
    def skips_far(self) -> bool:
        """True where the tiles that a warpgroup skips in a row may be more than the ring holds."""
        return self.skips_hidden and (self.features.key_ranges or self.skips_idle)

    @property
    def ends_first(self) -> bool:
        """True where V of a walk's last visit is given back before the next tile's K is waited for.

        That K may lie behind many uses of the rings.
        """
        return self.passes_uses or self.skips_far

    @property
    def passes_uses(self) -> bool:
        """True where a CTA passes over uses of the rings that the other of its cluster needs alone.

        Its consumers count their own fills, and V of the last visit is given back first
        (`ends_first`).
        """
        return self.cluster > 1 and self.is_dynamic

    @property
    def is_optimistic(self) -> bool:
        """True where plain tiles keep a row's first maximum as its reference.

        P and O in bfloat16 and fp32 have eight exponent bits, so the reference may lag by tens of
        powers of two before anything overflows; a row that does is redone with the running
        maximum. float16 has five, and raises it on the way (`settles_sums`). `max_score` needs the
        exact maximum. Few queries wait for memory, not for the softmax, and parts of a row's keys
        would be redone one by one.
        """
        return not (self.features.max_score or self.packs_heads)

    @property
    def settles_sums(self) -> bool:
        """True where a tile's sums say whether the reference of a row has to be raised."""
        return self.is_optimistic and self.dtype == "float16"

    @property
    def caps_by_polynomial(self) -> bool:
        """True where plain steps take a soft cap for small scores and leave others to a redo."""
        features = self.features
        return features.softcap and features.score_mod is None and self.is_optimistic

    @property
    def is_banded(self) -> bool:
        """True where tiles beside a query tile's first may hold hidden positions."""
        features = self.features
        has_limits = features.limit_left or features.limit_right
        return has_limits or features.block_lists or features.key_ranges

    @property
    def masks_later_tiles(self) -> bool:
        """True where cut tiles beside a query tile's first are worth a step of their own.

        The rows of a warpgroup lie on one tile of a causal diagonal that starts at a tile's edge,
        as it does where queries and keys are equally many: the rare second one is left to the step
        that fits every tile, and the kernel is a fifth shorter.
        """
        if not (self.is_optimistic and self.is_banded):
            return False
        features = self.features
        is_diagonal = not (features.limit_left or features.block_lists or features.key_ranges)
        return not is_diagonal or self.tile_n % WARPGROUP_ROWS != 0

    @property
    def is_dynamic(self) -> bool:
        """True where CTAs draw query tiles from a counter, since tiles differ in work.

        Few queries see about the same keys, and a counter would have to be zeroed before; the table
        of packed sequences has one.
        """
        return (self.is_banded and not self.packs_heads) or self.features.varlen

    @property
    def needs_counter(self) -> bool:
        """True where a launch needs a zeroed counter; the table of packed sequences has its own."""
        return self.is_dynamic and not self.features.varlen

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
    def name(self) -> str:
        """Kernel name, also in profiles: no two variants have the same."""
        return f"{self.family}{self.features.tag}"

    @property
    def family(self) -> str:
        """What the name says of shapes and tiles; variants share it."""
        kind = "bf16" if self.dtype == "bfloat16" else "f16"
        return (
            f"fovea_sm90_forward_{kind}_d{self.head_dim}x{self.head_dim_v * self.v_slices}"
            f"_m{self.tile_m}n{self.tile_n}"
            f"q{self.q_buffers}{'s' if self.spare_q else ''}c{self.cluster}"
            f"{'_idle' if self.skips_idle else ''}{'_packed' if self.packs_heads else ''}"
            f"{f'_pages{self.page_box}' if self.page_box else ''}"
        )

    def key_text(self) -> str:
        """Return the canonical text of plan and features."""
        return (
            f"sm90 forward {self.dtype} tile {self.tile_m}x{self.tile_n} head_dim {self.head_dim} "
            f"head_dim_v {self.head_dim_v} kv_stages {self.kv_stages} "
            f"q_buffers {self.q_buffers} cluster {self.cluster} packs_heads {self.packs_heads} "
            f"page_box {self.page_box} skips_idle {self.skips_idle} spare_q {self.spare_q}"
            f"{f' v_slices {self.v_slices}' if self.v_slices > 1 else ''}\n"
            f"{self.features.key_text()}"
        )


def make_packed_plan(
    dtype: Literal["bfloat16", "float16"],
    head_dim: int,
    features: ForwardFeatures,
    *,
    page_size: int | None = None,
) -> ForwardPlan:
    """Return the plan of a variant for few queries."""
    shape = packed_tile(head_dim, features)
    return ForwardPlan(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        packs_heads=True,
        features=features,
        page_box=_page_box(page_size, shape),
        **shape._asdict(),
    )


def make_forward_plan(
    dtype: Literal["bfloat16", "float16"],
    head_dims: tuple[int, int],
    features: ForwardFeatures,
    *,
    length: Length,
    page_size: int | None = None,
) -> ForwardPlan:
    """Return the plan of a variant for many queries.

    `head_dims` are columns of tiles, of all slices of V together.
    """
    shape = forward_tile(head_dims, features, length=length)
    if features.varlen:
        # Pages have no halves to share, and packed sequences are untried in pairs. What a spare Q
        # needs to know does not fit the registers of those who read pages.
        shape = shape._replace(cluster=1, skips_idle=False, spare_q=False)
    v_slices = v_slices_of(head_dims[1])
    return ForwardPlan(
        dtype=dtype,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1] // v_slices,
        v_slices=v_slices,
        features=features,
        page_box=_page_box(page_size, shape),
        **shape._asdict(),
    )


def _page_box(page_size: int | None, shape: TileShape) -> int:
    """Return the rows that one copy takes from a page: those both a page and a tile divide into."""
    return 0 if page_size is None else gcd(page_size, shape.tile_n)
