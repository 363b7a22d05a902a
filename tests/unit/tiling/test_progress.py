"""The progress bar is silent while work is short and when told to be quiet."""

import sys
import time

import pytest

from fovea.tiling import progress
from fovea.tiling.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_progress_of_short_work_prints_nothing(clock, capsys):
    with Progress("create_block_mask", 10) as bar:
        for _ in range(9):
            clock.now += 0.1
            bar.advance(1)
    assert capsys.readouterr().err == ""


def test_progress_without_a_terminal_prints_one_line(clock, capsys):
    with Progress("create_block_mask", 10) as bar:
        for _ in range(10):
            clock.now += 1.0
            bar.advance(1)
    assert capsys.readouterr().err == ("create_block_mask: 10% after 1 s, about 9 s left\n")


def test_progress_on_a_terminal_without_rich_rewrites_its_line(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_rich_bar", lambda label, total: None)
    with Progress("mask", 4) as bar:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        for _ in range(2):
            clock.now += 2.0
            bar.advance(1)
    assert capsys.readouterr().err == (
        "\rmask: 25% after 2 s, about 6 s left \rmask: 50% after 4 s, about 4 s left \n"
    )


def test_progress_with_quiet_prints_nothing(clock, capsys, monkeypatch):
    monkeypatch.setenv("FOVEA_QUIET", "1")
    with Progress("mask", 4) as bar:
        clock.now += 9
        bar.advance(1)
    assert capsys.readouterr().err == ""
