"""The command line as a whole: what reaches the terminal."""

import functools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("typer", reason="the extra cli is not installed")

from fovea.cli import bench, cache
from fovea.cli.main import main
from fovea.version import __version__


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOVEA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_lists_every_subcommand(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("demo", "info", "explain", "compile", "bench", "emulate", "cache"):
        assert f" {name} " in text


@pytest.mark.parametrize("name", ["demo", "explain", "compile", "bench", "emulate"])
def test_each_subcommand_describes_itself(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"fovea {name}" in capsys.readouterr().out


def test_unknown_subcommand_fails(capsys):
    assert main(["no-such-thing"]) == 2
    assert "no-such-thing" in capsys.readouterr().err


def test_info_prints_json(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fovea"] == __version__


def test_empty_cache_is_said_to_be_empty(cache_folder, capsys):
    assert main(["cache", "list"]) == 0
    text = capsys.readouterr().out.replace("\n", "")
    assert "holds no compiled kernel" in text
    assert main(["cache", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_damaged_entry_is_listed_as_damaged_and_cleared(cache_folder, capsys):
    entry = cache_folder / "v1" / "0123456789abcdef"
    entry.mkdir(parents=True)
    (entry / "record.json").write_text("{ cut sho")
    assert main(["cache", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["key"], listed["name"]) == ("0123456789abcdef", "(damaged)")
    assert main(["cache", "clear"]) == 0
    assert not entry.exists()


def test_long_cache_is_listed_from_its_end_unless_all_is_asked_for(cache_folder, capsys):
    for number in range(cache.SHOWN + 3):
        entry = cache_folder / "v1" / f"{number:016x}"
        entry.mkdir(parents=True)
        (entry / "record.json").write_text("{}")
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= cache.SHOWN + 4
    assert any(line.startswith("and 3 used before") for line in lines)
    assert main(["cache", "list", "--all"]) == 0
    assert capsys.readouterr().out.count("(damaged)") == cache.SHOWN + 3


def test_wrong_word_ends_with_one_line_and_no_traceback(capsys):
    assert main(["bench", "Q7"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: CALL='Q7'")
    assert "Traceback" not in error


def test_wrong_word_with_traceback_raises():
    with pytest.raises(ValueError, match="CALL='Q7'"):
        main(["--traceback", "bench", "Q7"])


def test_bench_times_every_implementation_of_a_masked_call(capsys, monkeypatch):
    quick = functools.partial(bench.time_interleaved, budget_s=0.0)
    monkeypatch.setattr(bench, "time_interleaved", quick)
    words = "bench B1 H2 S64 D16 fp32 --causal --window 9,0 --softcap 3.0".split()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "torch flex, uncompiled" in text
    assert "torch sdpa" not in text  # it has no window: not the same call


def test_explain_names_the_backend(capsys):
    assert main("explain B1 H2 S64 D16 --causal".split()) == 0
    assert "reference" in capsys.readouterr().out


def test_bench_without_a_peer_says_why(capsys, monkeypatch):
    quick = functools.partial(bench.time_interleaved, budget_s=0.0)
    monkeypatch.setattr(bench, "time_interleaved", quick)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    assert main("bench B1 H2 S64 D16 fp32 --backward --mask-mod causal".split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no peer: torch's scaled_dot_product_attention takes no mods" in text
    assert "no gradients on a CPU" in text


def test_compile_without_a_kernel_speaks_of_the_command_line(capsys):
    assert main("compile S64 D64 fp32 --arch sm_90a".split()) == 1
    error = capsys.readouterr().err
    assert "no kernel for sm90: dtype=torch.float32" in error
    assert "--arch" in error
    assert "archs" not in error


def test_explain_makes_a_block_mask_where_it_is_told(capsys):
    words = ["explain", "S256", "D64", "--mask-mod", "dilated(30, 3)"]
    assert main([*words, "--block-mask"]) == 0
    assert "block mask    bits of its partial blocks" in capsys.readouterr().out
    assert main(words) == 0
    assert "block mask" not in capsys.readouterr().out


def test_explain_says_that_one_source_serves_both_blackwells(capsys):
    assert main("explain S256 D64".split()) == 0
    text = capsys.readouterr().out
    assert text.count("one source for both, compiled for sm_103a") == 1


def test_causal_top_left_reaches_the_call(capsys):
    assert main("explain S64 Skv100 D64 --causal-top-left".split()) == 0
    assert "causal=top_left" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "compile"])
def test_block_mask_without_a_mask_mod_is_refused(command, capsys):
    assert main([command, "S256", "D64", "--block-mask"]) == 1
    assert "--mask-mod" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "compile", "bench", "emulate"])
def test_both_alignments_of_a_causal_mask_are_refused(command, capsys):
    assert main([command, "--causal", "--causal-top-left"]) == 1
    assert "--causal-top-left is not valid" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["cache", "list", "--json"], ["explain", "S64", "D64"]])
def test_closed_pipe_ends_without_a_word(words):
    """As of `fovea ... | head -1`, whose end closes before the rest is written."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "fovea", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1
