import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_variants import ToyAdd, ToyBroken

from fovea.compile import key
from fovea.compile.aot import load_bundle, write_bundle
from fovea.compile.bundle import FOLDER
from fovea.compile.cache import get_artifact
from fovea.compile.compiler import CompileError
from fovea.compile.target import HOST_TRIPLES, CompileTarget

VARIANTS = [ToyAdd(), ToyAdd(threads=64)]
TARGETS = [
    CompileTarget(arch="sm_90a", host_triple=HOST_TRIPLES[0]),
    CompileTarget(arch="sm_90a", host_triple=HOST_TRIPLES[1]),
    CompileTarget(arch="sm_100a", host_triple=HOST_TRIPLES[0]),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aot") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOVEA_CACHE_DIR", str(folder.parent / "cache"))
        write_bundle(VARIANTS, TARGETS, folder, workers=2)
    return folder


def test_bundle_holds_every_variant_for_every_target(path: Path) -> None:
    bundle = load_bundle(path)
    assert len(bundle.index) == 6
    for variant in VARIANTS:
        for target in TARGETS:
            found = bundle.find(variant, target)
            assert found is not None
            assert found.record.target == target
            assert found.record.kernels["toy_add_0"].threads == variant.threads
    assert bundle.find(ToyAdd(threads=32), TARGETS[0]) is None
    assert bundle.find(ToyAdd(), CompileTarget(arch="sm_103a")) is None


def test_bundle_serves_without_the_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "compiler_version", lambda: None)
    monkeypatch.setattr(key, "source_hash", lambda: "sources of another build")
    found = get_artifact(ToyAdd(), TARGETS[0], bundle=path)
    assert found.directory is not None
    assert found.directory.parent == path / FOLDER


_NO_COMPILER = """
import importlib.abc, importlib.metadata, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "platformdirs", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
distribution = importlib.metadata.distribution
def hidden(name):
    if name.startswith("nvidia-cutlass"):
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.metadata.distribution = hidden
from toy_variants import ToyAdd
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.runtime.module import open_launcher
artifact = get_artifact(ToyAdd(), CompileTarget(arch="sm_90a"))
import torch
x = torch.zeros(4)
try:
    open_launcher(artifact)(x, x, x, 1.0)
except ValueError as error:
    print(error)
"""


def test_machine_with_the_runtime_library_alone_opens_the_bundle(path: Path) -> None:
    from fovea.runtime import module

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "FOVEA_BUNDLE": str(path),
        "FOVEA_CACHE_DIR": "/proc/none",
        "FOVEA_RUNTIME_LIBRARY": str(module.runtime_library()),
    }
    done = subprocess.run(
        [sys.executable, "-c", _NO_COMPILER], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # The launcher itself speaks: it was opened, and refuses a CPU tensor.
    assert "expected device_type=cuda" in done.stdout


def test_bundle_is_replaced_as_a_whole(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    for variants in (VARIANTS, VARIANTS[1:]):
        write_bundle(variants, TARGETS[:1], folder, workers=1)
        assert len(load_bundle(folder).artifacts()) == len(variants)
    assert [p.name for p in tmp_path.iterdir() if "bundle" in p.name] == ["bundle"]


def test_folder_with_other_things_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match="no bundle"):
        write_bundle(VARIANTS, TARGETS, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_bundle_that_does_not_compile_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="toy_broken"):
        write_bundle([ToyBroken()], TARGETS[:1], tmp_path / "bundle", workers=1)
    assert not (tmp_path / "bundle").exists()


def test_folder_that_cannot_be_made_is_named_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea.compile.aot.compile_many", lambda *a, **k: pytest.fail("compiled"))
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "bundle"
    with pytest.raises(OSError, match=r"path=.*bundle cannot be made \(Not a directory\); name"):
        write_bundle(VARIANTS, TARGETS, folder)
