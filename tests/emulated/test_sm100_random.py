"""Random calls of every feature on Blackwell: each within its budget, or refused as it says.

One seed runs by default.
"""

import pytest
from judge import judge, run
from random_calls import random_call
from schedules import run_once

import fovea
from fovea.arch import SM100
from fovea.plan import select

BACKEND = "emulator:sm100"
QUICK = (10,)


def _seeds():
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(60)]


@pytest.mark.parametrize("seed", _seeds())
def test_random_call_is_within_the_budget_or_refused(seed: int) -> None:
    call = random_call(seed)
    problem = call.problem()
    lack = select.unsupported(problem, SM100)
    if lack is not None:
        with pytest.raises(fovea.UnsupportedError) as caught:
            run(call, BACKEND)
        assert f"does not take this call: {lack}; pass backend=None" in str(caught.value)
        return
    result = run(call, BACKEND)
    judgement = judge(call, result)
    assert judgement.wrong is None, judgement.wrong
    again = run_once(problem, SM100, seed=1 + seed, num_sms=(1, 2, 5)[seed % 3])
    judgement = judge(call, again)
    assert judgement.wrong is None, judgement.wrong


def test_random_calls_have_every_feature() -> None:
    calls = [random_call(seed) for seed in range(60)]
    names = {name for call in calls for name, value in call.options.items() if value is not None}
    assert names >= {"window", "softcap", "scale", "sink", "score_mod", "mask_mod", "block_mask"}
    assert {call.options["causal"] for call in calls} == {False, True, "top_left"}
    places = {name for call in calls for name in call.where}
    assert places >= {"page_table", "seqused_q", "seqused_kv", "cu_seqlens_kv"}
    refused = [call for call in calls if select.unsupported(call.problem(), SM100) is not None]
    assert len(refused) < len(calls) / 5
