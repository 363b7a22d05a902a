"""Recognised calls with mods and block masks: every change of what these hold is seen.

Every call is compared with the same call after the memo is cleared, which checks and traces anew.
"""

import sys
from pathlib import Path

import pytest
import torch

import fovea
from fovea.testing.inputs import normal

sys.path.insert(0, str(Path(__file__).parent))

from warm_calls import (
    HEADS,
    SEQLEN,
    assert_like_a_checked_call,
    attend,
    biased,
    block_mask,
    tensors,
)

global_slope = 0.5

pytestmark = pytest.mark.usefixtures("empty_memo")


# ------------------------------------------------------------------- what a mod captures changes


class Captured:
    """A score_mod over one of each kind of captured thing, and ways to change them."""

    def __init__(self):
        self.table, self.bias = normal((HEADS,), seed=5), normal((HEADS,), seed=6)
        self.numbers = [1, 2]
        self.fn = self.make(self.table, self.bias, 0.25, 3, True, lambda x: x * 2, self.numbers)

    @staticmethod
    def make(table, bias, slope, shift, flag, inner, numbers):
        def mod(s, b, h, i, j, extra=0.5, *, more=0.125):
            moved = inner(s + table[h] * slope * (j - i + shift)) + bias[h] + extra * i + more
            moved = moved * global_slope + len(numbers) + numbers[0]
            return moved if flag else -moved

        return mod

    def set(self, name, value):
        self.fn.__closure__[self.fn.__code__.co_freevars.index(name)].cell_contents = value

    def set_data(self, name, value):
        tensor = self.fn.__closure__[self.fn.__code__.co_freevars.index(name)].cell_contents
        tensor.data = value


CHANGES = {
    "nothing": (lambda c: None, True),
    "float": (lambda c: c.set("slope", -0.75), True),
    "int": (lambda c: c.set("shift", -2), True),
    "int to float": (lambda c: c.set("shift", 3.5), False),
    "int to bool": (lambda c: c.set("shift", True), False),
    "int beyond 32 bits": (lambda c: c.set("shift", 2**40), False),
    "tensor replaced": (lambda c: c.set("table", normal((HEADS,), seed=9)), True),
    "tensor filled": (lambda c: c.table.fill_(0.5), True),
    "tensor longer": (lambda c: c.set("table", normal((2 * HEADS,), seed=9)), False),
    "tensor longer in place": (lambda c: c.set_data("table", normal((7,), seed=9)), False),
    "tensor of another dtype": (lambda c: c.set_data("table", c.table.double()), False),
    "tensor twice": (lambda c: c.set("bias", c.table), False),
    "tensor requires grad": (lambda c: c.table.requires_grad_(), False),
    "parameter": (lambda c: c.set("table", torch.nn.Parameter(c.table, False)), False),
    "flag that is branched on": (lambda c: c.set("flag", False), False),
    "inner function": (lambda c: c.set("inner", lambda x: x * 3), False),
    "list": (lambda c: c.set("numbers", [1, 2, 3]), False),
    "list in place": (lambda c: c.numbers.append(4), False),
    "list of another number": (lambda c: c.set("numbers", [2, 2]), False),
    "default": (lambda c: setattr(c.fn, "__defaults__", (0.75,)), True),
    "default of another type": (lambda c: setattr(c.fn, "__defaults__", (1,)), False),
    "keyword default": (lambda c: setattr(c.fn, "__kwdefaults__", {"more": 7.0}), True),
    "code": (lambda c: setattr(c.fn, "__code__", c.fn.__code__.replace(co_name="other")), False),
    "default dtype": (lambda c: torch.set_default_dtype(torch.float64), False),
    "global": (lambda c: globals().update(global_slope=0.25), False),
    "global of another type": (lambda c: globals().update(global_slope=1), False),
}


# Seen, and without effect on what this mod computes.
WITHOUT_EFFECT = frozenset({"nothing", "parameter", "code", "tensor requires grad"})


@pytest.fixture
def restored():
    yield
    torch.set_default_dtype(torch.float32)
    globals().update(global_slope=0.5)


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_a_capture_is_seen(name, checked, restored):
    change, is_recognised = CHANGES[name]
    captured = Captured()
    q, k, v = tensors()
    before = attend(q, k, v, score_mod=captured.fn)
    attend(q, k, v, score_mod=captured.fn)
    assert len(checked) == 1
    change(captured)
    found = assert_like_a_checked_call(lambda: attend(q, k, v, score_mod=captured.fn))
    assert len(checked) == (2 if is_recognised else 3)
    assert torch.equal(found, before) == (name in WITHOUT_EFFECT)


def test_branch_on_a_captured_number_is_taken_anew(checked):
    def make(width):
        return lambda s, b, h, i, j: s * 2 if width > 3 else s + j

    q, k, v = tensors()
    doubled = attend(q, k, v, score_mod=lambda s, b, h, i, j: s * 2)
    moved = attend(q, k, v, score_mod=lambda s, b, h, i, j: s + j)
    checked.clear()
    # What was branched on is the comparison, so a number on its other side alone is new.
    for width, count in ((4, 1), (5, 1), (2, 2), (6, 2), (3, 2), (4, 2)):
        found = attend(q, k, v, score_mod=make(width))
        assert torch.equal(found, doubled if width > 3 else moved)
        assert len(checked) == count, width


