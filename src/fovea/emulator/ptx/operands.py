"""Operands: what is inside a statement after its opcode.

Lives here: registers, names, vectors, addresses. Not here: constants (`constants.py`), declarations
(`declarations.py`) and statements (`parser.py`). Invariant: a name becomes a register, a special
register or a symbol by its scope alone, never by the opcode.
"""

from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.constants import WARP_SIZE, ConstantParser
from fovea.emulator.ptx.lexer import Token
from fovea.emulator.ptx.scope import Scope
from fovea.emulator.ptx.types import OPAQUE_REGISTERS, SPECIAL_REGISTERS

_SPECIAL = SPECIAL_REGISTERS | OPAQUE_REGISTERS


class OperandParser(ConstantParser):
    """The operands that a cursor can read."""

    def __init__(self, text: str):
        super().__init__(text)
        self._element_bytes: dict[str, int] = {}  # of arrays that are no vectors, by unique name

    def _operand(self, scope: Scope) -> syntax.Operand:
        token = self._token
        if token.text == "[":
            return self._memory(scope)
        if self._accept("{"):
            items: list[syntax.Operand] = []
            while not self._accept("}"):
                items.append(self._operand(scope))
                if self._token.text != "}":
                    self._expect(",")
            return syntax.Vector(tuple(items))
        after = self._tokens[self._at + 1] if token.kind != "end" else token
        if token.text == "!" and after.kind == "word" and after.text != WARP_SIZE:
            self._next()
            name = self._next()
            register = scope.register(name.text)
            if register is None:
                self._fail(f"{name.text} is not a declared register", name)
            return syntax.Negated(register)
        if token.text == "_":
            self._next()
            first: syntax.Operand = syntax.Sink()
        elif token.kind == "word" and token.text != WARP_SIZE:
            first = self._name(scope)
        else:
            value = self._constant()
            first = value if isinstance(value, syntax.Immediate) else syntax.Immediate(value)
        if self._accept("|"):
            return syntax.Pair(first, self._operand(scope))
        return first

    def _name(self, scope: Scope) -> syntax.Operand:
        token = self._next()
        register = scope.register(token.text)
        if register is not None:
            return register
        elements = scope.vector(token.text)
        if elements is not None:
            return syntax.Vector(elements)
        unique = scope.variable(token.text)
        if unique is None and token.text.startswith("%"):
            if token.text.partition(".")[0] not in _SPECIAL:
                self._fail(f"register {token.text} is not declared", token)
            return syntax.SpecialRegister(token.text)
        if self._token.text == "[":
            return self._element(unique, token)
        return syntax.Symbol(unique or token.text, self._offset())

    def _element(self, unique: str | None, token: Token) -> syntax.Symbol:
        """Parse the `[index]` of `name[index]`, whose index counts elements (PTX ISA 6.4.2)."""
        self._next()
        size = self._element_bytes.get(unique or "")
        if unique is None or size is None:
            self._fail(f"{token.text} is no array of scalars, so it has no [index]", token)
        index = self._integer()
        self._expect("]")
        return syntax.Symbol(unique, index * size, is_element=True)

    def _offset(self) -> int:
        """Parse what may follow an address: `+` and a constant expression, such as `+-4`."""
        if self._token.text == "-":
            self._fail("no `-` may follow an address; a negative offset is written +-4")
        return self._integer() if self._accept("+") else 0

    def _memory(self, scope: Scope) -> syntax.Memory:
        token = self._expect("[")
        if self._token.kind == "word":
            base = self._name(scope)
        else:
            value = self._constant()
            base = value if isinstance(value, syntax.Immediate) else syntax.Immediate(value)
        if isinstance(base, syntax.Symbol):
            base, offset = syntax.Symbol(base.name), base.offset
        else:
            offset = self._offset()
        rest: list[syntax.Operand] = []
        while self._accept(","):
            rest.append(self._operand(scope))
        self._expect("]")
        if not isinstance(base, syntax.Register | syntax.Symbol | syntax.Immediate):
            self._fail(f"{base} cannot be an address (is the register declared?)", token)
        return syntax.Memory(base, offset, tuple(rest))
