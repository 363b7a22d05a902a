"""Schedules of uneven pace: each warpgroup falls behind in some of a few odd seeds."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fovea.emulator.pace import Pace

ACTIVE = cast(Any, [SimpleNamespace(index=number) for number in range(12)])


def turns(seed: int, active: Any = ACTIVE, num_warps: int = 12) -> Counter[int]:
    """Return how often each warpgroup runs in 6000 steps."""
    pace = Pace(seed, num_warps, Random(seed).random)
    return Counter(active[pace.next(active)].index // 4 for _ in range(6000))


@pytest.mark.parametrize("seed", [0, 2, 18])
def test_even_seeds_treat_all_alike(seed: int) -> None:
    assert min(turns(seed).values()) > 1800


def test_twelve_seeds_slow_each_of_three_warpgroups_more_and_less() -> None:
    rare = {}
    for seed in range(1, 13, 2):
        taken = turns(seed)
        slow = min(range(3), key=lambda group: taken[group])
        rare.setdefault(slow, []).append(taken[slow])
        assert all(taken[group] > 2500 for group in range(3) if group != slow)
    assert {
        slow: (0 < less < 150, more < 20) for slow, (less, more) in rare.items()
    } == dict.fromkeys(range(3), (True, True))


def test_slow_warps_alone_run() -> None:
    assert turns(1, ACTIVE[:4]) == {0: 6000}


def test_one_warpgroup_is_never_slow() -> None:
    assert turns(1, ACTIVE[:4], num_warps=4) == {0: 6000}
