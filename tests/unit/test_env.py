from pathlib import Path

import pytest

from fovea import env


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUNDLE", "CACHE_DIR", "CACHE_LIMIT", "CHECK", "QUIET", "RUNTIME_LIBRARY"):
        monkeypatch.delenv(f"FOVEA_{name}", raising=False)


def test_unset_variables_give_the_defaults() -> None:
    assert env.bundle() is None
    assert env.runtime_library() is None
    assert env.cache_limit_bytes() == 2 * 1024**3
    assert not env.check()
    assert not env.quiet()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("4k", 4096), ("1.5M", 3 * 2**19), ("2GB", 2**31), ("1T", 2**40)],
)
def test_cache_limit_with_a_unit_is_read_in_bytes(
    monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    monkeypatch.setenv("FOVEA_CACHE_LIMIT", text)
    assert env.cache_limit_bytes() == size


@pytest.mark.parametrize("text", ["much", "-1", "2X", "G", "nan", "inf", "1e30"])
def test_cache_limit_that_is_no_size_raises(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FOVEA_CACHE_LIMIT", text)
    with pytest.raises(ValueError, match=r"FOVEA_CACHE_LIMIT=.*allowed.*2G"):
        env.cache_limit_bytes()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("On", True), ("0", False), ("", False)])
def test_flag_is_read_from_its_text(
    monkeypatch: pytest.MonkeyPatch, text: str, value: bool
) -> None:
    monkeypatch.setenv("FOVEA_CHECK", text)
    monkeypatch.setenv("FOVEA_QUIET", text)
    assert env.check() is value
    assert env.quiet() is value


def test_flag_that_is_no_boolean_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_CHECK", "maybe")
    with pytest.raises(ValueError, match=r"FOVEA_CHECK='maybe'.*1, true, yes or on; 0, false"):
        env.check()


def test_paths_are_read_and_home_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FOVEA_BUNDLE", "~/bundle")
    monkeypatch.setenv("FOVEA_CACHE_DIR", str(tmp_path / "cache"))
    assert env.bundle() == tmp_path / "bundle"
    assert env.cache_dir() == tmp_path / "cache"


def test_cache_dir_without_a_setting_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "fovea"
    monkeypatch.setitem(__import__("sys").modules, "platformdirs", None)
    assert env.cache_dir() == tmp_path / "fovea"


def test_compiler_settings_are_those_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(env.compiler_settings())
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert dict(env.compiler_settings()) == {**before, "CUTE_DSL_LINEINFO": "1"}
