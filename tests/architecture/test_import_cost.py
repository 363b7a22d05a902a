"""What `import fovea` pulls in and costs, seen in a fresh interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

MOST_SECONDS = 1.0  # of the processor's time, after torch: other work must not fail the test

# Optional packages, and parts of torch that take long to import and that only some calls need.
UNWANTED = (
    "apache_tvm_ffi",
    "cutlass",
    "filelock",
    "llvmlite",
    "matplotlib",
    "platformdirs",
    "rich",
    "torch._inductor",
    "triton",
    "tvm_ffi",
    "typer",
)

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import fovea
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before),
                  "cuda": torch.cuda.is_initialized()}))
"""

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({unwanted!r}))  # None: an import raises, find_spec finds nothing
import torch, fovea
q = torch.randn(1, 8, 2, 16)
print(tuple(fovea.attention(q, q, q, causal=True).shape))
"""


def _run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def probe() -> dict:
    # The first run may compile byte code; the faster of two says what an import costs.
    return min((json.loads(_run(PROBE)) for _ in range(2)), key=lambda one: one["seconds"])


def test_import_takes_at_most_one_second_after_torch(probe):
    assert probe["seconds"] <= MOST_SECONDS


def test_import_pulls_in_no_optional_package(probe):
    pulled = [name for name in probe["new"] if name.startswith(UNWANTED)]
    assert pulled == []


def test_import_touches_no_device(probe):
    assert probe["cuda"] is False


def test_reference_runs_where_optional_packages_are_absent():
    roots = {name for name in UNWANTED if "." not in name}
    assert _run(BLOCKED.format(unwanted=roots)).strip() == "(1, 8, 2, 16)"
