"""Candidates of tile shapes: the one in use is among them, and none that cannot be built."""

import pytest

from benchmarks import tune_tiles
from fovea.arch import SM90
from fovea.plan import select
from fovea.plan.sm90 import ForwardPlan


@pytest.mark.parametrize("name", ["D128 causal S2048", "D64 document", "D256 natten"])
def test_the_plan_in_use_comes_first(name):
    problem = tune_tiles.CASES[name].problem("cpu")
    found = list(tune_tiles.plans(problem))
    assert found[0][1] == select.forward_plan(problem, SM90)
    texts = [text for text, _ in found]
    assert len(set(texts)) == len(texts) >= 4


def test_candidates_that_cannot_be_built_say_why():
    found = dict(tune_tiles.plans(tune_tiles.CASES["D128 natten"].problem("cpu")))
    assert found["192x64x4x2x1"] == "does not divide a block of 128"
    assert isinstance(found["128x64x4x2x1"], ForwardPlan)
    ranges = dict(tune_tiles.plans(tune_tiles.CASES["D128 document"].problem("cpu")))
    assert ranges["192x64x4x2x2"] == "does not fit two CTAs share one range of keys"


def test_candidates_differ_in_their_tile_alone():
    found = tune_tiles.plans(tune_tiles.CASES["D128 sinks"].problem("cpu"))
    assert len({plan.features for _, plan in found if isinstance(plan, ForwardPlan)}) == 1
