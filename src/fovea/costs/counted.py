"""What the emulator counted of each kernel: pipe cycles of a warp, by role.

Lives here: the values and their file, `counted.json`, which `benchmarks/model_counts.py` writes.
Not here: what units of a whole SM need (`work.py`). Invariant: a kernel that was not counted has no
costs; nothing is guessed.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fovea.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """Cycles of a warp on the pipes of its quarter of an SM, and its maxima, which are among them.

    Attributes:
        issue: instructions issued.
        fma, alu, mufu: cycles of each pipe.
        maxima: floating-point maxima and minima, in instructions.
    """

    issue: float
    fma: float
    alu: float
    mufu: float
    maxima: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCounts:
    """What a warp of a role does.

    Attributes:
        visit: for each plain KV tile.
        ends: for each query tile besides: its first and its masked tiles, the way out, the
            announcement.
    """

    visit: Cycles
    ends: Cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounts:
    """What the warps of a kernel do, by role.

    Attributes:
        late_share: of a Hopper kernel's softmax on a plain tile, the part that its machine code has
            behind the wait for the second product.
    """

    key: str
    roles: Mapping[str, RoleCounts]
    late_share: float = 0.0


def read_counts(key: str, record: Mapping[str, Any]) -> KernelCounts:
    """Return the counts of one record of a file."""
    return KernelCounts(
        key=key,
        late_share=record.get("late_share", 0.0),
        roles={
            role: RoleCounts(visit=Cycles(**counts["visit"]), ends=Cycles(**counts["ends"]))
            for role, counts in record["roles"].items()
        },
    )


def counts_key(plan_name: str, *, causal: bool) -> str:
    """Return the name under which a kernel was counted."""
    return f"{plan_name} {'causal' if causal else 'dense'}"


def counts_of(key: str) -> KernelCounts:
    """Return the counts of a kernel of ours.

    Raises:
        UnsupportedError: it was not counted.
    """
    record = _file().get(key)
    if record is None:
        family = "_".join(key.split("_")[:2])
        counted = ", ".join(known for known in _file() if known.startswith(family))
        raise UnsupportedError(
            f"the cost model has no counts of kernel {key!r} (it has: {counted}); run "
            "python -m benchmarks.model_counts, which counts on the emulator"
        )
    return read_counts(key, record)


def counted_keys() -> tuple[str, ...]:
    """Return the names of the kernels that were counted."""
    return tuple(_file())


@functools.cache
def _file() -> dict[str, Any]:
    text = resources.files("fovea.costs").joinpath("counted.json").read_text(encoding="utf-8")
    return json.loads(text)["kernels"]
