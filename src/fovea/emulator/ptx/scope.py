"""Nested scopes of a PTX function: registers, variables and labels.

Lives here: name look-up while parsing. Not here: storage. Invariant: every name gets an identity
that is unique in its function, so that inline-assembly blocks may reuse names.
"""

import re
from dataclasses import dataclass, field

from fovea.emulator.errors import PtxError
from fovea.emulator.ptx.syntax import Register

_NUMBERED = re.compile(r"(.*?)(\d+)$")
_COMPONENTS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}


@dataclass(slots=True)
class Scope:
    """One `{ ... }` of a function (or the module, with `outer=None`)."""

    number: int
    outer: "Scope | None"
    registers: dict[str, str] = field(default_factory=dict[str, str])
    families: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    variables: dict[str, str] = field(default_factory=dict[str, str])
    labels: set[str] = field(default_factory=set[str])
    # elements of each register of a `.v2` or `.v4` declaration; others have no entry
    lanes: dict[str, int] = field(default_factory=dict[str, int])

    def declare(
        self, name: str, ptx_type: str, count: int | None, line: int, lanes: int = 1
    ) -> None:
        """Declare a register, or the family `name0 .. name<count-1>`; `lanes` > 1 are vectors."""
        # `a` and the family `a<2>`, which is a0 and a1, may stand side by side
        if name in (self.registers if count is None else self.families):
            raise PtxError(f"register {name} is declared twice in one scope", line)
        if lanes > 1:
            self.lanes[name if count is None else f"{name}<"] = lanes
        if count is None:
            self.registers[name] = ptx_type
        else:
            self.families[name] = (ptx_type, count)

    def register(self, name: str) -> Register | None:
        """Return the register, or the element of a vector register, a name means, or None."""
        stem, dot, component = name.rpartition(".")
        if not dot:
            found = self._find(name)
            return found[0] if found is not None and found[1] == 1 else None
        found = self._find(stem)
        if found is None or _COMPONENTS.get(component, found[1]) >= found[1]:
            return None
        return _element(found[0], _COMPONENTS[component])

    def vector(self, name: str) -> tuple[Register, ...] | None:
        """Return the elements of the vector register a name means here, or None."""
        found = self._find(name)
        if found is None or found[1] == 1:
            return None
        return tuple(_element(found[0], position) for position in range(found[1]))

    def _find(self, name: str) -> tuple[Register, int] | None:
        """Return (register as declared, number of its elements), or None."""
        scope: Scope | None = self
        numbered = _NUMBERED.match(name)
        while scope is not None:
            found, declared = scope.registers.get(name), name
            if found is None and numbered is not None:
                family = scope.families.get(numbered[1])
                if family is not None and int(numbered[2]) < family[1]:
                    found, declared = family[0], f"{numbered[1]}<"
            if found is not None:
                register = Register(name, f"{scope.number}:{name}", found)
                return register, scope.lanes.get(declared, 1)
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


def _element(vector: Register, position: int) -> Register:
    """Return one element of a vector register; `.r` and `.x` name the same one."""
    suffix = "." + "xyzw"[position]
    return Register(vector.name + suffix, vector.uid + suffix, vector.type)
