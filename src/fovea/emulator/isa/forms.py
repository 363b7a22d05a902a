"""Forms of instructions in the manual's notation, and matching of opcodes against them.

A form is a line such as

    ld{.weak}.space{.cop}{.L2::cache_hint}{.vec}.type d, [a]{, cache-policy}

`.x` is a literal qualifier unless `x` names a set of values given beside the form; `{...}` is
optional, as a whole: of `{.sem.scope}` both are there or none. Operand names are the manual's: `d`,
`a-desc`; `[a]` a memory operand, `d|p` a pair.
Lives here: parsing and matching of that notation. Not here: what an instruction does.
Invariant: a match binds every set name to its value and every optional literal to True or False.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Modifiers = dict[str, str | bool]
Decoder = Callable[..., Any]

# optional trailing operands that are present exactly when a qualifier is
_OPERAND_QUALIFIER = {"cache-policy": "L2::cache_hint", "ctaMask": "multicast::cluster"}


@dataclass(frozen=True, slots=True)
class _Part:
    """One qualifier: literal text, or the name of a value set.

    `optional` is how many qualifiers may be left out from here on (0: this one is needed).
    """

    name: str
    values: frozenset[str] | None
    optional: int


@dataclass(frozen=True, slots=True)
class Form:
    """One line of the table of forms."""

    notation: str
    mnemonic: str
    parts: tuple[_Part, ...]
    operands: tuple[str, ...]
    optional_operands: tuple[str, ...]

    def match(self, qualifiers: tuple[str, ...]) -> Modifiers | None:
        """Return the bound qualifiers if the opcode has this form, else None."""
        return _match(self.parts, qualifiers)

    def reorder(self, qualifiers: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the qualifiers in the form's order, if they are its own in another one.

        ptxas takes them in any order, but for those that belong to the mnemonic, and for state
        spaces, types and layouts, whose order says which operand they speak of.
        """
        if self.mnemonic in _STRICT:
            return None
        count = next((n for n, part in enumerate(self.parts) if not _is_word(part)), 0)
        head, rest = self.parts[:count], qualifiers[count:]
        if _match(head, qualifiers[:count]) is None:
            return None
        ordered = _reorder(self.parts[count:], rest)
        return None if ordered is None else (*qualifiers[:count], *ordered)

    def bind(self, count: int, modifiers: Modifiers) -> tuple[str, ...] | None:
        """Return the operand names for `count` operands, or None if the count does not fit."""
        names = list(self.operands)
        extra = count - len(names)
        for name in self.optional_operands:
            qualifier = _OPERAND_QUALIFIER.get(name.strip("[]"))
            if qualifier is not None:
                if not modifiers.get(qualifier, False):
                    continue
            elif extra <= 0:
                continue
            names.append(name)
            extra -= 1
        return tuple(names) if extra == 0 else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered form, and how what it does is known."""

    form: Form
    decode: Decoder
    source: str
    evidence: str
    family: str
    targets: str
    kind: str

    def exists_on(self, target: str) -> bool:
        """Return whether a target has the form; `sm_90+` in `targets` means all from there on."""
        return not self.targets or any(
            name == target or (name[-1] == "+" and _architecture(target) >= _architecture(name))
            for name in self.targets.split(",")
        )


def _architecture(target: str) -> int:
    return int(target.removeprefix("sm_").rstrip("+af"))


def _match(parts: tuple[_Part, ...], qualifiers: tuple[str, ...]) -> Modifiers | None:
    if not parts:
        return {} if not qualifiers else None
    part, rest = parts[0], parts[1:]
    if qualifiers:
        head = qualifiers[0]
        hit = head in part.values if part.values is not None else head == part.name
        if hit:
            bound = _match(rest, qualifiers[1:])
            if bound is not None:
                bound[part.name] = head if part.values is not None else True
                return bound
    if part.optional:
        bound = _match(parts[part.optional :], qualifiers)
        if bound is not None:
            for left_out in parts[: part.optional]:
                bound.setdefault(left_out.name, "" if left_out.values is not None else False)
            return bound
    return None


# parts of a mnemonic that are written as qualifiers, and instructions that keep the manual's order
_WORDS = frozenset(
    """async bulk tensor reduce commit_group wait_group wait_all proxy to idx lo hi wide l r init
    inval arrive arrive_drop expect_tx complete_tx test_wait try_wait parity
    pending_count""".split()
)
_STRICT = ("mma", "wmma", "wgmma", "tcgen05", "bar", "barrier", "tensormap", "clusterlaunchcontrol",
           "createpolicy", "multimem")  # fmt: skip
_LAYOUTS = ("row", "col")
_TYPE = re.compile(r"(tf|bf|ue|[busfe])\d+(m\d+)?(x\d+)?|s2f6x2|pred")
_SPACES = ("global", "shared", "local", "const", "param")


def _group(qualifier: str) -> str:
    """Return what kind of qualifier keeps its order: "" for one that may stand anywhere."""
    if qualifier in _LAYOUTS:
        return "layout"
    if qualifier.partition("::")[0] in _SPACES:
        return "space"
    return "type" if _TYPE.fullmatch(qualifier) else ""


def _is_word(part: _Part) -> bool:
    return part.values <= _WORDS if part.values is not None else part.name in _WORDS


def _reorder(parts: tuple[_Part, ...], qualifiers: tuple[str, ...]) -> tuple[str, ...] | None:
    if not parts:
        return None if qualifiers else ()
    part = parts[0]
    passed: set[str] = set()
    for position, head in enumerate(qualifiers):
        group = _group(head)
        if group in passed:
            continue
        if group:
            passed.add(group)
        if head in part.values if part.values is not None else head == part.name:
            others = (*qualifiers[:position], *qualifiers[position + 1 :])
            found = _reorder(parts[1:], others)
            if found is not None:
                return (head, *found)
    return _reorder(parts[part.optional :], qualifiers) if part.optional else None


def parse_form(notation: str, sets: Mapping[str, str]) -> Form:
    """Parse one line of the table of forms; `sets` gives the values of each named qualifier."""
    opcode, _, operand_text = notation.strip().partition(" ")
    mnemonic = re.match(r"[a-z0-9_]+", opcode)
    if mnemonic is None:
        raise ValueError(f"form {notation!r} has no mnemonic")
    parts: list[_Part] = []
    for text in re.findall(r"\{[^}]*\}|\.[^.{}]+", opcode[mnemonic.end() :]):
        names = re.findall(r"\.([^.{}]+)", text)
        for position, name in enumerate(names):
            values = frozenset(sets[name].split()) if name in sets else None
            is_first = text[0] == "{" and not position
            parts.append(_Part(name, values, len(names) if is_first else 0))
    optional: list[str] = []
    fixed = operand_text
    for group in re.findall(r"\{\s*,([^{}]*)\}", operand_text):
        optional += _operand_names(group)
    fixed = re.sub(r"\{\s*,[^{}]*\}", "", fixed)
    return Form(
        notation.strip(), mnemonic[0], tuple(parts), tuple(_operand_names(fixed)), tuple(optional)
    )


def _operand_names(text: str) -> list[str]:
    names: list[str] = []
    depth, start = 0, 0
    for position, char in enumerate(text + ","):
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            name = text[start:position].strip()
            if name:
                names.append(name)
            start = position + 1
    return names
