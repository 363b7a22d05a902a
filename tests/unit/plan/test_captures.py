"""Which captured vectors a kernel reads two at a time, and which indices may wrap."""

import pytest
import torch

from fovea.mods.trace import trace_mask_mod, trace_score_mod
from fovea.plan.captures import may_be_negative, read_in_pairs

TABLE = torch.arange(64)
ONE_VECTOR = {
    "by key": (lambda b, h, q_idx, kv_idx: TABLE[kv_idx] > 3, True),
    "by query and key": (lambda b, h, q_idx, kv_idx: TABLE[q_idx] == TABLE[kv_idx], True),
    "by query alone": (lambda b, h, q_idx, kv_idx: TABLE[q_idx] > 3, False),
    "by a difference": (lambda b, h, q_idx, kv_idx: TABLE[kv_idx - q_idx] > 3, False),
    "by a shortened key": (lambda b, h, q_idx, kv_idx: TABLE[kv_idx.to(torch.int8)] > 3, False),
    "by a rounded key": (lambda b, h, q_idx, kv_idx: TABLE[kv_idx.half().long()] > 3, False),
    "by a key in 32 bits": (lambda b, h, q_idx, kv_idx: TABLE[kv_idx.int()] > 3, True),
    # A wrap adds the extent, which a vector read in pairs may have rounded up.
    "by key, and wrapping": (
        lambda b, h, q_idx, kv_idx: TABLE[kv_idx] == TABLE[q_idx - 1],
        False,
    ),
}


@pytest.mark.parametrize("name", ONE_VECTOR)
def test_vector_is_read_in_pairs_where_the_key_indexes_it_and_nothing_wraps(name):
    mod, expected = ONE_VECTOR[name]
    assert read_in_pairs(trace_mask_mod(mod).graph) == (expected,)


def test_matrix_is_not_read_in_pairs():
    bias = torch.zeros(8, 8)
    mod = trace_score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx, kv_idx], torch.float32)
    assert read_in_pairs(mod.graph) == (False,)


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda b, h, q_idx, kv_idx: TABLE[kv_idx] > 0, False),
        (lambda b, h, q_idx, kv_idx: TABLE[h] > 0, False),
        (lambda b, h, q_idx, kv_idx: TABLE[kv_idx.to(torch.int8)] > 0, True),
        (lambda b, h, q_idx, kv_idx: TABLE[kv_idx - q_idx] > 0, True),
        (lambda b, h, q_idx, kv_idx: TABLE[TABLE[kv_idx]] > 0, True),
    ],
)
def test_index_may_be_negative_unless_it_is_a_position_or_a_constant(mod, expected):
    graph = trace_mask_mod(mod).graph
    loads = [node for node in graph.nodes if node.op == "load"]
    assert may_be_negative(graph, loads[-1].args[0]) is expected
