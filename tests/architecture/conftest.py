"""The source tree as the architecture tests see it: parsed once, never imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A Python file of the repository."""

    path: str  # from the repository's root, with forward slashes
    num_lines: int
    tree: ast.Module

    @property
    def module(self) -> str:
        """The dotted name of a file under src/, e.g. fovea.plan.sm90."""
        parts = Path(self.path).with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imported_names(self) -> Iterator[tuple[int, str]]:
        """Yield (line, dotted name) of every import, those inside functions included.

        `from a.b import c` yields a.b.c: be c a module or a name in one, the prefix is right.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"


def _parse(folder: str) -> list[SourceFile]:
    files: list[SourceFile] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(
            SourceFile(
                path=path.relative_to(ROOT).as_posix(),
                num_lines=text.count("\n"),
                tree=ast.parse(text, filename=str(path)),
            )
        )
    return files


@pytest.fixture(scope="session")
def library() -> list[SourceFile]:
    """Every file of src/fovea."""
    return _parse("src/fovea")


@pytest.fixture(scope="session")
def repository(library: list[SourceFile]) -> list[SourceFile]:
    """Every Python file of ours: library, tests, benchmarks, examples, docs."""
    others = [file for name in ("tests", "benchmarks", "examples", "docs") for file in _parse(name)]
    return library + others
