"""An artifact: one compiled kernel variant as files, and the record that describes it.

Lives here: the value, its folder on disk, and the check that the files are whole. Making one is
`compiler`'s work, keeping them `cache`'s and `bundle`'s, running one `runtime/`'s. Invariant: an
`Artifact` that exists is whole: its contents were checked against the record's checksums.

Use:

    artifact = compile_variant(variant, CompileTarget(arch="sm_90a"))
    artifact.ptx, artifact.cubin                     # the kernel
    artifact.record.kernels["fovea_fwd_0"].registers # what it uses
    artifact.write(folder); read_artifact(folder)    # travel
    fovea.runtime.module.load(artifact, device)      # run

A folder holds `record.json`, `launcher.so` (what a GPU machine opens), `launcher.o` (the same
before linking, what the emulator opens), `kernel.ptx` and `kernel.cubin`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fovea.compile.cubin import KernelResources
from fovea.compile.target import CompileTarget

# Raise it when the files, the launcher's interface or the record change meaning.
FORMAT = 1

RECORD = "record.json"
LAUNCHER_LIBRARY, LAUNCHER_OBJECT = "launcher.so", "launcher.o"
PTX, CUBIN = "kernel.ptx", "kernel.cubin"
FILES = (LAUNCHER_LIBRARY, LAUNCHER_OBJECT, PTX, CUBIN)


class ArtifactError(RuntimeError):
    """A folder that holds no whole artifact of this format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRecord:
    """What an artifact is and what it was made from: the content of record.json.

    Attributes:
        name: the variant's name.
        symbol: name under which the launcher library shows its entry.
        key: identity in the cache.
        arch, host_triple: what it runs on.
        variant: canonical text of the plan and the mod graphs.
        fovea_version, compiler_version, source_hash: what made it.
        kernels: resources by PTX entry name.
        compile_seconds: time from the call of the compiler to the written files.
        checksums: SHA-256 of each file, hexadecimal.
    """

    name: str
    symbol: str
    key: str
    arch: str
    host_triple: str
    variant: str
    fovea_version: str
    compiler_version: str
    source_hash: str
    kernels: Mapping[str, KernelResources]
    compile_seconds: float
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    format: int = FORMAT

    @property
    def target(self) -> CompileTarget:
        return CompileTarget(arch=self.arch, host_triple=self.host_triple)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ArtifactRecord":
        """Return the record that a JSON text holds.

        Raises:
            ArtifactError: the text is no record of this format.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.get("format") != FORMAT:
                raise ArtifactError(
                    f"artifact has format {fields.get('format')!r}, this fovea reads {FORMAT}; "
                    "compile it again"
                )
            kernels = {n: KernelResources(**k) for n, k in fields.pop("kernels").items()}
            return cls(kernels=kernels, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{RECORD} is damaged: {error}; compile it again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A whole artifact, its files in memory.

    Attributes:
        record: what it is.
        contents: the bytes of each file.
        directory: where the same files lie on disk, or None.
    """

    record: ArtifactRecord
    contents: Mapping[str, bytes] = field(repr=False)
    directory: Path | None = None

    @property
    def ptx(self) -> str:
        return self.contents[PTX].decode()

    @property
    def cubin(self) -> bytes:
        return self.contents[CUBIN]

    @property
    def launcher_object(self) -> bytes:
        return self.contents[LAUNCHER_OBJECT]

    @property
    def launcher_library(self) -> bytes:
        return self.contents[LAUNCHER_LIBRARY]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.contents.values()))

    def write(self, directory: Path) -> "Artifact":
        """Write the files to a folder that is made if need be, the record last.

        Raises:
            OSError: the folder cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in self.contents.items():
            (directory / name).write_bytes(data)
        (directory / RECORD).write_text(self.record.to_json())
        return Artifact(record=self.record, contents=self.contents, directory=directory)


def seal_artifact(record: ArtifactRecord, contents: Mapping[str, bytes]) -> Artifact:
    """Return the artifact of these files, its record completed with their checksums."""
    checksums = {name: _checksum(contents[name]) for name in FILES}
    fields = {n: getattr(record, n) for n in ArtifactRecord.__slots__ if n != "checksums"}
    sealed = ArtifactRecord(**fields, checksums=checksums)
    return Artifact(record=sealed, contents={name: contents[name] for name in FILES})


def read_artifact(directory: Path) -> Artifact:
    """Return the artifact in a folder, checked against its checksums.

    Raises:
        ArtifactError: the folder is not there, or a file is missing, cut short or changed.
    """
    try:
        record = ArtifactRecord.from_json((directory / RECORD).read_text())
        contents = {name: (directory / name).read_bytes() for name in FILES}
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"no whole artifact in {directory}: {error}") from error
    for name, data in contents.items():
        if record.checksums.get(name) != _checksum(data):
            raise ArtifactError(
                f"{directory / name} is damaged ({len(data)} bytes, wrong checksum); remove the "
                "folder and compile again"
            )
    return Artifact(record=record, contents=contents, directory=directory)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
