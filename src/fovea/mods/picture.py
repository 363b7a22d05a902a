"""Examples of every mod of the library on a small grid, and pictures of them.

Lives here: `EXAMPLES`, one per mod, which the tests run and `scripts/docs` draws; `values` to
compute one; `draw` to draw one. Not here: the mods. Invariant: importing this needs torch alone;
matplotlib is imported inside `draw`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fovea.mods as library
from fovea.errors import missing_package
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.trace import trace_mask_mod, trace_score_mod


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A mod on a grid: `make()` gives the mod, `caption` is how a reader would call it."""

    name: str
    kind: str
    make: Callable[[], Callable[..., Any]]
    caption: str
    seqlen_q: int = 32
    seqlen_kv: int = 32
    batch: int = 1
    heads: int = 1


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _flags(length: int, *places: int) -> Tensor:
    flags = torch.zeros(length, dtype=torch.bool)
    flags[list(places)] = True
    return flags


def _mask(name: str, caption: str, make: Callable[[], Any], *grid: int) -> Example:
    q, kv = grid or (32, 32)
    return Example(
        name=name, kind="mask", make=make, caption=caption, seqlen_q=q, seqlen_kv=kv, heads=2
    )


def _score(name: str, caption: str, make: Callable[[], Any], *grid: int) -> Example:
    q, kv = grid or (32, 32)
    return Example(
        name=name,
        kind="score",
        make=make,
        caption=caption,
        seqlen_q=q,
        seqlen_kv=kv,
        batch=2,
        heads=4,
    )


