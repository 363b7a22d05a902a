"""Errors about the arguments of the public functions.

Lives here: how a wrong value is shown, and the checks of kinds. Not here: what a launch asks of its
values (`run.py`). Invariant: a text names the argument, the value got, what is allowed and the way
out.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from fovea.emulator.errors import LaunchError
from fovea.errors import invalid

_LONGEST = 60
_MOST_NAMES = 8
_PATH = re.compile(r"[/\\]|\.\w{1,5}$")


def shown(value: object) -> str:
    """Return a value as an error shows it: arrays by dtype and shape, long texts cut."""
    array: Any = value
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"<{type(value).__name__} of {array.dtype}, shape {tuple(array.shape)}>"
    try:
        text = repr(value)
    except Exception:  # a class's own `__repr__` must not hide the error
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def listed(names: Sequence[str]) -> str:
    """Return names as a text, the first few of many."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "") or "none"


def wrong(argument: str, value: object, allowed: str, remedy: str) -> LaunchError:
    """Return the error about one argument."""
    return LaunchError(invalid(argument, shown(value), allowed, remedy))


def check_kind(
    argument: str, value: object, kind: type | tuple[type, ...], allowed: str, remedy: str
) -> None:
    """Raise LaunchError unless a value is of a kind; bool does not count as int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong(argument, value, f"{allowed}, not {type(value).__name__}", remedy)


def check_text(argument: str, value: object, what: str, remedy: str, *, has: str) -> None:
    """Raise LaunchError unless a value is a text; the path of a file is none.

    Args:
        argument: its name.
        value: what was given.
        what: what the text is.
        remedy: the way out.
        has: a word that every such text has, and no path.
    """
    check_kind(argument, value, str, f"{what}, as a str", remedy)
    text = cast(str, value).strip()
    is_comment = text.startswith(("//", "/*"))
    if has in text or "\n" in text or is_comment or not _PATH.search(text):
        return
    raise wrong(argument, value, f"{what} itself, not the path of a file", remedy)


def integers(argument: str, value: object, allowed: str, remedy: str) -> tuple[int, ...]:
    """Return an iterable of integers as a tuple of ints, or raise LaunchError."""
    try:
        return tuple(operator.index(item) for item in cast(Iterable[Any], value))
    except (TypeError, ValueError, RuntimeError):
        raise wrong(argument, value, allowed, remedy) from None
