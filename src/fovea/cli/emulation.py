"""A call's own kernel, run on the emulator and checked against float64.

Lives here: from a compiled kernel to a checked result. The emulator is `fovea.emulator`'s, the
order of the launcher's arguments `runtime/arguments.py`'s. Invariant: what runs is the artifact
that a GPU would get, and its result is compared with the oracle before anything is reported.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fovea.cli.accuracy import Accuracy, judge
from fovea.cli.kernel import CompiledKernel
from fovea.emulator import Options
from fovea.problem import AttentionProblem
from fovea.runtime import emulated_module
from fovea.runtime.arguments import forward_call

# CTAs in flight: enough for more than one, few enough that a small case is quick.
_NUM_SMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """One emulated launch.

    Attributes:
        counters: sums over all warps, as the emulator names them.
        steps: scheduler steps.
    """

    accuracy: Accuracy
    counters: Mapping[str, int]
    steps: int
    seconds: float

    def count(self, prefix: str) -> int:
        """Return the sum of the counters whose name begins so."""
        return sum(value for name, value in self.counters.items() if name.startswith(prefix))


def emulate(problem: AttentionProblem, kernel: CompiledKernel, *, seed: int) -> Emulation:
    """Run a problem's kernel under one random schedule.

    Raises:
        EmulatorError: the kernel did what hardware does not allow; the text says where.
        LauncherError: llvmlite is missing.
    """
    launch = emulated_module.load(kernel.artifact, options=Options(seed=seed, num_sms=_NUM_SMS))
    call = forward_call(problem, kernel.plan, _NUM_SMS)
    start = time.perf_counter()
    (result,) = launch(*call.arguments)
    seconds = time.perf_counter() - start
    if call.padded_out is not None:
        call.out.copy_(call.padded_out[..., : call.out.shape[-1]])
    return Emulation(
        accuracy=judge(call.out, problem),
        counters=result.counters,
        steps=result.steps,
        seconds=seconds,
    )
