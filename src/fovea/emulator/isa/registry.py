"""The instruction registry: which forms exist, and the function that decodes each.

Lives here: the `@instruction` decorator, look-up of an opcode, the list behind the coverage table.
Not here: the instructions (one module per family in this package). Invariant: an opcode that
matches no form raises `UnsupportedForm`; there is no default.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fovea.emulator.errors import UnsupportedForm
from fovea.emulator.isa.forms import Decoder, Entry, Modifiers, parse_form

EVIDENCE = ("silicon-sm90", "manual-only", "inferred")

_ENTRIES: dict[str, list[Entry]] = {}
_loaded = False


def instruction(
    *notations: str,
    source: str,
    evidence: str,
    targets: str = "",
    kind: str = "alu",
    **sets: str,
) -> Callable[[Decoder], Decoder]:
    """Register the decorated decoder for one or more forms in the manual's notation.

    Args:
        notations: e.g. `"add.type d, a, b"`; see `isa/forms.py`.
        source: where the meaning is written, e.g. "PTX ISA 9.7.1.1".
        evidence: "silicon-sm90", "manual-only" or "inferred".
        targets: comma-separated targets that have it: "sm_90a" alone, "sm_90+" and all after it;
            empty means all.
        kind: instruction class for the counters (alu, mufu, memory, mma, sync, copy, control).
        sets: the values of each named qualifier, separated by spaces.
    """
    if evidence not in EVIDENCE:
        raise ValueError(f"evidence={evidence!r} is not one of {EVIDENCE}")

    def register(decode: Decoder) -> Decoder:
        family = decode.__module__.rpartition(".")[2]
        for notation in notations:
            form = parse_form(notation, sets)
            _ENTRIES.setdefault(form.mnemonic, []).append(
                Entry(form, decode, source, evidence, family, targets, kind)
            )
        return decode

    return register


def load_families() -> None:
    """Import every module of this package, so that its forms are registered."""
    global _loaded
    if _loaded:
        return
    name = __name__.rpartition(".")[0]
    package = importlib.import_module(name)
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{name}.{found.name}")
    _loaded = True


def entries() -> Iterator[Entry]:
    """Yield every registered form, in order of mnemonic."""
    load_families()
    for mnemonic in sorted(_ENTRIES):
        yield from _ENTRIES[mnemonic]


class Found(NamedTuple):
    """What an opcode means: its form, with the qualifiers and operands bound."""

    entry: Entry
    modifiers: Modifiers
    names: tuple[str, ...]
    opcode: str  # its qualifiers in the form's order


def find(opcode: str, operand_count: int, line: int, target: str) -> Found:
    """Return what an opcode as written means.

    Raises:
        UnsupportedForm: no registered form matches; the message lists the nearest ones.
    """
    load_families()
    mnemonic, *qualifiers = opcode.split(".")
    candidates = _ENTRIES.get(mnemonic, [])
    wrong_count = wrong_target = ""
    for is_reordered in (False, True):
        for entry in candidates:
            ordered = tuple(qualifiers)
            if is_reordered:
                ordered = entry.form.reorder(ordered) or ()
            modifiers = entry.form.match(ordered)
            if modifiers is None or len(ordered) != len(qualifiers):
                continue
            names = entry.form.bind(operand_count, modifiers)
            if names is None:
                wrong_count = entry.form.notation
            elif not entry.exists_on(target):
                wrong_target = entry.targets
            else:
                return Found(entry, modifiers, names, ".".join((mnemonic, *ordered)))
        if wrong_count or wrong_target:
            break
    if wrong_target:
        reason = f"exists on {wrong_target} only, the module's target is {target}"
        raise UnsupportedForm(f"`{opcode}` {reason}; correct its .target.", line, opcode)
    if wrong_count:
        reason = f"has {operand_count} operands; the form is `{wrong_count}`"
    elif candidates:
        known = "; ".join(sorted({entry.form.notation for entry in candidates})[:6])
        reason = f"is a form the emulator does not implement; it has: {known}"
    else:
        reason = "is an instruction the emulator does not implement"
    text = f"`{opcode}` {reason}. To add it see src/fovea/emulator/README.md"
    raise UnsupportedForm(text, line, opcode)
