"""Captured tensors too short for the call: found from shapes, and only where that is certain."""

from typing import Any

import pytest
import torch

import fovea
from fovea.errors import GatherError
from fovea.mods.trace import trace_mask_mod
from fovea.testing.inputs import Shape, cumulative, dense_qkv

SHAPE = Shape(batch=2, seqlen_q=12, seqlen_kv=12, heads_q=4, heads_kv=2, head_dim=8)
TEN, SHIFT = torch.zeros(10), 5
IDS = torch.zeros(10, dtype=torch.int32)
FULL = torch.zeros(2, 4, 12, 12)


def explain_on_meta(**options: Any) -> object:
    """Check a call whose tensors hold nothing at all: shapes alone can have told."""
    return fovea.explain(*(x.to("meta") for x in dense_qkv(SHAPE)), **options)


SHORT = {
    "ids by q_idx": ({"mask_mod": fovea.mods.document(IDS)}, "11 at q_idx=11"),
    "bias by kv_idx": ({"score_mod": lambda s, b, h, i, j: s + TEN[j]}, "11 at kv_idx=11"),
    "slopes by h": ({"score_mod": fovea.mods.alibi(slopes=TEN[:3])}, "3 at h=3.*4 query heads"),
    "table by b": ({"score_mod": lambda s, b, h, i, j: s * TEN[:1][b]}, "1 at b=1.*batch is 2"),
    "and": ({"mask_mod": lambda b, h, i, j: (i >= j) & (IDS[i] == IDS[j])}, "11 at q_idx=11"),
    "where": (
        {"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s + TEN[j], s)},
        "11 at kv_idx=11",
    ),
    "shifted": ({"score_mod": lambda s, b, h, i, j: s + TEN[i + SHIFT]}, "16 at q_idx=11"),
    "below the start": ({"score_mod": lambda s, b, h, i, j: s + TEN[j - 11]}, "-11 at kv_idx=0"),
    "halved": ({"score_mod": lambda s, b, h, i, j: s + TEN[:5][i // 2]}, "5 at q_idx=11"),
    "head bias": ({"score_mod": fovea.mods.head_bias(TEN[:2])}, "3 at h=3"),
    "pair of indices": (
        {"score_mod": lambda s, b, h, i, j: s + FULL[b, h, i, j + 1]},
        "12 at kv_idx=11",
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_capture_too_short_raises_from_shapes_alone(name):
    options, text = SHORT[name]
    # On a meta device the captured tensors stay where they are.
    with pytest.raises(GatherError, match=text):
        explain_on_meta(**options)
    with pytest.raises(ValueError, match=r"allowed: .*capture a tensor that covers"):
        fovea.attention(*dense_qkv(SHAPE), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": lambda s, b, h, i, j: s + FULL[b, h, i, j]},
        {"score_mod": lambda s, b, h, i, j: s + TEN[j - 10 + 8]},
        {"score_mod": lambda s, b, h, i, j: s + TEN[j.clamp(max=9)]},
        {"score_mod": lambda s, b, h, i, j: s + TEN[i % 10]},
        {"score_mod": lambda s, b, h, i, j: s + TEN[(i - j).abs().clamp(max=9)]},
        {"score_mod": lambda s, b, h, i, j: torch.where(j < 10, s + TEN[j], s)},
        {"mask_mod": lambda b, h, i, j: (j < 10) & (i < 10) & (IDS[i] == IDS[j])},
        {"mask_mod": lambda b, h, i, j: (i >= 10) | (j >= 10) | (IDS[i] == IDS[j])},
        # Every key before 2 and behind 9 is hidden from all queries.
        {"score_mod": lambda s, b, h, i, j: s + TEN[j], "mask_mod": lambda b, h, i, j: j < 10},
    ],
    ids=["exact", "wraps", "clamped", "modulo", "distance", "where", "and", "or", "hidden"],
)
def test_capture_long_enough_passes(options):
    explain_on_meta(**options)
    assert fovea.attention(*dense_qkv(SHAPE), **options).isfinite().all()


@pytest.mark.parametrize(
    ("seqlen_q", "options", "is_wrong"),
    [
        (12, {"causal": True}, True),  # the last query sees the last key
        (5, {"causal": "top_left"}, False),  # keys up to 4 alone
        (12, {"window": (0, 0)}, True),
        (9, {"causal": "top_left", "window": (2, 0)}, False),
    ],
)
def test_keys_that_the_band_hides_need_no_entry(seqlen_q, options, is_wrong):
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=seqlen_q, seqlen_kv=12, heads_q=2, head_dim=8))

    def call():
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + TEN[j], **options)

    if is_wrong:
        with pytest.raises(GatherError, match="11 at kv_idx=11"):
            call()
    else:
        assert call().isfinite().all()


def test_queries_that_see_nothing_need_no_entry():
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=12, seqlen_kv=4, heads_q=2, head_dim=8))
    tail = torch.ones(12)[-4:]
    out = fovea.attention(
        q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s * tail[i.clamp(min=8) - 8]
    )
    assert not out[:, :8].any()
    # Bottom-right: queries 0 to 7 see nothing, so no entry before 8 is ever asked for.
    with pytest.raises(GatherError, match="11 at q_idx=11"):
        fovea.attention(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s * TEN[i])


