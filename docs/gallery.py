"""Draw the picture of every mod in fovea.mods.

Lives here: the example calls, which `tables.py` also prints, and the drawing. Invariant: a picture
is the mod itself, evaluated at every (query, key) pair of one batch entry and head.

Usage: python docs/gallery.py    writes docs/pictures/<name>.png
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fovea

PICTURES = Path(__file__).parent / "pictures"
PIXELS = 192  # longest side; each pair becomes a square of whole pixels

VISIBLE, HIDDEN = (31, 111, 120), (232, 236, 239)
POSITIVE, NEUTRAL, NEGATIVE = (178, 72, 42), (250, 248, 244), (46, 86, 158)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call of the library, drawn.

    Attributes:
        call: Python source of the call, evaluated with the names below.
        sizes: queries and keys of the picture.
        kind: mask; bias (a score of 0 goes in); or curve (a score that grows with the key goes in).
        head: the head that is drawn.
    """

    call: str
    sizes: tuple[int, int] = (48, 48)
    kind: str = "mask"
    head: int = 0

    @property
    def name(self) -> str:
        """Name of the function, and of the picture."""
        found = re.match(r"\w+", self.call)
        assert found is not None, self.call
        return found[0]

    def make(self) -> Callable[..., Tensor]:
        """Return the mod."""
        library = {name: getattr(fovea.mods, name) for name in fovea.mods.__all__}
        return eval(self.call, library | inputs())


def inputs() -> dict[str, Any]:
    """Return the tensors that the calls name."""
    torch.manual_seed(0)
    flags = torch.zeros(48, dtype=torch.bool)
    flags[[0, 20, 21]] = True
    ids = torch.tensor([0] * 11 + [1] * 19 + [2] * 6 + [3] * 12)
    span = torch.full((48,), -1)
    span[8:20], span[30:41] = 0, 1
    path = (torch.arange(48)[:, None] - torch.arange(48)).abs()
    video = fovea.mods.video_tiles((4, 5, 3), (2, 2, 2))
    return {
        "torch": torch,
        "flags": flags,
        "ids": ids,
        "span": span,
        "offsets": fovea.mods.offsets_of([11, 19, 6, 12]),
        "prompt_of": torch.tensor([0, 0, 0, 0]),
        "text_of_image": torch.tensor([[4, 14], [14, 40], [22, 48]]),
        "table": torch.randn(4, 33).cumsum(1) / 3,
        "buckets": torch.randn(16, 4),
        "per_head": torch.tensor([1.5, -1.0]),
        "bias": torch.randn(1, 1, 48, 48),
        "residues": (torch.arange(48) < 40)[None],
        "distances": path.clamp(max=7)[None],
        "edges": torch.randint(0, 4, (1, 48, 48, 3)),
        "lengths": path.clamp(max=3)[None],
        "edge_table": torch.randn(4, 3, 4),
        "rope": torch.randn(1, 4, 48, 8),
        "selected": torch.tensor([[0, 0], [0, 1], [0, 2], [1, 3], [2, 4], [3, 5]])[None, None],
        "tile_table": torch.rand(1, 1, 6, 6) < 0.4,
        "video": video,
        "chosen": torch.randint(0, 48, (1, 48, 6)),
        "tree_of": fovea.mods.tree_ancestors([-1, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 8]),
    }


