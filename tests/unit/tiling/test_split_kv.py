"""Split counts on known shapes, and parts that cover their range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.tiling.split_kv import SplitDemand, num_splits, split_range

L2 = 50 << 20


def demand(**changes) -> SplitDemand:
    fields = {
        "num_tiles": 8,
        "query_tiles_per_head": 1,
        "num_kv_tiles": 512,
        "kv_head_bytes": 1 << 20,
        "is_banded": False,
    }
    return SplitDemand(**(fields | changes))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (demand(num_tiles=106), 1),  # 0.8 of 132 SMs is 105.6
        (demand(num_tiles=66), 2),  # two parts fill one wave exactly
        (demand(num_tiles=1, num_kv_tiles=4), 1),
        (demand(num_tiles=0), 1),
        (demand(num_tiles=132 * 4, query_tiles_per_head=300, kv_head_bytes=4 * L2), 4),
        (demand(num_tiles=132 * 4, query_tiles_per_head=300, kv_head_bytes=L2 + 1), 2),
        (
            demand(
                num_tiles=132 * 4, query_tiles_per_head=300, kv_head_bytes=4 * L2, is_banded=True
            ),
            1,
        ),
        (demand(num_tiles=132 * 4, query_tiles_per_head=100, kv_head_bytes=4 * L2), 1),
        # 8 tiles: 16 parts of 32 KV tiles fill 128 SMs once; 33 of 16 all of them twice.
        (demand(num_tiles=8), 16),
        # 40 tiles: 3 parts leave 12 SMs idle; 13 parts in four waves keep nearly all at work.
        (demand(num_tiles=40), 13),
        # 24 tiles over 64 KV tiles: two waves of 11 parts would not pay for their starts.
        (demand(num_tiles=24, num_kv_tiles=64), 5),
        # one tile over 128 KV tiles: parts beyond 32 cost the merge more than they save.
        (demand(num_tiles=1, num_kv_tiles=128), 32),
        (demand(num_tiles=1, num_kv_tiles=1024), 128),
        # one tile over five KV tiles: parts of 5, 3, 2, 2, 1 tiles.
        (demand(num_tiles=1, num_kv_tiles=5), 5),
    ],
)
def test_num_splits_on_known_shapes(case, expected):
    assert num_splits(case, num_sms=132, l2_bytes=L2) == expected


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 200), st.integers(1, 128))
def test_num_splits_is_at_least_one_and_within_limits(tiles, kv_tiles, sms, most):
    found = num_splits(
        demand(num_tiles=tiles, num_kv_tiles=kv_tiles), num_sms=sms, l2_bytes=L2, max_splits=most
    )
    assert 1 <= found <= min(most, kv_tiles)


@given(st.integers(0, 50), st.integers(0, 300), st.integers(1, 128))
def test_split_ranges_cover_the_range_and_are_even(first, tiles, splits):
    parts = [split_range(s, splits, first=first, end=first + tiles) for s in range(splits)]
    assert [t for begin, stop in parts for t in range(begin, stop)] == list(
        range(first, first + tiles)
    )
    sizes = [stop - begin for begin, stop in parts]
    assert max(sizes) - min(sizes) <= 1
