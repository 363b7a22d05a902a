"""Masks that are bands: what is read as one, and that its limits say what the mask says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fovea import mods
from fovea.mods.bands import band_of_mask
from fovea.mods.trace import trace_mask_mod

SIZE = 24


def _window(left: int, shift: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: (q_idx + shift >= kv_idx) & (q_idx - kv_idx < left)


BANDS: dict[str, Callable[..., Any]] = {
    "causal": mods.causal,
    "strictly_causal": lambda b, h, q_idx, kv_idx: kv_idx < q_idx,
    "future_only": lambda b, h, q_idx, kv_idx: kv_idx > q_idx,
    "window_by_numbers": _window(5, 2),
    "window_that_hides_all": _window(-40, 0),
    "library_window": mods.sliding_window(6, 3),
    "joined": mods.and_masks(mods.causal, mods.sliding_window(4), mods.sliding_window(9)),
    "negated": lambda b, h, q_idx, kv_idx: -kv_idx + 3 >= -q_idx,
    "beyond_any_position": lambda b, h, q_idx, kv_idx: q_idx + 2**61 >= kv_idx,
}

OTHERS: dict[str, Callable[..., Any]] = {
    "prefix": mods.prefix_lm(4),
    "dilated": mods.dilated(8, 2),
    "chunked": mods.chunked(8),
    "document": mods.document(torch.arange(SIZE) // 7),
    "by_head": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + h,
    "key_limit": lambda b, h, q_idx, kv_idx: kv_idx < 5,
    "sum_of_positions": lambda b, h, q_idx, kv_idx: q_idx + kv_idx > 9,
    "twice_the_key": lambda b, h, q_idx, kv_idx: q_idx >= 2 * kv_idx,
    "equal": lambda b, h, q_idx, kv_idx: q_idx == kv_idx,
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_has_the_limits_of_its_mask(name: str) -> None:
    mask = BANDS[name]
    traced = trace_mask_mod(mask, None)
    band = band_of_mask(traced.graph)
    assert band is not None
    least, largest = band.limits(traced.scalars)
    position = torch.arange(SIZE)
    distance = position - position[:, None]
    inside = torch.ones(SIZE, SIZE, dtype=torch.bool)
    if least is not None:
        inside &= distance >= least
    if largest is not None:
        inside &= distance <= largest
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(
        inside, mask(zero, zero, position[:, None], position[None]).expand(SIZE, SIZE)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_is_no_band(name: str) -> None:
    assert band_of_mask(trace_mask_mod(OTHERS[name], None).graph) is None
