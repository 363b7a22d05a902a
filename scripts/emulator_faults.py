"""Plant every synchronisation fault in our sm_90a forward kernel and count what is reported.

Usage: PYTHONPATH=src python scripts/emulator_faults.py [--seqlen 512 384] [--head-dim 128]
           [--causal] [--seeds 20] [--jobs 2] [--only WORDS] [--out FILE]

First the kernel as it is runs under all seeds: it must be silent and equal in every bit. Then each
variant of `fovea.emulator.planting` that the launch got to runs under seed 0, 1, ... until it is
reported. Prints a table by kind, and each variant that no seed reported, with whether its result
was wrong. Writes the same as JSON with `--out`.
"""

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fovea.arch import arch_named
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.emulator import EmulatorError, Options, load_launcher
from fovea.emulator.planting import PlantedFault, plant_faults
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, ForwardResult
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch
from fovea.testing.inputs import Shape
from fovea.testing.problems import dense_problem

SMS = 1  # one CTA runs every query tile, so that each buffer is used again
STEPS = 200_000  # a correct launch takes a few thousand: a loop without end shows soon


class Kernel:
    """One problem and the kernel that solves it, run from any PTX text."""

    def __init__(self, problem: AttentionProblem):
        arch = arch_named("sm90")
        self.problem = problem
        self.plan = forward_plan(problem, arch)
        target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
        self.artifact = get_artifact(ForwardVariant(self.plan), target)

    @property
    def ptx(self) -> str:
        """The text of the kernel as it is."""
        text = self.artifact.ptx
        return text if isinstance(text, str) else text.decode()

    def opened(self, text: str) -> Callable[[int], tuple[torch.Tensor, tuple[Any, ...]]]:
        """Return `run(seed)`, which gives the output and what the launches did."""
        launcher = load_launcher(self.artifact.launcher_object, text)

        def run(seed: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
            results: list[Any] = []
            options = Options(seed=seed, max_steps=STEPS)
            launch = ForwardLaunch(
                self.problem,
                self.plan,
                SMS,
                lambda *arguments: results.extend(launcher(*arguments, options=options)),
            )
            found = ForwardResult(*launch(tensors_of(self.problem), numbers_of(self.problem)))
            return found.out, tuple(results)

        return run


def try_fault(
    kernel: Kernel, fault: PlantedFault, seeds: int, expected: torch.Tensor
) -> dict[str, Any]:
    """Return what became of one variant: the first seed that reports it, and how."""
    row = {"kind": fault.kind, "line": fault.line, "statement": fault.statement, "seed": None}
    row |= {"report": "", "wrong_seeds": 0}
    try:
        run = kernel.opened(fault.text)
    except EmulatorError as error:
        return row | {"seed": 0, "report": type(error).__name__}
    for seed in range(seeds):
        try:
            out, _ = run(seed)
        except EmulatorError as error:
            return row | {"seed": seed, "report": type(error).__name__}
        row["wrong_seeds"] += int(not torch.equal(out, expected))
    return row


def baseline(kernel: Kernel, seeds: int) -> tuple[torch.Tensor, frozenset[int]]:
    """Run the kernel as it is; return its output and the lines it got to.

    Raises:
        SystemExit: a seed is reported, or gives other bits.
    """
    run, lines, start = kernel.opened(kernel.ptx), frozenset[int](), time.perf_counter()
    expected: torch.Tensor | None = None
    for seed in range(seeds):
        out, results = run(seed)
        lines = lines.union(*(result.lines for result in results))
        if expected is None:
            expected = out
        if not torch.equal(out, expected):
            raise SystemExit(f"seed {seed} gives other bits than seed 0")
    assert expected is not None
    seconds = (time.perf_counter() - start) / seeds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(f"as it is: {seeds} seeds silent and equal, {seconds:.2f} s each, {memory:.2f} GB")
    return expected, lines


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table and the variants that no seed reported."""
    kinds = Counter(row["kind"] for row in rows)
    first = Counter(row["kind"] for row in rows if row["seed"] == 0)
    later = Counter(row["kind"] for row in rows if row["seed"])
    say(f"{'kind':10} {'planted':>8} {'first seed':>11} {'later seed':>11} {'silent':>7}")
    for kind, count in kinds.items():
        a, b = first[kind], later[kind]
        say(f"{kind:10} {count:8} {a:11} {b:11} {count - a - b:7}")
    a, b = first.total(), later.total()
    say(f"{'all':10} {len(rows):8} {a:11} {b:11} {len(rows) - a - b:7}")
    for row in rows:
        if row["seed"] is None:
            place = f"line {row['line']} {row['kind']}: {row['statement'][:90]}"
            say(f"silent: {place} (wrong in {row['wrong_seeds']} seeds)")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


_kernel: list[Kernel] = []


def _work(item: tuple[PlantedFault, int, torch.Tensor]) -> dict[str, Any]:
    fault, seeds, expected = item
    return try_fault(_kernel[0], fault, seeds, expected)


def _prepare(shape: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    seqlen_q, seqlen_kv, head_dim, causal = shape
    problem = dense_problem(
        Shape(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=1, heads_kv=1, head_dim=head_dim),
        dtype=torch.bfloat16,
        causal="bottom_right" if causal else None,
    )
    _kernel[:] = [Kernel(problem)]


def main() -> int:
    """Run the sweep; the exit status is 1 if a variant gave a wrong result unreported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seqlen", nargs=2, type=int, default=(512, 384))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=(), help="words of the statements to change")
    parser.add_argument("--out", type=Path)
    use = parser.parse_args()
    shape = (*use.seqlen, use.head_dim, use.causal)
    _prepare(shape)
    expected, lines = baseline(_kernel[0], use.seeds)
    faults = [fault for fault in plant_faults(_kernel[0].ptx) if fault.line in lines]
    if use.only:
        faults = [f for f in faults if any(word in f.statement for word in use.only)]
    items = [(fault, use.seeds, expected) for fault in faults]
    with ProcessPoolExecutor(use.jobs, initializer=_prepare, initargs=(shape,)) as pool:
        rows: list[dict[str, Any]] = []
        for row in pool.map(_work, items):
            rows.append(row)
            found = "silent" if row["seed"] is None else f"seed {row['seed']} {row['report']}"
            say(f"{row['line']:6} {row['kind']:10} {found:28} {row['statement'][:70]}")
    report(rows)
    if use.out is not None:
        use.out.write_text(json.dumps({"shape": shape, "seeds": use.seeds, "rows": rows}, indent=1))
    return int(any(row["seed"] is None and row["wrong_seeds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
