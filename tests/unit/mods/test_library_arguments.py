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
