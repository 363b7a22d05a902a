"""Every case and check on a CUDA device; `scripts/gpu/run_cases.py` is the same without pytest."""

import pytest
from cases import CASES, case_named
from judge import judge, judge_gradients, run
from special import CHECKS


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_call_is_within_the_budget(name: str) -> None:
    case = case_named(name)
    call = case.build("cuda", is_small=False)
    judgement = judge(call, run(call, "cuda"))
    assert judgement.wrong is None, judgement.wrong
    if case.checks_gradients:
        wrong = judge_gradients(case.build("cuda", is_small=True), "cuda")
        assert wrong is None, wrong


@pytest.mark.parametrize("name", CHECKS)
def test_device_behaviour_is_right(name: str) -> None:
    CHECKS[name]()
