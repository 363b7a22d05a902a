"""Whether the machine's CUDA driver is new enough for the machine code of an artifact.

Lives here: what a cubin needs, what the driver offers, the error that names both. Not here: whether
the GPU is the right one (`module.py`). Invariant: asked before a launcher is opened, since the
driver's own refusal comes at the first launch and names neither version.
"""

import torch

from fovea.compile.artifact import Artifact
from fovea.compile.cubin import tools_version
from fovea.errors import UnsupportedError

Version = tuple[int, int]  # of CUDA: major, minor

# First CUDA whose driver knows the architecture. Source: CUDA release notes (12.0: compute
# capability 9.0 with the `a` features; 12.8: 10.0; 12.9: 10.3).
_FIRST_CUDA: dict[str, Version] = {"sm_90a": (12, 0), "sm_100a": (12, 8), "sm_103a": (12, 9)}
# Branch of the driver that came with a CUDA version (release notes, table of driver versions).
_DRIVER_BRANCH: dict[Version, int] = {(12, 0): 525, (12, 8): 570, (12, 9): 575, (13, 0): 580}


def check_driver(artifact: Artifact) -> None:
    """Check that the driver runs an artifact's machine code.

    Raises:
        UnsupportedError: it is too old.
    """
    offered, needed = driver_cuda(), needed_cuda(artifact)
    if offered is None or offered >= needed:
        return
    record = artifact.record
    raise UnsupportedError(
        f"artifact {record.name!r} for {record.arch} needs a driver for CUDA {_text(needed)} or "
        f"later{_branch(needed)}, this machine's driver is for CUDA {_text(offered)}"
        f"{_branch(offered)}; update the driver, or use backend='reference'"
    )


def needed_cuda(artifact: Artifact) -> Version:
    """Return the oldest CUDA whose driver runs an artifact's machine code.

    A driver runs what tools of its own major version made, minor versions ahead included (CUDA
    compatibility guide, minor version compatibility), if it knows the architecture.
    """
    first = _FIRST_CUDA[artifact.record.arch]
    tools = tools_version(artifact.cubin)
    return first if tools is None else max(first, (tools[0], 0))


def driver_cuda() -> Version | None:
    """Return the newest CUDA that the driver offers; None where torch cannot ask it."""
    # Not in a CPU build of torch, which has no CUDA device to run anything on either.
    ask = getattr(
        torch._C,  # pyright: ignore[reportPrivateUsage]
        "_cuda_getDriverVersion",
        None,
    )
    if ask is None:
        return None
    number: int = ask()  # 1000 major + 10 minor; 0 without a driver
    return (number // 1000, number % 1000 // 10) if number else None


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _branch(version: Version) -> str:
    known = _DRIVER_BRANCH.get(version)
    return "" if known is None else f" (release {known})"
