"""Planted faults: every variant of a PTX text with one synchronisation left out or made wrong.

Run each under a few seeds to learn what the emulator reports; `scripts/emulator_faults.py` does so
for this library's forward kernel. A variant need not be a fault: code that never runs, a wait for
something that is long over, a fence that another one covers.

Lives here: finding the statements and rewriting the text. Not here: what a fault looks like when
it runs (`races.py`, `machine/barrier.py`). Invariant: a variant keeps every line where it was, so
reports name the lines of the original.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fovea.emulator.arguments import check_text

_STATEMENT = re.compile(
    r"(?P<guard>@!?[\w%$.]+\s+)?(?P<opcode>[a-z]\w*(?:\.[\w:]+)*)"
    r"(?P<operands>(?:\s(?:[^;:{}]|\{[^;{}]*\})*)?);"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """One variant.

    Attributes:
        kind: "fence", "wait", "result", "commit", "arrive", "expect_tx", "phase", "count" or
            "barrier".
        line: of the statement, in the original and in the variant.
        statement: as it was.
        text: the whole variant.
    """

    kind: str
    line: int
    statement: str
    text: str


def plant_faults(text: str) -> list[PlantedFault]:
    """Return every variant of a PTX text that this module knows, in the order of the text."""
    check_text("text", text, "the PTX text", "pass Path(file).read_text()", has=".version")
    blank = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return list(_variants(text, blank))


def _variants(text: str, blank: str) -> Iterator[PlantedFault]:
    for found in _STATEMENT.finditer(blank):
        for kind, pattern, rewrite in _RULES:
            if not pattern.match(found["opcode"]):
                continue
            new = rewrite(found)
            if new is None:
                continue
            new += "\n" * found[0].count("\n")
            yield PlantedFault(
                kind=kind,
                line=blank.count("\n", 0, found.start()) + 1,
                statement=" ".join(found[0].split()),
                text=text[: found.start()] + new + text[found.end() :],
            )


# --- rewriting one statement ----------------------------------------------------------------------


def _remove(found: re.Match[str]) -> str:
    return ""


def _pass_at_once(found: re.Match[str]) -> str:
    """Let a wait loop on an mbarrier find its phase complete."""
    predicate = found["operands"].split(",")[0].strip()
    return f"setp.eq.u32 {predicate}, 0, 0;"


def _ignore_result(found: re.Match[str]) -> str:
    """Let a wait on an mbarrier happen, and its result be forgotten: nothing comes back to it."""
    result, *others = _split(found["operands"])
    guard, opcode = found["guard"] or "", found["opcode"]
    return (
        f"{{ .reg .pred planted; {guard}{opcode} planted, {', '.join(others)}; "
        f"{guard}setp.eq.u32 {result}, 0, 0; }}"
    )


def _change_last(
    position: int, operation: str, amount: str
) -> Callable[[re.Match[str]], str | None]:
    """Return a rewriting of one operand: `operation` with `amount` in a register of its own."""

    def rewrite(found: re.Match[str]) -> str | None:
        operands = _split(found["operands"])
        if len(operands) <= position:
            return None
        value = operands[position]
        operands[position] = "planted"
        guard, opcode = found["guard"] or "", found["opcode"]
        return (
            f"{{ .reg .b32 planted; {operation} planted, {value}, {amount}; "
            f"{guard}{opcode} {', '.join(operands)}; }}"
        )

    return rewrite


def _without_bytes(found: re.Match[str]) -> str:
    """Turn an arrival that announces bytes into a plain one."""
    operands = _split(found["operands"])
    opcode = found["opcode"].replace(".expect_tx", "")
    return f"{found['guard'] or ''}{opcode} {', '.join(operands[:-1])};"


def _split(operands: str) -> list[str]:
    """Split operands at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", operands)]


_RULES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], str | None]], ...] = tuple(
    (kind, re.compile(pattern), rewrite)
    for kind, pattern, rewrite in (
        ("fence", r"fence\.|wgmma\.fence|tcgen05\.fence", _remove),
        ("wait", r"wgmma\.wait_group|cp\.async(\.bulk)?\.wait_|tcgen05\.wait", _remove),
        ("wait", r"mbarrier\.(try|test)_wait", _pass_at_once),
        ("result", r"mbarrier\.(try|test)_wait", _ignore_result),
        ("commit", r"wgmma\.commit|cp\.async(\.bulk)?\.commit|tcgen05\.commit", _remove),
        ("arrive", r"mbarrier\.arrive(?!.*expect_tx)", _remove),
        ("expect_tx", r"mbarrier\.arrive.*expect_tx", _without_bytes),
        ("phase", r"mbarrier\.(try|test)_wait\.parity", _change_last(2, "xor.b32", "1")),
        ("count", r"mbarrier\.init", _change_last(1, "add.u32", "1")),
        ("count", r"bar(rier)?(\.cta)?\.(sync|arrive)", _change_last(1, "add.u32", "32")),
        ("barrier", r"bar(rier)?(\.cta)?\.(sync|arrive)|barrier\.cluster", _remove),
    )
)
