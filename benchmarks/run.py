"""What every benchmark on a GPU has in common: its options, and a run that keeps its rows.

Lives here: the shared part of the command lines, the board and the result file of one run. Not
here: how a time is taken (`protocol.py`), what is timed. Invariant: rows are written as they come,
so a run that is cut short keeps what it has.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from benchmarks import protocol


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each implementation")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="continuous work per turn, second half counts"
    )
    parser.add_argument("--no-burst", action="store_true", help="steady state only")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--bundle", help="folder of ahead-of-time artifacts (FOVEA_BUNDLE)")
    parser.add_argument("--out", help="result file (default: benchmarks/results/<gpu>/...)")
    return parser


class Run:
    """One run of a suite."""

    def __init__(self, options: argparse.Namespace, suite: str, unit: str = "TFLOP/s") -> None:
        """Open the board; exits with a message where there is no GPU."""
        protocol.require_gpu()
        if options.bundle:
            os.environ["FOVEA_BUNDLE"] = options.bundle
        self._board = protocol.Board()
        self._timing = protocol.Timing(
            rounds=options.rounds,
            segment_seconds=options.seconds,
            has_burst=not options.no_burst,
        )
        self._path = protocol.result_path(suite, options.out)
        self._unit = unit
        self._rows: list[dict[str, Any]] = []

    def measure(self, launches: Mapping[str, protocol.Launch]) -> dict[str, protocol.Samples]:
        """Return readings of every implementation, taken in turns."""
        return protocol.measure(launches, self._board, self._timing)

    def add(self, row: dict[str, Any], names: list[str], label: str) -> None:
        """Keep a row: on the screen, with the rates of `names` and its ratios, and in the file."""
        self._rows.append(row)
        print(protocol.table_line(row, names, label), flush=True)
        protocol.write_result(self._path, protocol.stamp(self._board), self._unit, self._rows)

    def end(self) -> None:
        """Say where the rows are."""
        print(f"wrote {self._path}")
