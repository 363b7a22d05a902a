"""In what order tiles run: longest first, and heads in groups whose K and V fit the L2 cache.

Lives here: the map from a launch index to (tile, head, batch) as pure integer functions. Not here:
which tiles exist (`bounds.py`) and the device twin (`kernels/device/scheduler.py`). Invariant: the
map is a bijection from `range(order.total)`; it holds for Python ints and int64 tensors alike, and
`total` may pass 2**31, so the device computes in 64 bits where `needs_int64` says so.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fovea.errors import invalid
from fovea.tiling.bounds import Band, Integer, ceil_div, smaller


class TilePlace(NamedTuple):
    """One tile of work: query tile (KV tile in the backward), query head, sequence."""

    tile: Integer
    head: Integer
    batch: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOrder:
    """An order of `num_tiles * heads * batch` tiles.

    Heads of all sequences are numbered in a row, `batch * heads + head`, and cut into sections of
    `section` heads (the last may be shorter). Sections run one after the other; inside one, tiles
    run from the longest to the shortest, all heads of the section at each tile. So the tail of
    each section is made of short tiles, and the heads in flight share their K and V in L2.
    """

    num_tiles: int
    heads: int
    batch: int
    section: int
    is_longest_last: bool

    def __post_init__(self) -> None:
        if self.num_tiles < 0 or self.heads < 0 or self.batch < 0 or self.section < 1:
            raise ValueError(
                invalid(
                    "TileOrder",
                    (self.num_tiles, self.heads, self.batch, self.section),
                    "counts of at least 0 and a section of at least 1",
                    "pass the sizes of the call",
                )
            )

    @property
    def total(self) -> int:
        """Number of tiles."""
        return self.num_tiles * self.heads * self.batch

    @property
    def needs_int64(self) -> bool:
        """Whether an index, or a product on the way to one, passes 31 bits."""
        return self.num_tiles * (self.heads * self.batch + self.section) >= 2**31

    def at(self, index: Integer) -> TilePlace:
        """Return the tile that runs at `index`, for `0 <= index < total`."""
        heads_total = self.heads * self.batch
        section_tiles = self.section * self.num_tiles
        section = index // section_tiles
        within = index - section * section_tiles
        first_head = section * self.section
        # The last section holds what is left; its stride shrinks with it.
        width = smaller(heads_total - first_head, self.section)
        rank = within // width
        flat_head = first_head + within - rank * width
        batch = flat_head // self.heads
        tile = self.num_tiles - 1 - rank if self.is_longest_last else rank
        return TilePlace(tile, flat_head - batch * self.heads, batch)


def section_heads(
    *,
    seqlen_kv: int,
    head_dim: int,
    head_dim_v: int,
    element_bytes: int,
    group_size: int,
    l2_bytes: int,
) -> int:
    """Return how many query heads run together so that their K and V stay in L2.

    A power of two of KV heads, at least one, each with all query heads of its group, since those
    read the same K and V.

    Units:
        l2_bytes: the share of the L2 that K and V may fill.
    """
    kv_head_bytes = max(1, seqlen_kv * (head_dim + head_dim_v) * element_bytes)
    return _whole_groups(l2_bytes // kv_head_bytes, group_size)


def heads_in_flight(*, num_tiles: int, group_size: int, num_ctas: int) -> int:
    """Return how many query heads run together where every tile has the same work.

    As many as have all their tiles in flight at once, with a third of the CTAs left for the next
    section: then a head's K and V are read from memory once, by tiles in step, and sections follow
    one another without waves that read everything anew. A power of two of KV heads, at least one.
    """
    return _whole_groups(num_ctas * 2 // 3 // max(1, num_tiles * group_size), group_size)


def _whole_groups(most_kv_heads: int, group_size: int) -> int:
    """Return the query heads of as many KV heads, a power of two, at least one."""
    return (1 << (max(1, most_kv_heads).bit_length() - 1)) * group_size


def is_longest_last(band: Band, *, over: Literal["q", "kv"]) -> bool:
    """Return whether later tiles have more work than earlier ones, or as much.

    A limit on the right gives later queries more keys, and earlier keys more queries; a limit on
    the left alone the other way round. With both, every tile away from the edges has the same
    work, and the shorter ones lie where the right limit puts them.
    """
    if band.is_unlimited:
        return False
    return (band.right is not None) == (over == "q")


def num_tiles(seqlen: int, tile: int) -> int:
    """Return the number of tiles of `tile` positions that cover `seqlen`."""
    count = ceil_div(seqlen, tile)
    assert isinstance(count, int)
    return count
