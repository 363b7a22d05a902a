"""The frozen latencies: their provenance, and the error that the committed result states."""

import json
from pathlib import Path

import pytest

from fovea.costs.calibration import Calibration, frozen
from fovea.costs.counted import counts_key, counts_of
from fovea.costs.launch import Call
from fovea.costs.machine import H200
from fovea.costs.predict import Predictor, kernel_of
from fovea.errors import UnsupportedError
from fovea.plan.features import ForwardFeatures
from fovea.plan.sm90 import ForwardPlan

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RECORD = json.loads((RESULTS / "model" / "calibration.json").read_text())


def _plan(row):
    features = ForwardFeatures(limit_right=row["causal"])
    return ForwardPlan(dtype="bfloat16", features=features, **row["plan"])


def test_frozen_constants_are_those_of_the_committed_result():
    told = frozen()
    assert told.calibration == Calibration(**RECORD["stamp"]["constants"])
    assert told.date
    assert all(len(digest) == 64 for digest in told.inputs.values())
    assert "benchmarks/results/h200/forward.json" in told.inputs


def test_model_is_within_ten_percent_in_the_mean_on_the_shapes_held_out():
    rows = [row for row in RECORD["rows"] if row["use"] == "held out"]
    assert len(rows) >= 12
    errors = [abs(row["model"] / row["measured"] - 1) for row in rows]
    assert sum(errors) / len(errors) <= 0.10
    assert frozen().mean_error == pytest.approx(sum(errors) / len(errors), abs=2e-3)


@pytest.mark.parametrize("index", range(0, len(RECORD["rows"]), 4))
def test_committed_figures_are_what_the_model_says(index):
    row = RECORD["rows"][index]
    calibration = frozen().calibration
    call = Call(
        batch=row["B"],
        heads=row["H"],
        seqlen_q=row["S"],
        seqlen_kv=row["S"],
        head_dim=row["D"],
        head_dim_v=row["D"],
        causal=row["causal"],
    )
    told = Predictor(calibration)(call, kernel_of(_plan(row), H200, calibration), row["mhz"])
    assert told.tflops == pytest.approx(row["model"], rel=2e-3), (
        "the model or the counts of Hopper kernels have changed: run python -m "
        "benchmarks.model_counts sm90, and python -m benchmarks.model_fit --check"
    )


def test_kernel_that_was_not_counted_is_refused_with_the_way_out():
    with pytest.raises(UnsupportedError, match=r"no counts of kernel.*benchmarks\.model_counts"):
        counts_of(counts_key("fovea_sm90_forward_bf16_d40x40", causal=False))


def test_features_that_the_model_does_not_know_are_refused():
    row = RECORD["rows"][0]
    plan = ForwardPlan(dtype="bfloat16", features=ForwardFeatures(sink=True), **row["plan"])
    with pytest.raises(UnsupportedError, match=r"no figure for sink \(it has: bfloat16, dense"):
        kernel_of(plan, H200, frozen().calibration)
