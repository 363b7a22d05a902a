"""fovea.flex_attention beside torch's: results, aux outputs, and torch's checks."""

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import fovea
from fovea.ops import warm


@pytest.fixture
def tensors():
    q = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    k = torch.randn(2, 2, 24, 8, dtype=torch.float64)
    return q, k, torch.randn(2, 2, 24, 6, dtype=torch.float64)


@pytest.fixture(autouse=True)
def eager_torch(monkeypatch):
    """Torch's function would compile itself; its eager math is the comparison."""
    monkeypatch.setattr(
        torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) * 0.1 * (h + 1)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("score_mod", [None, alibi])
@pytest.mark.parametrize("masked", [True, False])
def test_results_equal_torch(tensors, score_mod, masked, scale):
    block_mask = create_block_mask(causal, 1, 1, 20, 24, device="cpu") if masked else None
    arguments = (*tensors, score_mod, block_mask, scale, True)
    found, aux = fovea.flex_attention(*arguments, return_aux=AuxRequest(lse=True))
    expected, expected_aux = torch_flex_attention(*arguments, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(found, expected)
    # Torch's eager math keeps the log-sum-exp in the inputs' dtype or fp32, by version.
    torch.testing.assert_close(aux.lse.float(), expected_aux.lse.float())


def test_return_lse_returns_a_pair(tensors):
    out, lse = fovea.flex_attention(*tensors, enable_gqa=True, return_lse=True)
    expected, aux = fovea.flex_attention(*tensors, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, expected)
    assert torch.equal(lse, aux.lse)


def test_aux_is_torchs_and_holds_what_was_asked(tensors):
    _, aux = fovea.flex_attention(
        *tensors, enable_gqa=True, return_aux=AuxRequest(lse=False, max_scores=True)
    )
    assert isinstance(aux, AuxOutput)
    assert aux.lse is None
    q, k, _ = tensors
    scores = torch.einsum("bhmd,bhnd->bhmn", q, k.repeat_interleave(2, dim=1)) / 8**0.5
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))


def test_output_follows_the_strides_of_query(tensors):
    q, k, v = tensors
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query in (q, strided):
        out = fovea.flex_attention(query, k, v, enable_gqa=True)
        assert (out.stride(1) > out.stride(2)) == (query.stride(1) > query.stride(2))


def test_block_lists_are_honoured_where_torchs_eager_ignores_them():
    """Lists without the diagonal block and a mask that hides nothing: the lists decide."""
    whole = fovea.create_block_mask(causal, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16)
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    whole.mask_mod = lambda b, h, q_idx, kv_idx: q_idx >= -1
    out = fovea.flex_attention(q, k, v, block_mask=whole)
    first = fovea.flex_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16])
    torch.testing.assert_close(out[:, :, :16], first)


