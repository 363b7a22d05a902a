"""A keyword that no call has: the error names it, and what fovea calls a peer's."""

import pickle

import pytest
import torch

import fovea

X = torch.randn(1, 8, 2, 16)
PACKED = X[0]
BOUNDS = torch.tensor([0, 5, 8], dtype=torch.int32)


def varlen(q, k, v, **keywords):
    return fovea.attention_varlen(PACKED, PACKED, PACKED, BOUNDS, BOUNDS, 5, 5, **keywords)


CALLS = [fovea.attention, varlen, fovea.explain, fovea.precompile]
PEERS = {
    "is_causal": (True, r'causal="top_left"'),
    "attn_mask": (None, r"mask_mod=.*dense_bias"),
    "dropout_p": (0.0, "there is no dropout"),
    "window_size": ((3, 0), r"window=\(left, right\)"),
    "softmax_scale": (1.0, "pass scale="),
    "return_lse": (True, r"AuxRequest\(lse=True\)"),
    "alibi_slopes": (torch.ones(2), r"alibi\(slopes="),
    "cu_seqlens_k": (BOUNDS, "cu_seqlens_kv="),
    "windw": ((3, 0), "did you mean window="),
    "something": (1, "correct its spelling"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", PEERS)
def test_unknown_keyword_is_answered_with_its_name_here(name, call):
    value, remedy = PEERS[name]
    allowed = "allowed: .*causal, .*return_aux, .*window"
    with pytest.raises(TypeError, match=f"keyword='{name}'.*{allowed}.*{remedy}"):
        call(X, X, X, **{name: value})


def test_keyword_of_packed_sequences_names_their_function():
    with pytest.raises(TypeError, match=r"keyword='cu_seqlens_q'.*fovea\.attention_varlen"):
        fovea.attention(X, X, X, cu_seqlens_q=BOUNDS)


def test_grouped_heads_need_no_keyword():
    with pytest.raises(TypeError, match=r"keyword='enable_gqa'.*leave it out"):
        fovea.attention(X, X, X, enable_gqa=True)


def test_keywords_that_explain_takes_itself_are_among_those_allowed():
    with pytest.raises(TypeError, match=r"allowed: archs, backend, .*kernel_options, .*return_aux"):
        fovea.explain(X, X, X, foo=1)


def test_bounds_by_position_explain_the_packed_call():
    by_name = fovea.explain(
        PACKED,
        PACKED,
        PACKED,
        cu_seqlens_q=BOUNDS,
        cu_seqlens_kv=BOUNDS,
        max_seqlen_q=5,
        max_seqlen_kv=5,
        causal=True,
    )
    by_place = fovea.explain(PACKED, PACKED, PACKED, BOUNDS, BOUNDS, 5, 5, causal=True)
    assert (by_place.visible_pairs, by_place.total_pairs) == (42, 68)
    assert by_place == by_name


def test_more_by_position_than_a_packed_call_takes_raises():
    with pytest.raises(TypeError, match=r"8 arguments by position.*max_seqlen_kv.*by name"):
        fovea.explain(PACKED, PACKED, PACKED, BOUNDS, BOUNDS, 5, 5, None)


def test_unknown_keyword_in_a_compiled_call_raises():
    call = torch.compile(lambda x: fovea.attention(x, x, x, is_causal=True), backend="eager")
    with pytest.raises(Exception, match="top_left"):
        call(X)


def test_auxiliary_results_by_their_names_in_torch_are_answered_with_those_here():
    with pytest.raises(TypeError, match=r"keyword='max_scores'.*lse, max_score.*pass max_score="):
        fovea.AuxRequest(max_scores=True)


def test_auxiliary_request_is_a_tuple_that_pickles_and_compiles():
    request = pickle.loads(pickle.dumps(fovea.AuxRequest(lse=True)))
    assert request == fovea.AuxRequest(True, False) == (True, False)
    assert request._replace(max_score=True) == fovea.AuxRequest(lse=True, max_score=True)

    def call(x):
        out, aux = fovea.attention(x, x, x, return_aux=fovea.AuxRequest(lse=True))
        return out + aux.lse.transpose(1, 2).unsqueeze(-1)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(X), call(X))
