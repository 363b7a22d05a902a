"""Nested scopes of a PTX function: registers, variables and labels.

Lives here: name look-up while parsing. Not here: storage. Invariant: every name gets an identity
that is unique in its function, so that inline-assembly blocks may reuse names.
"""

import re
from dataclasses import dataclass, field

from fovea.emulator.errors import PtxError
from fovea.emulator.ptx.syntax import Register

_NUMBERED = re.compile(r"(.*?)(\d+)$")


@dataclass(slots=True)
class Scope:
    """One `{ ... }` of a function (or the module, with `outer=None`)."""

    number: int
    outer: "Scope | None"
    registers: dict[str, str] = field(default_factory=dict[str, str])
    families: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    variables: dict[str, str] = field(default_factory=dict[str, str])
    labels: set[str] = field(default_factory=set[str])

    def declare(self, name: str, ptx_type: str, count: int | None, line: int) -> None:
        """Declare a register, or the family `name0 .. name<count-1>`."""
        if name in self.registers or name in self.families:
            raise PtxError(f"register {name} is declared twice in one scope", line)
        if count is None:
            self.registers[name] = ptx_type
        else:
            self.families[name] = (ptx_type, count)

    def register(self, name: str) -> Register | None:
        """Return the register a name means here, or None."""
        scope: Scope | None = self
        numbered = _NUMBERED.match(name)
        while scope is not None:
            found = scope.registers.get(name)
            if found is None and numbered is not None:
                family = scope.families.get(numbered[1])
                if family is not None and int(numbered[2]) < family[1]:
                    found = family[0]
            if found is not None:
                return Register(name, f"{scope.number}:{name}", found)
            scope = scope.outer
        return None

    def variable(self, name: str) -> str | None:
        """Return the unique name of a variable visible here, or None."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.outer
        return None

    def label(self, name: str) -> str | None:
        """Return the unique name of a label visible here (after the function is parsed)."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return f"{scope.number}:{name}"
            scope = scope.outer
        return None
