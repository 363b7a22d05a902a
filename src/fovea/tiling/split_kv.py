"""How many parts the keys of one query tile are cut into, so that short queries fill the GPU.

Lives here: the choice of `num_splits` and the KV tiles of each part, both pure. Not here: merging
the parts (`kernels/portable/combine.py`). Invariant: the parts of a range are disjoint, cover it
and differ by at most one tile; a part may be empty, and then counts as a row with no key.
"""

from dataclasses import dataclass
from fractions import Fraction

from fovea.tiling.bounds import Integer

# Below this share of busy SMs a split is worth its second pass over the output.
_FULL_ENOUGH = Fraction(8, 10)
# A split count is good when its last wave is nearly as full as the best one's.
_EFFICIENCY_SHARE = Fraction(85, 100)
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
    many query tiles read all of them: then each part should fit. Otherwise the smallest count
    whose last wave is at least 85 % as full as the best count's.

    Source: the rule that FlashAttention-3 publishes for Hopper (thresholds 0.8 and 0.85).
    """
    if demand.num_tiles == 0 or demand.num_kv_tiles < _MIN_KV_TILES:
        return 1
    most = min(max_splits, demand.num_kv_tiles)
    if demand.num_tiles >= _FULL_ENOUGH * num_sms:
        is_thrashing = (
            demand.kv_head_bytes > l2_bytes
            and demand.query_tiles_per_head >= 2 * num_sms
            and not demand.is_banded
        )
        return min(-(-demand.kv_head_bytes // l2_bytes), most) if is_thrashing else 1
    # Splits per wave: the busy share of the SMs over all waves, but for a common factor. Kept as
    # (splits, waves) and compared crosswise, since a decoder asks again for every new length.
    counts = [
        (splits, -(-demand.num_tiles * splits // num_sms))
        for splits in range(1, min(most, num_sms) + 1)
        if splits == 1 or _is_shorter(demand.num_kv_tiles, splits)
    ]
    best, best_waves = counts[0]
    for splits, waves in counts:
        if splits * best_waves > best * waves:
            best, best_waves = splits, waves
    share, whole = _EFFICIENCY_SHARE.as_integer_ratio()
    return next(
        splits for splits, waves in counts if splits * best_waves * whole >= share * best * waves
    )


def split_range(
    split: Integer, num_splits: Integer, *, first: Integer, end: Integer
) -> tuple[Integer, Integer]:
    """Return the KV tiles `begin <= t < stop` of part `split` of the range `first <= t < end`."""
    tiles = end - first
    return first + tiles * split // num_splits, first + tiles * (split + 1) // num_splits


def _is_shorter(num_kv_tiles: int, splits: int) -> bool:
    """Return whether the longest part shrinks from `splits - 1` to `splits` parts."""
    return -(-num_kv_tiles // splits) < -(-num_kv_tiles // (splits - 1))
