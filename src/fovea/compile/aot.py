"""Making of bundles: artifacts compiled ahead of time, for machines without a compiler.

Lives here: the writer. What a bundle looks like and how one is searched is in `bundle`. Invariant:
a new bundle appears whole, by one rename; an old one is moved aside just before.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import fovea.version
from fovea.compile import key as keys
from fovea.compile.artifact import Artifact
from fovea.compile.bundle import FOLDER, FORMAT, INDEX, Bundle, BundleEntry, load_bundle
from fovea.compile.cache import Cache
from fovea.compile.key import Variant
from fovea.compile.pool import Job, compile_many
from fovea.compile.target import CompileTarget

__all__ = ["load_bundle", "write_bundle"]


def write_bundle(
    variants: Iterable[Variant],
    targets: Iterable[CompileTarget],
    path: Path,
    *,
    workers: int | None = None,
    cache: Cache | None = None,
) -> Bundle:
    """Compile every variant for every target into a folder; return it, opened.

    Args:
        variants: what to compile.
        targets: for what; launchers for another processor than this one can be made too.
        path: the folder to make; an earlier bundle there is replaced.
        workers, cache: as `compile_many` takes them.

    Raises:
        FileExistsError: `path` holds something that is no bundle.
        OSError: the folder cannot be made; nothing is compiled then.
        CompileError: variants do not compile; nothing is written then.
    """
    path = path.resolve()
    if path.exists() and not (path / INDEX).is_file() and (path.is_file() or any(path.iterdir())):
        raise FileExistsError(
            f"path={path} holds something that is no bundle; name a new or an empty folder"
        )
    jobs = [(variant, target) for variant in variants for target in targets]
    staging = path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex}")
    _make(staging, path)
    try:
        artifacts = compile_many(jobs, workers=workers, cache=cache)
        _write(jobs, artifacts, staging)
        if path.exists():
            # rename() replaces an empty folder only.
            old = staging.with_name(staging.name + "-old")
            os.rename(path, old)
            os.rename(staging, path)
            shutil.rmtree(old)
        else:
            os.rename(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return load_bundle(path)


def _make(staging: Path, path: Path) -> None:
    """Make the folder that becomes the bundle, before minutes of compiling."""
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"path={path} cannot be made ({error.strerror}); name a folder where you may write",
        ) from error


def _write(jobs: list[Job], artifacts: list[Artifact], folder: Path) -> None:
    entries: dict[str, dict[str, str]] = {}
    for (variant, target), artifact in zip(jobs, artifacts):
        key = keys.bundle_key(variant, target)
        artifact.write(folder / FOLDER / key)
        entry = BundleEntry(
            folder=key, name=variant.name, arch=target.arch, host_triple=target.host_triple
        )
        entries[key] = asdict(entry)
    index = {
        "format": FORMAT,
        "fovea_version": fovea.version.__version__,
        "compiler_version": keys.compiler_version(),
        "source_hash": keys.source_hash(),
        "artifacts": entries,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
