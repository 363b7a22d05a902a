"""The documentation says what the tree has: generated parts are current, links lead somewhere."""

import importlib.util
import inspect
import json
import os
import re
import statistics
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


# Pages whose blocks are no program, and why.
FRAGMENTS = {
    "src/fovea/emulator/README.md": "the form of a call and of a handler, not one that runs"
}
# What a page's code needs beside fovea; it is not run where that is absent.
NEEDS = {"docs/integrations.md": "transformers", "docs/emulator.md": "numpy"}


def _blocks(page: Path) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    has_compiler = importlib.util.find_spec("cutlass") is not None
    return [block for block in blocks if has_compiler or "fovea.precompile(" not in block]


def _names_of_pages_with_code() -> list[str]:
    pages = [*PAGES, *(ROOT / "src").rglob("*.md")]
    return [str(page.relative_to(ROOT)) for page in pages if _blocks(page)]


@pytest.mark.parametrize("page", sorted({*_names_of_pages_with_code()} - {*FRAGMENTS}))
def test_code_on_a_page_runs(page, tmp_path):
    """The blocks of a page are one program, in the order in which they stand."""
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    check = "\nif 'out' in globals(): assert out.isfinite().all()\n"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::FutureWarning",
            "-c",
            "\n".join(_blocks(ROOT / page)) + check,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr


def test_pages_of_fragments_have_some():
    assert {*FRAGMENTS} <= {*_names_of_pages_with_code()}


def test_every_path_in_the_where_table_exists():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("| I am looking for")[2]
    paths = re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", table)
    assert len(paths) > 30
    homes = (ROOT / "src" / "fovea", ROOT)
    assert [path for path in paths if not any((home / path).exists() for home in homes)] == []


def test_every_folder_of_tests_is_in_the_table_of_contributing():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Tests")[2].partition("\n- ")[0]
    named = re.findall(r"^\| `tests/([a-z]+)` \|", table, re.MULTILINE)
    folders = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir()]
    assert sorted(named) == sorted(name for name in folders if not name.startswith(("_", ".")))


def _ratios(name: str, peer: str) -> list[float]:
    path = ROOT / "benchmarks" / "results" / "h200" / f"{name}.json"
    rows = json.loads(path.read_text())["rows"]
    return [row["fovea"] / row[peer] for row in rows if row.get(peer)]


def test_readme_has_the_ratios_of_the_committed_results():
    text = " ".join((ROOT / "README.md").read_text().split())
    fa3 = _ratios("forward", "fa3")
    mean = statistics.geometric_mean(fa3)
    assert (
        f"the forward runs at {min(fa3):.2f} to {max(fa3):.2f} of FlashAttention-3's steady rate "
        f"over {len(fa3)} shapes ({mean:.2f} in the mean)"
    ) in text
    flex = _ratios("forward_mods", "flex") + _ratios("block_sparse", "flex")
    assert f"at {min(flex):.1f} to {max(flex):.1f} of torch's compiled `flex_attention`" in text


def test_pages_keep_to_their_length():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40
