"""The few latencies of the model that no data sheet has, fitted on one machine and then frozen.

Lives here: the values and their file, `frozen.json`. Not here: rates (`machine.py`), the fit
(`benchmarks/model_fit.py`). Invariant: the frozen file says on which date, from which inputs (by
hash) and on which measurements it was fitted; predictions for other machines take it as it is.
"""

import functools
import json
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

FROZEN_FILE = "frozen.json"
# Of what a query tile costs besides its plain tiles, the part before its second KV tile.
FIRST_PART = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Latencies, in clocks of an SM unless the name says otherwise.

    Attributes:
        serial_share: how much of the time of the FMA and ALU pipes does not overlap with the
            exponential unit's: 0 where all pipes run side by side. A warp issues in order, and its
            exponentials depend on its multiply-adds and its sums on its exponentials, so that a
            quarter of an SM rarely has two pipes busy. Known from elsewhere, too: exponentials
            moved to the FMA pipe made a Hopper kernel of head_dim 64 slower.
        product_gap: clocks that the tensor cores lose from one product to the next: a product is
            the chain of instructions between two commits.
        handoff: from what is signalled (a copy, a product, a barrier) to the first instruction of
            who waited for it.
        softmax_stall: of a KV tile, what a warpgroup waits for its own results beyond what the
            pipes need: chains of dependent instructions, issue slots that others hold.
        ends: of a query tile, the same in its first tile and on the way out: the maximum across
            lanes, the judgement, fences, the store.
        launch_us: of a launch, in microseconds: its start, its last CTA's end, the next one's wait.
        copy_latency: from the request to the first bytes of a bulk copy out of the L2 cache.
        memory_latency: how much longer it takes from memory, where all of Q comes from.
    """

    serial_share: float
    product_gap: float
    handoff: float
    softmax_stall: float
    ends: float
    launch_us: float
    copy_latency: float
    memory_latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A calibration with its provenance.

    Attributes:
        date: when it was fitted.
        inputs: SHA-256 of each file that went in.
        checked: when it last met measurements and kernels: the day of the fit, or a later one.
        mean_error, worst_error: of the rates it gave then, relative, over the shapes held out.
    """

    calibration: Calibration
    date: str
    inputs: dict[str, str]
    checked: str
    mean_error: float
    worst_error: float


@functools.cache
def frozen() -> Frozen:
    """Return the committed calibration."""
    text = resources.files("fovea.costs").joinpath(FROZEN_FILE).read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text)
    values = {field.name: float(record["constants"][field.name]) for field in fields(Calibration)}
    last = record.get("checked", record)
    return Frozen(
        calibration=Calibration(**values),
        date=record["date"],
        inputs=record["inputs"],
        checked=last["date"],
        mean_error=last["held_out"]["mean_error"],
        worst_error=last["held_out"]["worst_error"],
    )
