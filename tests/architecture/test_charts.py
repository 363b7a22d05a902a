"""Charts show the results that are committed."""

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHARTS = sorted((ROOT / "docs" / "pictures" / "charts").glob("*.png"))


def test_every_suite_has_a_chart():
    names = {path.stem for path in CHARTS}
    assert {"forward", "forward_mods", "varlen", "decode"} == names


@pytest.mark.parametrize("path", CHARTS, ids=lambda path: path.stem)
def test_chart_was_drawn_from_the_committed_result(path):
    result = ROOT / "benchmarks" / "results" / "h200" / f"{path.stem.removeprefix('chart_')}.json"
    digest = hashlib.sha256(result.read_bytes()).hexdigest()
    assert digest.encode() in path.read_bytes(), "run python docs/charts.py"
