"""`fovea emulate`: the kernel's own PTX, judged against float64."""

import json

import pytest
import torch

from fovea.arch import SM90
from fovea.cli.call import Call, Shape
from fovea.cli.demo import EMULATED_SHAPE, EMULATED_WINDOW
from fovea.cli.demo_call import make_call
from fovea.cli.emulation import emulate
from fovea.problem import Request, make_dense

CPU = torch.device("cpu")


def _within_budget(done) -> bool:
    # Twice plain attention's error, and one rounding of an output of the size of 1 in bf16.
    return done.accuracy.error <= 2 * done.accuracy.plain_error + 2**-8


def test_demo_call_runs_on_the_emulator_within_the_error_budget(tmp_path):
    call = make_call(EMULATED_SHAPE, EMULATED_WINDOW, CPU)
    problem = make_dense(call.q, call.k, call.v, Request(**call.keywords))
    done = emulate(problem, SM90, seed=0, trace=tmp_path / "trace.json")
    assert _within_budget(done)
    assert done.count("instructions.mma") > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(
        "wgmma" in event["args"]["instruction"] for event in events if event["name"] == "run"
    )


def test_output_is_the_same_under_another_schedule():
    # The kernel is one that test_attention.py runs too.
    shape = Shape(
        batch=1, heads_q=2, heads_kv=1, seqlen_q=70, seqlen_kv=133, head_dim=128, head_dim_v=128
    )
    call = Call(shape=shape, dtype=torch.bfloat16, keywords={})
    problem = make_dense(*call.make_inputs(CPU), Request(causal=True))
    first, other = (emulate(problem, SM90, seed=seed) for seed in (0, 1))
    assert _within_budget(first)
    assert first.accuracy == other.accuracy
    assert first.steps != other.steps  # the schedules did differ


def test_keys_in_parts_are_counted_with_their_merge(tmp_path):
    # One query tile and two SMs: two parts, of a kernel that test_few_queries.py runs too.
    shape = Shape(
        batch=1, heads_q=4, heads_kv=1, seqlen_q=1, seqlen_kv=900, head_dim=64, head_dim_v=64
    )
    call = Call(shape=shape, dtype=torch.bfloat16, keywords={})
    problem = make_dense(*call.make_inputs(CPU), Request(causal=True))
    done = emulate(problem, SM90, seed=0, trace=tmp_path / "trace.json")
    assert _within_budget(done)
    # Each of 8 KV tiles takes 4 + 8 products of 16 columns: head_dim 64, then 128 keys.
    assert done.count("instructions.mma") == 8 * (4 + 8) * 4
    assert done.count("mufu.ex2") > 8 * 128 * 64 // 32


def test_call_without_queries_is_exact_and_has_no_trace(tmp_path):
    shape = Shape(
        batch=1, heads_q=1, heads_kv=1, seqlen_q=0, seqlen_kv=64, head_dim=64, head_dim_v=64
    )
    call = Call(shape=shape, dtype=torch.bfloat16, keywords={})
    problem = make_dense(*call.make_inputs(CPU), Request())
    done = emulate(problem, SM90, seed=0)
    assert done.accuracy.error == 0
    assert done.steps == 0
    with pytest.raises(ValueError, match=r"--trace=.*launches no kernel"):
        emulate(problem, SM90, seed=0, trace=tmp_path / "trace.json")
