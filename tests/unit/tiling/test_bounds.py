"""Tile ranges against brute force over every (query, key) pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.tiling.bounds import Band, TileRange, kv_range, q_range, visible_pairs

lengths = st.integers(0, 40)
sides = st.one_of(st.none(), st.integers(0, 50), st.just(2**31 - 1))
causals = st.sampled_from([None, "bottom_right", "top_left"])
tiles = st.sampled_from([1, 2, 3, 8, 16, 64])


def visible_set(causal, window, seqlen_q, seqlen_kv) -> set[tuple[int, int]]:
    """Return the visible pairs straight from the words of the public contract."""
    offset = 0 if causal == "top_left" else seqlen_kv - seqlen_q
    left, right = window
    return {
        (i, j)
        for i in range(seqlen_q)
        for j in range(seqlen_kv)
        if (causal is None or j <= i + offset)
        and (left is None or j >= i + offset - left)
        and (right is None or j <= i + offset + right)
    }


def check_range(found: TileRange, touched: list[bool], full: list[bool]) -> None:
    """Check that ``found`` covers exactly the touched tiles, and as full the full ones among them.

    Both kinds are contiguous for a band, hence equality and not only containment.
    """
    first, full_begin, full_end, end = found
    assert 0 <= first <= full_begin <= full_end <= end <= max(len(touched), first)
    assert [first <= t < end for t in range(len(touched))] == touched
    assert [full_begin <= t < full_end for t in range(len(touched))] == full


@settings(max_examples=300, deadline=None)
@given(causals, sides, sides, lengths, lengths, tiles, tiles, st.sampled_from([1, 3, 4]))
def test_kv_range_of_every_query_tile_equals_brute_force(
    causal, left, right, seqlen_q, seqlen_kv, tile_m, tile_n, group_size
):
    band = Band.of(causal, (left, right), seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    pairs = visible_set(causal, (left, right), seqlen_q, seqlen_kv)
    rows = seqlen_q * group_size
    for q_tile in range(-(-rows // tile_m) + 1):
        queries = {
            r // group_size for r in range(q_tile * tile_m, min(rows, (q_tile + 1) * tile_m))
        }
        touched, full = [], []
        for kv_tile in range(-(-seqlen_kv // tile_n)):
            keys = range(kv_tile * tile_n, (kv_tile + 1) * tile_n)
            seen = [(i, j) in pairs for i in queries for j in keys]
            touched.append(any(seen))
            full.append(bool(seen) and all(seen))
        found = kv_range(
            q_tile, band, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv,
            tile_m=tile_m, tile_n=tile_n, group_size=group_size,
        )  # fmt: skip
        check_range(found, touched, full)


@settings(max_examples=300, deadline=None)
@given(causals, sides, sides, lengths, lengths, tiles, tiles)
def test_q_range_of_every_kv_tile_equals_brute_force(
    causal, left, right, seqlen_q, seqlen_kv, tile_m, tile_n
):
    band = Band.of(causal, (left, right), seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    pairs = visible_set(causal, (left, right), seqlen_q, seqlen_kv)
    for kv_tile in range(-(-seqlen_kv // tile_n) + 1):
        keys = range(kv_tile * tile_n, (kv_tile + 1) * tile_n)
        touched, full = [], []
        for q_tile in range(-(-seqlen_q // tile_m)):
            seen = [
                (i, j) in pairs for i in range(q_tile * tile_m, (q_tile + 1) * tile_m) for j in keys
            ]
            touched.append(any(seen))
            full.append(all(seen))
        found = q_range(
            kv_tile, band, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, tile_m=tile_m, tile_n=tile_n
        )
        check_range(found, touched, full)


@settings(max_examples=200, deadline=None)
@given(causals, sides, sides, lengths, lengths)
def test_visible_pairs_equals_brute_force(causal, left, right, seqlen_q, seqlen_kv):
    band = Band.of(causal, (left, right), seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    expected = len(visible_set(causal, (left, right), seqlen_q, seqlen_kv))
    assert visible_pairs(band, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv) == expected


@settings(max_examples=60, deadline=None)
@given(causals, sides, sides, st.integers(0, 2**31), tiles, tiles)
def test_ranges_of_tensor_lengths_equal_those_of_ints(causal, left, right, seed, tile_m, tile_n):
    generator = torch.Generator().manual_seed(seed)
    seqlen_q = torch.randint(0, 40, (5,), generator=generator)
    seqlen_kv = torch.randint(0, 40, (5,), generator=generator)
    tile = torch.randint(0, 6, (5,), generator=generator)
    for function, name in ((kv_range, "kv"), (q_range, "q")):
        band = Band.of(causal, (left, right), seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        together = function(
            tile, band, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, tile_m=tile_m, tile_n=tile_n
        )
        for s in range(5):
            m, n = int(seqlen_q[s]), int(seqlen_kv[s])
            one = function(
                int(tile[s]),
                Band.of(causal, (left, right), seqlen_q=m, seqlen_kv=n),
                seqlen_q=m, seqlen_kv=n, tile_m=tile_m, tile_n=tile_n,
            )  # fmt: skip
            got = [int(x[s]) if isinstance(x, torch.Tensor) else x for x in together]
            assert got == list(one), name


@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
def test_visible_pairs_at_a_million_tokens_needs_no_wide_memory(causal):
    n = 1 << 20
    band = Band.of(causal, (None, None), seqlen_q=n, seqlen_kv=n)
    assert visible_pairs(band, seqlen_q=n, seqlen_kv=n) == n * (n + 1) // 2


def test_kv_range_at_lengths_beyond_int32_stays_exact():
    n = 1 << 33
    band = Band.of("bottom_right", (1024, None), seqlen_q=n, seqlen_kv=n)
    last = n // 128 - 1
    found = kv_range(last, band, seqlen_q=n, seqlen_kv=n, tile_m=128, tile_n=128)
    assert found == TileRange(last - 8, last - 7, last, last + 1)
