"""Time forwards on block-sparse masks: fovea beside torch's compiled flex_attention.

    python -m benchmarks.bench_block_sparse                   # all masks
    python -m benchmarks.bench_block_sparse --mask random10

From the repository's root, with `src` and `.` on PYTHONPATH. Both get the same block mask, made by
fovea, or, with `--by-torch`, by torch. The FLOPs counted are those of visible pairs. Writes
block_sparse.json.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench_forward_mods, peers, protocol
from benchmarks.run import Run, parser_of
from benchmarks.shapes import MOD_SHAPE, Shape

DEVICE = "cuda"
MaskMod = Callable[..., Tensor]


def _random(percent: int, block: int) -> Callable[[Shape, str], MaskMod]:
    """Return a mask of whole blocks, chosen at random, each query block's own among them."""

    def make(shape: Shape, device: str) -> MaskMod:
        generator = torch.Generator().manual_seed(0)
        count = shape.S // block
        chosen = torch.rand(count, count, generator=generator) < percent / 100
        chosen |= torch.eye(count, dtype=torch.bool)
        chosen = chosen.to(device)
        return lambda b, h, q_idx, kv_idx: chosen[q_idx // block, kv_idx // block]

    return make


def _strided(shape: Shape, device: str) -> MaskMod:
    """Return a causal window of 512 keys beside every 16th column of 128 keys before it."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_near = q_idx - kv_idx < 512
        return (q_idx >= kv_idx) & (is_near | (kv_idx // 128 % 16 == 15))

    return mask_mod


def _global(shape: Shape, device: str) -> MaskMod:
    """Return a window of 512 keys on both sides, and 64 tokens that see and are seen by all."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_near = (q_idx - kv_idx).abs() <= 512
        return is_near | (q_idx < 64) | (kv_idx < 64)

    return mask_mod


MASKS: dict[str, Callable[[Shape, str], MaskMod]] = {
    "random10": _random(10, 128),
    "random25": _random(25, 128),
    "random50": _random(50, 128),
    "random25 of 64": _random(25, 64),
    "strided": _strided,
    "global": _global,
}


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = parser_of(__doc__)
    parser.add_argument("--mask", action="append", choices=MASKS, help="repeatable; default: all")
    parser.add_argument("--by-torch", action="store_true", help="block masks that torch made")
    options = parser.parse_args()
    run = Run(options, "block_sparse")
    inputs = peers.Inputs.random(MOD_SHAPE, getattr(torch, options.dtype))
    for name in options.mask or MASKS:
        case = bench_forward_mods.Case(mask_mod=MASKS[name](MOD_SHAPE, DEVICE))
        made = bench_forward_mods.makers(case, inputs, by_torch=options.by_torch)
        launches, outputs = peers.ready(made)
        checks = peers.largest_difference(outputs)
        del outputs
        pairs = bench_forward_mods.visible_pairs(case, MOD_SHAPE)
        rates = protocol.rates(run.measure(launches), MOD_SHAPE.forward_flops(pairs) / 1e12)
        head: dict[str, Any] = {**MOD_SHAPE.row(), "mod": name, "dtype": options.dtype}
        density = round(pairs / MOD_SHAPE.S**2, 3)
        row = {**head, "visible": density, "by_torch": options.by_torch, **rates, **checks}
        run.add(row, ["fovea", "flex"], f"{name} {100 * density:.0f} %")
    run.end()


if __name__ == "__main__":
    main()
