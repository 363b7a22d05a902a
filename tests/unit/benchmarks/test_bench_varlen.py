"""The varlen benchmark from command line to result file, on a simulated GPU."""

import json
import sys

import pytest
import torch

from benchmarks import bench_varlen, peers, prepare, protocol
from benchmarks.bench_varlen import CALLS, Call, Inputs, lengths

SECONDS = {"fovea": 1e-3, "fa3": 2e-3, "dense": 5e-4}


@pytest.fixture
def bench(gpu, monkeypatch, tmp_path):
    """Return a function that runs the benchmark's main and returns its result file's object."""

    def maker(name, value):
        def make(inputs, call):
            def launch():
                gpu.launch(name, SECONDS[name])
                return torch.full((2, 2), value)

            return launch

        return make

    nothing = torch.zeros(1)
    packed = Inputs(q=nothing, k=nothing, v=nothing, starts=nothing)
    dense = peers.Inputs(q=nothing, k=nothing, v=nothing)
    monkeypatch.setattr(protocol, "require_gpu", lambda: None)
    monkeypatch.setattr(protocol, "Board", lambda: gpu)
    monkeypatch.setattr(Inputs, "random", classmethod(lambda cls, call, dtype: packed))
    monkeypatch.setattr(peers.Inputs, "random", classmethod(lambda cls, shape, dtype: dense))
    made = {"fovea": maker("fovea", 1.0), "fa3": maker("fa3", 1.5)}
    monkeypatch.setattr(bench_varlen, "PACKED", made)
    monkeypatch.setitem(peers.FORWARD, "fovea", maker("dense", 1.0))

    def run(*words):
        out = tmp_path / "varlen.json"
        fixed = (bench_varlen.__file__, "--seconds", "0.1", "--rounds", "1", "--out", str(out))
        monkeypatch.setattr(sys, "argv", [*fixed, *words])
        bench_varlen.main()
        return json.loads(out.read_text())

    return run


def test_lengths_have_the_mean_and_the_limit_that_are_named():
    assert len(lengths()) == 64
    assert sum(lengths()) / 64 == pytest.approx(2048, rel=0.01)
    assert max(lengths()) == 16384
    assert min(lengths()) > 0


def test_dense_call_beside_has_about_as_many_pairs():
    for call in CALLS:
        assert call.dense.forward_flops() == pytest.approx(call.flops, rel=0.1)
        assert (call.dense.H, call.dense.Hkv, call.dense.D) == (call.H, call.Hkv, call.D)


def test_bench_varlen_writes_each_rate_by_its_own_pairs(bench):
    (row,) = bench("--call", "H32/8 D128 causal")["rows"]
    call = Call(32, 8, 128, True)
    assert row["fovea"] == pytest.approx(call.flops / 1e12 / 1e-3, rel=0.01)
    assert row["fa3"] == pytest.approx(call.flops / 1e12 / 2e-3, rel=0.01)
    assert row["dense"] == pytest.approx(call.dense.forward_flops() / 1e12 / 5e-4, rel=0.02)
    assert row["fovea_vs_fa3_max"] == 0.5
    assert (row["S"], row["longest"]) == (sum(lengths()), 16384)


def test_unknown_call_exits_with_the_known_ones(bench, capsys):
    with pytest.raises(SystemExit):
        bench("--call", "D999")
    assert "64 sequences H32/8 D128 causal" in capsys.readouterr().err


def test_prepare_names_the_kernels_of_every_call():
    plans = [variant.plan for variant in prepare.varlen_variants()]
    assert [plan.features.varlen for plan in plans] == [True] * len(CALLS) + [False] * len(CALLS)
    assert [plan.features.limit_right for plan in plans[: len(CALLS)]] == [c.causal for c in CALLS]
