"""The check of gathers that stands in for kernels agrees with the reference's own."""

import pytest
import torch

from fovea import dispatch
from fovea.dispatch import Choice
from fovea.errors import GatherError
from fovea.problem import AttentionProblem
from fovea.reference import gathers, tiled_forward
from fovea.testing.inputs import Shape
from fovea.testing.problems import dense_problem, varlen_problem

SHAPE = Shape(batch=1, seqlen_q=40, seqlen_kv=40, heads_q=2, heads_kv=1, head_dim=8)
TABLE, FLAGS = torch.zeros(30), torch.ones(30, dtype=torch.bool)


def distance(score, b, h, i, j):
    return score + TABLE[(i - j).abs()]


def by_distance(b, h, i, j):
    return FLAGS[(i - j).abs()]


def near(b, h, i, j):
    return (i - j).abs() < 30


CASES = {
    "score_mod": ({"score_mod": distance}, True),
    "mask_mod": ({"mask_mod": by_distance}, True),
    "hidden by a mask": ({"score_mod": distance, "mask_mod": near}, False),
    "hidden by a window": ({"mask_mod": by_distance, "window": (29, 29)}, False),
    "window too wide": ({"score_mod": distance, "window": (30, 30)}, True),
}


def _raises(run, problem: AttentionProblem) -> bool:
    try:
        run(problem)
    except GatherError:
        return True
    return False


@pytest.mark.parametrize("name", CASES)
def test_check_raises_where_the_reference_does(name):
    options, is_wrong = CASES[name]
    for problem in (
        dense_problem(SHAPE, **options),
        varlen_problem([0, 40, 3], [5, 40, 0], SHAPE, **options),
    ):
        assert _raises(tiled_forward.forward, problem) is is_wrong
        assert _raises(gathers.check_gathers, problem) is is_wrong


def test_kernel_backend_on_a_cpu_checks_gathers_first(monkeypatch):
    ran = []

    def run(problem, choice):
        ran.append(choice.backend)
        return tiled_forward.forward(problem)

    monkeypatch.setattr(dispatch, "_forward", run)
    choice = Choice("emulator:sm90", "asked for", "reference")
    dispatch.forward(dense_problem(SHAPE, score_mod=distance, mask_mod=near), choice)
    with pytest.raises(GatherError, match=r"\(30,\).*test_gathers.py"):
        dispatch.forward(dense_problem(SHAPE, score_mod=distance), choice)
    assert ran == ["emulator:sm90"]
