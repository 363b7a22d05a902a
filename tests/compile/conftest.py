"""What needs the compiler: the toy variants and a cache of their own."""

import sys
from pathlib import Path

import pytest

from fovea.compile import cache, key

# The toys are pickled to spawned workers, which import them by name.
sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = [] if key.compiler_version() else ["test_*.py"]


@pytest.fixture(autouse=True)
def isolated_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep tests away from the user's cache, bundles and each other."""
    root = tmp_path / "cache"
    monkeypatch.setenv("FOVEA_CACHE_DIR", str(root))
    monkeypatch.delenv("FOVEA_CACHE_LIMIT", raising=False)
    monkeypatch.delenv("FOVEA_BUNDLE", raising=False)
    for name in ("_in_process", "_in_process_locks", "_bundles"):
        monkeypatch.setattr(cache, name, {})
    monkeypatch.setattr(cache, "_warned", set())
    return root
