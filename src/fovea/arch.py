"""GPU architectures with kernels here, as values.

Lives here: names, compile targets and compute capabilities. What a kernel looks like on one of them
is in `plan/`. Invariant: importing this module asks no device and imports no torch.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from fovea.errors import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture that kernels are compiled for.

    Attributes:
        name: spelling in paths, plans and backend names ("sm90").
        target: what ptxas is asked for; the `a` suffix unlocks wgmma or tcgen05 and ties the binary
            to exactly this capability.
        capability: (major, minor) that a device must report.
        product: how people call it.
        num_sms: SMs of the board that a call is explained for without one: H200, B200, B300.
    """

    name: str
    target: str
    capability: tuple[int, int]
    product: str
    num_sms: int

    def __str__(self) -> str:
        return self.name


# Source: PTX ISA, section "PTX Module Directives: .target": sm_90a, sm_100a and sm_103a code runs
# on compute capability 9.0, 10.0 and 10.3 only.
SM90 = Arch(name="sm90", target="sm_90a", capability=(9, 0), product="Hopper", num_sms=132)
SM100 = Arch(name="sm100", target="sm_100a", capability=(10, 0), product="Blackwell", num_sms=148)
SM103 = Arch(
    name="sm103", target="sm_103a", capability=(10, 3), product="Blackwell Ultra", num_sms=148
)
ARCHS: dict[str, Arch] = {arch.name: arch for arch in (SM90, SM100, SM103)}


def arch_named(name: str) -> Arch:
    """Return the architecture spelled `name`.

    Raises:
        ValueError: no such architecture.
    """
    arch = ARCHS.get(name)
    if arch is None:
        raise ValueError(invalid("arch", repr(name), " | ".join(ARCHS), "name one of them"))
    return arch


def arch_of(device: Any) -> Arch | None:
    """Return the architecture of a torch device, or None where there are no kernels for it."""
    if device.type != "cuda":
        return None
    return _arch_of_cuda(device.index)


@cache
def _arch_of_cuda(index: int | None) -> Arch | None:
    import torch

    # ROCm reports capabilities too, but runs no PTX.
    if torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(index)
    for arch in ARCHS.values():
        if arch.capability == tuple(capability):
            return arch
    return None
