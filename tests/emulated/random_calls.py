"""Random calls of the public functions: any feature of a kernel drawn together with any other.

Not a test itself: `test_sm100_random.py` runs them. Not here: random problems for the reference
(`fovea.testing.random_problems`), whose draw knows no layouts, pages or block masks that fovea
makes itself. Invariant: the same seed gives the same call, so a failure is named by its seed.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from call import Call, Case
from case_inputs import expanded, heads_first, poisoned, ramp, unaligned
from case_options import (
    alibi,
    any_capture,
    bool_capture,
    gather_of_gather,
    late_keys,
    masking_score,
    relative_bias,
    row_reduction,
    scattered_by_head,
    softcap_mod,
    t5_bias,
    tanh_mod,
    wild_integers,
)
from packed_cases import PackedCase, Packing, inside_nan, pages_heads_first
from packed_cases import heads_first as packed_heads_first

import fovea
from fovea import mods
from fovea.testing.inputs import Shape, normal
from fovea.testing.masks import block_mask_of, random_states

HEAD_DIMS = (
    *((8, 8), (16, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128)),
    *((256, 256), (5, 3), (20, 36), (40, 128), (100, 24), (192, 192), (64, 256), (72, 200)),
)
QUERIES, KEYS = (0, 1, 3, 17, 64, 65, 128, 129, 200), (0, 1, 7, 64, 127, 128, 129, 257, 300)
GROUPS = (1, 1, 2, 3, 5, 8)
BLOCKS = (4, 16, 32, 64, 100, 128, 256)
PAGES = (1, 7, 16, 24, 64, 128)
_WORK = 8 * 128 * 256  # positions of the score matrix, of all heads: seconds on the emulator
Draw = random.Random


def random_call(seed: int) -> Call:
    """Return the call of a seed."""
    draw = Draw(seed)
    heads_kv, group = draw.choice((1, 1, 2, 3)), draw.choice(GROUPS)
    dims = draw.choice(HEAD_DIMS)
    shape = Shape(
        batch=draw.choice((1, 1, 2, 3)),
        seqlen_q=draw.choice(QUERIES),
        seqlen_kv=draw.choice(KEYS),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=dims[0],
        head_dim_v=dims[1],
    )
    while shape.batch * shape.heads_q * shape.seqlen_q * shape.k[1] > _WORK:
        shape = _smaller(shape)
    fields: dict[str, Any] = {
        "name": f"random {seed}",
        "dtype": draw.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        "wants_max_score": draw.random() < 0.3,
        "transform": ramp(-300.0, 300.0) if draw.random() < 0.15 else None,
    }
    kind = draw.random()
    if kind < 0.6:
        if fields["transform"] is None:
            fields["transform"] = draw.choice((None, poisoned, heads_first, expanded, unaligned))
        options = _random_options(draw, is_packed=False)
        return Case(shape=shape, small=shape, options=options, **fields).build("cpu", is_small=True)
    is_paged = kind >= 0.85
    if is_paged:
        dims = draw.choice(((64, 64), (128, 128), (192, 128), (256, 256), (64, 256), (40, 40)))
        shape = replace(shape, head_dim=dims[0], head_dim_v=dims[1])
    packing = _random_packing(draw, shape)
    layouts = (None, pages_heads_first) if is_paged else (None, packed_heads_first, inside_nan)
    return PackedCase(
        packing=packing,
        small_packing=packing,
        shape=shape,
        options=_random_options(draw, is_packed=True),
        layout=draw.choice(layouts),
        page_size=draw.choice(PAGES) if is_paged else None,
        **fields,
    ).build("cpu", is_small=True)


def _smaller(shape: Shape) -> Shape:
    if shape.batch > 1:
        return replace(shape, batch=shape.batch - 1)
    if shape.heads_kv is not None and shape.heads_kv > 1:
        return replace(shape, heads_kv=1, heads_q=shape.heads_q // shape.heads_kv)
    return replace(shape, heads_q=max(shape.heads_q - 3, 1))


def _random_packing(draw: Draw, shape: Shape) -> Packing:
    """Return sequences of at most the sizes of a shape, the first as long."""
    longest = (shape.seqlen_q, shape.k[1])
    rest = [tuple(draw.randint(0, size) // 2 for size in longest) for _ in range(shape.batch)]
    return Packing(
        lengths=(longest, *((pair[0], pair[1]) for pair in rest)),
        idle=draw.choice(((0, 0), (5, 0), (0, 33), (5, 33))),
        behind=draw.choice((0, 9)),
        slack=draw.choice((0, 0, 50)),
    )


def _random_options(draw: Draw, *, is_packed: bool) -> Callable[[Shape, torch.device], Any]:
    """Return a maker of options; what depends on sizes is drawn when they are known."""

    def make(shape: Shape, device: torch.device) -> dict[str, Any]:
        options: dict[str, Any] = {
            "causal": draw.choice((False, False, True, "top_left")),
            "window": draw.choice((None, None, None, (50, 3), (None, 40), (90, None), (0, 0))),
            "softcap": draw.choice((None, None, None, 1.5, 20.0, torch.tensor(3.0))),
            "scale": draw.choice((None, None, None, 0.0, -0.4, 0.3, torch.tensor(0.2))),
        }
        if draw.random() < 0.3:
            options["sink"] = normal((shape.heads_q,), seed=draw.randint(0, 99)) * 3
        if draw.random() < 0.5:
            options |= draw.choice(_SCORES)(shape, device)
        if draw.random() < 0.35:
            options |= draw.choice(_MASKS)(shape, device)
        if draw.random() < 0.35 and 0 not in (shape.seqlen_q, shape.k[1]):
            options["block_mask"] = _random_block_mask(draw, shape)
        return options

    return make


def _random_block_mask(draw: Draw, shape: Shape) -> Any:
    size = draw.choice(((128, 128), (draw.choice(BLOCKS), draw.choice(BLOCKS))))
    lengths = (shape.seqlen_q, shape.k[1])
    counts = (draw.choice((1, shape.batch)), draw.choice((1, shape.heads_q)))
    if draw.random() < 0.6:
        function = draw.choice(_MASKS)(shape, torch.device("cpu"))["mask_mod"]
        return fovea.create_block_mask(function, shape.batch, shape.heads_q, *lengths, "cpu", size)
    blocks = [-(-length // each) for length, each in zip(lengths, size, strict=True)]
    return block_mask_of(
        random_states(*counts, blocks[0], blocks[1], seed=draw.randint(0, 99)),
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        block_q=size[0],
        block_kv=size[1],
        mask_mod=mods.checkerboard(draw.randint(1, 3)),
    )


# --- mods that the named cases do not have: several captured numbers, several kinds of capture ----


def _numbers(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Run-time ints and floats, used as factor, divisor, shift and threshold."""
    factor, divisor, threshold, shift = 0.013, 7, 40, 2

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = abs(q_idx - kv_idx) < threshold
        bias = factor * ((q_idx // divisor) % 5) - (kv_idx >> shift) * 0.001
        return torch.where(near, score + bias * (h + 1), score * 0.75)

    return {"score_mod": score_mod}


def _mixed_captures(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Captures of several dtypes, one not contiguous and one expanded."""
    by_head = normal((shape.heads_q,), seed=20, dtype=torch.float16)
    table = normal((11, 2 * 7), seed=21, dtype=torch.bfloat16)[:, ::2]
    kinds = (torch.arange(max(shape.k[1], 1)) % 11).to(torch.int16)
    same = torch.tensor([0.5]).expand(shape.batch)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * same[b] + by_head[h] * table[kinds[kv_idx], q_idx % 7]

    return {"score_mod": score_mod}


def _two_conditions(shape: Shape, device: torch.device) -> dict[str, Any]:
    """A mask by captured numbers, a captured table of bools and the head."""
    first, width = 3, 61
    open_heads = torch.arange(max(shape.heads_q, 1)) % 3 != 1

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < first + b) | ((abs(kv_idx - q_idx) <= width) & open_heads[h])

    return {"mask_mod": mask_mod}


def _causal_mod(shape: Shape, device: torch.device) -> dict[str, Any]:
    offset = 10
    return {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset}


def _nothing_visible(shape: Shape, device: torch.device) -> dict[str, Any]:
    return {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < 0}


_SCORES = (
    *(alibi, relative_bias, t5_bias, tanh_mod, masking_score, gather_of_gather, row_reduction),
    *(wild_integers, softcap_mod, _numbers, _mixed_captures),
)
_MASKS = (
    *(bool_capture, any_capture, late_keys, scattered_by_head, _two_conditions, _causal_mod),
    _nothing_visible,
)
