import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fovea.version
from fovea.compile import key
from fovea.compile.target import CompileTarget


@pytest.fixture
def forget_sources() -> None:
    key.source_hash.cache_clear()


def test_key_is_stable(variant: Any, target: CompileTarget) -> None:
    assert key.cache_key(variant, target) == key.cache_key(variant, target)
    assert len(key.cache_key(variant, target)) == 64


def test_key_differs_by_variant_and_target(
    variant: Any, target: CompileTarget, another_variant: Callable[[str], Any]
) -> None:
    arm = CompileTarget(arch="sm_90a", host_triple="aarch64-unknown-linux-gnu")
    found = {
        key.cache_key(variant, target),
        key.cache_key(another_variant("other plan"), target),
        key.cache_key(type(variant)(name="fovea_other"), target),
        key.cache_key(variant, CompileTarget(arch="sm_100a")),
        key.cache_key(variant, arm),
    }
    assert len(found) == 5 - (target == arm)


def test_key_differs_by_compiler_version_sources_and_settings(
    variant: Any, target: CompileTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {key.cache_key(variant, target)}
    monkeypatch.setattr(key, "compiler_version", lambda: "9.9")
    found.add(key.cache_key(variant, target))
    monkeypatch.setattr(key, "source_hash", lambda: "other")
    found.add(key.cache_key(variant, target))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    found.add(key.cache_key(variant, target))
    monkeypatch.setattr(fovea.version, "__version__", "99")
    found.add(key.cache_key(variant, target))
    assert len(found) == 5


def test_bundle_key_holds_only_what_a_machine_without_compiler_knows(
    variant: Any, target: CompileTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key.bundle_key(variant, target)
    monkeypatch.setattr(key, "compiler_version", lambda: None)
    monkeypatch.setattr(key, "source_hash", lambda: "other")
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert key.bundle_key(variant, target) == before
    monkeypatch.setattr(fovea.version, "__version__", "99")
    assert key.bundle_key(variant, target) != before


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("kernels/sm90/forward/kernel.py", True),
        ("plan/sm90.py", True),
        ("mods/graph.py", True),
        ("mods/library.py", False),
        ("reference/dense.py", False),
        ("kernels/README.md", False),
    ],
)
def test_source_hash_follows_the_sources_that_emit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forget_sources: None, file: str, counts: bool
) -> None:
    monkeypatch.setattr(fovea.version, "__file__", str(tmp_path / "version.py"))
    before = key.source_hash()
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    key.source_hash.cache_clear()
    with_file = key.source_hash()
    path.write_text("x = 2\n")
    key.source_hash.cache_clear()
    changed = key.source_hash()
    key.source_hash.cache_clear()
    assert len({before, with_file, changed}) == (3 if counts else 1)


def test_compiler_version_without_the_compiler_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    key.compiler_version.cache_clear()
    assert key.compiler_version() is None
    key.compiler_version.cache_clear()
