"""What a mod reads of a function's or tensor's own is asked for in every call."""

from typing import Any

import pytest
import torch

import fovea
from fovea import mods


def _out(mod: Any) -> torch.Tensor:
    q = torch.linspace(-1, 1, 64).view(1, 8, 2, 4)
    return fovea.attention(q, q, q, score_mod=mod)


def _own(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * _own.factor


def _of_another(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * _own.factor


@pytest.mark.parametrize("mod", [_own, _of_another])
def test_attribute_of_a_function_is_read_again(mod: Any) -> None:
    outs = []
    for _own.factor in (1.0, 5.0, 1.0):
        outs.append(_out(mod))
        assert torch.equal(_out(mod), outs[-1])
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


def test_attribute_of_a_captured_tensor_is_read_again() -> None:
    table = torch.ones(2)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * table[h] * table.factor

    outs = []
    for table.factor in (1.0, 5.0):
        outs.append(_out(mod))
    assert not torch.equal(*outs)


def test_stride_of_a_captured_tensor_is_read_again() -> None:
    def over(table: torch.Tensor) -> torch.Tensor:
        return _out(lambda s, b, h, i, j: s * table[0, h] * table.stride(0))

    table = torch.ones(6, 6)
    assert not torch.equal(over(table[:2, :2]), over(table[::2, :2][:2]))


def test_attribute_of_a_mask_is_read_again_by_create_block_mask() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() < mask.width

    counts = []
    for mask.width in (1, 200):
        made = fovea.create_block_mask(mask, None, None, 300, 300, "cpu")
        counts.append(int(made.kv_num_blocks.sum()))
    assert counts[0] != counts[1]


def test_library_mods_have_no_attributes_of_their_own() -> None:
    made = (mods.causal, mods.alibi(2), mods.sliding_window(3), mods.softcap(2.0))
    assert not [mod for mod in made if mod.__dict__]
