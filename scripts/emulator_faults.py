"""Plant every synchronisation fault in our forward kernel and count what is reported.

Usage: PYTHONPATH=src python scripts/emulator_faults.py [--arch sm90] [--seqlen 512 384]
           [--head-dim 128] [--causal] [--seeds 20] [--jobs 2] [--kinds KINDS] [--only WORDS]
           [--lines LINES] [--out FILE]

First the kernel as it is runs every launch of `LAUNCHES`, with `--causal` of `CAUSAL_LAUNCHES` (or
the one of `--seqlen`), under all seeds: it must be silent and equal in every bit. Then each variant
of `fovea.emulator.planting` that a launch got to runs under seed 0, 1, ... until it is reported.
Prints a table by kind, and each variant that no seed reported: as redundant, with what orders the
same accesses without it (`redundant_statements.py`), or as silent. Writes the same as JSON with
`--out`.
"""

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from redundant_statements import REDUNDANT

from fovea.arch import arch_named
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.emulator import EmulatorError, Options, load_launcher
from fovea.emulator.planting import PlantedFault, plant_faults
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch
from fovea.testing.inputs import Shape, dense_qkv

# The first reuses every buffer; with one KV tile a row, waits of the tile before cover less; rows
# that are redone come after what is otherwise the end.
SMS = 1  # one CTA runs every query tile, so that each buffer is used again
STEPS = 200_000  # a correct launch takes a few thousand: a loop without end shows soon


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One use of the kernel; each reaches what the others cover by other means or not at all.

    Attributes:
        name: for the table.
        seqlen_q: query rows.
        seqlen_kv: keys.
        heads: of queries and of keys.
        is_falling: whether the first keys, which come last, outgrow the others: rows are redone.
        is_top_left: whether a causal mask begins at the first key: later rows see all of them.
    """

    name: str
    seqlen_q: int
    seqlen_kv: int
    heads: int = 1
    is_falling: bool = False
    is_top_left: bool = False

    def problem(self, head_dim: int, *, is_causal: bool) -> AttentionProblem:
        """Return the problem to solve."""
        shape = Shape(
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            heads_q=self.heads,
            heads_kv=self.heads,
            head_dim=head_dim,
        )
        q, k, v = dense_qkv(shape, dtype=torch.bfloat16)
        if self.is_falling:
            steps = torch.linspace(300, -300, self.seqlen_kv) * 0.6931471805599453
            q[..., 0] = 8
            k[..., 0] = (steps * head_dim**0.5 / 8).to(k.dtype)[:, None]
        causal = None
        if is_causal:
            causal = "top_left" if self.is_top_left else "bottom_right"
        return make_dense(q, k, v, Request(wants_lse=True, causal=causal))


LAUNCHES = (
    Launch(name="long", seqlen_q=512, seqlen_kv=384),
    Launch(name="short", seqlen_q=1152, seqlen_kv=64),
    Launch(name="redo", seqlen_q=512, seqlen_kv=448, is_falling=True),
    Launch(name="two redone", seqlen_q=1024, seqlen_kv=192, is_falling=True),
)
# A diagonal keeps the first rows of a query tile from its last keys, unless it lies past them.
CAUSAL_LAUNCHES = (
    *LAUNCHES,
    Launch(name="past", seqlen_q=768, seqlen_kv=256, is_top_left=True),
    Launch(name="past short", seqlen_q=768, seqlen_kv=128, is_top_left=True),
    # what came with the pause is used again only by a redo of as many KV tiles as there are stages
    Launch(name="one redone", seqlen_q=256, seqlen_kv=448, is_falling=True),
)


class Kernel:
    """One kernel and the problems it is to solve, run from any PTX text."""

    def __init__(self, problems: Sequence[AttentionProblem], arch_name: str):
        arch = arch_named(arch_name)
        self.problems = tuple(problems)
        self.plan = forward_plan(problems[0], arch)
        target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
        self.artifact = get_artifact(ForwardVariant(self.plan), target)

    @property
    def ptx(self) -> str:
        """The text of the kernel as it is."""
        text = self.artifact.ptx
        return text if isinstance(text, str) else text.decode()

    def opened(self, text: str) -> Callable[[int, int], tuple[torch.Tensor, tuple[Any, ...]]]:
        """Return `run(number of the problem, seed)`: the output, and what the launches did."""
        launcher = load_launcher(self.artifact.launcher_object, text)

        def run(number: int, seed: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
            results: list[Any] = []
            options = Options(seed=seed, max_steps=STEPS)
            problem = self.problems[number]
            launch = ForwardLaunch(
                problem,
                self.plan,
                SMS,
                lambda *arguments: results.extend(launcher(*arguments, options=options)),
            )
            out, *_ = launch(tensors_of(problem), numbers_of(problem))
            return out, tuple(results)

        return run


def try_fault(
    kernel: Kernel, fault: PlantedFault, seeds: int, expected: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return what became of one variant: the first seed that reports it, and how.

    Every launch runs under seed 0 before any runs under seed 1.
    """
    row = {"kind": fault.kind, "line": fault.line, "statement": fault.statement}
    row |= {"seed": None, "launch": None, "report": "", "wrong": 0}
    try:
        run = kernel.opened(fault.text)
    except EmulatorError as error:
        return row | {"seed": 0, "launch": 0, "report": type(error).__name__}
    for seed in range(seeds):
        for number, right in enumerate(expected):
            try:
                out, _ = run(number, seed)
            except EmulatorError as error:
                return row | {"seed": seed, "launch": number, "report": type(error).__name__}
            row["wrong"] += int(not torch.equal(out, right))
    return row


