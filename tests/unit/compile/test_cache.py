import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fovea.compile import cache as module
from fovea.compile import key, progress
from fovea.compile.artifact import FILES, PTX, RECORD, Artifact
from fovea.compile.bundle import FOLDER, INDEX
from fovea.compile.cache import Cache, get_artifact
from fovea.compile.target import CompileTarget
from fovea.errors import FoveaWarning, UnsupportedError

Compile = Callable[..., Artifact]
GIB = 2**30


class CountingCompiler:
    def __init__(self, compiler: Compile) -> None:
        self.compiler = compiler
        self.calls = 0

    def __call__(self, variant: Any, target: CompileTarget) -> Artifact:
        self.calls += 1
        return self.compiler(variant, target)


@pytest.fixture
def compiler(compile_fake: Compile, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    return CountingCompiler(compile_fake)


@pytest.fixture
def cache(isolated_cache: Path) -> Cache:
    return Cache(isolated_cache, GIB)


def test_second_request_is_served_from_disk(
    cache: Cache, compiler: CountingCompiler, variant: Any, target: CompileTarget
) -> None:
    first = cache.get_or_compile(variant, target, compiler=compiler)
    second = Cache(cache.root, GIB).get_or_compile(variant, target, compiler=compiler)
    assert compiler.calls == 1
    assert second == first
    assert second.directory is not None
    assert (second.directory / RECORD).is_file()


def test_other_variant_or_target_is_compiled_anew(
    cache: Cache,
    compiler: CountingCompiler,
    variant: Any,
    target: CompileTarget,
    another_variant: Callable[[str], Any],
) -> None:
    cache.get_or_compile(variant, target, compiler=compiler)
    cache.get_or_compile(another_variant("other"), target, compiler=compiler)
    cache.get_or_compile(variant, CompileTarget(arch="sm_100a"), compiler=compiler)
    assert compiler.calls == 3
    assert len(cache.entries()) == 3


@pytest.mark.parametrize("name", [*FILES, RECORD])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "flipped"])
def test_damaged_entry_is_detected_and_rebuilt(
    cache: Cache,
    compiler: CountingCompiler,
    variant: Any,
    target: CompileTarget,
    name: str,
    damage: str,
) -> None:
    stored = cache.get_or_compile(variant, target, compiler=compiler)
    assert stored.directory is not None
    path = stored.directory / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flipped = data.replace(b"plan", b"plum") if name == RECORD else b"\xff" + data[1:]
        path.write_bytes({"cut": data[:9], "empty": b"", "flipped": flipped}[damage])
    again = cache.get_or_compile(variant, target, compiler=compiler)
    assert again.contents == stored.contents
    if name == RECORD and damage == "flipped":
        return  # the text of a record is its own; its files are still whole
    assert compiler.calls == 2
    assert cache.load(again.record.key) is not None
    assert not list((cache.root / "staging").iterdir())


def test_entry_under_another_key_is_not_used(
    cache: Cache,
    compiler: CountingCompiler,
    variant: Any,
    target: CompileTarget,
    another_variant: Callable[[str], Any],
) -> None:
    stored = cache.get_or_compile(variant, target, compiler=compiler)
    assert stored.directory is not None
    other = another_variant("other")
    shutil.copytree(stored.directory, cache.root / "v1" / key.cache_key(other, target))
    assert cache.get_or_compile(other, target, compiler=compiler).record.variant == "other"


def test_size_cap_removes_the_least_recently_used(
    cache: Cache,
    compiler: CountingCompiler,
    target: CompileTarget,
    another_variant: Callable[[str], Any],
) -> None:
    variants = [another_variant(f"plan {i}") for i in range(4)]
    size = 0
    for age, variant in enumerate(variants):
        stored = cache.get_or_compile(variant, target, compiler=compiler)
        size = sum(f.stat().st_size for f in stored.directory.iterdir())  # type: ignore[union-attr]
        os.utime(stored.directory / RECORD, (1000 + age, 1000 + age))  # type: ignore[operator]
    # A hit on the oldest makes it the newest; then there is room for two and a half.
    assert cache.load(key.cache_key(variants[0], target)) is not None
    small = Cache(cache.root, int(2.5 * size))
    small.trim()
    kept = [variants[0], variants[3]]
    assert {e.key for e in small.entries()} == {key.cache_key(v, target) for v in kept}
    assert sum(e.num_bytes for e in small.entries()) <= small.limit_bytes


