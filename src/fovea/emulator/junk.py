"""What is read before it was written: a fault only if its bytes decide something.

Kernels load whole tiles of which the last rows were never filled, or branch past the loads of some
registers, compute on what is there, and drop what comes of it. A launch that meets such a read is
therefore run again, under the same schedule, with several contents of unwritten registers, shared
and local memory (`machine/unwritten.py`). If memory, control flow and output are the same for
all, the bytes decide nothing and a warning tells of the read; else the first report stands.
Lives here: those runs. Not here: which bytes were written (`machine/memory.py`, `machine/warp.py`);
tensor memory and results in flight, whose reads are always faults. Invariant: a launch
ends with the memory of one whole run or, if it reads what nobody wrote, as it was before.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import EmulatorError, UninitialisedRead
from fovea.emulator.machine.memory import GlobalMemory, Segment
from fovea.emulator.machine.unwritten import CONTENTS

_LIMIT_BYTES = 1 << 30  # launches with more global memory are not run again: it is copied before


def run_past_junk(attempt: Callable[[int | None], Any], memory: GlobalMemory) -> Any:
    """Run a launch; if it reads what nobody wrote, find out whether that matters.

    Args:
        attempt: runs the launch and returns its Result; given one of `CONTENTS`, unwritten
            registers and memory hold it and are no fault.
        memory: what the launch may write.

    Raises:
        UninitialisedRead: the bytes matter, or memory is too large to run again.
        Fault: what else the kernel did wrong.
    """
    segments = [segment for segment in memory.segments if not segment.is_read_only]
    if sum(len(segment.data) for segment in segments) > _LIMIT_BYTES:
        return attempt(None)
    before = [segment.data.copy() for segment in segments]
    try:
        return attempt(None)
    except UninitialisedRead as error:
        result = _same_for_all(attempt, segments, before)
        if result is None:
            _restore(segments, before)
            raise
        warning = (
            f"PTX line {error.where.line} `{error.where.text}`: {error.message}; what it holds "
            "changes no result"
        )
        return dataclasses.replace(result, warnings=(*result.warnings, warning))


def _same_for_all(
    attempt: Callable[[int | None], Any], segments: list[Segment], before: list[Any]
) -> Any:
    """Return the result of the launch if it is the same whatever unwritten memory holds."""
    result, after = None, None
    for content in CONTENTS:
        _restore(segments, before)
        try:
            other = attempt(content)
        except EmulatorError:
            return None
        if after is None or result is None:
            result, after = other, [segment.data.copy() for segment in segments]
            continue
        if (other.lines, other.steps, other.printed) != (
            result.lines,
            result.steps,
            result.printed,
        ):
            return None
        if not all(map(np.array_equal, after, (segment.data for segment in segments))):
            return None
    return result


def _restore(segments: list[Segment], before: list[Any]) -> None:
    for segment, data in zip(segments, before, strict=True):
        segment.data[:] = data
