"""Results of packed problems that need no kernel."""

import pytest
import torch

from fovea.problem import Request, VarlenRequest, make_varlen
from fovea.reference import tiled_forward
from fovea.runtime.trivial import trivial_forward
from fovea.testing.inputs import cumulative, normal


@pytest.mark.parametrize("used", [None, [3, 0, 1]])
@pytest.mark.parametrize("has_sink", [False, True])
def test_packed_call_without_keys_has_a_sink_in_used_rows_alone(used, has_sink):
    lengths, behind = [3, 2, 4], 2
    q = normal((sum(lengths) + behind, 2, 16), seed=0, dtype=torch.bfloat16)
    where = VarlenRequest(
        cumulative(lengths),
        cumulative([0, 0, 0]),
        4,
        0,
        seqused_q=None if used is None else torch.tensor(used, dtype=torch.int32),
    )
    sink = torch.tensor([-1.0, 2.0]) if has_sink else None
    request = Request(sink=sink, wants_lse=True, wants_max_score=True)
    problem = make_varlen(q, q[:0], q[:0], where, request)
    found, expected = trivial_forward(problem), tiled_forward.forward(problem)
    assert found is not None
    for mine, reference in zip(found, expected, strict=True):
        assert torch.equal(mine, reference)
    assert bool((found.lse[:, sum(lengths) :] == -torch.inf).all())


def test_empty_packed_batch_is_idle_rows_alone():
    q = normal((5, 2, 16), seed=0, dtype=torch.bfloat16)
    where = VarlenRequest(cumulative([]), cumulative([]), 0, 0)
    problem = make_varlen(q, q[:0], q[:0], where, Request(sink=torch.ones(2), wants_lse=True))
    found = trivial_forward(problem)
    assert found is not None
    assert not found.out.any()
    assert bool((found.lse == -torch.inf).all())
