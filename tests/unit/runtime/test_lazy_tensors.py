"""Tensors whose memory does not hold their values reach a kernel as copies that do.

The launcher is a stand-in that keeps its arguments: nothing is computed here.
"""

import pytest
import torch
from launch_arguments import NAMES, tensors

import fovea


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(like.shape, dtype=like.dtype)


@pytest.mark.parametrize("make", [torch._neg_view, _zeros])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_inputs_are_resolved_also_in_a_call_seen_before(place, make, launched):
    inputs = list(tensors())
    fovea.attention(*inputs)
    expected = make(inputs[place]).clone()
    inputs[place] = make(inputs[place])
    fovea.attention(*inputs)
    given = launched[-1][NAMES.index("qkv"[place])]
    assert not given.is_neg()
    assert given.data_ptr() != 0
    assert torch.equal(given, expected)


def test_sink_and_captures_are_resolved(launched):
    q, k, v = tensors()
    sink, slopes = torch.randn(4), torch.randn(4)

    def call(sink, slopes):
        fovea.attention(q, k, v, sink=sink, score_mod=lambda s, b, h, i, j: s * slopes[h])
        given = launched[-1]
        return given[NAMES.index("sink")], given[NAMES.index("captures")][0]

    call(sink, slopes)
    for found, value in zip(
        call(torch._neg_view(sink), torch._neg_view(slopes)), (sink, slopes), strict=True
    ):
        assert not found.is_neg()
        assert torch.equal(found, -value)
