"""The disk cache of artifacts, and the one place that decides where an artifact comes from.

Lives here: `get_artifact` (this process, a bundle, the disk, else the compiler) and the folder it
keeps. Identities are `key`'s matter, bundles `bundle`'s. Invariant: an entry appears whole, by one
rename, and is checked when it is read, so any number of processes may share a folder; whatever the
disk does, `get_artifact` returns a right artifact or the compiler's error.

    <root>/v1/<key>/      one artifact each; the record's modification time is its last use
    <root>/locks/         one lock file per key, so that processes wait instead of compiling twice
    <root>/staging/       entries being written or removed
"""

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from fovea import env
from fovea.compile import key as keys
from fovea.compile import progress
from fovea.compile.artifact import RECORD, Artifact, ArtifactError, read_artifact
from fovea.compile.bundle import Bundle, load_bundle
from fovea.compile.compiler import compile_variant
from fovea.compile.key import Variant
from fovea.compile.target import CompileTarget
from fovea.errors import FoveaWarning, UnsupportedError

# A compilation takes seconds; who waits longer for another process's lock compiles for itself.
_LOCK_PATIENCE_SECONDS = 120.0
# Another process may store and remove the same entry between two of our steps.
_RENAME_ATTEMPTS = 50
# What a crashed process left in staging/ is removed when it is this old.
_STALE_SECONDS = 3600.0

Compile = Callable[[Variant, CompileTarget], Artifact]

_log = logging.getLogger("fovea.compile")
_in_process: dict[str, Artifact] = {}
_in_process_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
_warned: set[str] = set()
_unwritten: dict[Path, Artifact] = {}  # by the folder that could not be written


def get_artifact(
    variant: Variant, target: CompileTarget, *, bundle: Path | None = None
) -> Artifact:
    """Return the artifact of a variant for a target from the nearest place that has it.

    Looked for in this process, in `bundle` (default FOVEA_BUNDLE) and in the disk cache, else
    compiled.

    Raises:
        UnsupportedError: it is nowhere and there is no compiler.
        ArtifactError: the bundle is damaged.
        CompileError: the compiler refuses the variant.
    """
    folder = bundle or env.bundle()
    key = keys.cache_key(variant, target)
    with _guard:
        lock = _in_process_locks.setdefault(f"{key} {folder}", threading.Lock())
    with lock:
        identity = f"{key} {folder}"
        if identity not in _in_process:
            found = None if folder is None else _from_bundle(folder, variant, target)
            _in_process[identity] = found or default_cache().get_or_compile(variant, target)
        return _in_process[identity]


def default_cache() -> "Cache":
    """Return the cache that the environment names."""
    return Cache(env.cache_dir(), env.cache_limit_bytes())


def entries() -> list["Entry"]:
    """Return what the default cache holds, last used first."""
    return default_cache().entries()


