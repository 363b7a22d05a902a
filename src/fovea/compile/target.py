"""What a kernel is compiled for, as an explicit value.

Lives here: the GPU architecture and host processor of an artifact. Which plan suits an architecture
is `plan/`'s matter. Invariant: nothing here asks a device, so a target can be named on any machine.
"""

import platform
from dataclasses import dataclass

from fovea.errors import invalid

# sm_103a (B300) takes the sm_100 kernels, compiled for it: `a` code runs on one capability only.
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
HOST_TRIPLES = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")


def native_host_triple() -> str:
    """Return the triple of this machine's processor.

    Raises:
        ValueError: launchers cannot be made for it.
    """
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    triple = f"{machine}-unknown-{platform.system().lower()}-gnu"
    if triple not in HOST_TRIPLES:
        raise ValueError(
            invalid("host_triple", repr(triple), " | ".join(HOST_TRIPLES), "name one of them")
        )
    return triple


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTarget:
    """The machine that an artifact is made for.

    Attributes:
        arch: GPU architecture as ptxas spells it.
        host_triple: processor and system of the launcher, LLVM's spelling; default this machine's.
    """

    arch: str
    host_triple: str = ""

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(invalid("arch", repr(self.arch), " | ".join(ARCHS), "name one"))
        if not self.host_triple:
            object.__setattr__(self, "host_triple", native_host_triple())
        if self.host_triple not in HOST_TRIPLES:
            raise ValueError(
                invalid("host_triple", repr(self.host_triple), " | ".join(HOST_TRIPLES), "name one")
            )

    def __str__(self) -> str:
        return f"{self.arch} on {self.host_triple.partition('-')[0]}"


def arch_for_capability(major: int, minor: int) -> str | None:
    """Return the architecture whose code runs on a compute capability, or None."""
    # Source: PTX ISA, ".target": code for sm_XYa runs on compute capability X.Y only.
    name = f"sm_{major}{minor}a"
    return name if name in ARCHS else None
