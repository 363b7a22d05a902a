"""The cost model's counts are those of the kernels as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.costs.counted import counts_of

ROOT = Path(__file__).parents[2]
# In a process of its own: a program that was loaded before does not count its pipes.
COUNT = """
import json, sys
from benchmarks import model_counts
with model_counts.pipe_counters():
    for case, plan, arch in model_counts.our_cases():
        if case.key == sys.argv[1]:
            run = lambda problem: model_counts.run_ours(plan, arch, problem)
            print(json.dumps(model_counts.count(case, run)["roles"]))
"""
KERNELS = {
    "fovea_sm100_forward_bf16_d128x128_m256n128e6 causal": "softmax",
    "fovea_sm90_forward_bf16_d128x128_m192n64q2c1 causal": "compute",
}


@pytest.mark.slow
@pytest.mark.parametrize("key", KERNELS)
def test_committed_counts_are_those_of_the_kernel(key):
    done = subprocess.run(
        [sys.executable, "-c", COUNT, key],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])[KERNELS[key]]["visit"]
    known = counts_of(key).roles[KERNELS[key]].visit
    for pipe in ("issue", "fma", "alu", "mufu"):
        # Waits differ with the schedule by an instruction or two.
        assert counted[pipe] == pytest.approx(getattr(known, pipe), rel=0.02, abs=4), (
            f"{pipe}: the kernel has changed; run python -m benchmarks.model_counts"
        )
