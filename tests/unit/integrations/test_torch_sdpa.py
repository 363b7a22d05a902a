"""fovea's kernels for torch's flash-attention operators, called as torch calls them."""

import pytest
import torch
from torch.nn import attention as torch_attention

import fovea
from fovea.integrations import torch_sdpa

NO_WINDOW = {"window_size_left": -1, "window_size_right": -1}


def heads_first(seqlen_q=6, seqlen_kv=6):
    q = torch.randn(2, 4, seqlen_q, 8, requires_grad=True)
    k = torch.randn(2, 4, seqlen_kv, 8, requires_grad=True)
    return q, k, torch.randn(2, 4, seqlen_kv, 8, requires_grad=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_kernels_equal_torchs_math(is_causal):
    q, k, v = heads_first()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse, *rest = torch_sdpa.sdpa_forward(q, k, v, 0.0, is_causal)
        found = torch_sdpa.sdpa_backward(
            grad, q, k, v, out, lse, *rest[:4], 0.0, is_causal, *rest[4:6]
        )
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, 4, 6)
    assert rest[2:4] == [6, 6]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_results_match_the_schema_of_torchs_operators():
    q, k, v = (t.detach() for t in heads_first())
    count = len(torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns)
    assert len(torch_sdpa.sdpa_forward(q, k, v)) == count
    schema = torch.ops.aten._flash_attention_forward.default._schema
    result = torch_sdpa.flash_attention_forward(q, k, v, None, None, 4, 4, 0.0, False, False)
    assert len(result) == len(schema.returns)
    assert result[2].dtype == torch.uint64


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (None, None)])
def test_flash_forward_and_backward_equal_fovea(window):
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in heads_first(5, 7))
    options = dict(zip(NO_WINDOW, window, strict=True))
    plain = tuple(None if x in (None, -1) else x for x in window)
    expected = fovea.attention(q, k, v, causal=True, window=plain)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse, *state = torch_sdpa.flash_attention_forward(
            q, k, v, None, None, 5, 7, 0.0, True, False, **options
        )
        found = torch_sdpa.flash_attention_backward(
            grad, q, k, v, out, lse, None, None, 5, 7, 0.0, True, *state[:2], **options
        )
    assert torch.equal(out, expected)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_packed_flash_forward_equals_fovea_and_writes_in_place():
    q, k = torch.randn(10, 4, 8), torch.randn(12, 2, 8)
    bounds_q = torch.tensor([0, 3, 10], dtype=torch.int32)
    bounds_kv = torch.tensor([0, 4, 12], dtype=torch.int32)
    arguments = (q, k, k, bounds_q, bounds_kv, 7, 8, 0.0, True, False)
    expected = fovea.attention_varlen(*arguments[:7], causal=True)
    out = torch.empty_like(q)
    lse = torch_sdpa.flash_attention_forward_into(out, *arguments, **NO_WINDOW)
    assert torch.equal(out, expected)
    assert lse.shape == (4, 10)


@pytest.mark.parametrize(
    ("place", "options", "name"),
    [
        (4, {}, "dropout_p=0.1"),
        (6, {}, "return_debug_mask=True"),
        (None, {"alibi_slopes": torch.ones(4)}, "alibi_slopes=a tensor"),
    ],
)
def test_what_fovea_lacks_raises_and_names_the_way_out(place, options, name):
    q, k, v = (t.detach().transpose(1, 2) for t in heads_first())
    arguments = [None, None, 6, 6, 0.0, False, False]
    if place is not None:
        arguments[place] = 0.1 if place == 4 else True
    with pytest.raises(fovea.UnsupportedError, match=name):
        torch_sdpa.flash_attention_forward(q, k, v, *arguments, **options)


def test_activate_and_deactivate_go_through_torchs_registry():
    q, k, v = heads_first()
    before = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch_sdpa.activate()
    try:
        assert torch_attention.current_flash_attention_impl() == "fovea"
        assert "fovea" in torch_attention.list_flash_attention_impls()
        # CPU tensors are none of its business.
        after = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert torch.equal(before, after)
    finally:
        torch_sdpa.deactivate()
    assert torch_attention.current_flash_attention_impl() is None
    with pytest.raises(ValueError, match="call activate"):
        torch_sdpa.deactivate()


def test_integrations_are_reached_from_the_package():
    assert fovea.integrations.torch_sdpa is torch_sdpa
    assert callable(fovea.integrations.transformers.register)
    with pytest.raises(AttributeError, match="vllm"):
        _ = fovea.integrations.vllm
    with pytest.raises(AttributeError, match="atention"):
        _ = fovea.atention
