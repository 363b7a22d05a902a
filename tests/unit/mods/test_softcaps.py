"""Which score mods are a soft cap, and of which number."""

from typing import Any

import pytest
import torch

from fovea import mods
from fovea.mods.softcaps import softcap_of_mod
from fovea.mods.trace import trace_score_mod

CAP = 30.0


def _cap(mod: Any) -> float | None:
    traced = trace_score_mod(mod, torch.float32)
    found = softcap_of_mod(traced.graph)
    return None if found is None else found.value(traced.scalars)


def _cast_to(dtype: torch.dtype, number: float = 30.07) -> Any:
    """Return a soft cap of a run-time number that a cast changes."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        cap = torch.full((), number).to(dtype)
        return cap * torch.tanh(s / cap)

    return mod


@pytest.mark.parametrize(
    ("mod", "cap"),
    [
        (lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), 50.0),
        (lambda s, b, h, q, k: torch.tanh(s / CAP) * CAP, 30.0),
        (lambda s, b, h, q, k: torch.tanh(s / -3) * -3, 3.0),
        (lambda s, b, h, q, k: torch.tanh(s * 0.02) * 50, 50.0),
        (lambda s, b, h, q, k: 8 * (0.125 * s).tanh(), 8.0),
        (mods.softcap(20.0), 20.0),
    ],
)
def test_soft_cap_is_read(mod: Any, cap: float) -> None:
    assert _cap(mod) == cap


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: 50.0 * torch.tanh(s / 40.0),
        lambda s, b, h, q, k: 50.0 * torch.tanh(50.0 / s),
        lambda s, b, h, q, k: torch.tanh(s),
        lambda s, b, h, q, k: 50.0 * torch.tanh(s * 0.03),
        lambda s, b, h, q, k: 50.0 * torch.tanh((s + q) / 50.0),
        lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0) + q,
        lambda s, b, h, q, k: 50.0 * torch.sigmoid(s / 50.0),
        lambda s, b, h, q, k: h * torch.tanh(s / h),
        mods.alibi(2),
        _cast_to(torch.int32),
        _cast_to(torch.bool),
        _cast_to(torch.bfloat16),
        _cast_to(torch.float16),
    ],
)
def test_other_mod_is_none(mod: Any) -> None:
    assert _cap(mod) is None
