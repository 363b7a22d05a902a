"""Fit the cost model's latencies to measured H200 rates, report the error, freeze them.

Half of the rows of `benchmarks/results/h200/forward.json` are fitted, the others held out: of the
four lengths of each head dim and mask two and two, in turns. The steady rate is taken with the SM
clock that was read during it, so a row gives clocks, not seconds.
Written to `benchmarks/results/model/calibration.json`, and with --freeze to
`src/fovea/costs/frozen.json`, which all predictions take as it is: it is not fitted to any other
machine, and not again because a prediction is unwelcome.

With --check nothing is fitted: the frozen latencies meet the measurements and kernels of the day,
and their errors are written to both files.

Usage: python -m benchmarks.model_fit [--freeze | --check]
"""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import protocol
from fovea.costs.calibration import FROZEN_FILE, Calibration, frozen
from fovea.costs.launch import Call
from fovea.costs.machine import H200
from fovea.costs.predict import Predictor, kernel_of
from fovea.plan.features import ForwardFeatures
from fovea.plan.select import length_of
from fovea.plan.sm90 import ForwardPlan, make_forward_plan

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "src" / "fovea" / "costs"
MEASURED = protocol.RESULTS / "h200" / "forward.json"
RESULT = protocol.RESULTS / "model" / "calibration.json"
INPUTS = (
    MEASURED,
    *(COSTS / f"{name}.py" for name in ("engine", "launch", "machine", "pipes", "sm90", "work")),
)
TILE_FIELDS = (
    *("tile_m", "tile_n", "head_dim", "head_dim_v"),
    *("kv_stages", "q_buffers", "cluster", "skips_idle", "spare_q"),
)
# Where the search begins, and its first step of each: round numbers of the right size.
START = Calibration(
    serial_share=0.5,
    product_gap=20.0,
    handoff=50.0,
    softmax_stall=100.0,
    ends=1000.0,
    launch_us=3.0,
    copy_latency=600.0,
    memory_latency=500.0,
)
STEPS = {
    "serial_share": 0.2,
    "product_gap": 10.0,
    "handoff": 25.0,
    "softmax_stall": 50.0,
    "ends": 400.0,
    "launch_us": 1.0,
    "copy_latency": 200.0,
    "memory_latency": 200.0,
}
# What keeps a latency physical. A copy out of the L2 cache takes no less than a load from it, some
# 200 clocks, and no more than four times that; memory adds some hundreds (arXiv 2501.12084). An
# empty kernel takes 2 us, and no launch of these waits for its last CTAs longer than a few more.
LEAST = {"launch_us": 2.0, "copy_latency": 200.0}
MOST = {"serial_share": 1.0, "launch_us": 8.0, "copy_latency": 800.0, "memory_latency": 1000.0}
HALVINGS = 3
LENGTHS = 4  # rows of one head dim and mask in the measurements

Row = Mapping[str, Any]


def call_of(row: Row) -> Call:
    """Return the call of a row."""
    return Call(
        batch=row["B"],
        heads=row["H"],
        seqlen_q=row["S"],
        seqlen_kv=row["S"],
        head_dim=row["D"],
        head_dim_v=row["D"],
        causal=row["causal"],
    )


def plan_of(row: Row) -> ForwardPlan:
    """Return the plan that a row's call gets."""
    features = ForwardFeatures(limit_right=row["causal"])
    dims = (row["D"], row["D"])
    return make_forward_plan("bfloat16", dims, features, length=length_of(row["S"]))


def predicted(rows: Sequence[Row], calibration: Calibration) -> list[float]:
    """Return the model's TFLOP/s of rows, at their clocks."""
    predict = Predictor(calibration)
    return [
        predict(call_of(row), kernel_of(plan_of(row), H200, calibration), row["fovea_mhz"]).tflops
        for row in rows
    ]


def loss(rows: Sequence[Row], calibration: Calibration) -> float:
    """Return the mean square of the logarithms of model over measurement."""
    rates = predicted(rows, calibration)
    return sum(
        math.log(rate / row["fovea"]) ** 2 for rate, row in zip(rates, rows, strict=True)
    ) / len(rows)


