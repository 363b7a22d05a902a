"""A call's own kernel, run on the emulator and checked against float64.

Lives here: from a problem to a checked result. The run itself is that of `runtime/emulated.py`.
Invariant: what runs is the artifact that a GPU would get, and its result is compared with the
oracle before anything is reported.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fovea.arch import Arch
from fovea.cli.accuracy import Accuracy, judge
from fovea.emulator import Options
from fovea.errors import invalid
from fovea.problem import AttentionProblem
from fovea.runtime import emulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """One emulated call: its launch, or that and the merge of parts of its keys.

    Attributes:
        counters: sums over all warps of all launches, as the emulator names them.
        steps: scheduler steps of all launches.
        seconds: of the run, the compiler's time included where the kernel was not cached.
    """

    accuracy: Accuracy
    counters: Mapping[str, int]
    steps: int
    seconds: float

    def count(self, prefix: str) -> int:
        """Return the sum of the counters whose name begins so."""
        return sum(value for name, value in self.counters.items() if name.startswith(prefix))


def emulate(
    problem: AttentionProblem, arch: Arch, *, seed: int, trace: Path | None = None
) -> Emulation:
    """Run a problem's kernel under one random schedule; write its trace to a file if one is named.

    The trace is that of the forward itself.

    Raises:
        EmulatorError: the kernel did what hardware does not allow; the text says where.
        ValueError: a trace of a call that launches nothing.
        LauncherError: llvmlite is missing.
    """
    start = time.perf_counter()
    forward, launches = emulated.emulate(
        problem, arch, options=Options(seed=seed, trace=trace is not None)
    )
    seconds = time.perf_counter() - start
    counters: Counter[str] = Counter()
    for launch in launches:
        counters.update(launch.counters)
    if trace is not None:
        if not launches:
            allowed = "none for a call without queries, keys or heads, which launches no kernel"
            raise ValueError(invalid("--trace", trace, allowed, "give every size 1 or more"))
        launches[0].write_trace(trace)
    return Emulation(
        accuracy=judge(forward.out, problem),
        counters=counters,
        steps=sum(launch.steps for launch in launches),
        seconds=seconds,
    )
