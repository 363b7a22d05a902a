"""What the library's factories refuse; errors name argument, value, what is allowed, way out."""

import pytest
import torch

from fovea import mods

IDS = torch.tensor([0, 0, 1])

WRONG = {
    "a list of ids": (lambda: mods.document([0, 0, 1]), TypeError, r"ids=list.*a tensor.*torch"),
    "float ids": (lambda: mods.document(torch.rand(4)), TypeError, r"ids.dtype=.*integers.*long"),
    "ids of three axes": (
        lambda: mods.document(IDS[None, None]),
        ValueError,
        r"ids.shape=.*1 or 2",
    ),
    "a bias of two axes": (
        lambda: mods.dense_bias(torch.zeros(4, 4)),
        ValueError,
        r"bias.shape.*4",
    ),
    "heads as text": (lambda: mods.alibi("a"), TypeError, r"heads='a'.*at least 1.*not str"),
    "slopes as a list": (lambda: mods.alibi(slopes=[1, 2]), TypeError, r"slopes=list.*a tensor"),
    "a window as text": (lambda: mods.sliding_window("3"), TypeError, r"left='3'.*not str"),
    "a negative window": (
        lambda: mods.sliding_window(-3),
        ValueError,
        r"left, right=\(-3, 0\).*at least 0",
    ),
    "a chunk of 0": (lambda: mods.chunked(0), ValueError, r"chunk=0.*at least 1"),
    "a dilation of 0": (lambda: mods.dilated(10, 0), ValueError, r"dilation=0.*at least 1"),
    "a cap of 0": (lambda: mods.softcap(0.0), ValueError, r"cap=0.0.*above 0"),
    "a window of two numbers": (lambda: mods.sliding_window(IDS), ValueError, r"left.shape.*\(\)"),
    "a window with a fraction": (
        lambda: mods.sliding_window(2.5),
        TypeError,
        r"left=2.5 .*an integer.*not float",
    ),
    "a prefix with a fraction": (
        lambda: mods.prefix_lm(torch.tensor(2.5)),
        TypeError,
        r"prefix.dtype=.*integers.*long",
    ),
    "an even kernel": (
        lambda: mods.natten_2d(6, 6, 4, 5),
        ValueError,
        r"kernel_height=4.*odd.*3 or 5",
    ),
    "an even kernel of tiles": (
        lambda: mods.natten_tiled((8, 8), (3, 4), (4, 4)),
        ValueError,
        r"kernel\[1\]=4.*odd",
    ),
    "a canvas of parts of tiles": (
        lambda: mods.natten_tiled((8, 8), (3, 3), (3, 3)),
        ValueError,
        r"canvas=\(8, 8\).*multiples of tile=\(3, 3\).*\(9, 9\)",
    ),
    "a kernel of parts of tiles": (
        lambda: mods.sliding_tile_2d((8, 8), (4, 6), (2, 4)),
        ValueError,
        r"kernel=\(4, 6\).*multiples of tile=\(2, 4\).*\(4, 8\)",
    ),
    "a video of parts of tiles": (
        lambda: mods.sliding_tile_3d((4, 4, 4), (2, 2, 2), (2, 3, 2)),
        ValueError,
        r"canvas=\(4, 4, 4\).*multiples of tile",
    ),
    "a canvas as a number": (
        lambda: mods.natten_tiled(8, (3, 3), (4, 4)),
        TypeError,
        r"canvas=8.*tuple of 2",
    ),
    "a Z curve over a rectangle": (
        lambda: mods.natten_morton(8, 4, 3, 3),
        ValueError,
        r"height, width=\(8, 4\).*powers of two",
    ),
    "a Z curve over 6 x 6": (
        lambda: mods.natten_morton(6, 6, 3, 3),
        ValueError,
        r"height, width=\(6, 6\).*powers of two",
    ),
    "offsets that fall": (
        lambda: mods.packed_causal(torch.tensor([0, 9, 5])),
        ValueError,
        r"offsets=\[0, 9, 5\].*offsets_of",
    ),
    "offsets from 1": (
        lambda: mods.document_ids(torch.tensor([1, 5, 9])),
        ValueError,
        r"offsets=\[1, 5, 9\].*0, then",
    ),
    "offsets of a mask from 1": (
        lambda: mods.document_mask(mods.causal, torch.tensor([1, 5])),
        ValueError,
        r"offsets=\[1, 5\]",
    ),
    "a negative length": (lambda: mods.offsets_of([3, -1]), ValueError, r"lengths\[1\]=-1"),
    "lengths of two axes": (
        lambda: mods.offsets_of(torch.ones(2, 2, dtype=torch.int64)),
        ValueError,
        r"lengths.shape=\(2, 2\)",
    ),
    "a prefix of another document count": (
        lambda: mods.shared_prefix(torch.tensor([0, 3, 5]), torch.tensor([0])),
        ValueError,
        r"prefix_of.shape=\(1,\).*\(2,\)",
    ),
    "a prefix as a list": (
        lambda: mods.prefix_lm([1, 2]),
        TypeError,
        r"prefix=\[1, 2\].*tensor \(batch,\).*torch.tensor",
    ),
    "intervals of three numbers": (
        lambda: mods.vision_cross_attention(torch.zeros(4, 3, dtype=torch.int64), 2),
        ValueError,
        r"intervals.shape=\(4, 3\)",
    ),
    "ancestors as floats": (
        lambda: mods.tree(3, torch.ones(4, 4)),
        TypeError,
        r"ancestors.dtype=torch.float32.*bool",
    ),
    "ancestors of unequal axes": (
        lambda: mods.tree(3, torch.ones(4, 5, dtype=torch.bool)),
        ValueError,
        r"ancestors.shape=\(4, 5\)",
    ),
    "a parent after its child": (
        lambda: mods.tree_ancestors([-1, 2, 0]),
        ValueError,
        r"parents\[1\]=2.*0 to 0",
    ),
    "flags as integers": (lambda: mods.global_tokens(IDS), TypeError, r"is_global.dtype.*\.bool"),
    "a table of buckets, transposed": (
        lambda: mods.t5_bias(torch.zeros(2, 32)),
        ValueError,
        r"table.shape=\(2, 32\).*buckets, heads.*table\.T",
    ),
    "a reach below the exact buckets": (
        lambda: mods.t5_bias(torch.zeros(32, 2), max_distance=8),
        ValueError,
        r"max_distance=8.*at least 9",
    ),
    "a table too short for its distance": (
        lambda: mods.relative_bias(torch.zeros(2, 5), 8),
        ValueError,
        r"table.shape=\(2, 5\).*\(heads, 17\)",
    ),
    "a table too long for its distance": (
        lambda: mods.relative_bias(torch.zeros(2, 19), 8),
        ValueError,
        r"table.shape=\(2, 19\).*\(heads, 17\)",
    ),
    "a cap of NaN": (lambda: mods.softcap(float("nan")), ValueError, r"cap=nan.*finite"),
    "heads that slopes contradict": (
        lambda: mods.alibi(3, torch.rand(4)),
        ValueError,
        r"heads=3.*4, the heads of slopes",
    ),
    "a number as an activation": (
        lambda: mods.activation(3),
        TypeError,
        r"function=3.*pointwise function",
    ),
    "rows that proteins do not divide": (
        lambda: mods.pair_bias(torch.zeros(2, 1, 4, 4), torch.ones(3, 4, dtype=torch.bool)),
        ValueError,
        r"residues.shape\[0\]=3.*multiple of 2",
    ),
    "rotary heads that do not divide": (
        lambda: mods.mla_rope(torch.zeros(1, 4, 2, 8), torch.zeros(1, 3, 2, 8)),
        ValueError,
        r"heads of k_rope=3.*divisor of 4",
    ),
    "swapped mods": (
        lambda: mods.masked_score(mods.causal, mods.alibi(2)),
        TypeError,
        r"score_mod=.*causal.*\(score, b, h, q_idx, kv_idx\).*mask_mod",
    ),
    "a score among masks": (
        lambda: mods.or_masks(mods.causal, mods.alibi(2)),
        TypeError,
        r"mask_mods\[1\]=.*\(b, h, q_idx, kv_idx\) -> bool",
    ),
    "a score as a mask": (lambda: mods.not_mask(mods.alibi(2)), TypeError, r"mask=.*-> bool"),
    "a maker among masks": (
        lambda: mods.and_masks(mods.sliding_window, mods.causal),
        TypeError,
        r"mask_mods\[0\]=.*sliding_window\(left, right\)",
    ),
    "a number among masks": (lambda: mods.and_masks(3), TypeError, r"mask_mods\[0\]=int"),
    "no mask": (lambda: mods.document_mask(None, torch.tensor([0, 2])), TypeError, r"mask=None"),
    "a number to shift": (lambda: mods.shifted(3), TypeError, r"mod=int"),
    "a shift with a fraction": (
        lambda: mods.shifted(mods.causal, 0.5),
        TypeError,
        r"q_offset=0.5.*an integer",
    ),
    "sequences of length 0": (
        lambda: mods.batched(mods.causal, 0),
        ValueError,
        r"length=0.*at least 1",
    ),
    "a flag as a number": (lambda: mods.strided(True), TypeError, r"stride=True.*not bool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_of_a_factory_is_named(name):
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        make()


def test_numbers_may_be_tensors_of_one():
    zero = torch.zeros((), dtype=torch.int64)
    visible = mods.sliding_window(torch.tensor(2))(zero, zero, torch.tensor(5), torch.arange(6))
    assert visible.tolist() == [False, False, False, True, True, True]


def test_prefix_in_a_tensor_of_one_is_that_number():
    zero = torch.zeros((), dtype=torch.int64)
    visible = mods.prefix_lm(torch.tensor(3))(zero, zero, torch.tensor(1), torch.arange(6))
    assert visible.tolist() == [True, True, True, False, False, False]


def test_heads_beside_slopes_of_as_many_are_taken():
    zero, slopes = torch.zeros((), dtype=torch.int64), torch.tensor([0.5, 2.0])
    score = mods.alibi(2, slopes)(torch.zeros(()), zero, torch.tensor(1), zero, torch.arange(3))
    assert score.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("call", ["natten_2d(4, 4, 9, 9)", "natten_tiled((4, 4), (9, 9), (2, 2))"])
def test_kernel_beyond_the_canvas_sees_all_of_it(call):
    zero, index = torch.zeros((), dtype=torch.int64), torch.arange(16)
    mask = eval(call, vars(mods))
    assert mask(zero, zero, index[:, None], index).all()


@pytest.mark.parametrize("call", ["natten_2d(6, 6, 3, 5)", "natten_morton(8, 8, 5, 3)"])
def test_every_query_of_a_neighbourhood_sees_a_whole_kernel(call):
    mask = eval(call, vars(mods))
    zero, index = torch.zeros((), dtype=torch.int64), torch.arange(64 if "morton" in call else 36)
    assert (mask(zero, zero, index[:, None], index).sum(1) == 15).all()
