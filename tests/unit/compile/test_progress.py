import time

import pytest

from fovea.compile import progress


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.05)
    monkeypatch.delenv("FOVEA_QUIET", raising=False)


def test_slow_compilation_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.compilation("kernel for sm_90a", "first use"):
        time.sleep(0.2)
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first == "fovea: compiling kernel for sm_90a (first use) ..."
    assert second.startswith("fovea: compiled kernel for sm_90a in 0.2")


def test_quick_compilation_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.compilation("kernel", "first use"):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_quiet_compilation_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOVEA_QUIET", "1")
    with progress.compilation("kernel", "first use"):
        time.sleep(0.1)
    with progress.Counter(2) as counter:
        counter.advance("kernel", 1.0)
    assert capsys.readouterr().err == ""


def test_failed_compilation_is_not_called_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress.compilation("kernel", "first use"):
            time.sleep(0.1)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert capsys.readouterr().err.splitlines()[1].startswith("fovea: failed on kernel")


def test_counter_without_a_terminal_says_one_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.Counter(2) as counter:
        counter.advance("first", 1.25)
        counter.advance("second", 0.0, failed=True)
    assert capsys.readouterr().err.splitlines() == [
        "fovea: compiling 2 kernels ...",
        "fovea: compiled 1/2 first: 1.2 s",
        "fovea: compiled 2/2 second: failed",
    ]


def test_counter_on_a_terminal_draws_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.Counter(2) as counter:
        counter.advance("first", 1.0)
        counter.advance("second", 2.0)
    assert "2/2" in capsys.readouterr().err
