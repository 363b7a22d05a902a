"""Opening of an artifact on the emulator.

Lives here: the twin of `module` for a machine without the GPU. The emulator itself knows nothing of
torch or artifacts. Invariant: the same launcher object, PTX and arguments that a GPU would get are
run; nothing of the call is modelled here.

    run = load(artifact)
    (result,) = run(q, k, v, out, 0.125)     # CPU tensors; `out` holds the result afterwards
    result.counters
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fovea.compile.artifact import LAUNCHER_OBJECT, PTX, Artifact
from fovea.compile.target import native_host_triple
from fovea.emulator import Options, Result, load_launcher
from fovea.errors import UnsupportedError

EmulatedLauncher = Callable[..., tuple[Result, ...]]


def load(artifact: Artifact, *, options: Options | None = None) -> EmulatedLauncher:
    """Return the launcher of an artifact, to be called with CPU tensors.

    It takes what the launcher of `module.load` takes, and returns what each launch did: counters,
    steps, a trace. The PTX is parsed once per artifact.

    Raises:
        UnsupportedError: the launcher is for another processor.
        LauncherError: llvmlite is missing, or the launcher cannot be opened.
    """
    record = artifact.record
    if record.host_triple != native_host_triple():
        raise UnsupportedError(
            f"artifact {record.name!r} has a launcher for {record.host_triple}, this machine is "
            f"{native_host_triple()}; compile it for this one"
        )
    opened = _open(_Identity(artifact), options)

    def run(*arguments: Any) -> tuple[Result, ...]:
        return opened(*map(_plain, arguments))

    return run


class _Identity:
    """An artifact as a key: two with the same launcher and PTX are the same."""

    __slots__ = ("_parts", "artifact")

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        checksums = artifact.record.checksums
        self._parts = (checksums[LAUNCHER_OBJECT], checksums[PTX])

    def __hash__(self) -> int:
        return hash(self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._parts == other._parts


@functools.cache
def _open(identity: _Identity, options: Options | None) -> EmulatedLauncher:
    artifact = identity.artifact
    return load_launcher(artifact.launcher_object, artifact.ptx, options=options)


def _plain(argument: Any) -> Any:
    """Return an argument without autograd: a tensor that requires grad is not exported."""
    if isinstance(argument, Tensor):
        return argument.detach()
    if isinstance(argument, tuple):
        return tuple(map(_plain, argument))  # pyright: ignore[reportUnknownArgumentType]
    return argument
