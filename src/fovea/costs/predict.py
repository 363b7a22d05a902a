"""The model's figure for a call: cycles, and TFLOP/s at a clock.

Lives here: from a call to a plan, its simulation, its launch. Not here: any of these. Invariant: a
prediction names the clock that it was made for; it is a model's figure, never a measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fovea.costs import sm90, sm100
from fovea.costs.calibration import Calibration
from fovea.costs.counted import KernelCounts, counts_key, counts_of
from fovea.costs.coverage import counted_head_dims, coverage
from fovea.costs.engine import Simulation
from fovea.costs.launch import Call, TileTimes, launch_cycles
from fovea.costs.machine import Machine
from fovea.costs.work import ELEMENT_BYTES
from fovea.errors import UnsupportedError
from fovea.plan.features import ForwardFeatures
from fovea.plan.sm90 import ForwardPlan as Sm90Plan
from fovea.plan.sm100 import ForwardPlan as Sm100Plan

_CLOCK_STEP_MHZ = 50  # clocks are rounded to it, so that one simulation serves many calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that the model can run.

    Attributes:
        rows, tile_n: query rows of a query tile, of all CTAs of a cluster, and its KV columns.
        cluster: CTAs that work on a query tile together.
        visit_bytes: of K and V that a CTA asks the L2 cache for, a KV tile.
        is_persistent: a CTA goes on to another query tile.
        simulate: runs a CTA through query tiles of so many KV tiles.
    """

    name: str
    machine: Machine
    rows: int
    tile_n: int
    cluster: int
    visit_bytes: float
    is_persistent: bool
    simulate: Callable[[list[int]], Simulation]

    def times(self, mhz: float) -> TileTimes:
        """Return the times of its query tiles at an SM clock."""
        return TileTimes.of(
            lambda visits: self.simulate(visits).now,
            least_visit=self.visit_bytes / self.machine.l2_bytes_at(mhz),
            is_persistent=self.is_persistent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says of a call.

    Attributes:
        cycles: of the launch, without what `launch_us` stands for.
        tflops: at `mhz`.
        peak_share: of the tensor cores' dense peak at that clock.
    """

    kernel: str
    mhz: float
    cycles: float
    tflops: float
    peak_share: float
    times: TileTimes


def kernel_of(plan: Sm90Plan | Sm100Plan, machine: Machine, calibration: Calibration) -> Kernel:
    """Return a plan of ours as a kernel that the model can run.

    Raises:
        UnsupportedError: the kernel was not counted.
    """
    causal = plan.features.limit_right
    lack = _lack_of(plan)
    if lack is not None:
        raise no_figure(lack, _arch_of(plan))
    key = counts_key(plan.family, causal=causal)
    if isinstance(plan, Sm100Plan):
        return graph_kernel(sm100.graph_of(plan), counts_of(key), machine, calibration)
    counts = counts_of(key)
    model = sm90.Sm90Model(plan=plan, counts=counts, machine=machine, calibration=calibration)
    columns = plan.head_dim + plan.head_dim_v
    return Kernel(
        name=counts.key,
        machine=machine,
        rows=plan.tile_m * plan.cluster,
        tile_n=plan.tile_n,
        cluster=plan.cluster,
        visit_bytes=plan.tile_n * columns * ELEMENT_BYTES / plan.cluster,
        is_persistent=True,
        simulate=lambda visits: sm90.simulate(model, visits),
    )


_WORDS = {  # features by what a call asks for
    "limit_left": "window",
    "softcap": "softcap",
    "explicit_scale": "scale <= 0",
    "sink": "sink",
    "max_score": "max_score",
    "score_mod": "score_mod",
    "mask_mod": "mask_mod",
    "block_lists": "block_mask",
    "key_ranges": "block_mask",
    "varlen": "packed sequences",
}


def no_figure(lack: str, arch: str) -> UnsupportedError:
    """Return the error of a call that the model does not know."""
    return UnsupportedError(
        f"the cost model has no figure for {lack} (it has: {coverage(arch)}); change the call, or "
        "leave out --timeline"
    )


def _lack_of(plan: Sm90Plan | Sm100Plan) -> str | None:
    """Return what of a plan the model does not know, None for nothing."""
    if plan.dtype != "bfloat16":
        return "float16"
    if plan.features != ForwardFeatures(limit_right=plan.features.limit_right):
        return ", ".join(
            dict.fromkeys(word for name, word in _WORDS.items() if getattr(plan.features, name))
        )
    if plan.packs_heads:
        return "64 queries or fewer"
    dims = (plan.head_dim, plan.head_dim_v)
    if dims not in counted_head_dims(_arch_of(plan)):
        return f"kernels of head dims {dims[0]} and {dims[1]}"
    return None


def _arch_of(plan: Sm90Plan | Sm100Plan) -> str:
    return "sm100" if isinstance(plan, Sm100Plan) else "sm90"


def graph_kernel(
    graph: sm100.Graph, counts: KernelCounts, machine: Machine, calibration: Calibration
) -> Kernel:
    """Return a graph of Blackwell roles as a kernel that the model can run."""
    model = sm100.Sm100Model(graph=graph, counts=counts, machine=machine, calibration=calibration)
    columns = graph.head_dim + graph.head_dim_v
    return Kernel(
        name=counts.key,
        machine=machine,
        rows=graph.tile_rows,
        tile_n=graph.tile_n,
        cluster=graph.pair,
        visit_bytes=graph.tile_n * columns * ELEMENT_BYTES / graph.pair,
        is_persistent=graph.is_persistent,
        simulate=lambda visits: sm100.simulate(model, visits),
    )


class Predictor:
    """Predictions with one calibration; simulations are kept."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._times: dict[tuple[str, str, int], TileTimes] = {}

    def __call__(self, call: Call, kernel: Kernel, mhz: float) -> Prediction:
        """Return the model's figure for a call on a kernel at an SM clock."""
        rounded = round(mhz / _CLOCK_STEP_MHZ) * _CLOCK_STEP_MHZ
        key = (kernel.name, kernel.machine.name, rounded)
        if key not in self._times:
            self._times[key] = kernel.times(rounded)
        times, machine = self._times[key], kernel.machine
        cycles = launch_cycles(
            call,
            times,
            shape=(kernel.rows, kernel.tile_n),
            workers=machine.num_sms // kernel.cluster,
        )
        seconds = cycles / (mhz * 1e6) + self._calibration.launch_us * 1e-6
        rate = call.flops / seconds
        peak = machine.num_sms * machine.tensor_flops * mhz * 1e6
        return Prediction(
            kernel=kernel.name,
            mhz=mhz,
            cycles=cycles,
            tflops=rate * 1e-12,
            peak_share=rate / peak,
            times=times,
        )
