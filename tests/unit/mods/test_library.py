"""Every mod of the library: traced against vmap, and against its formula where that is short."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea import mods
from fovea.mods.derivative import derivative
from fovea.mods.evaluate import Positions
from fovea.mods.picture import EXAMPLES, Example, example_score, values
from fovea.mods.pull_back import evaluate_derivative
from fovea.mods.trace import trace_mask_mod, trace_score_mod


def directly(example: Example, mod: Any) -> Tensor:
    first: tuple[Any, ...] = () if example.kind == "mask" else (0,)
    for dims in (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, None),
        (0, None, None, None),
    ):
        mod = torch.vmap(mod, in_dims=(*first, *dims))
    extents = (example.batch, example.heads, example.seqlen_q, example.seqlen_kv)
    scores = () if example.kind == "mask" else (example_score(example),)
    return mod(*scores, *(torch.arange(extent) for extent in extents))


@pytest.mark.parametrize("name", EXAMPLES)
def test_library_mod_traced_equals_vmap(name: str) -> None:
    example = EXAMPLES[name]
    actual = values(example)
    expected = directly(example, example.make()).expand(actual.shape)
    if example.kind == "mask":
        assert torch.equal(actual, expected)
        assert 0 < actual.sum() < actual.numel()
    elif name in ("mla_rope", "activation"):
        # a row sum in another order; gelu from erf
        band = 8 * torch.finfo(torch.float32).eps * (1 + expected.abs().max())
        assert (actual - expected).abs().max() <= band
    else:
        assert torch.equal(actual, expected)


def test_library_every_mod_has_an_example() -> None:
    makers = {
        *("alibi_slopes", "document_ids", "offsets_of", "tree_ancestors", "undo_softmax"),
        *("pooled_tile_scores", "pooled_tiles", "top_k_with_self", "video_tiles", "VideoTiles"),
    }
    assert set(mods.__all__) - makers <= set(EXAMPLES)


@pytest.mark.parametrize("name", sorted(set(mods.__all__) & set(EXAMPLES)))
def test_library_docstring_has_formula_shapes_example_and_source(name: str) -> None:
    text = inspect.getdoc(getattr(mods, name)) or ""
    for section in ("Formula:", "Shapes:", "Example:", "Source:"):
        assert section in text or name == "alibi_slopes", section


@pytest.mark.parametrize("name", [e.name for e in EXAMPLES.values() if e.kind == "score"])
def test_library_score_mod_derivative_equals_autograd(name: str) -> None:
    example = EXAMPLES[name]
    mod = example.make()
    traced = trace_score_mod(mod)
    score = example_score(example).double().requires_grad_()
    extents = (example.batch, example.heads, example.seqlen_q, example.seqlen_kv)
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    indices = [torch.arange(e).reshape(shape) for e, shape in zip(extents, shapes)]
    grad = torch.randn(extents, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    d_score, _ = evaluate_derivative(
        derivative(traced.graph),
        Positions(b=indices[0], h=indices[1], q_idx=indices[2], kv_idx=indices[3]),
        score=score.detach(),
        grad=grad,
        captures=traced.captures,
        scalars=traced.scalars,
    )
    for dims in (
        (None,) * 3 + (0,),
        (None, None, 0, None),
        (None, 0, None, None),
        (0,) + (None,) * 3,
    ):
        mod = torch.vmap(mod, in_dims=(0, *dims))
    (expected,) = torch.autograd.grad(
        mod(score, *(torch.arange(extent) for extent in extents)), [score], grad
    )
    eps = torch.finfo(torch.float64).eps
    assert (d_score - expected).abs().max() <= 32 * eps * expected.abs().max()


def pairs(example: str) -> list[tuple[int, int]]:
    grid = values(EXAMPLES[example])[0, 0]
    return [(q, kv) for q in range(grid.shape[0]) for kv in range(grid.shape[1]) if grid[q, kv]]


def plain(name: str, predicate: Any) -> bool:
    example = EXAMPLES[name]
    wanted = [
        (q, kv)
        for q in range(example.seqlen_q)
        for kv in range(example.seqlen_kv)
        if predicate(q, kv)
    ]
    return pairs(name) == wanted


def test_library_masks_equal_their_formulas_in_plain_python() -> None:
    ids = [0] * 7 + [1] * 12 + [2] * 4 + [3] * 9
    start = [0] * 7 + [7] * 12 + [19] * 4 + [23] * 9
    assert plain("causal", lambda q, kv: q >= kv)
    assert plain("sliding_window", lambda q, kv: 0 <= q - kv <= 6)
    assert plain("dilated", lambda q, kv: 0 <= q - kv <= 12 and (q - kv) % 3 == 0)
    assert plain("prefix_lm", lambda q, kv: kv < 9 or q >= kv)
    assert plain("chunked", lambda q, kv: q // 8 == kv // 8 and q >= kv)
    assert plain("llama4_chunked", lambda q, kv: (q - 3) // 8 == (kv - 3) // 8 and 3 <= kv <= q)
    assert plain("streaming", lambda q, kv: kv <= q and (kv < 3 or q - kv < 6))
    assert plain("gpt_oss", lambda q, kv: 0 <= q - kv < 8)
    assert plain("document", lambda q, kv: ids[q] == ids[kv] and q >= kv)
    assert plain("packed_causal", lambda q, kv: start[q] <= kv <= q)
    assert plain("and_masks", lambda q, kv: ids[q] == ids[kv] and q >= kv)
    assert plain("batched", lambda q, kv: q // 8 == kv // 8 and q >= kv)
    assert plain("not_mask", lambda q, kv: q < kv)
    assert plain("shifted", lambda q, kv: q + 16 >= kv)
    assert plain("checkerboard", lambda q, kv: (q // 4 + kv // 4) % 2 == 0)
    assert plain(
        "draft_blocks", lambda q, kv: kv < 8 or (q - (kv - 8) >= 0 and q // 6 == (kv - 8) // 6)
    )
    assert plain("svg_spatial", lambda q, kv: q < 4 or kv < 4 or abs(q - kv) < 12)


def test_library_natten_orders_show_the_same_neighbourhoods() -> None:
    """Row-major, tiled and Morton order of one 8 x 8 canvas are permutations of each other."""
    row_major = mods.natten_2d(8, 8, 3, 3)
    index = torch.arange(64)
    tiled = ((index // 16) // 2 * 4 + index % 16 // 4) * 8 + (index // 16) % 2 * 4 + index % 4
    bits = [(index >> n) & 1 for n in range(6)]
    morton = (bits[1] + 2 * bits[3] + 4 * bits[5]) * 8 + bits[0] + 2 * bits[2] + 4 * bits[4]
    whole = row_major(0, 0, index[:, None], index[None, :])
    assert torch.equal(whole[tiled][:, tiled], values(EXAMPLES["natten_tiled"])[0, 0])
    assert torch.equal(whole[morton][:, morton], values(EXAMPLES["natten_morton"])[0, 0])
    assert (whole.sum(1) == 9).all()


def test_library_t5_buckets_equal_the_published_rule() -> None:
    table = torch.arange(32.0)[:, None].expand(32, 4).contiguous()
    traced = trace_score_mod(mods.t5_bias(table, 128))
    from fovea.mods.evaluate import Positions, evaluate

    q, kv = torch.arange(300)[:, None], torch.arange(300)
    zero = torch.zeros((), dtype=torch.int64)
    got = evaluate(
        traced.graph,
        Positions(b=zero, h=zero, q_idx=q, kv_idx=kv),
        score=torch.zeros(300, 300),
        captures=traced.captures,
        scalars=traced.scalars,
    )
    relative = kv - q
    expected = torch.where(relative > 0, 16, 0)
    n = relative.abs()
    far = 8 + (torch.log(n.float().clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 8).long()
    expected = expected + torch.where(n < 8, n, far.clamp(max=15))
    assert torch.equal(got.long(), expected)


def test_library_alibi_slopes_halve_per_head_group() -> None:
    assert torch.equal(mods.alibi_slopes(8), 2.0 ** -torch.arange(1.0, 9.0))
    assert mods.alibi_slopes(12).shape == (12,)
    assert mods.alibi_slopes(12)[8] == 2.0**-0.5


def test_library_video_tiles_round_trip() -> None:
    tiles = mods.video_tiles((3, 5, 6), (2, 2, 4))
    x = torch.randn(2, 90, 3)
    tiled = tiles.tiled(x)
    assert tiled.shape == (2, tiles.sizes.shape[0] * 16, 3)
    assert int(tiles.sizes.sum()) == 90
    assert torch.equal(tiles.untiled(tiled), x)
    visible = mods.tile_padding(tiles.sizes, 16)(0, 0, 0, torch.arange(tiled.shape[1]))
    assert torch.equal(tiled[:, ~visible], torch.zeros_like(tiled[:, ~visible]))
    pooled = mods.pooled_tiles(tiled, 16, tiles.sizes)
    assert torch.allclose(pooled[0, 0], x[0][tiles.order[: tiles.sizes[0]]].mean(0))


def test_library_undo_softmax_recovers_the_activation() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64) for _ in range(3))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k)
    new = torch.log(torch.relu(score) + 1)
    out = torch.einsum("bhqk,bkhd->bqhd", new.softmax(-1), v)
    got = mods.undo_softmax(out, new.logsumexp(-1), v.sum(1, keepdim=True))
    assert torch.allclose(got, torch.einsum("bhqk,bkhd->bqhd", torch.relu(score), v))


def test_library_per_batch_tables() -> None:
    ids = torch.tensor([[0, 0, 1], [0, 1, 1]])
    index = torch.arange(3)
    for make in (mods.document, mods.transfusion):
        traced = trace_mask_mod(make(ids))
        assert traced.graph.captures[0].rank == 2
    assert mods.prefix_lm(torch.tensor([2, 0]))(1, 0, index[0], index[1]) == False  # noqa: E712


def test_library_wrong_input_raises() -> None:
    with pytest.raises(ValueError, match=r"top_k\.shape"):
        mods.selected_tiles(torch.zeros(2, 2, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="positive extents"):
        mods.video_tiles((0, 1, 1))
    with pytest.raises(ValueError, match="heads or slopes"):
        mods.alibi()
