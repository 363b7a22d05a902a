"""Interleaved timing of several implementations of one call.

Lives here: the loop and the median. What a published figure needs beyond that (steady state,
clocks, watts) is in `benchmarks/`. Invariant: implementations take turns, so that a change of clock
or a neighbour's load meets them all.
"""

import math
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
        num_rounds: how many readings there are, after a warm-up.
    """

    median_s: float
    num_rounds: int


# On a GPU a reading spans about this long, and this many launches at most: events around one launch
# would time the host, which needs tens of microseconds to make it.
_SPAN_S = 0.02
_MOST_LAUNCHES = 100
_SLEEP_CYCLES_PER_S = 2e9  # about a GPU's clock; a longer sleep does no harm


def time_interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    budget_s: float = 2.0,
    most_rounds: int = 100,
) -> dict[str, Timing]:
    """Return the timing of each call, after one warm-up round that also compiles what must be.

    On a GPU it is the device's time of a call among many that are launched one behind the other, on
    a CPU the time of one call. At least three rounds are timed, whatever the budget says.
    """
    readers: dict[str, Callable[[], float]] = {}
    for name, call in calls.items():
        call()
        readers[name] = _gpu_reader(call) if device.type == "cuda" else _host_reader(call)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for num_rounds in range(1, most_rounds + 1):
        for name, read in readers.items():
            samples[name].append(read())
        if num_rounds >= 3 and time.perf_counter() - start > budget_s:
            break
    return {
        name: Timing(median_s=statistics.median(seconds), num_rounds=len(seconds))
        for name, seconds in samples.items()
    }


def _host_reader(call: Call) -> Callable[[], float]:
    def read() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return read


def _gpu_reader(call: Call) -> Callable[[], float]:
    """Return a function that gives the device's time of one call in seconds."""
    _gpu_seconds(call, 1, 0.0)  # the warm-up before may have left work for the second call
    start = time.perf_counter()
    single_s = _gpu_seconds(call, 1, 0.0)
    host_s = time.perf_counter() - start
    count = max(1, min(_MOST_LAUNCHES, round(_SPAN_S / max(single_s, 1e-6))))
    # `host_s` includes the wait for the result: an upper bound of what the host needs.
    return lambda: _gpu_seconds(call, count, min(count * host_s, _SPAN_S) if count > 1 else 0.0)


def _gpu_seconds(call: Call, count: int, head_start_s: float) -> float:
    """Return the device's time of one call out of `count` in a row.

    The GPU sleeps for `head_start_s` first, so that the host is ahead of it all the way.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if head_start_s:
        torch.cuda._sleep(int(head_start_s * _SLEEP_CYCLES_PER_S))  # pyright: ignore
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def ratio_text(ratio: float) -> str:
    """Return a ratio as `1.25x`, with two digits that are not 0 however small it is."""
    digits = 2 if ratio <= 0 else max(2, 1 - math.floor(math.log10(ratio)))
    return f"{ratio:.{digits}f}x"
