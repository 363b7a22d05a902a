import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fovea.compile.artifact import (
    FILES,
    PTX,
    RECORD,
    Artifact,
    ArtifactError,
    ArtifactRecord,
    read_artifact,
)
from fovea.compile.target import CompileTarget


@pytest.fixture
def artifact(
    variant: Any, target: CompileTarget, compile_fake: Callable[..., Artifact]
) -> Artifact:
    return compile_fake(variant, target)


def test_artifact_written_and_read_is_the_same(artifact: Artifact, tmp_path: Path) -> None:
    written = artifact.write(tmp_path / "deep" / "folder")
    read = read_artifact(tmp_path / "deep" / "folder")
    assert read == written
    assert read.contents == artifact.contents
    assert read.record == artifact.record
    assert read.directory == tmp_path / "deep" / "folder"
    assert read.record.kernels["fovea_fake_0"].registers == 168


def test_artifact_pickles_for_the_pool(artifact: Artifact) -> None:
    assert pickle.loads(pickle.dumps(artifact)) == artifact


def test_record_as_json_is_readable_and_complete(artifact: Artifact) -> None:
    fields = json.loads(artifact.record.to_json())
    assert fields["kernels"]["fovea_fake_0"]["threads"] == 384
    assert fields["variant"] == "plan"
    assert ArtifactRecord.from_json(artifact.record.to_json()) == artifact.record


@pytest.mark.parametrize("name", [*FILES, RECORD])
def test_artifact_with_a_file_cut_short_is_refused(
    artifact: Artifact, tmp_path: Path, name: str
) -> None:
    artifact.write(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match="damaged"):
        read_artifact(tmp_path)


@pytest.mark.parametrize("name", [*FILES, RECORD])
def test_artifact_with_a_file_missing_is_refused(
    artifact: Artifact, tmp_path: Path, name: str
) -> None:
    artifact.write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ArtifactError, match="no whole artifact"):
        read_artifact(tmp_path)


def test_artifact_with_one_byte_changed_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    artifact.write(tmp_path)
    data = bytearray((tmp_path / PTX).read_bytes())
    data[7] ^= 1
    (tmp_path / PTX).write_bytes(data)
    with pytest.raises(ArtifactError, match=r"kernel\.ptx is damaged"):
        read_artifact(tmp_path)


def test_artifact_of_another_format_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    artifact.write(tmp_path)
    fields = json.loads((tmp_path / RECORD).read_text())
    fields["format"] = 0
    (tmp_path / RECORD).write_text(json.dumps(fields))
    with pytest.raises(ArtifactError, match=r"format 0.*compile it again"):
        read_artifact(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "kernels": 3}'])
def test_record_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError):
        ArtifactRecord.from_json(text)
