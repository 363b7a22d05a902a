"""Time forwards with mods: fovea beside torch's compiled flex_attention.

    python -m benchmarks.bench_forward_mods                       # all cases
    python -m benchmarks.bench_forward_mods --case window1024 --case alibi

From the repository's root, with `src` and `.` on PYTHONPATH. Both get the same Python functions
and block lists of the same mask. The FLOPs counted are those of visible pairs. Writes
forward_mods.json.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from benchmarks import peers, protocol
from benchmarks.run import Run, parser_of
from benchmarks.shapes import MOD_SHAPE, Shape

DEVICE = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is asked of both implementations."""

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None


def causal(shape: Shape, device: str) -> Case:
    """Return the causal mask as a mask_mod."""
    return Case(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


def window1024(shape: Shape, device: str) -> Case:
    """Return a causal sliding window of 1024 keys."""
    return Case(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 1024))


def alibi(shape: Shape, device: str) -> Case:
    """Return ALiBi with its usual slopes, on a causal mask."""
    slopes = torch.exp2(-8.0 * torch.arange(1, shape.H + 1, device=device) / shape.H)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return Case(score_mod=score_mod, mask_mod=causal(shape, device).mask_mod)


def document(shape: Shape, device: str) -> Case:
    """Return causal attention inside documents of random lengths, 1024 tokens on average."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, shape.S // 1024)
    starts = torch.randint(1, shape.S, (count - 1,), generator=generator).sort().values
    ids = torch.bucketize(torch.arange(shape.S), starts, right=True).to(device, torch.int32)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return Case(mask_mod=mask_mod)


def softcap(shape: Shape, device: str) -> Case:
    """Return a tanh soft cap at 50 on a causal mask."""
    return Case(
        score_mod=lambda score, b, h, q_idx, kv_idx: 50.0 * torch.tanh(score / 50.0),
        mask_mod=causal(shape, device).mask_mod,
    )


def prefix_lm(shape: Shape, device: str) -> Case:
    """Return a causal mask whose first quarter of keys every row sees."""
    prefix = shape.S // 4
    return Case(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx))


def natten(shape: Shape, device: str) -> Case:
    """Return neighbourhoods of 13 x 13 in an image 128 wide."""
    from fovea import mods

    return Case(mask_mod=mods.natten_2d(shape.S // 128, 128, 13, 13))


def sinks(shape: Shape, device: str) -> Case:
    """Return a causal window of 1024 keys beside the first 4: two ranges a row."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 1024) | (kv_idx < 4))

    return Case(mask_mod=mask_mod)


CASES = (causal, window1024, alibi, document, softcap, prefix_lm, natten, sinks)


def visible_pairs(case: Case, shape: Shape) -> int:
    """Return the number of visible pairs of one head, counted in rows of 512 queries."""
    if case.mask_mod is None:
        return shape.S * shape.S
    zero = torch.zeros((), dtype=torch.int64, device=DEVICE)
    position = torch.arange(shape.S, device=DEVICE)
    return sum(
        int(case.mask_mod(zero, zero, rows[:, None], position).sum())
        for rows in position.split(512)
    )


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = parser_of(__doc__)
    names = [case.__name__ for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="repeatable; default: all")
    parser.add_argument("--by-torch", action="store_true", help="block masks that torch made")
    options = parser.parse_args()
    run = Run(options, "forward_mods")
    inputs = peers.Inputs.random(MOD_SHAPE, getattr(torch, options.dtype))
    for make in CASES:
        if options.case and make.__name__ not in options.case:
            continue
        case = make(MOD_SHAPE, DEVICE)
        launches, outputs = peers.ready(makers(case, inputs, by_torch=options.by_torch))
        checks = peers.largest_difference(outputs)
        del outputs
        work = MOD_SHAPE.forward_flops(visible_pairs(case, MOD_SHAPE)) / 1e12
        rates = protocol.rates(run.measure(launches), work)
        head = {**MOD_SHAPE.row(), "mod": make.__name__, "dtype": options.dtype}
        if options.by_torch:
            head["by_torch"] = True
        run.add({**head, **rates, **checks}, ["fovea", "flex"], make.__name__)
    run.end()


def makers(
    case: Case, inputs: peers.Inputs, *, by_torch: bool = False
) -> dict[str, Callable[[], peers.Launch]]:
    """Return both implementations of a case; the block mask is built outside of any clock."""
    import fovea

    mask = None
    if case.mask_mod is not None:
        create = flex_attention.create_block_mask if by_torch else fovea.create_block_mask
        size = (MOD_SHAPE.S, MOD_SHAPE.S)
        mask = create(case.mask_mod, None, None, *size, device=DEVICE)
    keywords = {"score_mod": case.score_mod, "block_mask": mask}
    return {
        "fovea": lambda: peers.fovea_forward(inputs, MOD_SHAPE, **keywords),
        "flex": lambda: peers.flex_forward(inputs, MOD_SHAPE, **keywords),
    }


if __name__ == "__main__":
    main()