def fit(rows: Sequence[Row]) -> Calibration:
    """Return the latencies that fit rows best: one after the other, in ever smaller steps."""
    best, least = START, loss(rows, START)
    steps = dict(STEPS)
    for _ in range(HALVINGS):
        has_moved = True
        while has_moved:
            has_moved = False
            for name, step in steps.items():
                for sign in (1, -1):
                    value = getattr(best, name) + sign * step
                    value = min(max(value, LEAST.get(name, 0.0)), MOST.get(name, math.inf))
                    tried = replace(best, **{name: value})
                    its = loss(rows, tried)
                    if its < least * (1 - 1e-4):
                        best, least, has_moved = tried, its, True
                        break
        steps = {name: step / 2 for name, step in steps.items()}
        print(f"{math.sqrt(least):.4f} {best}")
    return best


def result_rows(rows: Sequence[Row], calibration: Calibration) -> list[dict[str, Any]]:
    """Return model beside measurement, for each shape."""
    found: list[dict[str, Any]] = []
    for index, (row, rate) in enumerate(zip(rows, predicted(rows, calibration), strict=True)):
        plan = plan_of(row)
        found.append(
            {
                **{name: row[name] for name in ("B", "H", "Hkv", "S", "D", "causal")},
                "use": "fitted" if is_fitted(index) else "held out",
                "mhz": row["fovea_mhz"],
                "measured": row["fovea"],
                "model": round(rate, 1),
                "error": round(rate / row["fovea"] - 1, 4),
                "plan": {name: getattr(plan, name) for name in TILE_FIELDS},
            }
        )
    return found


def is_fitted(index: int) -> bool:
    """Return whether a row of the measurements is one of those fitted: a chequerboard."""
    return (index // LENGTHS + index) % 2 == 0


def errors(rows: Sequence[Row], use: str) -> dict[str, float]:
    """Return the mean and the worst error of the rows of one use."""
    found = [abs(row["error"]) for row in rows if row["use"] == use]
    return {
        "shapes": len(found),
        "mean_error": round(sum(found) / len(found), 4),
        "worst_error": round(max(found), 4),
    }


def input_hashes() -> dict[str, str]:
    """Return the SHA-256 of each file that went in, and of the counts of Hopper kernels."""
    found = {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in INPUTS
    }
    kernels = json.loads((COSTS / "counted.json").read_text(encoding="utf-8"))["kernels"]
    hopper = {key: record for key, record in kernels.items() if "_sm90_" in key}
    text = json.dumps(hopper, sort_keys=True)
    return {**found, "counts of sm90 kernels": hashlib.sha256(text.encode()).hexdigest()}


def write_frozen(calibration: Calibration, summary: Mapping[str, Any]) -> None:
    """Write new constants with their date, errors and inputs."""
    record = {
        "date": date.today().isoformat(),
        "constants": asdict(calibration),
        "fitted": summary["fitted"],
        "held_out": summary["held out"],
        "inputs": input_hashes(),
    }
    (COSTS / FROZEN_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_check(summary: Mapping[str, Any]) -> None:
    """Add to the frozen file what errors its constants have today; leave all else as it is."""
    record = json.loads((COSTS / FROZEN_FILE).read_text(encoding="utf-8"))
    record["checked"] = {
        "date": date.today().isoformat(),
        "fitted": summary["fitted"],
        "held_out": summary["held out"],
        "inputs": input_hashes(),
    }
    (COSTS / FROZEN_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Fit or take the frozen constants, and report; with --freeze write them, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--freeze", action="store_true", help="write src/fovea/costs/frozen.json")
    what.add_argument("--check", action="store_true", help="take the frozen latencies; fit nothing")
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    if options.check:
        calibration = frozen().calibration
    else:
        best = fit([row for index, row in enumerate(measured) if is_fitted(index)])
        calibration = Calibration(**{name: round(value, 4) for name, value in asdict(best).items()})
    rows = result_rows(measured, calibration)
    summary = {use: errors(rows, use) for use in ("fitted", "held out")}
    for row in rows:
        print(row)
    print(summary)
    stamp = {**protocol.cpu_stamp(), "constants": asdict(calibration), "errors": summary}
    protocol.write_result(RESULT, stamp, "TFLOP/s, steady, H200", rows)
    if options.freeze:
        write_frozen(calibration, summary)
    if options.check:
        write_check(summary)


if __name__ == "__main__":
    main()
