"""The instruction registry: which forms exist, and the function that decodes each.

Lives here: the `@instruction` decorator, look-up of an opcode, the list behind the coverage table.
Not here: the instructions (one module per family in this package). Invariant: an opcode that
matches no form raises `UnsupportedForm`; there is no default.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from itertools import takewhile

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


# ptxas takes these at the head of `atom` and `red` in any order, and Triton writes the space first
_ATOMIC_SETS = (
    ("relaxed", "acquire", "release", "acq_rel"),
    ("cta", "cluster", "gpu", "sys"),
    ("global", "shared", "shared::cta", "shared::cluster"),
)


def _in_order(qualifiers: list[str]) -> list[str]:
    """Return an atomic's qualifiers with order, scope and space as the manual has them."""
    ranks = {value: rank for rank, values in enumerate(_ATOMIC_SETS) for value in values}
    head = [*takewhile(ranks.__contains__, qualifiers)]
    return sorted(head, key=ranks.__getitem__) + qualifiers[len(head) :]


def find(
    opcode: str, operand_count: int, line: int, target: str
) -> tuple[Entry, Modifiers, tuple[str, ...]]:
    """Return the entry, bound qualifiers and operand names for an opcode as written.

    Raises:
        UnsupportedForm: no registered form matches; the message lists the nearest ones.
    """
    load_families()
    mnemonic, *qualifiers = opcode.split(".")
    if mnemonic in ("atom", "red"):
        qualifiers = _in_order(qualifiers)
    candidates = _ENTRIES.get(mnemonic, [])
    wrong_count = wrong_target = ""
    for entry in candidates:
        modifiers = entry.form.match(tuple(qualifiers))
        if modifiers is None:
            continue
        names = entry.form.bind(operand_count, modifiers)
        if names is None:
            wrong_count = entry.form.notation
        elif not entry.exists_on(target):
            wrong_target = entry.targets
        else:
            return entry, modifiers, names
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
