"""Time dense forwards: fovea beside FlashAttention-3, cuDNN, FlashAttention-2 and flex.

    python -m benchmarks.bench_forward                        # four shapes, about two minutes
    python -m benchmarks.bench_forward --shape "S16384 D128"  # every known shape that matches
    python -m benchmarks.bench_forward --all --peers fa3      # all 27 beside one peer
    python -m benchmarks.bench_forward --wide --peers fa3,flex  # head dims beyond 256

From the repository's root, with `src` and `.` on PYTHONPATH. Writes forward.json.
"""

import argparse
from functools import partial

import torch

from benchmarks import peers, protocol, shapes
from benchmarks.run import Run, parser_of


def main() -> None:
    """Run the benchmark as the command line says."""
    options = parse()
    run = Run(options, "forward")
    names = [*([] if options.without_fovea else ["fovea"]), *options.peers]
    for shape in chosen(options):
        inputs = peers.Inputs.random(shape, getattr(torch, options.dtype))
        makers = {name: partial(peers.FORWARD[name], inputs, shape) for name in names}
        launches, outputs = peers.ready(makers)
        checks = peers.largest_difference(outputs)
        del outputs
        rates = protocol.rates(run.measure(launches), shape.forward_flops() / 1e12)
        run.add({**shape.row(), "dtype": options.dtype, **rates, **checks}, names, str(shape))
    run.end()


def chosen(options: argparse.Namespace) -> tuple[shapes.Shape, ...]:
    """Return the shapes that the command line asks for, in order, each once."""
    if options.all:
        return shapes.DENSE_SHAPES
    if options.wide:
        return shapes.WIDE_SHAPES
    if not options.shape:
        return shapes.QUICK_SHAPES
    found = [s for words in options.shape for s in shapes.select(words.split())]
    return tuple(dict.fromkeys(found))


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--shape", action="append", metavar="WORDS", help='such as "S16384 D128 causal"; repeatable'
    )
    parser.add_argument("--all", action="store_true", help="all 27 shapes")
    parser.add_argument("--wide", action="store_true", help="head dims beyond 256 alone")
    parser.add_argument(
        "--peers",
        type=lambda text: [name for name in text.split(",") if name],
        default=["fa3", "cudnn", "flex"],
        metavar="NAMES",
        help="comma-separated, of fa3, cudnn, fa2, flex (default: fa3,cudnn,flex)",
    )
    parser.add_argument("--without-fovea", action="store_true", help="time the peers alone")
    options = parser.parse_args()
    unknown = set(options.peers) - set(peers.FORWARD)
    if unknown:
        parser.error(f"--peers {','.join(unknown)} is not valid (allowed: fa3, cudnn, fa2, flex)")
    return options


if __name__ == "__main__":
    main()
