"""Draw the picture of every mod in fovea.mods.

Lives here: order, colours and files. The examples are those of `fovea.mods.picture`, which the
tests run too. Invariant: a picture is the mod itself, evaluated at every (query, key) pair of one
batch entry and head.

Usage: python docs/gallery.py    writes docs/pictures/<name>.png
"""

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

import fovea
from fovea.mods.picture import EXAMPLES, Example, values

PICTURES = Path(__file__).parent / "pictures"
PIXELS = 192  # longest side; each pair becomes a square of whole pixels

VISIBLE, HIDDEN = (31, 111, 120), (232, 236, 239)
POSITIVE, NEUTRAL, NEGATIVE = (178, 72, 42), (250, 248, 244), (46, 86, 158)

# The modules of the library, in the order of the page.
SECTIONS = {
    "positions": "Positions",
    "documents": "Documents",
    "images": "Images and video",
    "sparse": "Chosen keys",
    "combine": "Made of others",
    "scores": "Scores",
}
# These change the score itself: they are shown on scores that grow with the key.
OF_THE_SCORE = {"activation", "causal_score", "gemma2", "softcap", "temperature"}


def function_of(example: Example) -> str:
    """Return the name of the library's function that an example shows."""
    if example.name in fovea.mods.__all__:
        return example.name
    found = re.match(r"\w+", example.caption)
    assert found is not None, example.caption
    return found[0]


def sections() -> dict[str, list[Example]]:
    """Return the examples by title of their section."""
    found: dict[str, list[Example]] = {title: [] for title in SECTIONS.values()}
    for example in EXAMPLES.values():
        module = getattr(fovea.mods, function_of(example)).__module__
        found[SECTIONS[module.rpartition(".")[2]]].append(example)
    return found


def undrawn() -> list[str]:
    """Return the public names that are no mods: they make tables for them."""
    drawn = {function_of(example) for example in EXAMPLES.values()}
    return [name for name in fovea.mods.__all__ if name not in drawn]


def shown(example: Example) -> Tensor:
    """Return what the picture shows at every pair, (queries, keys): visible, or the new score."""
    if example.kind == "mask":
        return values(example)[0, 0]
    mod, zero, num_kv = example.make(), torch.tensor(0), example.seqlen_kv
    grows = function_of(example) in OF_THE_SCORE
    before = torch.linspace(-4, 4, num_kv) if grows else torch.zeros(num_kv)

    def at(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(before[kv_idx], zero, zero, q_idx, kv_idx)

    over_keys = torch.vmap(at, in_dims=(None, 0))
    over_all = torch.vmap(over_keys, in_dims=(0, None))
    return over_all(torch.arange(example.seqlen_q), torch.arange(num_kv))


def colours(example: Example) -> Tensor:
    """Return the picture's colours, (queries, keys, 3) bytes."""

    def colour(rgb: tuple[int, int, int]) -> Tensor:
        return torch.tensor(rgb, dtype=torch.float32)

    pairs = shown(example)
    if example.kind == "mask":
        return torch.where(pairs[..., None], colour(VISIBLE), colour(HIDDEN)).to(torch.uint8)
    finite = pairs.isfinite()
    most = pairs[finite].abs().max().clamp_min(1e-6)
    share = torch.where(finite, pairs, 0.0).div(most)[..., None]
    towards = torch.where(share > 0, colour(POSITIVE), colour(NEGATIVE))
    picture = torch.lerp(colour(NEUTRAL).expand_as(towards), towards, share.abs())
    return torch.where(finite[..., None], picture, colour(HIDDEN)).to(torch.uint8)


def draw(example: Example, path: Path) -> None:
    """Write the picture of an example."""
    from matplotlib import image

    picture = colours(example)
    scale = max(1, PIXELS // max(picture.shape[:2]))
    picture = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    # No program name inside, so that another version of matplotlib writes the same file.
    image.imsave(path, picture.numpy(), metadata={"Software": ""})


def main() -> int:
    """Write every picture, remove strays, and return the exit status."""
    PICTURES.mkdir(exist_ok=True)
    for example in EXAMPLES.values():
        draw(example, PICTURES / f"{example.name}.png")
    for stray in {path.stem for path in PICTURES.glob("*.png")} - set(EXAMPLES):
        (PICTURES / f"{stray}.png").unlink()
    print(f"{len(EXAMPLES)} pictures in {PICTURES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
