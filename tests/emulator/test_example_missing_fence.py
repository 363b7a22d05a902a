"""The example that finds a planted missing fence still finds it."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "find_missing_fence.py"


def load_example():
    spec = importlib.util.spec_from_file_location("find_missing_fence", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_is_clean_whole_and_reported_without_each_line(capsys):
    example = load_example()
    example.main()
    whole, without_fence, without_wait = capsys.readouterr().out.split("\nwithout ")
    assert "right and silent in 20 of 20 seeds" in whole
    # The values alone never show the missing fence here: only the report does.
    assert "right in 20 of 20 seeds if nobody looks" in without_fence
    assert "reported in 20 of 20 seeds" in without_fence
    assert "rule: a generic write needs fence.proxy.async" in without_fence
    assert "cp.async.bulk.global.shared::cta.bulk_group [%out]" in without_fence
    assert "reported in 20 of 20 seeds" in without_wait
    assert "st.shared.v4.b32 [%slot]" in without_wait
