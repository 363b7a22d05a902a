"""Artifacts and variants for tests that need no compiler."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fovea.compile import cache, key
from fovea.compile.artifact import FILES, Artifact, ArtifactRecord, seal_artifact
from fovea.compile.cubin import KernelResources
from fovea.compile.target import CompileTarget

RESOURCES = KernelResources(
    registers=168, stack_bytes=0, local_bytes=0, shared_bytes=1024, threads=384
)


@dataclasses.dataclass(frozen=True)
class FakeVariant:
    name: str = "fovea_fake"
    text: str = "plan"

    def key_text(self) -> str:
        return self.text

    def build(self) -> tuple[object, list[object]]:
        raise AssertionError("nothing here may reach the compiler")


def fake_artifact(variant: FakeVariant, target: CompileTarget) -> Artifact:
    """Return what a compiler would for this variant: other text, other bytes."""
    seed = f"{variant}{target}".encode()
    contents = {name: hashlib.sha256(seed + name.encode()).digest() * 32 for name in FILES}
    record = ArtifactRecord(
        name=variant.name,
        symbol=f"__tvm_ffi_{variant.name}",
        key=key.cache_key(variant, target),
        arch=target.arch,
        host_triple=target.host_triple,
        variant=variant.key_text(),
        fovea_version="0",
        compiler_version=key.compiler_version() or "none",
        source_hash=key.source_hash(),
        kernels={f"{variant.name}_0": RESOURCES},
        compile_seconds=0.5,
    )
    return seal_artifact(record, contents)


@pytest.fixture
def target() -> CompileTarget:
    return CompileTarget(arch="sm_90a")


@pytest.fixture
def variant() -> FakeVariant:
    return FakeVariant()


@pytest.fixture
def compile_fake() -> Callable[[FakeVariant, CompileTarget], Artifact]:
    return fake_artifact


@pytest.fixture
def another_variant() -> Callable[[str], FakeVariant]:
    return lambda text: FakeVariant(text=text)


@pytest.fixture(autouse=True)
def isolated_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep tests away from the user's cache, bundles and each other."""
    root = tmp_path / "cache"
    monkeypatch.setenv("FOVEA_CACHE_DIR", str(root))
    monkeypatch.delenv("FOVEA_CACHE_LIMIT", raising=False)
    monkeypatch.delenv("FOVEA_BUNDLE", raising=False)
    for name in ("_in_process", "_in_process_locks", "_bundles"):
        monkeypatch.setattr(cache, name, {})
    monkeypatch.setattr(cache, "_warned", set())
    return root
