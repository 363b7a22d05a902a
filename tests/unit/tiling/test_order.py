"""Tile order: a bijection, longest first, and exact in 64 bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.tiling.bounds import Band, kv_range, q_range
from fovea.tiling.order import (
    TileOrder,
    TilePlace,
    heads_in_flight,
    is_longest_last,
    num_tiles,
    section_heads,
)

counts = st.integers(1, 7)


@settings(max_examples=200)
@given(counts, counts, counts, st.integers(1, 20), st.booleans())
def test_order_visits_every_tile_once(tiles, heads, batch, section, last):
    order = TileOrder(
        num_tiles=tiles, heads=heads, batch=batch, section=section, is_longest_last=last
    )
    seen = [order.at(i) for i in range(order.total)]
    every = {TilePlace(t, h, b) for t in range(tiles) for h in range(heads) for b in range(batch)}
    assert len(seen) == len(every)
    assert set(seen) == every


@settings(max_examples=100)
@given(counts, counts, counts, st.integers(1, 20), st.booleans())
def test_order_of_a_tensor_of_indices_equals_that_of_ints(tiles, heads, batch, section, last):
    order = TileOrder(
        num_tiles=tiles, heads=heads, batch=batch, section=section, is_longest_last=last
    )
    together = order.at(torch.arange(order.total))
    columns = [x.tolist() for x in together]
    assert list(zip(*columns)) == [tuple(order.at(i)) for i in range(order.total)]


def test_order_inside_a_section_goes_from_long_to_short():
    order = TileOrder(num_tiles=5, heads=6, batch=1, section=4, is_longest_last=True)
    tiles = [order.at(i).tile for i in range(20)]
    assert tiles == [t for t in (4, 3, 2, 1, 0) for _ in range(4)]
    rest = [order.at(i) for i in range(20, 30)]
    assert [p.head for p in rest] == [4, 5] * 5


def test_order_at_two_to_the_33_tiles_stays_exact():
    order = TileOrder(
        num_tiles=1 << 15, heads=1 << 10, batch=1 << 8, section=8, is_longest_last=True
    )
    assert order.needs_int64
    last = order.total - 1
    assert order.at(last) == TilePlace(0, (1 << 10) - 1, (1 << 8) - 1)
    middle = order.at(torch.tensor([1 << 32]))
    assert [int(x) for x in middle] == list(order.at(1 << 32))


@pytest.mark.parametrize("section", [0, -1])
def test_order_with_an_empty_section_raises(section):
    with pytest.raises(ValueError, match="section of at least 1"):
        TileOrder(num_tiles=1, heads=1, batch=1, section=section, is_longest_last=False)


@pytest.mark.parametrize(
    ("seqlen_kv", "group_size", "expected"),
    [(8192, 1, 8), (8192, 4, 32), (1 << 22, 4, 4), (0, 2, 2 << 25)],
)
def test_section_heads_is_a_power_of_two_of_kv_heads(seqlen_kv, group_size, expected):
    # 8192 keys x 256 values x 2 bytes = 4 MiB a head; 32 MiB hold eight.
    found = section_heads(
        seqlen_kv=seqlen_kv, head_dim=128, head_dim_v=128, element_bytes=2,
        group_size=group_size, l2_bytes=32 << 20,
    )  # fmt: skip
    assert found == expected


@pytest.mark.parametrize(
    ("tiles", "group_size", "expected"),
    [
        (3, 1, 16),
        (11, 1, 8),
        (43, 1, 2),
        (86, 1, 1),
        (1000, 1, 1),
        (11, 4, 8),
        (11, 8, 8),
        (0, 2, 128),
    ],
)
def test_heads_in_flight_have_all_their_tiles_on_two_thirds_of_the_ctas(
    tiles, group_size, expected
):
    found = heads_in_flight(num_tiles=tiles, group_size=group_size, num_ctas=132)
    assert found == expected
    assert found == group_size or found * tiles <= 88


# A limit on both sides is left out: there no single end is the longest.
@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (None, (None, None)),
        (None, (30, None)),
        (None, (None, 30)),
        ("bottom_right", (None, None)),
        ("top_left", (None, None)),
    ],
)
@pytest.mark.parametrize("lengths", [(96, 96), (64, 128), (128, 64)])
def test_longest_tile_is_first_or_last_as_said(causal, window, lengths):
    seqlen_q, seqlen_kv = lengths
    band = Band.of(causal, window, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    for over, function, seqlen in (("q", kv_range, seqlen_q), ("kv", q_range, seqlen_kv)):
        sizes = []
        for t in range(num_tiles(seqlen, 16)):
            found = function(t, band, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, tile_m=16, tile_n=16)
            sizes.append(found.end - found.first)
        if band.is_unlimited:
            assert len(set(sizes)) == 1
        elif is_longest_last(band, over=over):
            assert sizes == sorted(sizes)
        else:
            assert sizes == sorted(sizes, reverse=True)
