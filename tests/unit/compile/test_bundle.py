import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fovea.compile import key
from fovea.compile.artifact import CUBIN, Artifact, ArtifactError
from fovea.compile.bundle import FOLDER, INDEX, load_bundle
from fovea.compile.target import CompileTarget
from fovea.errors import FoveaWarning

Compile = Callable[..., Artifact]


@pytest.fixture
def path(compile_fake: Compile, variant: Any, target: CompileTarget, tmp_path: Path) -> Path:
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


def test_variant_in_the_bundle_is_found(path: Path, variant: Any, target: CompileTarget) -> None:
    found = load_bundle(path).find(variant, target)
    assert found is not None
    assert found.record.variant == variant.key_text()
    assert load_bundle(path).artifacts() == [found]
    assert load_bundle(path).summary().startswith("1 artifacts for sm_90a on ")


def test_variant_or_target_not_in_the_bundle_is_none(
    path: Path, variant: Any, target: CompileTarget, another_variant: Callable[[str], Any]
) -> None:
    bundle = load_bundle(path)
    assert bundle.find(another_variant("other"), target) is None
    assert bundle.find(variant, CompileTarget(arch="sm_100a")) is None


def test_artifact_of_another_compiler_is_not_used_where_there_is_one(
    path: Path, variant: Any, target: CompileTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "compiler_version", lambda: "9.9")
    with pytest.warns(FoveaWarning, match=r"here is 9\.9.*fovea compile"):
        assert load_bundle(path).find(variant, target) is None


def test_artifact_of_other_sources_is_not_used_where_there_is_a_compiler(
    path: Path, variant: Any, target: CompileTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = load_bundle(path).artifacts()[0].record
    monkeypatch.setattr(key, "compiler_version", lambda: record.compiler_version)
    monkeypatch.setattr(key, "source_hash", lambda: "other")
    with pytest.warns(FoveaWarning, match="made from other kernel sources"):
        assert load_bundle(path).find(variant, target) is None


def test_artifact_of_other_sources_is_used_without_a_compiler(
    path: Path, variant: Any, target: CompileTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "compiler_version", lambda: None)
    monkeypatch.setattr(key, "source_hash", lambda: "other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_bundle(path).find(variant, target) is not None


def test_damaged_artifact_in_a_bundle_raises(
    path: Path, variant: Any, target: CompileTarget
) -> None:
    (path / FOLDER / "one" / CUBIN).write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"kernel\.cubin is damaged"):
        load_bundle(path).find(variant, target)


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"format": 7, "artifacts": {}}', '{"format": 1}']
)
def test_folder_that_is_no_bundle_raises(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / INDEX).write_text(text)
    with pytest.raises(ArtifactError, match="bundle"):
        load_bundle(tmp_path)
