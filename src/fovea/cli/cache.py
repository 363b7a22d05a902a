"""`fovea cache list` and `fovea cache clear`.

Lives here: the table on the terminal. What the cache is and how it stays whole is in
`compile/cache.py`.
"""

import json
import time
from typing import Annotated

import typer
from rich.table import Table

from fovea.cli.console import output
from fovea.compile import artifact as artifacts
from fovea.compile import cache

SHOWN = 20  # entries that fit a screen
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one list of all.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help=f"Not only the last {SHOWN}.")] = False,
) -> None:
    """List the compiled kernels that are kept on disk, last used first."""
    folder = cache.default_cache()
    entries = folder.entries()
    if as_json:
        print(
            json.dumps(
                [
                    {"key": e.key, "bytes": e.num_bytes, "last_used": e.last_used, **_named(e)}
                    for e in entries
                ],
                indent=1,
            )
        )
        return
    console = output()
    if not entries:
        console.print(f"{folder.root} holds no compiled kernel")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("kernel", "for", "size", "used", "key"):
        justify = "right" if heading in ("size", "used") else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    shown = entries if show_all else entries[:SHOWN]
    for entry in shown:
        size = f"{entry.num_bytes / 2**10:.0f} KiB"
        named = _named(entry)
        used = _ago(entry.last_used)
        table.add_row(named["name"], named["arch"], size, used, entry.key[:8])
    console.print(table)
    if len(shown) < len(entries):
        console.print(f"and {len(entries) - len(shown)} used before (--all lists them)")
    total = sum(entry.num_bytes for entry in entries) / 2**20
    limit = folder.limit_bytes / 2**20
    console.print(
        f"{len(entries)} kernels, {total:.1f} of at most {limit:.0f} MiB in {folder.root}"
    )


def clear() -> None:
    """Remove every compiled kernel from disk; they are compiled again when they are needed."""
    root = cache.default_cache().root
    freed = cache.clear()
    print(f"{freed / 2**20:.1f} MiB freed in {root}")


def _named(entry: cache.Entry) -> dict[str, str]:
    """Return what an entry's record calls itself; a damaged one is named so, not hidden."""
    try:
        text = (entry.directory / artifacts.RECORD).read_text()
        record = artifacts.ArtifactRecord.from_json(text)
    except (OSError, artifacts.ArtifactError):
        return {"name": "(damaged)", "arch": "?"}
    return {"name": record.name, "arch": record.arch}


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
