"""The forward benchmarks from command line to result file, on a simulated GPU."""

import json
import sys

import pytest
import torch

from benchmarks import bench_forward, bench_forward_mods, peers, protocol
from benchmarks.shapes import Shape

SECONDS = {"fovea": 1e-3, "fa3": 2e-3, "flex": 4e-3}


@pytest.fixture
def bench(gpu, monkeypatch, tmp_path):
    """Return a function that runs a benchmark's main and returns its result file's object."""
    monkeypatch.setattr(protocol, "require_gpu", lambda: None)
    monkeypatch.setattr(protocol, "Board", lambda: gpu)
    small = torch.zeros(1, 2, 3, 4)
    inputs = peers.Inputs(q=small, k=small, v=small)
    monkeypatch.setattr(peers.Inputs, "random", classmethod(lambda cls, shape, dtype: inputs))

    def maker(name, value):
        def make(inputs, shape, **keywords):
            def launch():
                gpu.launch(name, SECONDS[name])
                out = torch.full((1, 2, 3, 4), value)
                return out.transpose(1, 2) if name == "flex" else out

            return launch

        return make

    def missing(inputs, shape):
        raise ImportError("no such package")

    made = {"fovea": maker("fovea", 1.0), "fa3": maker("fa3", 1.25), "flex": maker("flex", 1.0)}
    monkeypatch.setattr(peers, "FORWARD", made | {"cudnn": missing})
    monkeypatch.setattr(peers, "fovea_forward", made["fovea"])
    monkeypatch.setattr(peers, "flex_forward", made["flex"])

    def run(module, *words):
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [module.__file__, *words, "--out", str(out)])
        module.main()
        return json.loads(out.read_text())

    return run


def test_bench_forward_writes_rates_of_every_peer_that_runs(bench, capsys):
    result = bench(bench_forward, "--shape", "S16384 D128", "--rounds", "1", "--seconds", "0.2")
    assert [row["causal"] for row in result["rows"]] == [False, True]
    row = result["rows"][0]
    work = Shape(1, 16, 16, 16384, 128, False).forward_flops() / 1e12
    assert row["fovea"] == pytest.approx(work / 1e-3, rel=0.01)
    assert row["fa3"] == pytest.approx(work / 2e-3, rel=0.01)
    assert row["fovea_burst"] == pytest.approx(work / 1e-3, rel=0.02)
    assert row["fovea_vs_fa3_max"] == 0.25
    assert row["fovea_vs_flex_max"] == 0.0
    assert "cudnn" not in row
    assert (row["fovea_mhz"], row["fovea_watts"]) == (1500, 650)
    assert result["stamp"]["gpu"] == "NVIDIA H200"
    assert result["stamp"]["command"].startswith("python -m benchmarks.bench_forward --shape")
    printed = capsys.readouterr()
    assert "cudnn left out: ImportError: no such package" in printed.err
    assert "x2.00 fa3" in printed.out


def test_bench_forward_without_fovea_times_the_peers(bench):
    words = ("--shape", "B4", "--without-fovea", "--peers", "fa3", "--no-burst", "--seconds", "0.1")
    (row,) = bench(bench_forward, *words)["rows"]
    assert {"B", "H", "Hkv", "S", "D", "causal", "fa3"} <= set(row)
    assert not {"fovea", "fa3_burst"} & set(row)


def test_bench_forward_of_a_failing_fovea_raises(bench, monkeypatch):
    def broken(inputs, shape):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(peers.FORWARD, "fovea", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        bench(bench_forward, "--shape", "B4")


def test_bench_forward_of_an_unknown_peer_exits(bench, capsys):
    with pytest.raises(SystemExit):
        bench(bench_forward, "--peers", "fa9")
    assert "--peers fa9 is not valid" in capsys.readouterr().err


def test_bench_forward_mods_counts_visible_pairs(bench, monkeypatch):
    monkeypatch.setattr(bench_forward_mods, "DEVICE", "cpu")
    monkeypatch.setattr(bench_forward_mods, "MOD_SHAPE", Shape(1, 2, 2, 1500, 128, False))
    result = bench(
        bench_forward_mods, "--case", "window1024", "--case", "alibi", "--seconds", "0.1",
        "--rounds", "1",
    )  # fmt: skip
    pairs = {"window1024": sum(min(i + 1, 1024) for i in range(1500)), "alibi": 1500 * 1501 // 2}
    assert [row["mod"] for row in result["rows"]] == ["window1024", "alibi"]
    for row in result["rows"]:
        work = 4 * 2 * 128 * pairs[row["mod"]] / 1e12
        assert row["fovea"] == pytest.approx(work / 1e-3, rel=0.05, abs=0.1)
