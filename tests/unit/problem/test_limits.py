"""Values at the edges of what arguments can hold."""

import pytest
import torch

import fovea
from fovea.problem import Request, VarlenRequest, make_varlen
from fovea.reference import tiled_forward
from fovea.testing.inputs import Shape, dense_qkv, normal

SHAPE = Shape(batch=2, seqlen_q=5, seqlen_kv=7, heads_q=4, heads_kv=2, head_dim=8)


@pytest.mark.parametrize("extent", [2**31 - 1, 2**31, 2**63, 2**80])
def test_window_of_any_size_is_taken_eagerly_and_in_a_graph(extent):
    q, k, v = dense_qkv(SHAPE)

    def attend(*tensors):
        return fovea.attention(*tensors, window=(extent, 0))

    expected = fovea.attention(q, k, v, window=(None, 0))
    torch.testing.assert_close(attend(q, k, v), expected)
    graph = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(q, k, v), expected)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**80])
def test_captured_integer_beyond_64_bits_raises_with_the_users_line(number):
    with pytest.raises(ValueError, match=r"test_limits\.py.*-2\*\*63"):
        fovea.attention(*dense_qkv(SHAPE), mask_mod=lambda b, h, i, j: i < number)
    bounds = [5, number]
    for bound in bounds:  # the second call finds the trace of the first

        def mask_mod(b, h, i, j, bound=bound):
            return i < bound

        if bound == number:
            with pytest.raises(ValueError, match=r"test_limits\.py.*-2\*\*63"):
                fovea.create_block_mask(mask_mod, None, None, 5, 7)
        else:
            assert fovea.create_block_mask(mask_mod, None, None, 5, 7).shape == (1, 1, 5, 7)


@pytest.mark.parametrize("layout", ["sparse", "jagged"])
def test_captured_tensor_that_is_not_strided_raises_with_the_users_line(layout):
    table = normal((5, 7), seed=0)
    if layout == "sparse":
        table = table.to_sparse()
    else:
        table = torch.nested.nested_tensor([table[0], table[1, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"layout of a tensor captured.*test_limits\.py"):
        fovea.attention(*dense_qkv(SHAPE), score_mod=lambda s, b, h, i, j: s + table[i, j])


def test_paged_sequence_of_negative_length_sees_nothing():
    q = normal((4, 4, 8), seed=0)
    pages = normal((3, 4, 2, 8), seed=1)
    where = VarlenRequest(
        torch.tensor([0, 2, 4], dtype=torch.int32),
        None,
        2,
        4,
        seqused_kv=torch.tensor([-1, 3], dtype=torch.int32),
        page_table=torch.tensor([[0], [1]], dtype=torch.int32),
    )
    # As on a GPU, where nobody looks: the public function raises on a CPU.
    out = tiled_forward.forward(make_varlen(q, pages, pages, where, Request())).out
    assert not out[:2].any()
    assert out[2:].all()
