"""What the units of an SM have to do for a piece of a kernel: products, copies, vector work.

Lives here: the map from sizes and counts to cycles by unit. Not here: when the pieces run
(`sm90.py`, `sm100.py`). Invariant: cycles of a unit at its full rate, as `Machine` states it; a
piece lasts at least as long as its fullest unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fovea.costs.counted import Cycles
from fovea.costs.machine import Machine

ELEMENT_BYTES = 2
COUNTED_EXPONENTIALS = 16  # results a clock and SM that `pipes.py` counts a MUFU cycle by

# Lanes of the timeline and of the table, in the order in which they are shown.
UNITS = {
    "tensor": "tensor cores",
    "vector": "vector pipes, in turn",
    "mufu": "exponential unit",
    "fma": "FMA pipe",
    "alu": "ALU pipe",
    "issue": "instruction issue",
    "shared": "shared memory",
    "tensor load": "tensor memory, loads",
    "tensor store": "tensor memory, stores",
    "l2": "copy engine (L2)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product (m x k) times (k x n) of 16-bit elements.

    Attributes:
        a_is_shared: A comes from shared memory, not from registers or tensor memory.
        b_share: of B's bytes, what this SM's shared memory holds: a half where two CTAs multiply
            as a pair.
    """

    m: int
    n: int
    k: int
    a_is_shared: bool
    b_share: float = 1.0

    def work(self, machine: Machine) -> dict[str, float]:
        """Return the cycles that it takes."""
        flops = 2 * self.m * self.n * self.k
        elements = self.n * self.k * self.b_share + (self.m * self.k if self.a_is_shared else 0)
        return {
            "tensor": flops / machine.tensor_flops,
            "shared": elements * ELEMENT_BYTES / machine.shared_bytes,
        }


def copy_work(machine: Machine, num_bytes: float) -> dict[str, float]:
    """Return the cycles of a bulk copy into an SM's shared memory, whoever asked for it."""
    return {
        "l2": num_bytes / machine.port_bytes,
        "shared": num_bytes / machine.shared_bytes,
    }


def warpgroup_work(machine: Machine, cycles: Cycles, serial_share: float) -> dict[str, float]:
    """Return the cycles of a warpgroup's instructions: it has a warp on each quarter of the SM.

    On the unit "vector" they queue for their pipes one after the other, as far as `serial_share`
    says; see `Calibration`.
    """
    mufu = cycles.mufu * COUNTED_EXPONENTIALS / machine.exponentials
    return {
        "vector": mufu + serial_share * (cycles.fma + cycles.alu),
        "issue": cycles.issue,
        "fma": cycles.fma,
        "alu": cycles.alu,
        "mufu": mufu,
    }


def scaled(work: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return a part, or a multiple, of some work."""
    return {unit: cycles * factor for unit, cycles in work.items()}


def added(*works: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of pieces of work."""
    total: dict[str, float] = {}
    for work in works:
        for unit, cycles in work.items():
            total[unit] = total.get(unit, 0.0) + cycles
    return total
