"""`fovea info`: what is installed, what works here, and why something else does not.

Lives here: gathering the facts and laying them out as plain text or JSON. Invariant: needs torch
alone; an optional package is looked up by its metadata and never imported.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fovea import env
from fovea.arch import ARCHS, arch_of
from fovea.compile.artifact import ArtifactError
from fovea.compile.bundle import load_bundle
from fovea.plan.select import unsupported
from fovea.problem import Request, make_dense
from fovea.version import __version__

# What each extra of pyproject.toml brings; a clone on PYTHONPATH has no metadata to ask.
EXTRAS = {
    "cuda": ("nvidia-cutlass-dsl", "apache-tvm-ffi", "filelock", "platformdirs"),
    "emulator": ("numpy", "llvmlite"),
    "cli": ("typer", "rich", "matplotlib"),
}
# Where the name to import differs from the distribution's.
IMPORT_NAMES = {"nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
# Variables that hold a value, not a path, and what reads them.
_VALUES: dict[str, Callable[[], object]] = {
    "FOVEA_CACHE_LIMIT": env.cache_limit_bytes,
    "FOVEA_CHECK": env.check,
    "FOVEA_QUIET": env.quiet,
}
USAGE = "usage: fovea info [--json]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A CUDA device as fovea sees it."""

    index: int
    name: str
    capability: str
    memory_gib: float
    arch: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `fovea info` prints.

    Attributes:
        packages: version by distribution name, None where it is not installed.
        backends: for each backend, what it can do here or what it lacks.
        problems: what is wrong with the value of an environment variable, by that variable.
    """

    fovea: str
    location: str
    python: str
    system: str
    torch: str
    torch_cuda: str | None
    packages: dict[str, str | None]
    backends: dict[str, str]
    gpus: list[Gpu]
    cache_folder: str
    cache: str
    bundle: str | None
    runtime_library: str | None
    problems: dict[str, str]


def gather() -> Facts:
    """Return the facts about this machine and this installation."""
    packages = {name: _version(name) for names in EXTRAS.values() for name in names}
    gpus = _gpus()
    bundle, runtime_library = env.bundle(), env.runtime_library()
    return Facts(
        fovea=__version__,
        location=str(Path(__file__).parents[1]),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        packages=packages,
        backends=_backends(packages, gpus, has_bundle=bundle is not None and bundle.is_dir()),
        gpus=gpus,
        cache_folder=str(env.cache_dir()),
        cache=_cache_summary(env.cache_dir()),
        bundle=None if bundle is None else str(bundle),
        runtime_library=None if runtime_library is None else str(runtime_library),
        problems=_problems(bundle, runtime_library),
    )


def _problems(bundle: Path | None, runtime_library: Path | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if bundle is not None and not bundle.is_dir():
        found["FOVEA_BUNDLE"] = "no such folder"
    if runtime_library is not None and not runtime_library.is_file():
        found["FOVEA_RUNTIME_LIBRARY"] = "no such file"
    for name, read in _VALUES.items():
        try:
            read()
        except ValueError as error:
            found[name] = str(error)
    return found


def _archs_with_kernels() -> list[str]:
    """Return the architectures whose kernels take a plain call."""
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    problem = make_dense(q, q, q, Request())
    return [f"{a.name} ({a.product})" for a in ARCHS.values() if unsupported(problem, a) is None]


def as_text(facts: Facts) -> str:
    """Return the facts as aligned lines of text."""
    rows: list[tuple[str, str]] = [
        ("fovea", f"{facts.fovea}  ({facts.location})"),
        ("python", f"{facts.python}  ({facts.system})"),
        ("torch", f"{facts.torch}  (CUDA {facts.torch_cuda or 'none: a CPU build'})"),
    ]
    rows += [("GPU", _gpu_line(gpu)) for gpu in facts.gpus] or [("GPU", "none visible")]
    rows += [("forward kernels", ", ".join(_archs_with_kernels()))]
    rows += [(f"backend {name}", text) for name, text in facts.backends.items()]
    for extra, names in EXTRAS.items():
        found = ", ".join(f"{name} {facts.packages[name] or '(missing)'}" for name in names)
        rows.append((f"extra {extra}", found))
    rows.append(("cache", f"{facts.cache_folder}  ({facts.cache})"))
    for name, path, variable in (
        ("bundle", facts.bundle, "FOVEA_BUNDLE"),
        ("runtime library", facts.runtime_library, "FOVEA_RUNTIME_LIBRARY"),
    ):
        problem = facts.problems.get(variable)
        if problem is not None:
            rows.append((name, f"{path}  ({problem}: correct {variable} or unset it)"))
        elif path is not None:
            holds = f"  ({bundle_summary(Path(path))})" if name == "bundle" else ""
            rows.append((name, f"{path}{holds}"))
        elif name == "bundle":
            rows.append((name, f"none ({variable})"))
    rows += [(name, facts.problems[name]) for name in _VALUES if name in facts.problems]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)


def bundle_summary(path: Path) -> str:
    """Return how many kernels a bundle holds and for what, or that it cannot be opened."""
    try:
        return load_bundle(path).summary()
    except ArtifactError as error:
        return str(error)


def run_plain(words: Sequence[str]) -> int:
    """Run `fovea info` where typer is absent and return the exit status."""
    if any(word != "--json" for word in words):
        sys.stderr.write(USAGE)
        return 2
    show(as_json="--json" in words)
    return 0


def show(*, as_json: bool) -> None:
    """Print the facts."""
    facts = gather()
    print(json.dumps(asdict(facts), indent=1) if as_json else as_text(facts), end="")
    if as_json:
        print()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # A folder on PYTHONPATH can be imported and has no metadata.
        found = importlib.util.find_spec(IMPORT_NAMES.get(distribution, distribution))
        return None if found is None else "(version unknown)"


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        # torch declares no type for them.
        properties = cast(Any, torch.cuda).get_device_properties(index)
        arch = arch_of(torch.device("cuda", index))
        gpus.append(
            Gpu(
                index=index,
                name=properties.name,
                capability=f"{properties.major}.{properties.minor}",
                memory_gib=round(properties.total_memory / 2**30, 1),
                arch=None if arch is None else arch.name,
            )
        )
    return gpus


def _gpu_line(gpu: Gpu) -> str:
    kernels = f"kernels {gpu.arch}" if gpu.arch else "no kernels for it: the reference runs there"
    memory = f"{gpu.memory_gib} GiB"
    return f"{gpu.index}: {gpu.name}, capability {gpu.capability}, {memory}, {kernels}"


def _backends(
    packages: dict[str, str | None], gpus: Iterable[Gpu], *, has_bundle: bool
) -> dict[str, str]:
    lacks_compiler = _missing(packages, EXTRAS["cuda"][:2])
    lacks_runtime = _missing(packages, EXTRAS["cuda"][1:2])
    lacks_emulator = _missing(packages, EXTRAS["emulator"])
    if not any(gpu.arch for gpu in gpus):
        cuda = "no GPU with kernels is visible"
    elif lacks_runtime:
        cuda = f"missing {lacks_runtime}"
    elif lacks_compiler and not has_bundle:
        cuda = f"runs compiled kernels only: missing {lacks_compiler}, and FOVEA_BUNDLE is not set"
    else:
        cuda = "ready"
    if lacks_emulator:
        emulator = f"missing {lacks_emulator}"
    elif lacks_compiler:
        emulator = f"runs compiled kernels only: missing {lacks_compiler}"
    else:
        emulator = "ready"
    compiler = f"missing {lacks_compiler}" if lacks_compiler else "ready (needs no GPU)"
    return {"reference": "ready", "cuda": cuda, "emulator": emulator, "compiler": compiler}


def _missing(packages: dict[str, str | None], names: Iterable[str]) -> str:
    return ", ".join(name for name in names if packages[name] is None)


def _cache_summary(folder: Path) -> str:
    try:
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if folder.exists() and not folder.is_dir():
        return "not a folder: correct FOVEA_CACHE_DIR"
    if not sizes:
        return "empty"
    held = f"{len(sizes)} files, {sum(sizes) / 2**20:.1f}"
    try:
        return f"{held} of at most {env.cache_limit_bytes() / 2**20:.0f} MiB"
    except ValueError:
        return f"{held} MiB"  # `_problems` says what is wrong with the limit
