import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.emulator.layout.tensor_map import make_tensor_map
from fovea.emulator.layout.tensor_tile import clip_box, shared_chunks, tile_shape


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_clipped_box_covers_the_elements_inside_the_tensor(data):
    rank = data.draw(st.integers(1, 4))
    sizes = tuple(data.draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
    box = (8, *data.draw(st.lists(st.integers(1, 5), min_size=rank - 1, max_size=rank - 1)))
    steps = tuple(data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    start = tuple(data.draw(st.lists(st.integers(-9, 12), min_size=rank, max_size=rank)))
    strides = tuple(160 * 7**i for i in range(rank - 1))
    tensor = make_tensor_map(4096, "bf16", sizes, strides, box, element_strides=steps)
    tile = clip_box(tensor, start)

    expected = np.full(tuple(reversed(tensor.box_counts)), -1, np.int64)
    for index in itertools.product(*(range(n) for n in tensor.box_counts)):
        where = [s + i * step for s, i, step in zip(start, index, (1, *steps[1:]))]
        if all(0 <= w < n for w, n in zip(where, sizes)):
            offset = sum(w * s for w, s in zip(where, tensor.strides))
            expected[tuple(reversed(index))] = 4096 + offset

    got = np.full_like(expected, -1)
    if not tile.is_empty:
        grids = [np.arange(n) * s for n, s in zip(tile.counts, tile.strides)]
        got[tile.inside] = tile.address + sum(np.meshgrid(*grids, indexing="ij", sparse=True))
        assert tile.span(2) == (got[got >= 0].min(), got.max() + 2)
    assert np.array_equal(got, expected)


def test_coordinates_of_another_rank_are_refused():
    tensor = make_tensor_map(0, "bf16", (64, 8), (128,), (64, 8))
    with pytest.raises(ValueError, match="3 coordinates for a tensor map of rank 2"):
        clip_box(tensor, (0, 0, 0))


def test_shared_chunks_of_a_box_narrower_than_its_swizzle_keep_the_swizzle_pitch():
    tensor = make_tensor_map(0, "bf16", (32, 8), (64,), (32, 8), swizzle=128)
    table, first = shared_chunks(tensor, 1024)
    assert tile_shape(tensor) == (8, 64)
    assert first == 64
    assert [list(row) for row in table[:3]] == [[0, 1, 2, 3], [9, 8, 11, 10], [18, 19, 16, 17]]


def test_shared_chunks_without_swizzle_are_dense():
    tensor = make_tensor_map(0, "f32", (12, 3, 2), (48, 144), (12, 3, 2))
    table, first = shared_chunks(tensor, 2048 + 256)
    assert first == 128
    assert np.array_equal(table, 16 + np.arange(18).reshape(6, 3))
