"""Rule 2: block lists AND mask_mod AND causal AND window AND lengths; -inf scores are hidden."""

import itertools

import pytest
import torch

import fovea
from fovea.testing.inputs import Shape, dense_qkv
from fovea.testing.masks import block_mask_of, dense_states, random_states
from fovea.testing.spelled_out import band, positions, spelled_out

ROWS, KEYS = 21, 30
SHAPE = Shape(batch=2, seqlen_q=ROWS, seqlen_kv=KEYS, heads_q=2, head_dim=8)
AUX = fovea.AuxRequest(lse=True, max_score=True)


def _mask_mod(b, h, q_idx, kv_idx):
    return (q_idx + 3 * kv_idx + h + b) % 4 != 0


def _inner_mask_mod(b, h, q_idx, kv_idx):
    return (2 * q_idx + kv_idx) % 3 != 0


def _block_mask(mask_mod, *, batch=1, heads=1, seed=0):
    states = random_states(batch, heads, 3, 4, seed=seed)
    mask = block_mask_of(
        states, seqlen_q=ROWS, seqlen_kv=KEYS, block_q=8, block_kv=8, mask_mod=mask_mod
    )
    return mask, dense_states(states, block_q=8, block_kv=8)[:, :, :ROWS, :KEYS]


def _check(visible, **options):
    """Compare outputs and gradients of a call with attention spelled out on `visible`."""
    ours = [x.requires_grad_() for x in dense_qkv(SHAPE, dtype=torch.float64)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    out, aux = fovea.attention(*ours, return_aux=AUX, **options)
    expected = spelled_out(*theirs, visible=visible)
    torch.testing.assert_close(out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.lse, expected.lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.max_score, expected.max_score, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out * weight).sum(), ours)
    for found, wanted in zip(
        grads, torch.autograd.grad((expected.out * weight).sum(), theirs), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("causal", "window", "has_mask_mod", "has_block_mask"),
    list(
        itertools.product(
            [False, True, "top_left"],
            [None, (6, 2), (None, 3), (4, None)],
            [False, True],
            [False, True],
        )
    ),
)
def test_every_condition_hides_whatever_the_others_say(
    causal, window, has_mask_mod, has_block_mask
):
    visible = band(ROWS, KEYS, causal=causal, window=window)
    options = {"causal": causal, "window": window}
    index = positions(2, 2, ROWS, KEYS)
    if has_mask_mod:
        options["mask_mod"] = _mask_mod
        visible = visible & _mask_mod(*index)
    if has_block_mask:
        options["block_mask"], state = _block_mask(_inner_mask_mod)
        visible = visible & ((state == 2) | ((state == 1) & _inner_mask_mod(*index)))
    _check(visible, **options)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_block_mask_batch_and_heads_are_one_or_those_of_the_call(batch, heads):
    mask, state = _block_mask(_inner_mask_mod, batch=batch, heads=heads, seed=3)
    visible = (state == 2) | ((state == 1) & _inner_mask_mod(*positions(2, 2, ROWS, KEYS)))
    _check(visible, block_mask=mask)


def test_block_lists_hide_where_the_mask_mod_is_true_everywhere():
    mask, state = _block_mask(lambda b, h, q_idx, kv_idx: q_idx >= 0)
    assert bool((state == 0).any())
    _check(state > 0, block_mask=mask)


def test_full_blocks_are_seen_where_the_block_masks_own_mask_mod_is_false():
    mask, state = _block_mask(lambda b, h, q_idx, kv_idx: q_idx < 0)
    _check(state == 2, block_mask=mask)


def test_full_blocks_do_not_disable_the_calls_mask_mod():
    mask, state = _block_mask(lambda b, h, q_idx, kv_idx: q_idx < 0)
    visible = (state == 2) & _mask_mod(*positions(2, 2, ROWS, KEYS))
    _check(visible, block_mask=mask, mask_mod=_mask_mod)


