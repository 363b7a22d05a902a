"""The public face: sorted, documented, and all of it there."""

import ast
import importlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _all_lists(library):
    for file in library:
        for node in file.tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
            ):
                yield file, ast.literal_eval(node.value)


def test_every_all_list_is_sorted_and_unique(library):
    unsorted = [file.path for file, names in _all_lists(library) if names != sorted(set(names))]
    assert unsorted == []


def test_every_public_name_exists_and_is_documented():
    fovea = importlib.import_module("fovea")
    names = [name for name in fovea.__all__ if name != "__version__"]
    missing = [name for name in names if not hasattr(fovea, name)]
    undocumented = [
        name for name in names if name not in missing and not getattr(fovea, name).__doc__
    ]
    assert (missing, undocumented) == ([], [])


def test_version_is_the_one_in_version_py():
    fovea = importlib.import_module("fovea")
    version = importlib.import_module("fovea.version")
    assert fovea.__version__ == version.__version__


def test_every_package_but_kernels_is_type_checked_strictly(library):
    """No file is exempt: a new package must be named in pyright's strict list."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["include"] == ["src"]
    assert "exclude" not in settings
    packages = {"/".join(file.path.split("/")[:3]) for file in library if file.path.count("/") > 2}
    assert packages - {"src/fovea/kernels"} - set(settings["strict"]) == set()
    assert "src/fovea/*.py" in settings["strict"]
