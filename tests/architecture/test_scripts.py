"""Scripts and pins: exact, and the same wherever a version is written."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ROOT / "scripts" / name for name in ("bench", "check", "demo", "docs", "test", "test_foreign")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _pins() -> dict[str, str]:
    """Return name -> version of every line in the requirement files."""
    pins: dict[str, str] = {}
    for file in sorted((ROOT / "scripts").glob("requirements-*.txt")):
        for line in file.read_text().splitlines():
            text = line.partition("#")[0].partition(";")[0].strip()
            if not text or text.startswith("-r "):
                continue
            match = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)", text)
            assert match, f"{file.name}: {line!r} is no exact pin"
            assert pins.setdefault(match[1], match[2]) == match[2], f"{match[1]} is pinned twice"
    return pins


def _names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", text)[0] for text in requirements}


def test_every_requirement_of_the_project_is_pinned():
    wanted = _names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        wanted |= _names(extra)
    assert wanted - set(_pins()) == set()


def test_ruff_is_the_same_in_scripts_hooks_and_extra():
    version = _pins()["ruff"]
    hooks = re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == [version, version]
    assert f"ruff=={version}" in PROJECT["optional-dependencies"]["test"]


def test_torch_is_the_only_hard_dependency():
    assert _names(PROJECT["dependencies"]) == {"torch"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_is_executable_bash_that_parses(script):
    assert script.stat().st_mode & 0o111
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", script], check=True)


def test_bench_of_an_unknown_suite_names_the_list_before_it_sets_anything_up():
    ended = subprocess.run([ROOT / "scripts" / "bench", "foo"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert re.search(r"error: .*'foo'.*scripts/bench --list", ended.stderr)


def test_continuous_integration_calls_the_script_for_people():
    assert 'scripts/test"' in (ROOT / ".ci" / "run").read_text()
