"""Tile ranges under causal alignment, window and lengths: the specification of device code.

Lives here: pure integer formulas that say which KV tiles a query tile visits, which query tiles a
KV tile visits, and which of them need no test per element. Does not live here: block lists
(``block_lists.py``), mask mods, the order in which tiles run (``order.py``).

Invariant: every division acts on a number that is not negative, so truncating and floored
division agree and the device twin may use either. Lengths, windows and tile indices may be Python
ints or integer tensors (one value per sequence, say); a side of the window is ``None`` when
unlimited, which is a static fact.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

Integer: TypeAlias = "int | Tensor"
Side: TypeAlias = "int | Tensor | None"
Causal: TypeAlias = Literal["bottom_right", "top_left"] | None


def smaller(a: Integer, b: Integer) -> Integer:
    """Return the elementwise minimum of ints or tensors."""
    if isinstance(a, int):
        return min(a, b) if isinstance(b, int) else b.clamp(max=a)
    return a.clamp(max=b)


def larger(a: Integer, b: Integer) -> Integer:
    """Return the elementwise maximum of ints or tensors."""
    if isinstance(a, int):
        return max(a, b) if isinstance(b, int) else b.clamp(min=a)
    return a.clamp(min=b)


def ceil_div(a: Integer, b: int) -> Integer:
    """Return ``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + (b - 1)) // b


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Keys a query may see by position: ``q + offset - left <= kv <= q + offset + right``.

    ``offset`` is the key on the diagonal of query 0; it is negative when bottom-right alignment
    meets more queries than keys. ``left`` and ``right`` count keys beside the diagonal.
    """

    offset: Integer
    left: Side
    right: Side

    @classmethod
    def of(
        cls,
        causal: Causal,
        window: tuple[Side, Side],
        *,
        seqlen_q: Integer,
        seqlen_kv: Integer,
    ) -> "Band":
        """Return the band of an attention call.

        The diagonal is bottom-right aligned unless ``causal="top_left"``. A window side wider
        than both sequences together is cut to that, so that later sums stay within three lengths.
        """
        offset = 0 if causal == "top_left" else seqlen_kv - seqlen_q
        left, right = window
        widest = seqlen_q + seqlen_kv
        if causal is not None:
            # Windows are never negative, so the causal limit is the tighter one.
            right = 0
        return cls(
            offset=offset,
            left=None if left is None else smaller(left, widest),
            right=None if right is None else smaller(right, widest),
        )

    @property
    def is_unlimited(self) -> bool:
        """Return whether the band hides nothing."""
        return self.left is None and self.right is None

    def first_key(self, q: Integer) -> Integer:
        """Return the first key that query ``q`` may see, at least 0; lengths are not applied."""
        return 0 if self.left is None else larger(q + self.offset - self.left, 0)

    def end_key(self, q: Integer, seqlen_kv: Integer) -> Integer:
        """Return one past the last key that query ``q`` may see, from 0 to ``seqlen_kv``."""
        if self.right is None:
            return seqlen_kv
        return larger(smaller(q + self.offset + self.right + 1, seqlen_kv), 0)

    def first_query(self, kv: Integer) -> Integer:
        """Return the first query that may see key ``kv``, at least 0; lengths are not applied."""
        return 0 if self.right is None else larger(kv - self.offset - self.right, 0)

    def end_query(self, kv: Integer, seqlen_q: Integer) -> Integer:
        """Return one past the last query that may see key ``kv``, from 0 to ``seqlen_q``."""
        if self.left is None:
            return seqlen_q
        return larger(smaller(kv - self.offset + self.left + 1, seqlen_q), 0)


class TileRange(NamedTuple):
    """Tiles ``first <= t < end`` to visit; ``full_begin <= t < full_end`` need no element test.

    ``first <= full_begin <= full_end <= end`` always; nothing to visit is ``first == end``.
    """

    first: Integer
    full_begin: Integer
    full_end: Integer
    end: Integer


def _tile_range(
    begin: Integer, end: Integer, full_begin: Integer, full_end: Integer, tile: int
) -> TileRange:
    """Return tiles covering ``[begin, end)`` and those inside ``[full_begin, full_end)``.

    All four are positions that are not negative.
    """
    end_tile = ceil_div(end, tile)
    first = smaller(begin // tile, end_tile)
    # An empty position range may still touch a tile (begin 5, end 3): nothing is visible then.
    is_live = _positive(end - begin)
    end_tile = first + (end_tile - first) * is_live
    full_first = larger(smaller(ceil_div(full_begin, tile), end_tile), first)
    full_last = larger(smaller(full_end // tile, end_tile), full_first)
    return TileRange(first, full_first, full_last, end_tile)


def _positive(a: Integer) -> Integer:
    """Return 1 where ``a > 0``, else 0."""
    return smaller(larger(a, 0), 1)


def kv_range(
    q_tile: Integer,
    band: Band,
    *,
    seqlen_q: Integer,
    seqlen_kv: Integer,
    tile_m: int,
    tile_n: int,
    group_size: int = 1,
) -> TileRange:
    """Return the KV tiles that a query tile visits in the forward pass.

    A tile is full when each of its keys exists and is seen by every existing row of the query
    tile; rows past the end do not count, since their results are never stored. With
    ``group_size`` g > 1 the rows of a tile are packed pairs (query, head of the group), query
    ``row // g``. A ``q_tile`` past the end visits nothing.

    Source: ours; the bound of causal attention, window and lengths written out.
    """
    rows = seqlen_q * group_size
    row_begin = smaller(q_tile * tile_m, rows)
    row_end = smaller(q_tile * tile_m + tile_m, rows)
    has_rows = _positive(row_end - row_begin)
    q_first = row_begin // group_size
    # Without rows this would be query -1; any legal query will do, the range is emptied below.
    q_last = larger(row_end - 1, 0) // group_size
    begin = band.first_key(q_first)
    end = band.end_key(q_last, seqlen_kv) * has_rows
    full_begin = band.first_key(q_last)
    full_end = band.end_key(q_first, seqlen_kv)
    return _tile_range(begin, end, full_begin, full_end, tile_n)


def q_range(
    kv_tile: Integer,
    band: Band,
    *,
    seqlen_q: Integer,
    seqlen_kv: Integer,
    tile_m: int,
    tile_n: int,
) -> TileRange:
    """Return the query tiles that a KV tile visits in the backward pass.

    A tile is full when all ``tile_m * tile_n`` positions exist and are visible. Keys past the end
    do count here: their ``P = exp(0 - lse)`` may overflow and would reach dQ as ``inf * 0``.
    """
    kv_first = smaller(kv_tile * tile_n, seqlen_kv)
    kv_stop = smaller(kv_tile * tile_n + tile_n, seqlen_kv)
    has_keys = _positive(kv_stop - kv_first)
    # 1 when the whole tile lies before seqlen_kv, else 0.
    is_whole = _positive(kv_stop - kv_first - (tile_n - 1))
    kv_last = larger(kv_stop - 1, 0)
    begin = band.first_query(kv_first)
    end = band.end_query(kv_last, seqlen_q) * has_keys
    full_begin = band.first_query(kv_last)
    full_end = band.end_query(kv_first, seqlen_q) * is_whole
    return _tile_range(begin, end, full_begin, full_end, tile_m)


def visible_pairs(band: Band, *, seqlen_q: int, seqlen_kv: int) -> int:
    """Return the number of (query, key) pairs inside the band and the lengths, in O(1)."""
    offset = cast(int, band.offset)
    ends = seqlen_q * seqlen_kv
    if band.right is not None:
        ends = _sum_clamped(offset + cast(int, band.right) + 1, seqlen_q, seqlen_kv)
    begins = 0
    if band.left is not None:
        begins = _sum_clamped(offset - cast(int, band.left), seqlen_q, seqlen_kv)
    return ends - begins


def _sum_clamped(start: int, count: int, limit: int) -> int:
    """Return the sum over ``i in range(count)`` of ``start + i`` clamped to ``[0, limit]``."""
    rising_begin = min(max(-start, 0), count)
    rising_end = min(max(limit - start, rising_begin), count)
    rising = rising_end - rising_begin
    first = start + rising_begin
    return rising * first + rising * (rising - 1) // 2 + (count - rising_end) * limit