_OFFSETS = library.offsets_of([7, 12, 4, 9])
_SPANS = torch.tensor([-1] * 6 + [0] * 8 + [-1] * 5 + [1] * 9 + [-1] * 4)
_ANCESTORS = library.tree_ancestors([-1, 0, 1, 1, 3, 3, 0, 6])
_TOP_K = library.top_k_with_self(_random(1, 2, 8, 8), 3)
_TOKENS = _random(1, 32, 32).topk(6).indices
_MASKS = (
    _mask("causal", "causal", lambda: library.causal),
    _mask("sliding_window", "sliding_window(6)", lambda: library.sliding_window(6)),
    _mask("dilated", "dilated(12, 3)", lambda: library.dilated(12, 3)),
    _mask("prefix_lm", "prefix_lm(9)", lambda: library.prefix_lm(9)),
    _mask("chunked", "chunked(8)", lambda: library.chunked(8)),
    _mask(
        "llama4_chunked",
        "llama4_chunked(8, padding)",
        lambda: library.llama4_chunked(8, torch.tensor([3])),
    ),
    _mask("streaming", "streaming(6, sinks=3)", lambda: library.streaming(6, 3)),
    _mask("gpt_oss", "gpt_oss(8)", lambda: library.gpt_oss(8)),
    _mask(
        "global_tokens",
        "or_masks(sliding_window(2, 2), global_tokens(flags))",
        lambda: library.or_masks(
            library.sliding_window(2, 2), library.global_tokens(_flags(32, 4, 20))
        ),
    ),
    _mask(
        "global_sliding_window",
        "global_sliding_window(4, flags)",
        lambda: library.global_sliding_window(4, _flags(32, 0, 17)),
    ),
    _mask("checkerboard", "checkerboard(4)", lambda: library.checkerboard(4)),
    _mask("strided", "strided(6)", lambda: library.strided(6)),
    _mask("block_diffusion", "block_diffusion(16, 4)", lambda: library.block_diffusion(16, 4)),
    _mask(
        "document",
        "document(ids)",
        lambda: library.document(library.document_ids(_OFFSETS)),
    ),
    _mask(
        "document_mask",
        "document_mask(prefix_lm(3), offsets)",
        lambda: library.document_mask(library.prefix_lm(3), _OFFSETS),
    ),
    _mask("packed_causal", "packed_causal(offsets)", lambda: library.packed_causal(_OFFSETS)),
    _mask(
        "shared_prefix",
        "shared_prefix(offsets, [0, 0, 2, 0])",
        lambda: library.shared_prefix(_OFFSETS, torch.tensor([0, 0, 2, 0])),
    ),
    _mask("transfusion", "transfusion(spans)", lambda: library.transfusion(_SPANS)),
    _mask(
        "vision_cross_attention",
        "vision_cross_attention(intervals, 5)",
        lambda: library.vision_cross_attention(
            torch.tensor([[0, 18], [3, 18], [18, 32], [25, 32]]), 5
        ),
        32,
        20,
    ),
    _mask("tree", "tree(12, ancestors)", lambda: library.tree(12, _ANCESTORS), 8, 20),
    _mask("draft_blocks", "draft_blocks(8, 6)", lambda: library.draft_blocks(8, 6), 24, 32),
    _mask("local_2d", "local_2d(6, 6, 1, 1)", lambda: library.local_2d(6, 6, 1, 1), 36, 36),
    _mask("natten_2d", "natten_2d(6, 6, 3, 3)", lambda: library.natten_2d(6, 6, 3, 3), 36, 36),
    _mask(
        "natten_tiled",
        "natten_tiled((8, 8), (3, 3), (4, 4))",
        lambda: library.natten_tiled((8, 8), (3, 3), (4, 4)),
        64,
        64,
    ),
    _mask(
        "natten_morton",
        "natten_morton(8, 8, 3, 3)",
        lambda: library.natten_morton(8, 8, 3, 3),
        64,
        64,
    ),
    _mask(
        "sliding_tile_2d",
        "sliding_tile_2d((8, 8), (4, 6), (2, 2), text=4)",
        lambda: library.sliding_tile_2d((8, 8), (4, 6), (2, 2), 4),
        68,
        68,
    ),
    _mask(
        "sliding_tile_3d",
        "sliding_tile_3d((4, 4, 4), (2, 4, 4), (2, 2, 2), text=4)",
        lambda: library.sliding_tile_3d((4, 4, 4), (2, 4, 4), (2, 2, 2), 4),
        68,
        68,
    ),
    _mask("svg_spatial", "svg_spatial(4, 7, 2)", lambda: library.svg_spatial(4, 7, 2, multiple=4)),
    _mask("svg_temporal", "svg_temporal(4, 4, 7)", lambda: library.svg_temporal(4, 4, 7)),
    _mask(
        "selected_tiles",
        "selected_tiles(top_k, 4, sizes)",
        lambda: library.selected_tiles(_TOP_K, 4, torch.tensor([4, 4, 3, 4, 4, 2, 4, 4])),
    ),
    _mask(
        "block_map",
        "block_map(random < 0.4, 4)",
        lambda: library.block_map(_random(1, 2, 8, 8, seed=3) < -0.2, 4),
    ),
    _mask(
        "tile_padding",
        "tile_padding(sizes, 4)",
        lambda: library.tile_padding(torch.tensor([4, 3, 4, 1, 4, 2, 4, 4]), 4),
    ),
    _mask("top_k_tokens", "top_k_tokens(indices)", lambda: library.top_k_tokens(_TOKENS)),
    _mask(
        "and_masks",
        "and_masks(causal, document(ids))",
        lambda: library.and_masks(
            library.causal, library.document(library.document_ids(_OFFSETS), causal=False)
        ),
    ),
    _mask(
        "or_masks",
        "or_masks(sliding_window(2), dilated(30, 5))",
        lambda: library.or_masks(library.sliding_window(2), library.dilated(30, 5)),
    ),
    _mask("not_mask", "not_mask(causal)", lambda: library.not_mask(library.causal)),
    _mask(
        "shifted",
        "shifted(causal, q_offset=16)",
        lambda: library.shifted(library.causal, torch.tensor(16)),
        16,
        32,
    ),
    _mask("batched", "batched(causal, 8)", lambda: library.batched(library.causal, 8)),
)
_SCORES = (
    _score("alibi", "alibi(4)", lambda: library.alibi(4)),
    _score(
        "alibi_slopes",
        "alibi(slopes=alibi_slopes(4))",
        lambda: library.alibi(slopes=library.alibi_slopes(4)),
    ),
    _score("softcap", "softcap(2.0)", lambda: library.softcap(2.0)),
    _score("gemma2", "gemma2(2.0, window=8)", lambda: library.gemma2(2.0, 8)),
    _score("causal_score", "causal_score", lambda: library.causal_score),
    _score("relative_position", "relative_position()", library.relative_position),
    _score(
        "relative_bias",
        "relative_bias(table, 8)",
        lambda: library.relative_bias(_random(4, 17), 8),
    ),
    _score("t5_bias", "t5_bias(table)", lambda: library.t5_bias(_random(32, 4), 64)),
    _score(
        "t5_bias_decoder",
        "t5_bias(table, bidirectional=False)",
        lambda: library.t5_bias(_random(16, 4), 24, bidirectional=False),
    ),
    _score("head_bias", "head_bias(bias)", lambda: library.head_bias(_random(4))),
    _score("dense_bias", "dense_bias(bias)", lambda: library.dense_bias(_random(1, 4, 32, 32))),
    _score(
        "pair_bias",
        "pair_bias(bias, residues)",
        lambda: library.pair_bias(_random(1, 4, 32, 32), _random(2, 32) < 1),
    ),
    _score("sandwich", "sandwich(4, 32)", lambda: library.sandwich(4, 32)),
    _score(
        "graphormer_spatial",
        "graphormer_spatial(table, distances)",
        lambda: library.graphormer_spatial(_random(4, 6), _integers(6, 2, 32, 32)),
    ),
    _score(
        "graphormer_edges",
        "graphormer_edges(table, edges, lengths)",
        lambda: library.graphormer_edges(
            _random(4, 3, 5), _integers(5, 2, 32, 32, 3), _integers(4, 2, 32, 32, seed=1)
        ),
    ),
    _score(
        "mla_rope",
        "mla_rope(q_rope, k_rope, 0.25)",
        lambda: library.mla_rope(_random(2, 4, 32, 8), _random(2, 1, 32, 8), 0.25),
    ),
    _score(
        "activation",
        "activation(gelu)",
        lambda: library.activation(torch.nn.functional.gelu),
    ),
    _score("temperature", "temperature(scale)", lambda: library.temperature(torch.tensor(0.5))),
    _score(
        "masked_score",
        "masked_score(alibi(4), causal)",
        lambda: library.masked_score(library.alibi(4), library.causal),
    ),
)
EXAMPLES: dict[str, Example] = {example.name: example for example in (*_MASKS, *_SCORES)}