def test_entry_just_stored_is_kept_under_any_cap(
    isolated_cache: Path, compiler: CountingCompiler, variant: Any, target: CompileTarget
) -> None:
    tiny = Cache(isolated_cache, 0)
    stored = tiny.get_or_compile(variant, target, compiler=compiler)
    assert stored.directory is not None
    assert stored.directory.is_dir()


def test_trim_removes_what_a_crash_left_in_staging(cache: Cache) -> None:
    old, new = cache.root / "staging" / "1-old", cache.root / "staging" / "2-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (1000, 1000))
    cache.trim()
    assert not old.exists()
    assert new.exists()


def test_entries_are_listed_and_cleared(
    cache: Cache, compiler: CountingCompiler, variant: Any, target: CompileTarget
) -> None:
    assert module.entries() == []
    assert module.clear() == 0
    cache.get_or_compile(variant, target, compiler=compiler)
    (entry,) = module.entries()
    assert entry.key == key.cache_key(variant, target)
    assert abs(entry.last_used - time.time()) < 60
    assert module.clear() == entry.num_bytes > 4096
    assert module.entries() == []


def test_racing_store_keeps_one_whole_entry(
    cache: Cache, compile_fake: Compile, variant: Any, target: CompileTarget
) -> None:
    artifact = compile_fake(variant, target)
    threads = [threading.Thread(target=cache.store, args=(artifact,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.load(artifact.record.key) is not None
    assert len(cache.entries()) == 1
    assert not list((cache.root / "staging").iterdir())


def test_waiting_process_takes_what_the_first_compiled(
    cache: Cache, compile_fake: Compile, variant: Any, target: CompileTarget
) -> None:
    started, calls = threading.Event(), []

    def slow(variant: Any, target: CompileTarget) -> Artifact:
        calls.append(threading.get_ident())
        started.set()
        time.sleep(0.3)
        return compile_fake(variant, target)

    first = threading.Thread(target=lambda: cache.get_or_compile(variant, target, compiler=slow))
    first.start()
    started.wait()
    # A cache object of its own, as in another process: only the lock file is shared.
    found = Cache(cache.root, GIB).get_or_compile(variant, target, compiler=slow)
    first.join()
    assert found.record.key == key.cache_key(variant, target)
    assert len(calls) == 1


_WRITER = """
import pickle, sys
from pathlib import Path
from fovea.compile.cache import Cache
artifact = pickle.loads(Path(sys.argv[2]).read_bytes())
cache = Cache(Path(sys.argv[1]), int(sys.argv[3]))
for _ in range(25):
    cache.store(artifact)
    found = cache.load(artifact.record.key)
    assert found is None or found.contents == artifact.contents
    cache._remove(cache._directory(artifact.record.key))
"""


def test_many_processes_store_load_and_remove_without_harm(
    cache: Cache, compile_fake: Compile, variant: Any, target: CompileTarget, tmp_path: Path
) -> None:
    import pickle

    artifact = compile_fake(variant, target)
    (tmp_path / "artifact").write_bytes(pickle.dumps(artifact))
    command = [sys.executable, "-W", "error", "-c", _WRITER, str(cache.root)]
    command += [str(tmp_path / "artifact"), str(GIB)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "damaged" not in errors
    assert not list((cache.root / "staging").iterdir())


def _serves_from_memory(
    cache: Cache, compiler: CountingCompiler, variant: Any, target: CompileTarget
) -> Artifact:
    with pytest.warns(FoveaWarning, match=r"cannot be written .*FOVEA_CACHE_DIR") as said:
        artifact = cache.get_or_compile(variant, target, compiler=compiler)
    assert len(said) == 1
    assert artifact.directory is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, not again
        again = cache.get_or_compile(variant, target, compiler=compiler)
    assert again is artifact
    assert compiler.calls == 1
    return artifact


def test_cache_below_a_file_serves_from_memory_with_one_warning(
    tmp_path: Path, compiler: CountingCompiler, variant: Any, target: CompileTarget
) -> None:
    (tmp_path / "file").write_text("")
    _serves_from_memory(Cache(tmp_path / "file" / "cache", GIB), compiler, variant, target)


def test_cache_in_a_read_only_place_serves_from_memory_with_one_warning(
    compiler: CountingCompiler, variant: Any, target: CompileTarget
) -> None:
    # /proc takes no folder, from root either.
    _serves_from_memory(Cache(Path("/proc/fovea"), GIB), compiler, variant, target)


def test_compilation_says_that_it_is_cached_only_where_it_is(
    cache: Cache,
    compiler: CountingCompiler,
    compile_fake: Compile,
    variant: Any,
    target: CompileTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []

    def note_of(label: str, note: str) -> contextlib.AbstractContextManager[None]:
        notes.append(note)
        return contextlib.nullcontext()

    monkeypatch.setattr(progress, "compilation", note_of)
    cache.get_or_compile(variant, target, compiler=compiler)
    unwritable = Cache(Path("/proc/fovea/notes"), GIB)
    _serves_from_memory(unwritable, CountingCompiler(compile_fake), variant, target)
    assert notes == ["first use, then cached", "first use"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_failing_write_serves_from_memory_and_leaves_nothing(
    cache: Cache,
    compiler: CountingCompiler,
    variant: Any,
    target: CompileTarget,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    write = Path.write_bytes

    def fail(self: Path, data: bytes) -> int:
        if self.name == PTX:
            raise OSError(code, os.strerror(code))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    _serves_from_memory(cache, compiler, variant, target)
    assert cache.entries() == []
    assert not list((cache.root / "staging").iterdir())


_FULL_DISK = """
import pickle, resource, sys, warnings
from pathlib import Path
from fovea.compile.cache import Cache
artifact = pickle.loads(Path(sys.argv[2]).read_bytes())
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    kept = Cache(Path(sys.argv[1]), 2**30).store(artifact)
assert kept.directory is None and kept == artifact
assert len(said) == 1 and "cannot be written" in str(said[0].message), said
"""


def test_disk_that_takes_no_more_bytes_serves_from_memory(
    cache: Cache, compile_fake: Compile, variant: Any, target: CompileTarget, tmp_path: Path
) -> None:
    import pickle

    (tmp_path / "artifact").write_bytes(pickle.dumps(compile_fake(variant, target)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-B", "-c", _FULL_DISK, str(cache.root), str(tmp_path / "artifact")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert cache.entries() == []


def test_get_artifact_compiles_once_in_a_process(
    compiler: CountingCompiler,
    variant: Any,
    target: CompileTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cache.get_or_compile, "__kwdefaults__", {"compiler": compiler})
    found: list[Artifact] = []
    threads = [
        threading.Thread(target=lambda: found.append(get_artifact(variant, target)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.calls == 1
    assert len({id(a) for a in found}) == 1


@pytest.fixture
def bundle(compile_fake: Compile, variant: Any, target: CompileTarget, tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    compile_fake(variant, target).write(folder / FOLDER / "one")
    entry = {
        "folder": "one",
        "name": variant.name,
        "arch": target.arch,
        "host_triple": target.host_triple,
    }
    index = {"format": 1, "artifacts": {key.bundle_key(variant, target): entry}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_get_artifact_prefers_the_bundle(
    bundle: Path,
    variant: Any,
    target: CompileTarget,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    if how == "variable":
        monkeypatch.setenv("FOVEA_BUNDLE", str(bundle))
    found = get_artifact(variant, target, bundle=bundle if how == "argument" else None)
    assert found.directory == bundle / FOLDER / "one"


def test_get_artifact_without_compiler_and_without_bundle_says_what_to_do(
    variant: Any, target: CompileTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "compiler_version", lambda: None)
    with pytest.raises(UnsupportedError, match=r"fovea-attention\[cuda\].*FOVEA_BUNDLE"):
        get_artifact(variant, target)


def test_get_artifact_missing_in_the_bundle_without_compiler_says_what_it_holds(
    bundle: Path,
    another_variant: Callable[[str], Any],
    target: CompileTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key, "compiler_version", lambda: None)
    with pytest.raises(UnsupportedError, match="it has 1 artifacts for sm_90a"):
        get_artifact(another_variant("other"), target, bundle=bundle)