def test_key_of_batch_one_is_shared_under_a_block_mask_of_the_batch(tensors):
    q, k, v = tensors
    block_mask = create_block_mask(causal, 2, 1, 20, 24, device="cpu")
    out = fovea.flex_attention(q, k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    expected = fovea.flex_attention(
        q,
        k[:1].repeat(2, 1, 1, 1),
        v[:1].repeat(2, 1, 1, 1),
        block_mask=block_mask,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected)


def test_key_of_batch_one_without_such_a_mask_raises(tensors):
    q, k, v = tensors
    with pytest.raises(ValueError, match="batch of key=1"):
        fovea.flex_attention(q, k[:1], v[:1], enable_gqa=True)


def test_fewer_heads_without_enable_gqa_raise(tensors):
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        fovea.flex_attention(*tensors)


def test_wrong_rank_raises_with_torchs_layout(tensors):
    q, k, v = tensors
    with pytest.raises(ValueError, match=r"query\.shape.*\(batch, heads, seqlen, head_dim\)"):
        fovea.flex_attention(q[0], k, v)


def test_return_lse_with_return_aux_raises(tensors):
    with pytest.raises(ValueError, match="return_lse"):
        fovea.flex_attention(*tensors, return_lse=True, return_aux=AuxRequest(lse=True))


def test_nested_tensor_raises_and_names_what_takes_it():
    nested = torch.nested.nested_tensor(
        [torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged
    )
    with pytest.raises(fovea.UnsupportedError, match=r"fovea\.attention"):
        fovea.flex_attention(nested, nested, nested)


def test_tuning_options_change_nothing_and_unknown_ones_raise(tensors):
    options = {"num_warps": 4, "BLOCK_M": 64, "fwd_num_stages": 3, "backend": "reference"}
    found = fovea.flex_attention(*tensors, enable_gqa=True, kernel_options=options)
    assert torch.equal(found, fovea.flex_attention(*tensors, enable_gqa=True))
    with pytest.raises(ValueError, match=r"kernel_options key='num_warp'.*backend"):
        fovea.flex_attention(*tensors, enable_gqa=True, kernel_options={"num_warp": 4})


def test_backend_and_deterministic_options_reach_the_call(tensors):
    with pytest.raises(fovea.UnsupportedError, match="backend='cuda'"):
        fovea.flex_attention(*tensors, enable_gqa=True, kernel_options={"backend": "cuda"})
    with pytest.raises(TypeError, match="deterministic='yes'"):
        fovea.flex_attention(*tensors, enable_gqa=True, kernel_options={"deterministic": "yes"})


def test_gradients_equal_those_of_attention(tensors):
    q, k, v = (t.requires_grad_() for t in tensors)
    found = torch.autograd.grad(
        fovea.flex_attention(q, k, v, alibi, enable_gqa=True).square().sum(), (q, k, v)
    )
    other = fovea.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=alibi
    )
    for one, expected in zip(
        found, torch.autograd.grad(other.square().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, expected)


def count_of_checks(monkeypatch):
    """Return a list that grows with every call whose arguments are checked."""
    seen = []
    warm.clear()
    module = sys.modules["fovea.api.flex"]  # the package has the function under this name
    make_dense = module.make_dense
    monkeypatch.setattr(module, "make_dense", lambda *a: seen.append(a) or make_dense(*a))
    return seen


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_repeated_call_is_recognised_and_gives_the_same(tensors, needs_grad, masked, monkeypatch):
    seen = count_of_checks(monkeypatch)
    q, k, v = (t.requires_grad_(needs_grad) for t in tensors)
    block_mask = create_block_mask(causal, 1, 1, 20, 24, device="cpu") if masked else None
    results = []
    for _ in range(3):
        out, aux = fovea.flex_attention(
            q,
            k,
            v,
            lambda s, b, h, i, j: s * 2,
            block_mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        grads = torch.autograd.grad(out.square().sum(), (q, k, v)) if needs_grad else ()
        results.append((out, aux.lse, aux.max_scores, *grads))
    assert len(seen) == 1
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_wrong_call_raises_after_a_right_one(tensors):
    q, k, v = tensors
    for _ in range(2):
        fovea.flex_attention(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        fovea.flex_attention(q, k, v)
    with pytest.raises(ValueError, match="batch"):
        fovea.flex_attention(q, k[:1], v[:1], enable_gqa=True)
    with pytest.raises(ValueError, match="kernel_options"):
        fovea.flex_attention(q, k, v, enable_gqa=True, kernel_options={"blocks": 1})
    with pytest.raises(TypeError, match="key"):
        fovea.flex_attention(q, 3, v, enable_gqa=True)


def test_layouts_of_attention_and_flex_attention_are_told_apart():
    """The same numbers of another order of axes: (2, 4, 4, 8) is good for both."""
    x = torch.randn(2, 4, 4, 8)
    for _ in range(2):
        flat = fovea.attention(x, x, x)
        flexed = fovea.flex_attention(x, x, x)
        torch.testing.assert_close(flexed, torch_flex_attention(x, x, x))
        torch.testing.assert_close(
            flat, torch_flex_attention(*[x.transpose(1, 2)] * 3).transpose(1, 2)
        )
