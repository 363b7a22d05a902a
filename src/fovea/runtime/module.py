"""Opening of an artifact on a CUDA device.

Lives here: the runtime library, the launcher library and the check that both fit the device. What
is passed to a launcher is `arguments`' matter; the emulator's twin is `emulated_module`. Invariant:
torch, apache-tvm-ffi and libcute_dsl_runtime.so are all that is needed; no compiler, no cutlass.

    run = load(artifact, torch.device("cuda", 0))
    run(q, k, v, out, 0.125)

`run` is a `tvm_ffi.Function`: tensors and Python scalars in the order of the host function, without
the stream. It launches on the current torch stream of the tensors' device, whatever the current
device is, and raises ValueError or TypeError by itself for a wrong dtype, rank, shape or device.
"""

import ctypes
import functools
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fovea import env
from fovea.compile.artifact import LAUNCHER_LIBRARY, Artifact
from fovea.compile.target import arch_for_capability, native_host_triple
from fovea.errors import UnsupportedError, missing_package
from fovea.runtime.driver_version import check_driver

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

Launcher = Callable[..., Any]

_opening = threading.Lock()
_opened: dict[str, tuple[Launcher, ctypes.CDLL]] = {}


def load(artifact: Artifact, device: torch.device) -> Launcher:
    """Return the launcher of an artifact, to be called with tensors of a CUDA device.

    An artifact is opened once in a process; its first call puts the kernel on every visible device,
    so the same launcher serves them all.

    Raises:
        UnsupportedError: the artifact is for another processor or GPU, the driver is too old for
            it, or a library is missing.
    """
    _check_fits(artifact, device)
    return open_launcher(artifact)


def open_launcher(artifact: Artifact) -> Launcher:
    """Return the launcher of an artifact for this machine's processor, whatever its GPU.

    Raises:
        UnsupportedError: a library is missing or the launcher cannot be opened.
    """
    identity = artifact.record.checksums[LAUNCHER_LIBRARY]
    with _opening:
        if identity not in _opened:
            _opened[identity] = _open(artifact)
        return _opened[identity][0]


def _open(artifact: Artifact) -> tuple[Launcher, ctypes.CDLL]:
    runtime_library()
    tvm_ffi = _tvm_ffi()
    library = _open_library(artifact)
    address = ctypes.cast(library[artifact.record.symbol], ctypes.c_void_p).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library), library


def _open_library(artifact: Artifact) -> ctypes.CDLL:
    """Open the launcher from its folder, else from memory.

    The folder is given up quietly where it cannot serve: it may have been removed since, or lie on
    a file system mounted noexec.
    """
    if artifact.directory is not None:
        try:
            return ctypes.CDLL(str(artifact.directory / LAUNCHER_LIBRARY))
        except OSError as error:
            if "undefined symbol" in str(error):
                raise _unusable(artifact, error) from error
    # The descriptor stays open as long as the process: the loader knows a library by its path, and
    # a number used twice would give the first library again.
    descriptor = os.memfd_create(artifact.record.name)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(artifact.launcher_library)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise _unusable(artifact, error) from error


def _unusable(artifact: Artifact, error: OSError) -> UnsupportedError:
    return UnsupportedError(
        f"launcher of {artifact.record.name!r} (compiler {artifact.record.compiler_version}) "
        f"cannot be opened: {error}; the runtime library in use is {runtime_library()}: install "
        "the nvidia-cutlass-dsl version that made the artifact, or compile it again"
    )


@functools.cache
def runtime_library() -> Path:
    """Load CuTe-DSL's runtime library so that launchers find its symbols; return where it lies.

    Raises:
        UnsupportedError: it is neither named by FOVEA_RUNTIME_LIBRARY nor installed.
    """
    path = env.runtime_library() or _installed_runtime_library()
    if path is None:
        raise UnsupportedError(
            f"{RUNTIME_LIBRARY} is not installed here: pip install 'nvidia-cutlass-dsl[cu13]', or "
            "set FOVEA_RUNTIME_LIBRARY to a copy of that file"
        )
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UnsupportedError(
            f"runtime library {path} cannot be loaded: {error}; set FOVEA_RUNTIME_LIBRARY to "
            f"{RUNTIME_LIBRARY} of nvidia-cutlass-dsl for this machine"
        ) from error
    return path


def _installed_runtime_library() -> Path | None:
    # torch's CUDA major decides; a CPU build of torch has none and takes the newer.
    major = (torch.version.cuda or "13").partition(".")[0]
    for distribution in (f"nvidia-cutlass-dsl-libs-cu{major}", "nvidia-cutlass-dsl-libs-base"):
        try:
            files = importlib.metadata.files(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == RUNTIME_LIBRARY and "stubs" not in file.parts:
                return Path(str(file.locate()))
    return None


def _tvm_ffi() -> Any:
    try:
        return importlib.import_module("tvm_ffi")
    except ImportError as error:
        raise UnsupportedError(
            missing_package("running a compiled kernel", "apache-tvm-ffi", "cuda")
        ) from error


def _check_fits(artifact: Artifact, device: torch.device) -> None:
    record = artifact.record
    if record.host_triple != native_host_triple():
        raise UnsupportedError(
            f"artifact {record.name!r} has a launcher for {record.host_triple}, this machine is "
            f"{native_host_triple()}; compile it for this one"
        )
    if device.type != "cuda":
        raise UnsupportedError(
            f"artifact {record.name!r} runs on cuda devices, got {device}; use "
            "fovea.runtime.emulated_module, or backend='reference'"
        )
    arch = arch_for_capability(*torch.cuda.get_device_capability(device))
    if arch != record.arch:
        raise UnsupportedError(
            f"artifact {record.name!r} is for {record.arch}, {torch.cuda.get_device_name(device)} "
            f"takes {arch or 'no artifact of fovea'}; compile it for that, or use "
            "backend='reference'"
        )
    check_driver(artifact)