SECTIONS: dict[str, list[Example]] = {
    "Positions": [
        Example(call="causal"),
        Example(call="sliding_window(9)"),
        Example(call="sliding_window(6, 6)"),
        Example(call="dilated(24, 4)"),
        Example(call="strided(8)"),
        Example(call="prefix_lm(14)"),
        Example(call="chunked(12)"),
        Example(call="llama4_chunked(12, torch.tensor([5]))"),
        Example(call="streaming(10, sinks=4)"),
        Example(call="gpt_oss(8)"),
        Example(call="global_tokens(flags)"),
        Example(call="global_sliding_window(4, flags)"),
        Example(call="block_diffusion(24, 6)"),
        Example(call="checkerboard(6)"),
    ],
    "Documents": [
        Example(call="document(ids)"),
        Example(call="document_mask(prefix_lm(5), offsets)"),
        Example(call="packed_causal(offsets)"),
        Example(call="shared_prefix(offsets, prompt_of)"),
        Example(call="transfusion(span)"),
        Example(call="vision_cross_attention(text_of_image, 8)", sizes=(48, 24)),
        Example(call="tree(12, tree_of)", sizes=(12, 24)),
        Example(call="draft_blocks(12, 6)", sizes=(36, 48)),
    ],
    "Images and video": [
        Example(call="natten_2d(8, 8, 3, 3)", sizes=(64, 64)),
        Example(call="natten_tiled((8, 8), (3, 3), (4, 4))", sizes=(64, 64)),
        Example(call="natten_morton(8, 8, 3, 3)", sizes=(64, 64)),
        Example(call="sliding_tile_2d((8, 8), (6, 6), (2, 2), text=8)", sizes=(72, 72)),
        Example(call="sliding_tile_3d((4, 4, 4), (6, 4, 2), (2, 2, 2), text=8)", sizes=(72, 72)),
        Example(call="svg_spatial(8, 8, width=2, multiple=4)", sizes=(64, 64)),
        Example(call="svg_temporal(8, 7, 8, width=2)", sizes=(64, 64)),
    ],
    "Chosen keys": [
        Example(call="selected_tiles(selected, 8)"),
        Example(call="block_map(tile_table, 8)"),
        Example(call="tile_padding(video.sizes, 8)", sizes=(48, 96)),
        Example(call="top_k_tokens(chosen)"),
    ],
    "Made of others": [
        Example(call="and_masks(causal, checkerboard(6))"),
        Example(call="or_masks(sliding_window(4), global_tokens(flags))"),
        Example(call="not_mask(causal)"),
        Example(call="shifted(causal, q_offset=16)", sizes=(32, 48)),
        Example(call="batched(causal, 16)"),
        Example(call="masked_score(alibi(4), causal)", kind="bias"),
    ],
    "Scores": [
        Example(call="alibi(4)", kind="bias"),
        Example(call="relative_position()", kind="bias"),
        Example(call="relative_bias(table, 16)", kind="bias"),
        Example(call="t5_bias(buckets, 32)", kind="bias"),
        Example(call="head_bias(per_head)", kind="bias"),
        Example(call="dense_bias(bias)", kind="bias"),
        Example(call="pair_bias(bias, residues)", kind="bias"),
        Example(call="sandwich(4, 48)", kind="bias"),
        Example(call="graphormer_spatial(table, distances)", kind="bias"),
        Example(call="graphormer_edges(edge_table, edges, lengths)", kind="bias"),
        Example(call="mla_rope(rope, rope)", kind="bias"),
        Example(call="causal_score", kind="curve"),
        Example(call="softcap(1.0)", kind="curve"),
        Example(call="gemma2(1.0, window=20)", kind="curve"),
        Example(call="temperature(torch.tensor(2.0))", kind="curve"),
        Example(call="activation(torch.relu)", kind="curve"),
    ],
}


def examples() -> list[Example]:
    """Return all examples, in the order of the page."""
    return [example for section in SECTIONS.values() for example in section]


def undrawn() -> list[str]:
    """Return the public names that are no mods: they make tables for them."""
    drawn = {example.name for example in examples()}
    return [name for name in fovea.mods.__all__ if name not in drawn]


def evaluate(example: Example) -> Tensor:
    """Return the mod's value at every pair, (queries, keys)."""
    mod, (num_q, num_kv) = example.make(), example.sizes
    zero, head = torch.tensor(0), torch.tensor(example.head)
    rows, columns = torch.arange(num_q), torch.arange(num_kv)
    if example.kind == "mask":

        def at(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.as_tensor(mod(zero, head, q_idx, kv_idx))
    else:
        ramp = torch.linspace(-4, 4, num_kv) if example.kind == "curve" else torch.zeros(num_kv)

        def at(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mod(ramp[kv_idx], zero, head, q_idx, kv_idx)

    over_keys = torch.vmap(at, in_dims=(None, 0))
    return torch.vmap(over_keys, in_dims=(0, None))(rows, columns)


def colours(example: Example, values: Tensor) -> Tensor:
    """Return the picture's colours, (queries, keys, 3) bytes."""

    def colour(rgb: tuple[int, int, int]) -> Tensor:
        return torch.tensor(rgb, dtype=torch.float32)

    if example.kind == "mask":
        picture = torch.where(values[..., None], colour(VISIBLE), colour(HIDDEN))
        return picture.to(torch.uint8)
    finite = values.isfinite()
    most = values[finite].abs().max().clamp_min(1e-6)
    share = torch.where(finite, values, 0.0).div(most)[..., None]
    towards = torch.where(share > 0, colour(POSITIVE), colour(NEGATIVE))
    picture = torch.lerp(colour(NEUTRAL).expand_as(towards), towards, share.abs())
    return torch.where(finite[..., None], picture, colour(HIDDEN)).to(torch.uint8)


def draw(example: Example, path: Path) -> None:
    """Write the picture of an example."""
    from matplotlib import image

    picture = colours(example, evaluate(example))
    scale = max(1, PIXELS // max(picture.shape[:2]))
    picture = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    # No program name inside, so that another version of matplotlib writes the same file.
    image.imsave(path, picture.numpy(), metadata={"Software": ""})


def picture_name(example: Example) -> str:
    """Return the file name of an example's picture: a name drawn twice gets its arguments too."""
    twice = [other for other in examples() if other.name == example.name]
    if twice[0] == example:
        return f"{example.name}.png"
    return f"{example.name}_{twice.index(example) + 1}.png"


def main() -> int:
    """Write every picture and return the exit status."""
    PICTURES.mkdir(exist_ok=True)
    for example in examples():
        draw(example, PICTURES / picture_name(example))
    wanted = {picture_name(example) for example in examples()}
    for stray in {path.name for path in PICTURES.glob("*.png")} - wanted:
        (PICTURES / stray).unlink()
    print(f"{len(wanted)} pictures in {PICTURES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
