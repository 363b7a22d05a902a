"""The decode benchmark from command line to result file, on a simulated GPU."""

import contextlib
import json
import sys

import pytest
import torch

from benchmarks import bench_decode, prepare, protocol
from benchmarks.bench_decode import CALLS, QUICK_CALLS, Call, Inputs

SECONDS = {"fovea": 1e-5, "fa3": 2e-5, "copy": 8e-6}


@pytest.fixture
def bench(gpu, monkeypatch, tmp_path):
    """Return a function that runs the benchmark's main and returns its result file's object."""
    graphs = []

    class Graph:
        def __init__(self):
            self.launches = []
            graphs.append(self)

        def replay(self):
            for name in self.launches:
                gpu.launch(name, SECONDS[name])

    @contextlib.contextmanager
    def recording(graph):
        begin = len(gpu.launched)
        yield
        graph.launches = gpu.launched[begin:]

    def calls_of(name, value):
        def make(inputs, call):
            def launch(k):
                gpu.launch(name, SECONDS[name])
                return torch.full((2, 2), value)

            return [lambda k=k: launch(k) for k in inputs.keys]

        return make

    def missing(inputs, call):
        raise ImportError("no such package")

    monkeypatch.setattr(protocol, "require_gpu", lambda: None)
    monkeypatch.setattr(protocol, "Board", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    one = torch.zeros(1)
    random = classmethod(lambda cls, call, dtype: Inputs(q=one, keys=[one] * call.turns, values=[]))
    monkeypatch.setattr(Inputs, "random", random)
    made = {"fovea": 1.0, "fa3": 1.5, "copy": 0.0}
    makers = {name: calls_of(name, value) for name, value in made.items()}
    monkeypatch.setattr(bench_decode, "DECODE", {**makers, "cudnn": missing, "flex": missing})

    def run(*words):
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [bench_decode.__file__, *words, "--out", str(out)])
        bench_decode.main()
        return json.loads(out.read_text())

    return run


def test_bench_decode_writes_bytes_of_k_and_v_a_second(bench, capsys):
    result = bench("--call", "B4 S32768", "--rounds", "1", "--seconds", "0.1")
    assert result["unit"] == "GB/s"
    (row,) = result["rows"]
    assert (row["B"], row["S"], row["Sq"]) == (4, 32768, 1)
    work = 2 * 4 * 32768 * 8 * 128 * 2 / 1e9
    assert row["fovea"] == pytest.approx(work / 1e-5, rel=0.02)
    assert row["fa3"] == pytest.approx(work / 2e-5, rel=0.02)
    assert row["fovea_of_copy"] == pytest.approx(0.8, rel=0.02)
    assert row["fovea_vs_fa3_max"] == 0.5
    assert "flex left out: ImportError" in capsys.readouterr().err


def test_bench_decode_of_an_unknown_call_or_peer_exits(bench):
    for words in (("--call", "B5"), ("--peers", "fa9")):
        with pytest.raises(SystemExit):
            bench(*words)


def test_turns_exceed_the_cache_and_calls_are_known_once():
    assert len(set(CALLS)) == len(CALLS)
    assert set(QUICK_CALLS) <= set(CALLS)
    for call in CALLS:
        assert call.turns * call.kv_bytes >= 2**29
    assert Call(1, 32, 8, 1, 4096, 128).turns == 32


def test_kernels_of_all_calls_pack_heads():
    assert all(variant.plan.packs_heads for variant in prepare.decode_variants())
