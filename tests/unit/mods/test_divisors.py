"""Integers divided by 0: refused where the result depends on it, wherever the 0 comes from."""

import re

import pytest
import torch

import fovea
from fovea.testing.inputs import normal

_Q = normal((1, 5, 2, 8), seed=0)
_K = normal((1, 4, 2, 8), seed=1)
_STEPS = torch.tensor([3, 0, 2, 5])
_NOTHING = torch.tensor(0)


def _attend(**options):
    return fovea.attention(_Q, _K, _K, **options)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s + i // _NOTHING,
        lambda s, b, h, i, j: s + i % _STEPS[j],
        lambda s, b, h, i, j: s + torch.div(i, _STEPS[j], rounding_mode="trunc"),
        lambda s, b, h, i, j: s + torch.fmod(i, _STEPS[j]),
        lambda s, b, h, i, j: s + i // (j - 1),
        lambda s, b, h, i, j: s + torch.where(j == 0, i // (j - 1), i // (j - 2)),
    ],
)
def test_score_mod_that_divides_by_zero_raises_and_names_its_line(mod):
    line = f"{re.escape(__file__)}:{mod.__code__.co_firstlineno} "
    with pytest.raises(ValueError, match=rf"divisor of integers \(mod at {line}.*=0 is not valid"):
        _attend(score_mod=mod)


def test_mask_mod_that_divides_by_zero_raises_in_a_call_and_in_a_block_mask():
    def mask(b, h, i, j):
        return i // _STEPS[j] == 0

    with pytest.raises(ValueError, match=r"divisor of integers .*mask\)=0"):
        _attend(mask_mod=mask)
    with pytest.raises(ValueError, match=r"divisor of integers .*mask\)=0"):
        fovea.create_block_mask(mask, None, None, 5, 4, "cpu")


def test_division_by_zero_that_the_result_leaves_out_does_no_harm():
    def guarded(s, b, h, i, j):
        return s + torch.where(_STEPS[j] == 0, 0, i // _STEPS[j])

    def clamped(s, b, h, i, j):
        return s + torch.where(_STEPS[j] == 0, 0, i // _STEPS[j].clamp(min=1))

    assert torch.equal(_attend(score_mod=guarded), _attend(score_mod=clamped))


def test_division_by_zero_at_a_hidden_position_does_no_harm():
    def divides(s, b, h, i, j):
        return s + i // _STEPS[j]

    def clamped(s, b, h, i, j):
        return s + i // _STEPS[j].clamp(min=1)

    def shows(b, h, i, j):
        return j != 1

    expected = _attend(score_mod=clamped, mask_mod=shows)
    assert torch.equal(_attend(score_mod=divides, mask_mod=shows), expected)


def test_division_of_floats_by_zero_is_infinite_as_in_torch():
    def divides(s, b, h, i, j):
        return torch.where((i + 1.0) // (j * 0.0) > 1e30, s, 0.0)

    assert torch.equal(_attend(score_mod=divides), _attend())


def test_captured_zero_raises_in_the_operator_under_dynamic_compilation():
    def attend(q, n):
        return fovea.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + i // n)

    compiled = torch.compile(attend, dynamic=True, backend="eager")
    q = normal((1, 4, 1, 8), seed=2)
    for n in (5, 7):
        torch.testing.assert_close(compiled(q, n), attend(q, n))
    with pytest.raises(ValueError, match=r"score_mod captures and divides integers by=0 is not"):
        compiled(q, 0)