def baseline(kernel: Kernel, seeds: int) -> tuple[list[torch.Tensor], frozenset[int]]:
    """Run the kernel as it is; return its outputs and the lines it got to.

    Raises:
        SystemExit: a seed is reported, or gives other bits.
    """
    run, lines, start = kernel.opened(kernel.ptx), frozenset[int](), time.perf_counter()
    expected: list[torch.Tensor] = []
    for number in range(len(kernel.problems)):
        for seed in range(seeds):
            out, results = run(number, seed)
            lines = lines.union(*(result.lines for result in results))
            if seed == 0:
                expected.append(out)
            if not torch.equal(out, expected[number]):
                raise SystemExit(f"launch {number}: seed {seed} gives other bits than seed 0")
    seconds = (time.perf_counter() - start) / seeds / len(kernel.problems)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(f"as it is: {seeds} seeds silent and equal, {seconds:.2f} s each, {memory:.2f} GB")
    return expected, lines


def reason_for(fault: PlantedFault, faults: Sequence[PlantedFault], label: str) -> str:
    """Return why a statement may be left out ("" if nobody knows); `faults` are all of a text."""
    if fault.kind in ("phase", "count", "expect_tx"):
        return ""
    for item in REDUNDANT.get(label, ()):
        places = sorted(
            {other.line for other in faults if item.opcode in other.statement.split()[0]}
        )
        if len(places) == item.of and fault.line in [places[n - 1] for n in item.numbers]:
            return item.reason
    return ""


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table and the variants that no seed reported."""
    heads = ("first seed", "later seed", "redundant", "silent")
    say(f"{'kind':10} {'planted':>8}" + "".join(f"{head:>12}" for head in heads))
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        fates = Counter(_fate(row) for row in rows if kind in (row["kind"], "all"))
        say(f"{kind:10} {fates.total():8}" + "".join(f"{fates[head]:12}" for head in heads))
    for row in rows:
        if row["seed"] is None:
            place = f"line {row['line']} {row['kind']}: {row['statement'][:90]}"
            say(f"{_fate(row)}: {place} (wrong in {row['wrong']} runs) {row['reason']}")


def _fate(row: dict[str, Any]) -> str:
    if row["seed"] is None:
        return "redundant" if row["reason"] and not row["wrong"] else "silent"
    return "later seed" if row["seed"] else "first seed"


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


_kernel: list[Kernel] = []


def _work(item: tuple[PlantedFault, int, list[torch.Tensor]]) -> dict[str, Any]:
    fault, seeds, expected = item
    return try_fault(_kernel[0], fault, seeds, expected)


def _prepare(launches: Sequence[Launch], head_dim: int, is_causal: bool, arch_name: str) -> None:
    torch.set_num_threads(1)
    problems = [item.problem(head_dim, is_causal=is_causal) for item in launches]
    _kernel[:] = [Kernel(problems, arch_name)]


def main() -> int:
    """Run the sweep; the exit status is 1 if a variant is silent and nothing explains it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--seqlen", nargs=2, type=int, help="of the only launch")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=(), help="kinds of faults to plant")
    parser.add_argument("--only", nargs="*", default=(), help="words of the statements to change")
    parser.add_argument("--lines", nargs="*", type=int, default=(), help="lines to change")
    parser.add_argument("--out", type=Path)
    use = parser.parse_args()
    launches = CAUSAL_LAUNCHES if use.causal else LAUNCHES
    if use.seqlen:
        launches = (Launch(name="given", seqlen_q=use.seqlen[0], seqlen_kv=use.seqlen[1]),)
    setting = (launches, use.head_dim, use.causal, use.arch)
    _prepare(*setting)
    expected, lines = baseline(_kernel[0], use.seeds)
    every_fault = plant_faults(_kernel[0].ptx)
    label = f"{use.arch} d{use.head_dim}{' causal' if use.causal else ''}"
    faults = [fault for fault in every_fault if fault.line in lines]
    if use.kinds:
        faults = [f for f in faults if f.kind in use.kinds]
    if use.only:
        faults = [f for f in faults if any(word in f.statement for word in use.only)]
    if use.lines:
        faults = [f for f in faults if f.line in use.lines]
    items = [(fault, use.seeds, expected) for fault in faults]
    with ProcessPoolExecutor(use.jobs, initializer=_prepare, initargs=setting) as pool:
        rows: list[dict[str, Any]] = []
        for fault, row in zip(faults, pool.map(_work, items)):
            row["reason"] = reason_for(fault, every_fault, label)
            rows.append(row)
            found = "silent"
            if row["seed"] is not None:
                place = launches[row["launch"]].name
                found = f"{place}, seed {row['seed']}: {row['report']}"
            say(f"{row['line']:6} {row['kind']:10} {found:36} {row['statement'][:70]}")
    report(rows)
    if use.out is not None:
        use.out.write_text(json.dumps({"seeds": use.seeds, "rows": rows}, indent=1))
    return int(any(_fate(row) == "silent" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
