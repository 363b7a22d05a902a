"""Rule 13 and packed calls: pages, block masks by sequence, mods that see the sequence as b."""

import pytest
import torch

import fovea
from fovea.errors import UnsupportedError
from fovea.testing.inputs import Shape, cumulative, normal, paged
from fovea.testing.masks import block_mask_of, dense_states, random_states
from fovea.testing.problems import check_reference, varlen_problem
from fovea.testing.spelled_out import band, spelled_out

LENGTHS_Q, LENGTHS_KV = [5, 1, 0, 9], [7, 4, 3, 9]
AUX = fovea.AuxRequest(lse=True, max_score=True)


def _packed(dtype=torch.float64):
    q = normal((sum(LENGTHS_Q), 4, 8), seed=0, dtype=dtype)
    k = normal((sum(LENGTHS_KV), 2, 8), seed=1, dtype=dtype)
    v = normal((sum(LENGTHS_KV), 2, 6), seed=2, dtype=dtype)
    return q, k, v


def _call(q, k, v, **options):
    return fovea.attention_varlen(
        q,
        k,
        v,
        cumulative(LENGTHS_Q),
        cumulative(LENGTHS_KV),
        max(LENGTHS_Q),
        max(LENGTHS_KV),
        return_aux=AUX,
        **options,
    )


def _by_sequence(q, k, v, **spelled):
    """Return (out, lse) of each sequence spelled out, joined; `spelled` maps i to arguments."""
    outs, lses = [], []
    begin_q = begin_kv = 0
    for i, (rows, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_KV, strict=True)):
        part_q = q[None, begin_q : begin_q + rows]
        part_k, part_v = (x[None, begin_kv : begin_kv + keys] for x in (k, v))
        arguments = {name: of(i, rows, keys) for name, of in spelled.items()}
        result = spelled_out(part_q, part_k, part_v, **arguments)
        outs.append(result.out[0])
        lses.append(result.lse[0])
        begin_q, begin_kv = begin_q + rows, begin_kv + keys
    return torch.cat(outs), torch.cat(lses, dim=1)


