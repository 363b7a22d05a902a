"""Which calls the cost model has a figure for.

Lives here: the sentence that an error, the help and the pages say. Not here: the counts that it
rests on (`counted.py`). Invariant: read from those counts, so that it cannot say more than there
is.
"""

import functools
import re

from fovea.costs.counted import counted_keys

_SOURCES = {"sm90": "sm90", "sm100": "sm100", "sm103": "sm100"}
_KEY = re.compile(r"fovea_(sm\d+)_forward_bf16_d(\d+)x(\d+)_")


@functools.cache
def counted_head_dims(arch: str) -> tuple[tuple[int, int], ...]:
    """Return (head_dim, head_dim_v) of the kernels of an architecture that were counted."""
    found = [_KEY.match(key) for key in counted_keys()]
    dims = {
        (int(match[2]), int(match[3]))
        for match in found
        if match is not None and match[1] == _SOURCES[arch]
    }
    return tuple(sorted(dims))


def coverage(*archs: str) -> str:
    """Return the calls that there is a figure for on some architectures."""
    return (
        "bfloat16, dense or causal and nothing else, more than 64 queries, head dims that kernels "
        f"round up to {'; '.join(f'{_pairs(arch)} on {arch}' for arch in archs)}"
    )


def _pairs(arch: str) -> str:
    pairs = [f"{d}" if d == dv else f"({d}, {dv})" for d, dv in counted_head_dims(arch)]
    return " or ".join((", ".join(pairs[:-1]), pairs[-1]))
