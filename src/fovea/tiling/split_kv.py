"""How many parts the keys of one query tile are cut into, so that short queries fill the GPU.

Lives here: the choice of `num_splits` and the KV tiles of each part, both pure. Not here: merging
the parts (`kernels/portable/combine.py`). Invariant: the parts of a range are disjoint, cover it
and differ by at most one tile; a part may be empty, and then counts as a row with no key.
"""

from dataclasses import dataclass

from fovea.tiling.bounds import Integer

# Below so many tenths of busy SMs a split is worth its second pass over the output.
_FULL_TENTHS = 8
# Parts that the merge loads at once, and what every further round of loads takes, in visits of a
# KV tile: measured, docs/notes/hopper_decode.md.
MERGED_AT_ONCE = 32
_ROUND_TILES = 2
_MAX_WAVES = 4  # of parts; more even nothing out that their starts do not cost
# Fewer tiles than this leave each part nothing to pipeline.
_MIN_KV_TILES = 5
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDemand:
    """What the choice depends on.

    Attributes:
        num_tiles: query tiles of the whole call, batch and (packed) heads included.
        query_tiles_per_head: of one head of one sequence.
        num_kv_tiles: KV tiles of the longest query tile.
        kv_head_bytes: K and V of one head of one sequence.
        is_banded: causal or windowed.
    """

    num_tiles: int
    query_tiles_per_head: int
    num_kv_tiles: int
    kv_head_bytes: int
    is_banded: bool


def num_splits(
    demand: SplitDemand, *, num_sms: int, l2_bytes: int, max_splits: int = MAX_SPLITS
) -> int:
    """Return the number of parts, 1 for no split.

    Enough tiles to fill the GPU need no split, unless one head's K and V do not fit the L2 while
    many query tiles read all of them: then each part should fit. Otherwise the smallest count of
    those that take the least time: the KV tiles that the busiest SM visits, one more for the start
    of each part, and the merge.

    Source: the thresholds of 0.8 and of the L2 are those FlashAttention-3 publishes for Hopper.
    """
    if demand.num_tiles == 0 or demand.num_kv_tiles < _MIN_KV_TILES:
        return 1
    most = min(max_splits, demand.num_kv_tiles)
    if 10 * demand.num_tiles >= _FULL_TENTHS * num_sms:
        is_thrashing = (
            demand.kv_head_bytes > l2_bytes
            and demand.query_tiles_per_head >= 2 * num_sms
            and not demand.is_banded
        )
        return min(-(-demand.kv_head_bytes // l2_bytes), most) if is_thrashing else 1

    counts = [waves * num_sms // demand.num_tiles for waves in range(1, _MAX_WAVES + 1)]
    counts += range(MERGED_AT_ONCE, most, MERGED_AT_ONCE)
    longest = {-(-demand.num_kv_tiles // min(count, most)) for count in counts}

    def visits(splits: int) -> int:
        waves = -(-demand.num_tiles * splits // num_sms)
        rounds = (splits - 1) // MERGED_AT_ONCE
        return waves * (-(-demand.num_kv_tiles // splits) + 1) + rounds * _ROUND_TILES

    return min(sorted(-(-demand.num_kv_tiles // tiles) for tiles in longest), key=visits)


def split_range(
    split: Integer, num_splits: Integer, *, first: Integer, end: Integer
) -> tuple[Integer, Integer]:
    """Return the KV tiles `begin <= t < stop` of part `split` of the range `first <= t < end`."""
    tiles = end - first
    return first + tiles * split // num_splits, first + tiles * (split + 1) // num_splits
