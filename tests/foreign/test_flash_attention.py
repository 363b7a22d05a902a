"""flash-attn-4's kernels on the emulator: right against float64, silent under every schedule."""

import pytest
import torch
from flash_attention_runs import LARGE, RAGGED, Kernel, Run, run

from fovea.problem import ForwardResult, GradientNeeds, Gradients
from fovea.reference.dense import oracle
from fovea.testing.budget import check_backward, check_forward

SEEDS = 20
FORWARD = [
    Kernel(arch=arch, head_dim=head_dim, causal=causal)
    for arch in ("sm_90a", "sm_100a")
    for head_dim in (64, 128)
    for causal in (False, True)
] + [Kernel(arch="sm_100a", head_dim=128, causal=True, takes_over=True)]
# Relative error of the package's degree-3 polynomial for 2^x on [0, 1), the minimax polynomial's:
# 8.8e-5 (its p0 is 1, so that the sum of exponentials is off by no more than this).
EXP2_ERROR = 8.8e-5
NEEDS = GradientNeeds(q=True, k=True, v=True, sink=False, score_captures=())


@pytest.fixture(scope="module", params=FORWARD, ids=str)
def forward(request, tmp_path_factory) -> Run:
    """One kernel's run: a whole tile count once, a ragged shape under twenty schedules."""
    calls = {"large": (LARGE, 1), "ragged": (RAGGED, SEEDS)}
    return run(request.param, calls, tmp_path_factory.mktemp("forward"))


def test_forward_is_silent_and_equal_under_twenty_schedules(forward):
    assert forward.error == ""
    assert forward.warnings == []
    first, *others = forward.results["ragged"]
    assert len(others) == SEEDS - 1
    for other in others:
        assert torch.equal(other["out"].view(torch.int16), first["out"].view(torch.int16))
        assert torch.equal(other["lse"], first["lse"])


@pytest.mark.parametrize("call", ["large", "ragged"])
def test_forward_is_within_the_error_budget(forward, call):
    found, problem = forward.results[call][0], forward.problems[call]
    exact = oracle(problem).lse
    # lse is judged here: a polynomial of degree 3 stands for part of exp2 on sm_100a.
    assert (found["lse"] - exact).abs().max() <= EXP2_ERROR
    check_forward(problem, ForwardResult(out=found["out"], lse=exact, max_score=None))


def check_gradients(found: Run, call: str) -> None:
    for result in found.results[call]:
        gradients = Gradients(**result, dsink=None, score_captures=())
        check_backward(
            found.problems[call], gradients, dout=found.dout[call], dlse=None, needs=NEEDS
        )


def backward_kernels():
    for arch in ("sm_90a", "sm_100a"):
        for head_dim, causal in ((64, True), (128, False), (128, True)):
            kernel = Kernel(arch=arch, head_dim=head_dim, causal=causal, is_backward=True)
            yield pytest.param(kernel, id=str(kernel))


@pytest.mark.parametrize("kernel", list(backward_kernels()))
def test_backward_is_silent_and_right_under_schedules(kernel, tmp_path):
    found = run(kernel, {"large": (LARGE, 5)}, tmp_path)
    assert found.error == ""
    assert len(found.kernels) >= 3  # delta, the products, dq's conversion
    check_gradients(found, "large")
    # On sm_100a dk and dv leave by stores that no wait covers (flash_bwd_sm100.py, the condition
    # `epi_stage < num_epi_stages - 1`): a warning, for the manual does not forbid it.
    if kernel.arch == "sm_100a":
        assert any("it is in no group and never waited for" in text for text in found.warnings)
    else:
        # the preprocess kernel may branch past loads and drop what it computes on their registers
        assert all("what it holds changes no result" in text for text in found.warnings)
