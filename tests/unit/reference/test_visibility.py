import pytest
import torch

from fovea.reference.sequences import pieces
from fovea.reference.visibility import BlockStates, Tile, Visibility
from fovea.testing.inputs import Shape
from fovea.testing.masks import block_mask_of, dense_states, random_states
from fovea.testing.problems import dense_problem

SHAPE = Shape(batch=2, seqlen_q=37, seqlen_kv=53, heads_q=2)


def _visited(problem, *, rows, tile_n):
    """Return (visible, visited) of all pairs, put together from the tiles."""
    (piece,) = pieces(problem)
    visibility = Visibility.of(problem, piece, BlockStates.of(problem))
    shape = (piece.batch, piece.heads_q, piece.seqlen_q, piece.seqlen_kv)
    visible = torch.zeros(shape, dtype=torch.bool)
    visited = torch.zeros(shape, dtype=torch.bool)
    for begin in range(0, piece.seqlen_q, rows):
        end = min(begin + rows, piece.seqlen_q)
        for tile, hidden in visibility.tiles(begin, end, tile_n):
            keys = slice(tile.kv_begin, tile.kv_end)
            visited[:, :, begin:end, keys] = True
            part = visible[:, :, begin:end, keys]
            part.copy_(torch.ones(()) if hidden is None else ~hidden.expand(part.shape))
    return visible, visited


def _indices():
    b = torch.arange(2).view(2, 1, 1, 1)
    h = torch.arange(2).view(1, 2, 1, 1)
    return b, h, torch.arange(37).view(37, 1), torch.arange(53)


@pytest.mark.parametrize("rows", [1, 8, 10, 37])
@pytest.mark.parametrize("tile_n", [1, 16, 53])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (4, None), (None, 6), (4, 6), (0, 0)])
def test_tiles_of_a_band_cover_what_is_visible(causal, window, rows, tile_n):
    problem = dense_problem(SHAPE, causal=causal, window=window)
    _, _, q, kv = _indices()
    diagonal = q if causal == "top_left" else q + 53 - 37
    left, right = window or (None, None)
    expected = torch.ones(37, 53, dtype=torch.bool)
    if causal:
        expected &= kv <= diagonal
    if left is not None:
        expected &= kv >= diagonal - left
    if right is not None:
        expected &= kv <= diagonal + right
    visible, visited = _visited(problem, rows=rows, tile_n=tile_n)
    assert torch.equal(visible, expected.expand(visible.shape))
    assert bool((visited | ~visible).all())


def test_tiles_of_a_causal_mask_skip_what_lies_above_the_diagonal():
    shape = Shape(batch=1, seqlen_q=64, seqlen_kv=64)
    _, visited = _visited(dense_problem(shape, causal=True), rows=8, tile_n=8)
    assert visited.float().mean() == (8 * 9 / 2) / 64


def test_tiles_of_a_mask_mod_skip_tiles_without_a_visible_pair():
    def document(b, h, q_idx, kv_idx):
        return q_idx // 16 == kv_idx // 16

    shape = Shape(batch=1, seqlen_q=64, seqlen_kv=64)
    visible, visited = _visited(dense_problem(shape, mask_mod=document), rows=16, tile_n=16)
    assert visited.float().mean() == 1 / 4
    assert torch.equal(visible, visited)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("block_q", "block_kv"), [(5, 7), (16, 16), (64, 8), (128, 128)])
def test_tiles_of_block_lists_obey_lists_and_both_mask_mods(batch, heads, block_q, block_kv):
    def inner(b, h, q_idx, kv_idx):
        return (q_idx + 2 * kv_idx + h) % 3 != 0

    def outer(b, h, q_idx, kv_idx):
        return (q_idx * 5 + kv_idx + b) % 4 != 0

    states = random_states(batch, heads, -(-37 // block_q), -(-53 // block_kv), seed=1)
    mask = block_mask_of(
        states, seqlen_q=37, seqlen_kv=53, block_q=block_q, block_kv=block_kv, mask_mod=inner
    )
    problem = dense_problem(SHAPE, block_mask=mask, mask_mod=outer, causal=True)
    b, h, q, kv = _indices()
    state = dense_states(states, block_q=block_q, block_kv=block_kv)[:, :, :37, :53]
    expected = (state == 2) | ((state == 1) & inner(b, h, q, kv))
    expected = expected & outer(b, h, q, kv) & (kv <= q + 53 - 37)
    for rows, tile_n in ((10, 16), (37, 53)):
        visible, visited = _visited(problem, rows=rows, tile_n=tile_n)
        assert torch.equal(visible, expected.expand(visible.shape))
        assert bool((visited | ~visible).all())


def test_tiles_inside_full_blocks_need_no_mask():
    states = torch.full((1, 1, 4, 4), 2, dtype=torch.int8)
    mask = block_mask_of(
        states,
        seqlen_q=64,
        seqlen_kv=64,
        block_q=16,
        block_kv=16,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx < 0,
    )
    problem = dense_problem(Shape(batch=1, seqlen_q=64, seqlen_kv=64), block_mask=mask)
    (piece,) = pieces(problem)
    visibility = Visibility.of(problem, piece, BlockStates.of(problem))
    assert [hidden for _, hidden in visibility.tiles(0, 64, 16)] == [None] * 4


def test_block_states_without_a_host_copy_are_neither_empty_nor_full():
    # As while a CUDA graph is captured: every tile is visited and masked then.
    states = torch.zeros((1, 1, 1, 1), dtype=torch.int8)
    blocks = BlockStates(states=states, lowest=None, highest=None, block_q=8, block_kv=8)
    tile = Tile(q_begin=0, q_end=4, kv_begin=0, kv_end=4)
    assert not blocks.is_empty(tile)
    assert not blocks.is_full(tile)


def test_mask_mod_that_gathers_out_of_range_raises():
    table = torch.ones(40, dtype=torch.bool)

    def gathered(b, h, q_idx, kv_idx):
        return table[torch.maximum(q_idx, kv_idx)]

    problem = dense_problem(SHAPE, mask_mod=gathered)
    with pytest.raises(IndexError, match=r"shape \(40,\).*test_visibility.py"):
        _visited(problem, rows=37, tile_n=16)


def test_mask_mod_that_gathers_out_of_range_behind_the_band_passes():
    table = torch.ones(40, dtype=torch.bool)

    def gathered(b, h, q_idx, kv_idx):
        return table[kv_idx]

    # top_left: query 36 sees keys up to 36.
    _visited(dense_problem(SHAPE, mask_mod=gathered, causal="top_left"), rows=37, tile_n=16)
