"""`fovea emulate`: what it says before it starts."""

import dataclasses

import pytest

pytest.importorskip("typer", reason="the extra cli is not installed")

from fovea.cli import emulate
from fovea.cli.call import EMULATED


def test_long_call_is_known_to_be_long_and_the_default_is_not():
    assert emulate.estimate_seconds(EMULATED, 1) < 5
    large = dataclasses.replace(EMULATED, heads_q=16, seqlen_q=8192, seqlen_kv=8192)
    assert emulate.estimate_seconds(large, 1) > 3600
    assert emulate.estimate_seconds(large, 2) == 2 * emulate.estimate_seconds(large, 1)


def test_trace_in_a_folder_that_is_missing_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(emulate, "compile_forward", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(ValueError, match=r"--trace=.*none/t\.json.*a file in a folder that exists"):
        emulate.run(trace=tmp_path / "none" / "t.json")


def test_trace_that_is_a_folder_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(emulate, "compile_forward", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(ValueError, match=r"--trace=.*a file in a folder that exists"):
        emulate.run(trace=tmp_path)