def test_mods_of_one_code_that_differ_in_kinds_are_all_known(checked):
    q, k, v = tensors()
    mods = [biased(normal((HEADS,), seed=1), slope) for slope in (0.5, 2, torch.tensor(0.1))]
    expected = [attend(q, k, v, score_mod=mod) for mod in mods]
    assert len(checked) == 3
    for mod, result in zip(mods, expected, strict=True):
        assert torch.equal(attend(q, k, v, score_mod=mod), result)
    assert len(checked) == 3


def test_empty_cell_and_missing_global_raise_what_the_mod_raises():
    def make():
        table = normal((HEADS,), seed=1)

        def mod(s, b, h, i, j):
            return s + table[h]

        def delete():
            nonlocal table
            del table

        return mod, delete

    mod, delete = make()
    q, k, v = tensors()
    attend(q, k, v, score_mod=mod)
    delete()
    with pytest.raises(NameError):
        attend(q, k, v, score_mod=mod)


def test_gathers_out_of_range_are_found_after_a_good_call():
    q, k, v = tensors()

    def make(table, shift):
        return lambda s, b, h, i, j: s + table[h + shift]

    attend(q, k, v, score_mod=make(normal((HEADS,), seed=1), 0))
    with pytest.raises(IndexError, match="index into dimension 0"):
        attend(q, k, v, score_mod=make(normal((HEADS,), seed=1), 1))
    with pytest.raises(IndexError, match="index into dimension 0"):
        attend(q, k, v, score_mod=make(normal((HEADS - 1,), seed=1), 0))


def test_gather_that_a_number_hides_is_found_with_another_number():
    q, k, v = tensors()
    table = normal((HEADS - 1,), seed=1)

    def make(limit):
        return lambda s, b, h, i, j: torch.where(h < limit, table[h], s)

    for _ in range(2):
        attend(q, k, v, score_mod=make(HEADS - 1))
    with pytest.raises(IndexError, match="index into dimension 0"):
        attend(q, k, v, score_mod=make(HEADS))


def test_mod_for_fewer_heads_raises_after_a_good_call():
    q, k, v = tensors()
    attend(q, k, v, score_mod=fovea.mods.alibi(HEADS))
    with pytest.raises(ValueError, match="query heads"):
        attend(q, k, v, score_mod=fovea.mods.alibi(HEADS - 1))


# ------------------------------------------------------------------------------------ block masks


BLOCK_CHANGES = {
    "contents": lambda m: m.kv_num_blocks.zero_(),
    "full contents": lambda m: m.full_kv_num_blocks.zero_(),
    "tensor": lambda m: setattr(m, "kv_num_blocks", torch.zeros_like(m.kv_num_blocks)),
    "mask_mod": lambda m: setattr(m, "mask_mod", lambda b, h, i, j: i == j),
    "no mask_mod": lambda m: setattr(m, "mask_mod", fovea.mods.causal),
}


@pytest.mark.parametrize("name", BLOCK_CHANGES)
def test_change_of_a_block_mask_is_seen(name):
    q, k, v = tensors()
    mask = block_mask(9)
    before = attend(q, k, v, block_mask=mask)
    attend(q, k, v, block_mask=mask)
    BLOCK_CHANGES[name](mask)
    found = assert_like_a_checked_call(lambda: attend(q, k, v, block_mask=mask))
    assert not torch.equal(found, before)


def test_block_mask_that_becomes_wrong_raises():
    q, k, v = tensors()
    mask = block_mask()
    attend(q, k, v, block_mask=mask)
    mask.kv_indices.resize_(1, 1, 3, 1)
    with pytest.raises(ValueError, match="block_mask"):
        attend(q, k, v, block_mask=mask)
    mask = block_mask()
    attend(q, k, v, block_mask=mask)
    mask.seq_lengths = (SEQLEN, SEQLEN + 8)
    with pytest.raises(ValueError, match="seq_lengths"):
        attend(q, k, v, block_mask=mask)


def test_lists_of_int64_follow_their_contents():
    """They are converted in every call, and so are never taken from the memo."""
    q, k, v = tensors()
    mask = block_mask(9)
    mask.kv_num_blocks = mask.kv_num_blocks.long()
    before = attend(q, k, v, block_mask=mask)
    mask.kv_num_blocks.zero_()
    assert not torch.equal(attend(q, k, v, block_mask=mask), before)


def test_masks_of_one_layout_share_a_known_call(checked):
    q, k, v = tensors()
    masks = [block_mask(width) for width in (1, 9)]
    masks[1].kv_indices, masks[1].kv_num_blocks = masks[0].kv_indices, masks[0].kv_num_blocks
    for mask in masks:
        attend(q, k, v, block_mask=mask)
        count = len(checked)
        attend(q, k, v, block_mask=mask)
        assert len(checked) == count
