"""`fovea explain --timeline`: what it prints and writes, and what it refuses."""

import json

import pytest

pytest.importorskip("typer")

from fovea.cli.application import run_application


def test_timeline_of_a_blackwell_kernel_says_that_it_is_a_model(capsys):
    words = "explain B1 H2 S2048 D128 --arch sm100 --timeline"
    assert run_application(words.split()) == 0
    out = capsys.readouterr().out
    assert "softmax 1" in out
    assert "exponential unit" in out
    assert "A model's figure, no measurement:" in out
    assert "on a B200 never checked" in out


def test_output_writes_a_picture_and_perfetto_json(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    words = f"explain B1 H2 S1024 D64 --causal --arch sm90 --timeline --output {picture}"
    assert run_application(words.split()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(picture.with_suffix(".json").read_text())["traceEvents"]
    assert any(event["name"] == "softmax" for event in events)
    assert "compute 2" in capsys.readouterr().out


def test_arch_without_timeline_is_refused(capsys):
    assert run_application(["explain", "S1024", "--arch", "sm100"]) == 1
    assert "add --timeline" in capsys.readouterr().err


def test_unknown_arch_names_those_there_are(capsys):
    assert run_application(["explain", "S1024", "--arch", "sm80", "--timeline"]) == 1
    assert "sm90 | sm100 | sm103" in capsys.readouterr().err


def test_call_beyond_the_model_is_refused_with_what_it_knows(capsys):
    assert run_application("explain S1024 --window 64,0 --arch sm90 --timeline".split()) == 1
    assert "plain dense and causal calls" in capsys.readouterr().err
