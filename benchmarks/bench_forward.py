"""Time dense forwards: fovea beside FlashAttention-3, cuDNN, FlashAttention-2 and flex.

    python -m benchmarks.bench_forward                        # four shapes, about two minutes
    python -m benchmarks.bench_forward --shape "S16384 D128"  # every known shape that matches
    python -m benchmarks.bench_forward --all --peers fa3      # all 27 beside one peer

From the repository's root, with `src` and `.` on PYTHONPATH. Writes forward.json.
"""

import argparse
import os
from functools import partial
from typing import Any

import torch

from benchmarks import peers, protocol, shapes


def main() -> None:
    """Run the benchmark as the command line says."""
    options = parse()
    protocol.require_gpu()
    if options.bundle:
        os.environ["FOVEA_BUNDLE"] = options.bundle
    board = protocol.Board()
    timing = protocol.Timing(
        rounds=options.rounds,
        segment_seconds=options.seconds,
        has_burst=not options.no_burst,
    )
    names = [*([] if options.without_fovea else ["fovea"]), *options.peers]
    path = protocol.result_path("forward", options.out)
    rows: list[dict[str, Any]] = []
    for shape in chosen(options):
        inputs = peers.Inputs.random(shape, getattr(torch, options.dtype))
        makers = {name: partial(peers.FORWARD[name], inputs, shape) for name in names}
        launches, outputs = peers.ready(makers)
        checks = peers.largest_difference(outputs)
        del outputs
        samples = protocol.measure(launches, board, timing)
        rates = protocol.rates(samples, shape.forward_flops() / 1e12)
        rows.append({**shape.row(), "dtype": options.dtype, **rates, **checks})
        print(protocol.table_line(rows[-1], names, str(shape)), flush=True)
        # After every shape: a run that is cut short keeps what it has.
        protocol.write_result(path, protocol.stamp(board), "TFLOP/s", rows)
    print(f"wrote {path}")


def chosen(options: argparse.Namespace) -> tuple[shapes.Shape, ...]:
    """Return the shapes that the command line asks for, in order, each once."""
    if options.all:
        return shapes.DENSE_SHAPES
    if not options.shape:
        return shapes.QUICK_SHAPES
    found = [s for words in options.shape for s in shapes.select(words.split())]
    return tuple(dict.fromkeys(found))


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument(
        "--shape", action="append", metavar="WORDS", help='such as "S16384 D128 causal"; repeatable'
    )
    parser.add_argument("--all", action="store_true", help="all 27 shapes")
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


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--rounds", type=int, default=2, help="turns of each implementation")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="continuous work per turn, second half counts"
    )
    parser.add_argument("--no-burst", action="store_true", help="steady state only")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--bundle", help="folder of ahead-of-time artifacts (FOVEA_BUNDLE)")
    parser.add_argument("--out", help="result file (default: benchmarks/results/<gpu>/...)")


if __name__ == "__main__":
    main()
