"""Bundles of artifacts made ahead of time, as a machine without a compiler reads them.

Lives here: the index and the search in it. Making a bundle is `aot`'s work. Invariant: an artifact
is found by what such a machine knows (GPU architecture, processor, fovea's version, plan and mod
graphs); the compiler's version and the sources' hash are compared only where there is a compiler.

    <path>/index.json          bundle key -> folder, name and target
    <path>/artifacts/<key>/    one artifact each
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.compile import key as keys
from fovea.compile.artifact import Artifact, ArtifactError, read_artifact
from fovea.compile.key import Variant
from fovea.compile.target import CompileTarget
from fovea.errors import FoveaWarning

INDEX, FOLDER = "index.json", "artifacts"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleEntry:
    """One line of a bundle's index."""

    folder: str
    name: str
    arch: str
    host_triple: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: its folder.
        index: where each artifact lies and what it is, by bundle key.
    """

    path: Path
    index: Mapping[str, "BundleEntry"]

    def find(self, variant: Variant, target: CompileTarget) -> Artifact | None:
        """Return the artifact of a variant for a target, or None where the bundle has none to use.

        One that another compiler or other sources made is not used where it could be compiled anew;
        that is said once.

        Raises:
            ArtifactError: the artifact's files are damaged.
        """
        entry = self.index.get(keys.bundle_key(variant, target))
        if entry is None:
            return None
        artifact = read_artifact(self.path / FOLDER / entry.folder)
        stale = _staleness(artifact)
        if stale:
            warnings.warn(
                f"bundle {self.path} holds {variant.name!r} for {target} {stale}: it is not used "
                "and the kernel compiled here; make the bundle again with `fovea compile`",
                FoveaWarning,
                stacklevel=2,
            )
            return None
        return artifact

    def artifacts(self) -> list[Artifact]:
        """Return all artifacts of the bundle.

        Raises:
            ArtifactError: one is damaged.
        """
        return [read_artifact(self.path / FOLDER / e.folder) for e in self.index.values()]

    def summary(self) -> str:
        """Return how many artifacts there are, for which GPUs and processors."""
        targets = sorted(
            {f"{e.arch} on {e.host_triple.partition('-')[0]}" for e in self.index.values()}
        )
        return f"{len(self.index)} artifacts for {', '.join(targets) or 'nothing'}"


def load_bundle(path: Path) -> Bundle:
    """Open a bundle; its artifacts are read when they are asked for.

    Raises:
        ArtifactError: there is no bundle of this format.
    """
    try:
        content: dict[str, Any] = json.loads((path / INDEX).read_text())
        if content["format"] != FORMAT:
            raise ArtifactError(
                f"bundle {path} has format {content['format']!r}, this fovea reads {FORMAT}; make "
                "it again with `fovea compile`"
            )
        index = {str(k): BundleEntry(**e) for k, e in content["artifacts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"no bundle in {path} ({error!r}); name (FOVEA_BUNDLE) a folder that "
            "`fovea compile --bundle` or fovea.precompile(bundle=...) made"
        ) from error
    return Bundle(path=path, index=index)


def _staleness(artifact: Artifact) -> str:
    version = keys.compiler_version()
    if version is None:
        return ""
    if version != artifact.record.compiler_version:
        return f"made by compiler {artifact.record.compiler_version}, here is {version}"
    if keys.source_hash() != artifact.record.source_hash:
        return "made from other kernel sources"
    return ""