def _check(options, **spelled):
    ours = [x.requires_grad_() for x in _packed()]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    out, aux = _call(*ours, **options)
    expected, expected_lse = _by_sequence(*theirs, **spelled)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.lse, expected_lse, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), ours)
    for found, wanted in zip(
        grads, torch.autograd.grad(expected.square().sum(), theirs), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_each_sequence_attends_to_itself_alone(causal, window):
    _check(
        {"causal": causal, "window": window},
        visible=lambda i, rows, keys: band(rows, keys, causal=causal, window=window),
    )


def test_mods_see_the_sequence_as_b_and_indices_from_its_start():
    slopes = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)

    def by_sequence(score, b, h, q_idx, kv_idx):
        return score + slopes[b] * (q_idx - 2 * kv_idx)

    def hides_first_keys(b, h, q_idx, kv_idx):
        return kv_idx >= b

    def score_of(i, rows, keys):
        return lambda s, b, h, q_idx, kv_idx: s + slopes[i] * (q_idx - 2 * kv_idx)

    _check(
        {"score_mod": by_sequence, "mask_mod": hides_first_keys},
        score=score_of,
        visible=lambda i, rows, keys: (torch.arange(keys) >= i).expand(rows, keys),
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("heads", [1, 4])
def test_block_mask_counts_blocks_from_each_start(batch, heads):
    states = random_states(batch, heads, 3, 3, seed=2)

    def odd(b, h, q_idx, kv_idx):
        return (q_idx + kv_idx + b) % 2 == 1

    mask = block_mask_of(states, seqlen_q=9, seqlen_kv=9, block_q=4, block_kv=4, mask_mod=odd)
    state = dense_states(states, block_q=4, block_kv=4)

    def visible(i, rows, keys):
        own = state[min(i, batch - 1)][:, :rows, :keys]
        q_idx, kv_idx = torch.arange(rows).view(-1, 1), torch.arange(keys)
        return (own == 2) | ((own == 1) & odd(i, 0, q_idx, kv_idx))

    _check({"block_mask": mask}, visible=visible)


@pytest.mark.parametrize("batch", [2, 3])
def test_block_mask_of_another_number_of_sequences_raises(batch):
    states = random_states(batch, 1, 3, 3)
    mask = block_mask_of(states, seqlen_q=9, seqlen_kv=9, block_q=4, block_kv=4, mask_mod=None)
    with pytest.raises(ValueError, match=r"block_mask"):
        _call(*_packed(), block_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_call_with_everything_is_within_budget(dtype):
    bias = normal((4, 4, 9, 9), seed=4).requires_grad_()
    problem = varlen_problem(
        LENGTHS_Q,
        LENGTHS_KV,
        Shape(heads_q=4, heads_kv=2, head_dim=16),
        dtype=dtype,
        causal=True,
        sink=torch.zeros(4),
        softcap=3.0,
        score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[b, h, q_idx, kv_idx],
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 5 != 0,
        seqused_q=torch.tensor([5, 1, 0, 6], dtype=torch.int32),
        seqused_kv=torch.tensor([6, 0, 3, 9], dtype=torch.int32),
    )
    check_reference(problem, tile_n=4)


def _paged_call(page_size, *, options, requires_grad=False):
    q, k, v = _packed(torch.float32)
    used = torch.tensor([7, 2, 0, 9], dtype=torch.int32)
    starts = cumulative(LENGTHS_KV).tolist()
    caches = [
        paged([x[a : a + n] for a, n in zip(starts[:-1], used.tolist())], page_size, seed=5)
        for x in (k, v)
    ]
    assert torch.equal(caches[0].page_table, caches[1].page_table)
    common = {"seqused_kv": used, "return_aux": AUX, **options}
    where = (max(LENGTHS_Q), max(LENGTHS_KV))
    found = fovea.attention_varlen(
        q.requires_grad_(requires_grad),
        caches[0].pages,
        caches[1].pages,
        cumulative(LENGTHS_Q),
        None,
        *where,
        page_table=caches[0].page_table,
        **common,
    )
    expected = fovea.attention_varlen(
        q, k, v, cumulative(LENGTHS_Q), cumulative(LENGTHS_KV), *where, **common
    )
    return found, expected


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 100])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (3, 1), "softcap": 2.0}, {"sink": torch.ones(4)}],
)
def test_pages_of_any_size_give_the_result_of_packed_keys(page_size, options):
    (out, aux), (expected, expected_aux) = _paged_call(page_size, options=options)
    assert torch.equal(out, expected)
    assert torch.equal(aux.lse, expected_aux.lse)
    assert torch.equal(aux.max_score, expected_aux.max_score)


def test_pages_with_mods_and_a_block_mask():
    states = random_states(1, 1, 3, 3, seed=2)
    mask = block_mask_of(
        states,
        seqlen_q=9,
        seqlen_kv=9,
        block_q=4,
        block_kv=4,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    )
    options = {
        "block_mask": mask,
        "score_mod": lambda s, b, h, q_idx, kv_idx: s + 0.5 * (b + kv_idx - q_idx),
    }
    (out, _), (expected, _) = _paged_call(3, options=options)
    assert torch.equal(out, expected)


def test_pages_with_gradients_raise():
    with pytest.raises((UnsupportedError, ValueError), match=r"page_table"):
        _paged_call(4, options={}, requires_grad=True)


def test_pages_without_seqused_kv_raise():
    q, _, _ = _packed()
    cache = torch.zeros(3, 4, 2, 8, dtype=torch.float64)
    table = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="seqused_kv"):
        fovea.attention_varlen(q, cache, cache, cumulative(LENGTHS_Q), None, 9, 9, page_table=table)
