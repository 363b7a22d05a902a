"""Progress lines of compilations, on stderr.

Lives here: what a waiting user sees. Invariant: nothing is shown for what takes less than a second,
nothing at all under FOVEA_QUIET, and never anything on stdout.
"""

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from fovea import env

PATIENCE_SECONDS = 1.0


@contextmanager
def compilation(label: str, note: str) -> Generator[None]:
    """Say that something is being compiled if it takes more than a second, and how long it took.

    Args:
        label: what is compiled, for what.
        note: what the user may want to know, in brackets.
    """
    if env.quiet():
        yield
        return
    said = threading.Event()

    def say() -> None:
        said.set()
        _write(f"fovea: compiling {label} ({note}) ...")

    start = time.perf_counter()
    timer = threading.Timer(PATIENCE_SECONDS, say)
    timer.daemon = True
    timer.start()
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        timer.cancel()
        if said.is_set():
            state = "compiled" if succeeded else "failed on"
            _write(f"fovea: {state} {label} in {time.perf_counter() - start:.1f} s")


class Counter:
    """A count of finished compilations: a bar with rich on a terminal, else one line each."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None
        if not env.quiet() and sys.stderr.isatty():
            self._bar, self._task = _rich_bar(total)

    def __enter__(self) -> "Counter":
        if self._bar is not None:
            self._bar.start()
        elif self._total > 1 and not env.quiet():
            _write(f"fovea: compiling {self._total} kernels ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, label: str, seconds: float, *, failed: bool = False) -> None:
        """Count one more, and say which."""
        self._done += 1
        text = f"{label}: {'failed' if failed else f'{seconds:.1f} s'}"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        elif not env.quiet():
            _write(f"fovea: compiled {self._done}/{self._total} {text}")


def _rich_bar(total: int) -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
    except ImportError:
        return None, None
    columns = (BarColumn(), MofNCompleteColumn(), Elapsed(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True))
    return bar, bar.add_task("compiling", total=total)


def _write(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