def test_block_lists_may_hide_positions_but_no_heads():
    mask = fovea.create_block_mask(
        lambda b, h, i, j: j < 4, None, None, 12, 12, device="cpu", BLOCK_SIZE=4
    )
    q, k, v = dense_qkv(SHAPE)
    short = TEN[:4]
    fovea.attention(q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: s + short[j])
    with pytest.raises(GatherError, match="3 at h=3"):
        fovea.attention(q, k, v, block_mask=mask, score_mod=fovea.mods.head_bias(TEN[:3]))


def test_packed_sequences_are_judged_by_their_own_lengths():
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=12, heads_q=2, head_dim=8))
    borders = cumulative([7, 5])

    def call(table):
        return fovea.attention_varlen(
            *(q[0], k[0], v[0], borders, borders, 100, 100),
            score_mod=lambda s, b, h, i, j: s + table[j],
        )

    assert call(TEN[:7]).isfinite().all()
    with pytest.raises(GatherError, match="=6 is not valid"):
        call(TEN[:6])


def test_empty_call_needs_no_entries():
    q, k, v = dense_qkv(Shape(batch=1, seqlen_q=0, seqlen_kv=3, heads_q=2, head_dim=8))
    out = fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + TEN[:0][i])
    assert out.shape == (1, 0, 2, 8)


def test_capture_too_short_raises_when_a_compiled_graph_runs():
    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def call(q, k, v, table):
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j])

    q, k, v = dense_qkv(SHAPE)
    assert call(q, k, v, torch.zeros(12)).isfinite().all()
    with pytest.raises(GatherError, match="11 at kv_idx=11"):
        call(q, k, v, torch.zeros(11))


@pytest.mark.parametrize("heads", [1, 3])
def test_alibi_of_fewer_heads_than_the_call_raises(heads):
    for _ in range(2):  # traced, and found again
        with pytest.raises(ValueError, match=rf"heads of score_mod .*={heads} .*4 query heads"):
            explain_on_meta(score_mod=fovea.mods.alibi(heads))
    explain_on_meta(score_mod=fovea.mods.alibi(4))
    explain_on_meta(score_mod=fovea.mods.alibi(8))


def test_alibi_inside_another_mod_keeps_its_number_of_heads():
    mod = fovea.mods.masked_score(fovea.mods.alibi(2), fovea.mods.causal)
    with pytest.raises(ValueError, match="heads of score_mod"):
        fovea.attention(*dense_qkv(SHAPE), score_mod=mod)


def test_block_mask_of_a_capture_too_short_raises():
    flags, order = torch.ones(10, dtype=torch.bool), torch.arange(12)
    with pytest.raises(GatherError, match="11 at q_idx=11"):
        fovea.create_block_mask(fovea.mods.document(IDS), None, None, 12, 12, device="cpu")
    with pytest.raises(GatherError, match=r"\(10,\).*=1[01] is not valid"):
        fovea.create_block_mask(
            lambda b, h, i, j: flags[order[i]], None, None, 12, 12, device="cpu"
        )
    fovea.create_block_mask(fovea.mods.document(IDS), None, None, 10, 10, device="cpu")


def test_block_mask_region_that_no_position_decides_is_looked_at_too():
    """Interval analysis settles whole regions without a look at their positions."""
    flags, order = torch.ones(300, dtype=torch.bool), torch.arange(1024)
    with pytest.raises(GatherError, match=r"\(300,\)"):
        fovea.create_block_mask(
            lambda b, h, i, j: flags[order[i]], None, None, 1024, 1024, device="cpu"
        )


@pytest.mark.parametrize("seqlen", [12, 300])
def test_block_mask_may_guard_its_gathers(seqlen):
    flags = torch.arange(10) % 3 == 0
    mask = fovea.create_block_mask(
        lambda b, h, i, j: (i < 10) & flags[i], None, None, seqlen, seqlen, device="cpu"
    )
    assert mask.kv_num_blocks.sum() == mask.kv_indices.shape[-1]  # the first row of blocks
    assert mask.full_kv_num_blocks.sum() == 0


def test_traced_mod_knows_the_heads_it_is_made_for():
    assert trace_mask_mod(lambda b, h, i, j: i >= j).heads == ()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_capture_that_shrank_between_calls_raises(requires_grad):
    """Whatever is kept of an earlier call, extents are looked at again."""
    q, k, v = (x.requires_grad_(requires_grad) for x in dense_qkv(SHAPE))

    def biased(table):
        return lambda s, b, h, i, j: s + table[j]

    mod = biased(torch.zeros(12))
    for _ in range(3):
        assert fovea.attention(q, k, v, score_mod=mod).isfinite().all()
    for shorter in (biased(TEN), mod):
        mod.__closure__[0].cell_contents = TEN
        with pytest.raises(GatherError, match="11 at kv_idx=11"):
            fovea.attention(q, k, v, score_mod=shorter)
