"""Where the commands print: lines break at a terminal's width, and nowhere in a pipe or a file."""

from rich.console import Console

_UNBROKEN = 1000  # columns; tables take what they need


def output() -> Console:
    """Return standard output, on which the name of a kernel can be searched for."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNBROKEN
    return console
