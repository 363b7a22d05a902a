"""The documentation says what the tree has: generated parts are current, links lead somewhere."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fovea
from fovea.mods.picture import EXAMPLES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if not path.name.startswith(".")
)


def test_generated_parts_are_current():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "tables.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}(run scripts/docs)"


def test_every_mod_of_the_library_has_its_picture():
    drawn = {path.stem for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert drawn == set(EXAMPLES), "run scripts/docs"
    makers = {name: getattr(fovea.mods, name) for name in fovea.mods.__all__}
    mods = [
        name
        for name, maker in makers.items()
        if "Callable" in str(inspect.signature(maker).return_annotation)
    ]
    assert [name for name in mods if name not in EXAMPLES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    inside = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in inside if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_code_on_the_first_pages_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["out"].isfinite().all()


def test_every_path_in_the_where_table_exists():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("| I am looking for")[2]
    paths = re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", table)
    assert len(paths) > 30
    homes = (ROOT / "src" / "fovea", ROOT)
    assert [path for path in paths if not any((home / path).exists() for home in homes)] == []


def test_pages_keep_to_their_length():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40
