"""The counts that the cost model reads, and the kernels that calls get."""

import json

from benchmarks import model_counts


def test_counts_are_those_of_the_kernels_that_calls_get():
    counted = json.loads(model_counts.OURS.read_text(encoding="utf-8"))["kernels"]
    assert sorted(counted) == sorted(case.key for case, _, _ in model_counts.our_cases()), (
        "plans have changed: run python -m benchmarks.model_counts"
    )
