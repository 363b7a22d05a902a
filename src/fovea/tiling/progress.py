"""One progress bar for work of unknown speed, silent while it is short.

Lives here: `Progress`. Invariant: nothing is printed in the first second, nor ever with
FOVEA_QUIET=1; what is printed goes to stderr. rich draws the bar where it is installed, otherwise
one plain line is rewritten (or, where stderr is no terminal, printed once at the start).
"""

import sys
import time
from types import TracebackType
from typing import Any

from fovea import env

_SILENT_SECONDS = 1.0
_REFRESH_SECONDS = 0.25


class Progress:
    """A bar over a known number of steps, used as a context manager."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._next_draw = self._started + _SILENT_SECONDS
        self._is_silent = env.quiet()
        self._bar: Any = None
        self._has_printed = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._has_printed and sys.stderr.isatty():
            sys.stderr.write("\n")

    def advance(self, steps: int) -> None:
        """Count `steps` as done and redraw if it is time to."""
        self._done += steps
        now = time.monotonic()
        if self._is_silent or self._done == 0 or now < self._next_draw:
            return
        self._next_draw = now + _REFRESH_SECONDS
        if not self._has_printed:
            self._bar = _rich_bar(self._label, self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif sys.stderr.isatty() or not self._has_printed:
            sys.stderr.write(self._line(now))
            sys.stderr.flush()
        self._has_printed = True

    def _line(self, now: float) -> str:
        spent = now - self._started
        left = spent * (self._total - self._done) / max(self._done, 1)
        share = 100 * self._done // max(self._total, 1)
        text = f"{self._label}: {share}% after {spent:.0f} s, about {left:.0f} s left"
        return f"\r{text} " if sys.stderr.isatty() else f"{text}\n"


def _rich_bar(label: str, total: int) -> Any:
    """Return a started rich progress display on a terminal, or None."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    bar = RichProgress(console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total)
    bar.start()
    return bar
