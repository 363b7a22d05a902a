"""`fovea explain --timeline`: what it prints and writes, and what it refuses."""

import json
import re

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


def test_timeline_says_what_is_drawn_and_what_each_letter_of_it_means(capsys):
    assert run_application("explain S2048 D128 --arch sm90 --timeline".split()) == 0
    out = capsys.readouterr().out
    assert "6 KV tiles are drawn; query tiles of this call have up to 32" in out
    starts = ("copies  ", "tensor cores  ", "compute ")
    rows = [line.split()[-1] for line in out.splitlines() if line.startswith(starts)]
    rows = [row for row in rows if len(row) > 40]  # not those of the table below
    assert len(rows) == 5
    for letter in set("".join(rows)):
        assert f"\n{letter}  " in out
    assert "r  scores are read from tensor memory" not in out  # Hopper has none


def test_output_without_timeline_is_refused(capsys):
    assert run_application(["explain", "S1024", "--output", "t.png"]) == 1
    assert "add --timeline" in capsys.readouterr().err


def test_unknown_arch_names_those_there_are(capsys):
    assert run_application(["explain", "S1024", "--arch", "sm80", "--timeline"]) == 1
    assert "sm90 | sm100 | sm103" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "lack"),
    [
        ("S1024 --window 64,0 --arch sm90", "for window (it has"),
        ("S1024 --score-mod alibi(16) --softcap 9 --arch sm90", "for softcap, score_mod (it has"),
        ("S1024 --mask-mod causal --arch sm100", "for mask_mod (it has"),
        ("S1024 --mask-mod causal --block-mask --arch sm90", "for block_mask (it has"),
        ("S1024 --window -,0 --arch sm90", "for window (it has"),
        ("S1024 fp16 --arch sm100", "for float16"),
        ("S64 Skv1024 --arch sm100", "for 64 queries or fewer"),
        ("S1024 D96 --arch sm90", "for kernels of head dims 96 and 96"),
        ("S1024 D256 --arch sm103", "for kernels of head dims 256 and 256"),
    ],
)
def test_call_beyond_the_model_is_refused_with_what_it_knows(words, lack, capsys):
    assert run_application(["explain", *words.split(), "--timeline"]) == 1
    error = capsys.readouterr().err
    assert f"no figure {lack}" in error
    assert "(it has: bfloat16, dense or causal and nothing else, more than 64 queries" in error


def test_arch_narrows_what_explain_says(capsys):
    assert run_application("explain S1024 D64 --mask-mod checkerboard(3) --block-mask".split()) == 0
    whole = capsys.readouterr().out
    words = "explain S1024 D64 --mask-mod checkerboard(3) --block-mask --arch sm100"
    assert run_application(words.split()) == 0
    narrow = capsys.readouterr().out
    assert "kernels for sm90, sm100, sm103" in whole
    assert "on sm90" in whole
    assert "kernels for sm100:" in narrow
    assert "sm90" not in narrow
    assert "sm103" not in narrow


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/such/folder/x.png", "a file in a folder that exists"),
        ("x.foo", "a file that ends in .*png.*; name x.png"),
        ("x", "name x.png"),
        (".", "a file in a folder that exists"),
    ],
)
def test_output_that_cannot_be_written_is_refused_before_anything_is_drawn(output, message, capsys):
    pytest.importorskip("matplotlib")
    words = ["explain", "S1024", "D64", "--timeline", "--output", output]
    assert run_application(words) == 1
    printed = capsys.readouterr()
    assert re.search(f"--output={re.escape(output)} .*{message}", printed.err)
    assert printed.out == ""
