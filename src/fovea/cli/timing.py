"""Interleaved timing of several implementations of one call.

Lives here: the loop and the median. What a published figure needs beyond that (steady state,
clocks, watts) is in `benchmarks/`. Invariant: implementations take turns, so that a change of clock
or a neighbour's load meets them all.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one implementation took.

    Attributes:
        median_s: median of the rounds, in seconds.
        num_rounds: how many rounds were timed, after one that was not.
    """

    median_s: float
    num_rounds: int


def time_interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    budget_s: float = 2.0,
    most_rounds: int = 100,
) -> dict[str, Timing]:
    """Return the timing of each call, after one warm-up round that also compiles what must be.

    At least three rounds are timed, whatever the budget says.
    """
    once = _time_on_gpu if device.type == "cuda" else _time_on_host
    for call in calls.values():
        once(call)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for num_rounds in range(1, most_rounds + 1):
        for name, call in calls.items():
            samples[name].append(once(call))
        if num_rounds >= 3 and time.perf_counter() - start > budget_s:
            break
    return {
        name: Timing(median_s=statistics.median(seconds), num_rounds=len(seconds))
        for name, seconds in samples.items()
    }


def _time_on_host(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _time_on_gpu(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