def clear() -> int:
    """Remove everything from the default cache and this process; return the bytes freed."""
    with _guard:
        _in_process.clear()
        _in_process_locks.clear()
        _unwritten.clear()
    return default_cache().clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One artifact in a cache folder."""

    key: str
    directory: Path
    num_bytes: int
    last_used: float


class Cache:
    """Artifacts in a folder, about `limit_bytes` at most; the least recently used are removed."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes

    def get_or_compile(
        self, variant: Variant, target: CompileTarget, *, compiler: Compile = compile_variant
    ) -> Artifact:
        """Return the artifact from the folder, else compile and keep it."""
        key = keys.cache_key(variant, target)
        found = self.load(key)
        if found is not None:
            return found
        with self._lock(key):
            found = self.load(key)  # another process may have been faster
            if found is not None:
                return found
            # To take the lock was to write into the folder.
            note = "first use" if str(self.root) in _warned else "first use, then cached"
            with progress.compilation(f"{variant.name} for {target}", note):
                artifact = compiler(variant, target)
            return self.store(artifact)

    def load(self, key: str) -> Artifact | None:
        """Return a whole artifact or None; a damaged entry is removed."""
        directory = self._directory(key)
        if not _exists(directory):
            return _unwritten.get(directory)
        try:
            artifact = read_artifact(directory)
            if artifact.record.key != key:
                raise ArtifactError(f"{directory} holds the artifact {artifact.record.key}")
        except ArtifactError as error:
            if _exists(directory):  # else another process has just removed it
                _log.warning("compile cache: %s; compiling again", error)
                self._remove(directory)
            return None
        # Last use, for the size cap; a folder that cannot be written serves all the same.
        with contextlib.suppress(OSError):
            os.utime(directory / RECORD)
        return artifact

    def store(self, artifact: Artifact) -> Artifact:
        """Keep an artifact; return it, in memory alone where the folder cannot be written."""
        directory = self._directory(artifact.record.key)
        staging = self._new_staging()
        try:
            written = artifact.write(staging)
            directory.parent.mkdir(parents=True, exist_ok=True)
            self._rename_into_place(staging, directory)
            self.trim(keep=artifact.record.key)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            self._warn_unwritable(error)
            _unwritten[directory] = artifact
            return artifact
        return Artifact(record=written.record, contents=written.contents, directory=directory)

    def entries(self) -> list[Entry]:
        """Return what the folder holds, last used first."""
        found: list[Entry] = []
        for directory in _listed(self.root / "v1"):
            try:
                sizes = [f.stat().st_size for f in directory.iterdir()]
                used = (directory / RECORD).stat().st_mtime
            except OSError:
                sizes, used = [], 0.0  # being removed, or half an entry: oldest of all
            found.append(
                Entry(key=directory.name, directory=directory, num_bytes=sum(sizes), last_used=used)
            )
        return sorted(found, key=lambda e: (-e.last_used, e.key))

    def clear(self) -> int:
        """Remove all entries; return the bytes freed.

        Raises:
            OSError: an entry cannot be removed.
        """
        freed = 0
        for entry in self.entries():
            shutil.rmtree(entry.directory)
            freed += entry.num_bytes
        for name in ("locks", "staging"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        return freed

    def trim(self, *, keep: str = "") -> None:
        """Remove the least recently used entries until the rest fits the size cap."""
        total = 0
        for entry in self.entries():
            total += entry.num_bytes
            if total > self.limit_bytes and entry.key != keep:
                self._remove(entry.directory)
        now = time.time()
        for directory in _listed(self.root / "staging"):
            with contextlib.suppress(OSError):
                if now - directory.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(directory)

    def _directory(self, key: str) -> Path:
        return self.root / "v1" / key

    def _new_staging(self) -> Path:
        return self.root / "staging" / f"{os.getpid()}-{uuid.uuid4().hex}"

    def _rename_into_place(self, staging: Path, directory: Path) -> None:
        for _ in range(_RENAME_ATTEMPTS):
            try:
                os.rename(staging, directory)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            # The same artifact was stored meanwhile, or a damaged one is there, which load removes.
            if self.load(directory.name) is not None:
                shutil.rmtree(staging, ignore_errors=True)
                return
        raise OSError(errno.EBUSY, f"{directory} is stored and removed all the time")

    def _remove(self, directory: Path) -> None:
        # Renamed first: a reader sees a whole entry or none.
        aside = self._new_staging()
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.rename(directory, aside)
            shutil.rmtree(aside)
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            self._warn_unwritable(error)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Generator[None]:
        """Hold the key's lock; go on without it where locks do not work.

        The lock only saves work. What keeps entries whole is the rename.
        """
        import filelock

        lock = filelock.FileLock(self.root / "locks" / f"{key}.lock")
        try:
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_LOCK_PATIENCE_SECONDS)
        except filelock.Timeout:
            _log.warning(
                "compile cache: another process has held %s for %.0f s; compiling without waiting",
                lock.lock_file,
                _LOCK_PATIENCE_SECONDS,
            )
        except (OSError, NotImplementedError) as error:
            self._warn_unwritable(error)
        try:
            yield
        finally:
            lock.release()

    def _warn_unwritable(self, error: Exception) -> None:
        if str(self.root) in _warned:
            return
        _warned.add(str(self.root))
        warnings.warn(
            f"compile cache {self.root} cannot be written ({error}): kernels are kept in memory "
            "and compiled again by the next process; make room there, or set FOVEA_CACHE_DIR to a "
            "folder that can be written",
            FoveaWarning,
            stacklevel=2,
        )


_bundles: dict[Path, Bundle] = {}


def _from_bundle(folder: Path, variant: Variant, target: CompileTarget) -> Artifact | None:
    if folder not in _bundles:
        _bundles[folder] = load_bundle(folder)
    bundle = _bundles[folder]
    found = bundle.find(variant, target)
    if found is None and keys.compiler_version() is None:
        raise UnsupportedError(
            f"bundle {folder} has no artifact of {variant.name!r} for {target} (it has "
            f"{bundle.summary()}), and there is no compiler here; add it with `fovea compile`, pip "
            "install 'fovea-attention[cuda]', or use backend='reference'"
        )
    return found


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(p for p in directory.iterdir() if p.is_dir())
    except OSError:
        return []


def _exists(directory: Path) -> bool:
    try:
        return directory.is_dir()
    except OSError:
        return False