def example_score(example: Example) -> Tensor:
    """Return the scores that a score example is shown on.

    Shapes: (batch, heads, seqlen_q, seqlen_kv) fp32.
    """
    return _random(example.batch, example.heads, example.seqlen_q, example.seqlen_kv, seed=7)


def values(example: Example) -> Tensor:
    """Return an example's mask, or its new scores, over its whole grid.

    Shapes: (batch, heads, seqlen_q, seqlen_kv), bool or fp32.
    """
    is_mask = example.kind == "mask"
    traced = trace_mask_mod(example.make()) if is_mask else trace_score_mod(example.make())
    shape = (example.batch, example.heads, example.seqlen_q, example.seqlen_kv)
    result = evaluate(
        traced.graph,
        Positions(
            b=torch.arange(shape[0]).reshape(-1, 1, 1, 1),
            h=torch.arange(shape[1]).reshape(-1, 1, 1),
            q_idx=torch.arange(shape[2]).reshape(-1, 1),
            kv_idx=torch.arange(shape[3]),
        ),
        score=None if is_mask else example_score(example),
        captures=traced.captures,
        scalars=traced.scalars,
    )
    return result.expand(shape)


def draw(name: str, axes: Any = None, head: int = 0) -> Any:
    """Return a matplotlib figure of an example: keys to the right, queries downwards.

    Args:
        name: a key of EXAMPLES.
        axes: matplotlib axes to draw into; new ones by default.
        head: which head to show.

    Raises:
        ModuleNotFoundError: matplotlib is absent (it comes with the extra `cli` or `docs`).
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            missing_package("a picture of a mod", "matplotlib", "cli"), name="matplotlib"
        ) from error

    example = EXAMPLES[name]
    grid = values(example)[0, head]
    if axes is None:
        wide = 0.6 + 3.2 * grid.shape[1] / max(grid.shape)
        _, axes = plt.subplots(figsize=(wide, 0.9 + 3.2 * grid.shape[0] / max(grid.shape)))
    if example.kind == "mask":
        axes.imshow(grid.numpy(), cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest")
    else:
        change = (grid - example_score(example)[0, head]).masked_fill(grid.isinf(), torch.nan)
        reach = max(float(change.nan_to_num().abs().max()), 1e-6)
        axes.imshow(change.numpy(), cmap="RdBu", vmin=-reach, vmax=reach, interpolation="nearest")
        axes.set_facecolor("0.92")
    axes.set(xlabel="key", ylabel="query", xticks=[], yticks=[])
    axes.set_title(example.caption, fontsize=8, family="monospace")
    return axes.figure
