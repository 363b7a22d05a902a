"""The coverage page is generated and current."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_coverage_page_is_current() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    script = ROOT / "scripts" / "ptx_coverage.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