def test_mask_mod_disables_neither_causal_nor_window():
    def everything(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    _check(band(ROWS, KEYS, causal=True), causal=True, mask_mod=everything)
    _check(band(ROWS, KEYS, window=(2, 1)), window=(2, 1), mask_mod=everything)


def test_mask_mod_from_score_like_captured_tensors_is_honoured():
    allowed = torch.rand(ROWS, KEYS) > 0.4
    _check(allowed, mask_mod=lambda b, h, q_idx, kv_idx: allowed[q_idx, kv_idx])


@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, (3, 2)), (True, (3, 0)), (True, None), ("top_left", (3, None)), ("top_left", None)],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(7, 12), (12, 7), (1, 9), (9, 1), (8, 8)])
def test_the_diagonal_is_bottom_right_aligned_unless_top_left(causal, window, seqlen_q, seqlen_kv):
    q, k, v = dense_qkv(Shape(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv), dtype=torch.float64)
    out, aux = fovea.attention(q, k, v, causal=causal, window=window, return_aux=AUX)
    visible = band(seqlen_q, seqlen_kv, causal=causal, window=window)
    expected = spelled_out(q, k, v, visible=visible)
    torch.testing.assert_close(out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.lse, expected.lse, rtol=1e-12, atol=1e-12)


def test_causal_true_means_bottom_right():
    q, k, v = dense_qkv(SHAPE)
    assert torch.equal(
        fovea.attention(q, k, v, causal=True), fovea.attention(q, k, v, causal="bottom_right")
    )


def test_score_of_minus_infinity_is_not_visible():
    def hides_odd_keys_and_row_two(score, b, h, q_idx, kv_idx):
        return torch.where((kv_idx % 2 == 1) | (q_idx == 2), float("-inf"), score)

    def visible(b, h, q_idx, kv_idx):
        return (kv_idx % 2 == 0) & (q_idx != 2)

    _check(visible(*positions(2, 2, ROWS, KEYS)), score_mod=hides_odd_keys_and_row_two)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_infinite_or_nan_sink_gives_nan_in_the_rows_of_its_head_alone(value):
    q, k, v = dense_qkv(Shape(seqlen_q=6, seqlen_kv=9, heads_q=2, heads_kv=2, head_dim=8))

    def run(sink):
        return fovea.attention(
            *(q, k, v),
            sink=torch.tensor(sink, dtype=q.dtype),
            mask_mod=lambda b, h, q_idx, kv_idx: q_idx != 2,
            return_aux=fovea.AuxRequest(lse=True),
        )

    out, aux = run([value, 0.5])
    expected, expected_aux = run([0.5, 0.5])
    assert bool(aux.lse[:, 0].isnan().all())
    assert torch.equal(aux.lse[:, 1], expected_aux.lse[:, 1])
    assert torch.equal(out[:, :, 1], expected[:, :, 1])
    assert bool((out[:, 2] == 0).all())
    assert bool(out[:, [0, 1, 3, 4, 5], 0].isnan().all())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("key", [0, 3, KEYS - 1])
def test_infinite_or_nan_scores_give_nan_in_that_row_alone(value, key):
    def spoils_row_five(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx == 5) & (kv_idx == key), value, score)

    q, k, v = dense_qkv(SHAPE, dtype=torch.float64)
    out, aux = fovea.attention(q, k, v, score_mod=spoils_row_five, return_aux=AUX)
    clean, clean_aux = fovea.attention(q, k, v, return_aux=AUX)
    others = torch.arange(ROWS) != 5
    assert bool(out[:, 5].isnan().all())
    assert bool(aux.lse[:, :, 5].isnan().all())
    torch.testing.assert_close(out[:, others], clean[:, others], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(aux.lse[..., others], clean_aux.lse[..., others])


def test_nan_in_a_query_stays_in_its_row():
    q, k, v = dense_qkv(SHAPE)
    q[:, 7] = torch.nan
    out = fovea.attention(q, k, v, causal=True)
    assert bool(out[:, 7].isnan().all())
    assert not bool(out[:, torch.arange(ROWS) != 7].isnan().any())


def test_nan_in_a_hidden_key_changes_nothing():
    q, k, v = dense_qkv(SHAPE)
    expected = fovea.attention(q, k, v, window=(3, 3))
    k[:, 0] = torch.nan  # seen by no query: the first sees keys 6..12
    assert torch.equal(fovea.attention(q, k, v, window=(3, 3)), expected)
