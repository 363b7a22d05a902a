"""The functions registered with transformers, alone and in small models where it is installed."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import fovea
from fovea.integrations import transformers as integration
from fovea.integrations.transformers import attention_forward, attention_mask

LAYER = SimpleNamespace(is_causal=True)


def tensors(seqlen_q=6, seqlen_kv=6):
    q = torch.randn(2, 4, seqlen_q, 8)
    return q, torch.randn(2, 2, seqlen_kv, 8), torch.randn(2, 2, seqlen_kv, 8)


def math(q, k, v, visible=None, bias=None, scale=None):
    """Return (batch, seqlen, heads, dim) attention of (batch, heads, seqlen, dim) tensors."""
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    return (s.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def test_without_a_mask_a_causal_layer_is_causal():
    q, k, v = tensors()
    out, weights = attention_forward(LAYER, q, k, v, None)
    torch.testing.assert_close(out, math(q, k, v, torch.ones(6, 6).tril().bool()))
    assert weights is None
    assert out.is_contiguous()


def test_without_a_mask_one_query_or_another_layer_sees_everything():
    q, k, v = tensors(1, 6)
    torch.testing.assert_close(attention_forward(LAYER, q, k, v, None)[0], math(q, k, v))
    q, k, v = tensors()
    for layer, options in ((SimpleNamespace(is_causal=False), {}), (LAYER, {"is_causal": False})):
        out, _ = attention_forward(layer, q, k, v, None, **options)
        torch.testing.assert_close(out, math(q, k, v))


def test_longer_keys_without_a_mask_are_aligned_top_left():
    """As with an empty static cache: keys behind the queries are not filled yet."""
    q, k, v = tensors(4, 9)
    out, _ = attention_forward(LAYER, q, k, v, None)
    torch.testing.assert_close(out, math(q, k, v, torch.ones(4, 9).tril().bool()))


def test_sliding_window_counts_the_query_itself():
    q, k, v = tensors()
    out, _ = attention_forward(LAYER, q, k, v, None, sliding_window=3)
    i, j = torch.arange(6).view(-1, 1), torch.arange(6)
    torch.testing.assert_close(out, math(q, k, v, (j <= i) & (j > i - 3)))


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (1, 1, 6, 6), (2, 4, 6, 6), (2, 1, 1, 6)])
def test_bool_and_additive_masks_broadcast(shape):
    q, k, v = tensors()
    visible = torch.rand(shape) > 0.3
    out, _ = attention_forward(LAYER, q, k, v, visible)
    torch.testing.assert_close(out, math(q, k, v, visible))
    bias = torch.randn(shape)
    out, _ = attention_forward(LAYER, q, k, v, bias)
    torch.testing.assert_close(out, math(q, k, v, bias=bias))


def test_scaling_softcap_sinks_and_position_bias_are_used():
    q, k, v = tensors()
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    sink = torch.randn(4)
    out, _ = attention_forward(
        LAYER, q, k, v, None, 0.3, is_causal=False, position_bias=bias, s_aux=sink, softcap=2.0
    )
    expected = fovea.attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        scale=0.3,
        softcap=2.0,
        sink=sink,
        score_mod=lambda s, b, h, i, j: s + bias[0, h, i, j],
    )
    torch.testing.assert_close(out, expected)
    (found,) = torch.autograd.grad(out.square().sum(), bias)
    (wanted,) = torch.autograd.grad(expected.square().sum(), bias)
    torch.testing.assert_close(found, wanted)


def test_block_mask_is_used():
    q, k, v = tensors()
    block_mask = fovea.create_block_mask(causal, 1, 1, 6, 6, device="cpu")
    out, _ = attention_forward(LAYER, q, k, v, block_mask)
    torch.testing.assert_close(out, math(q, k, v, torch.ones(6, 6).tril().bool()))


def test_packed_sequences_run_as_varlen():
    q, k, v = (t[:1] for t in tensors())
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    out, _ = attention_forward(
        LAYER,
        q,
        k,
        v,
        None,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=4,
        max_length_k=4,
    )
    ids = torch.tensor([0, 0, 1, 1, 1, 1])
    visible = torch.ones(6, 6).tril().bool() & (ids.view(-1, 1) == ids)
    torch.testing.assert_close(out, math(q, k, v, visible))


def test_mask_adds_offsets_and_padding():
    """Four new queries behind a cache of three, keys from position 1, two keys padded."""
    q, k, v = tensors(4, 6)
    padding = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    mask = attention_mask(
        batch_size=2,
        q_length=4,
        kv_length=6,
        q_offset=3,
        kv_offset=1,
        mask_function=causal,
        attention_mask=padding,
        allow_is_causal_skip=True,
    )
    out, _ = attention_forward(LAYER, q, k, v, mask)
    i, j = torch.arange(4).view(-1, 1) + 3, torch.arange(6) + 1
    padded = torch.nn.functional.pad(padding.bool(), (0, 1))[:, 1:]
    torch.testing.assert_close(out, math(q, k, v, (j <= i) & padded.view(2, 1, 1, 6)))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_offset_of_a_static_cache_may_be_a_tensor(as_tensor):
    q, k, v = tensors(1, 8)
    offset = torch.tensor(4) if as_tensor else 4
    mask = attention_mask(
        batch_size=2, q_length=1, kv_length=8, q_offset=offset, mask_function=causal
    )
    assert not mask.is_causal
    out, _ = attention_forward(LAYER, q, k, v, mask)
    torch.testing.assert_close(out, math(q, k, v, torch.arange(8) <= 4))


def test_offset_that_the_cache_counts_on_stays_as_it_was():
    """Each layer of a static cache adds to its length in place, before it attends."""
    q, k, v = tensors(2, 8)
    length = torch.tensor(3)
    mask = attention_mask(
        batch_size=2,
        q_length=2,
        kv_length=8,
        q_offset=length,
        kv_offset=length - 2,
        mask_function=causal,
    )
    length.add_(2)
    i, j = torch.arange(2).view(-1, 1) + 3, torch.arange(8) + 1
    torch.testing.assert_close(attention_forward(LAYER, q, k, v, mask)[0], math(q, k, v, j <= i))


def test_mask_is_a_finished_one_and_a_plain_block_mask_of_it_says_the_same():
    """transformers hands back what is a 4-D tensor or a BlockMask; GPT-2 asks for its ndim."""
    q, k, v = tensors(4, 6)
    padding = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    facts = {"batch_size": 2, "q_length": 4, "kv_length": 6, "q_offset": 2}
    for options in ({}, {"attention_mask": padding}):  # causal where no mask_function is given
        mask = attention_mask(**facts, **options)
        assert isinstance(mask, BlockMask)
        assert len(mask.shape) == mask.ndim == 4
        assert mask.is_plain == (not options)
        plain = mask.to("cpu")
        assert type(plain) is BlockMask
        out, _ = attention_forward(LAYER, q, k, v, mask)
        torch.testing.assert_close(attention_forward(LAYER, q, k, v, plain)[0], out)


def test_causal_flag_is_set_only_where_diagonals_agree():
    facts = {"batch_size": 1, "mask_function": causal, "allow_is_causal_skip": True}
    assert attention_mask(q_length=6, kv_length=6, **facts).is_causal
    assert attention_mask(q_length=2, kv_length=6, q_offset=4, **facts).is_causal
    assert not attention_mask(q_length=2, kv_length=6, q_offset=3, **facts).is_causal
    facts["allow_is_causal_skip"] = False
    assert not attention_mask(q_length=6, kv_length=6, **facts).is_causal


def test_dropout_raises_and_weights_warn_once(monkeypatch):
    q, k, v = tensors()
    with pytest.raises(fovea.UnsupportedError, match="attention_dropout"):
        attention_forward(LAYER, q, k, v, None, dropout=0.1)
    monkeypatch.setattr(integration, "_has_warned", False)
    with pytest.warns(fovea.FoveaWarning, match="eager"):
        attention_forward(LAYER, q, k, v, None, output_attentions=True)


@pytest.mark.parametrize("name", ["my_flash", "sdpa2", "org/name"])
def test_name_that_transformers_would_misread_raises(name):
    with pytest.raises(ValueError, match="is not valid"):
        integration.register(name)


MODELS = {
    "llama": ("LlamaConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
    "phi3": ("Phi3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_model_gives_the_logits_of_eager_attention(kind, padded):
    transformers = pytest.importorskip("transformers")
    integration.register()
    name, extra = MODELS[kind]
    config = getattr(transformers, name)(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
        pad_token_id=0,
        **extra,
    )
    ids = torch.randint(1, 50, (2, 12))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    tell = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    results = []
    for implementation in ("eager", "fovea"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation
        ).eval()
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
            tokens = model.generate(ids, **tell)
            static = model.generate(
                ids, cache_implementation="static", disable_compile=True, **tell
            )
            cache = transformers.StaticCache(config=config, max_cache_len=32)
            parts = [model(ids[:, :7], attention_mask=mask[:, :7], past_key_values=cache).logits]
            parts.append(model(ids[:, 7:], attention_mask=mask, past_key_values=cache).logits)
        in_parts = torch.cat(parts, 1)[mask.bool()]
        results.append((logits[mask.bool()], in_parts, tokens, static))
    for found in (results[1][0], results[1][1]):
        torch.testing.assert_close(found, results[0][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(results[1][2], results[0][2])
    assert torch.equal(results[1][3], results[0][2])
