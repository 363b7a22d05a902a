"""Write the generated parts of the documentation into its pages.

Lives here: the parts that are text; pictures are `gallery.py`'s. A generated part stands between
`<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` and is never edited by hand.

Usage: python docs/tables.py           write
       python docs/tables.py --check   fail where a page is out of date
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from fovea import env

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"


def environment() -> str:
    """Return the table of environment variables, from the docstring of fovea.env."""
    rows = [line for line in (env.__doc__ or "").splitlines() if line.startswith("|")]
    return "\n".join(re.sub(r"\b(FOVEA_\w+)\b", r"`\1`", row) for row in rows)


def rule_tests(rule: int) -> str:
    """Return the line that names the tests guarding one rule of the meaning."""
    files = sorted((TESTS / "unit" / "semantics").glob(f"test_rule_{rule:02d}_*.py"))
    if not files:
        return "*No test guards this rule yet.*"
    return "Test: " + ", ".join(f"`{file.relative_to(TESTS.parent)}`" for file in files)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "environment.md": {"environment": environment},
    "semantics.md": {f"rule {n}": lambda n=n: rule_tests(n) for n in range(1, 14)},
}


def fill(page: str, name: str, text: str) -> str:
    """Return a page with one generated part replaced.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"no generated part {name!r}; add {begin} and {end} to the page")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(*, check: bool) -> int:
    """Write (or only compare) every generated part and return the exit status."""
    stale: list[str] = []
    for file, parts in PARTS.items():
        path = DOCS / file
        old = page = path.read_text(encoding="utf-8")
        for name, make in parts.items():
            page = fill(page, name, make())
        if page == old:
            continue
        stale.append(file)
        if not check:
            path.write_text(page, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
