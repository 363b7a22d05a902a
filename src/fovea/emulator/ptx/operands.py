"""The token cursor, constant expressions and operands: the lower half of the parser.

Lives here: what is inside a statement after its opcode. Not here: declarations and statements
(`parser.py`). Invariant: a name becomes a register, a special register or a symbol by its scope
alone, never by the opcode.
"""

import math
import operator
import struct
from typing import NoReturn

from fovea.emulator.errors import PtxError
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.lexer import Token, tokenize
from fovea.emulator.ptx.scope import Scope
from fovea.emulator.ptx.types import LANES, SPECIAL_REGISTERS

_PRECEDENCE = (("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
WARP_SIZE = "WARP_SZ"  # the one constant with a name (PTX ISA 4.4)
_OF_FLOATS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class OperandParser:
    """A cursor over the tokens of a text, and the operands it can read."""

    def __init__(self, text: str):
        self._text = text
        self._tokens = tokenize(text)
        self._at = 0

    # --- tokens -----------------------------------------------------------------------------

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    @property
    def line(self) -> int:
        """The line the cursor stands at."""
        return self._token.line

    @property
    def _following(self) -> str:
        """The text of the token after the current one."""
        return self._tokens[self._at + 1].text

    def _next(self) -> Token:
        token = self._tokens[self._at]
        if token.kind == "end":
            self._fail("the text ends in the middle of something", token)
        self._at += 1
        return token

    def _natural(self) -> int:
        """Parse a non-negative integer literal."""
        token = self._next()
        try:
            return int(token.text.rstrip("U"), 0)
        except ValueError:
            self._fail(f"expected a non-negative integer, got {token.text!r}", token)

    def _accept(self, text: str) -> bool:
        if self._tokens[self._at].text == text and self._tokens[self._at].kind != "string":
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> Token:
        token = self._next()
        if token.text != text:
            self._fail(f"expected {text!r}, got {token.text or 'the end of the text'!r}", token)
        return token

    def _fail(self, message: str, token: Token | None = None) -> NoReturn:
        raise PtxError(message, (token or self._token).line)

    # --- operands ---------------------------------------------------------------------------

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
        if self._accept("!"):
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
            if token.text.partition(".")[0] not in SPECIAL_REGISTERS:
                self._fail(f"register {token.text} is not declared", token)
            return syntax.SpecialRegister(token.text)
        return syntax.Symbol(unique or token.text, self._offset())

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

    def _constant(self, level: int = 0) -> int | float | syntax.Immediate:
        """Parse a constant expression; a lone `0f`/`0d` literal keeps its bits."""
        if level == len(_PRECEDENCE):
            return self._atom()
        value = self._constant(level + 1)
        while self._token.text in _PRECEDENCE[level] and self._token.kind == "punctuation":
            after = self._tokens[self._at + 1]
            if level == 0 and after.kind == "word" and after.text != WARP_SIZE:
                break  # `5|%p`: a pair, not an expression
            sign = self._next().text
            right = self._constant(level + 1)
            if isinstance(value, float) and isinstance(right, float) and sign in _OF_FLOATS:
                value = _OF_FLOATS[sign](value, right)
            elif isinstance(value, int) and isinstance(right, int):
                value = _fold(sign, value, right, self._token.line)
            else:
                self._fail(f"no constant expression: {value} {sign} {right}")
        return value

    def _integer(self) -> int:
        """Parse a constant expression that must be an integer."""
        token = self._token
        value = self._constant()
        if not isinstance(value, int):
            self._fail("an integer constant is needed", token)
        return value

    def _atom(self) -> int | float | syntax.Immediate:
        token = self._next()
        if token.text in "+-" and token.kind == "punctuation":
            value = self._atom()
            if isinstance(value, syntax.Immediate):
                self._fail("no sign may stand before the bits of a float", token)
            return -value if token.text == "-" else value
        if token.text == "~":
            value = self._atom()
            if not isinstance(value, int):
                self._fail("~ needs an integer", token)
            return ~value
        if token.text == "(":
            value = self._constant()
            self._expect(")")
            return value
        if token.text == WARP_SIZE:
            return LANES
        if token.kind != "number":
            self._fail(f"expected a constant, got {token.text!r}", token)
        text = token.text
        if text[:2] in ("0f", "0F"):
            bits = int(text[2:], 16)
            value = struct.unpack("<f", struct.pack("<I", bits))[0]
            return syntax.Immediate(value, bits, "f32")
        if text[:2] in ("0d", "0D"):
            bits = int(text[2:], 16)
            return syntax.Immediate(struct.unpack("<d", struct.pack("<Q", bits))[0], bits, "f64")
        if "." in text or ("e" in text.lower() and text[:2].lower() != "0x"):
            return self._decimal(text)
        text = text.rstrip("U")
        is_octal = len(text) > 1 and text[0] == "0" and text.isdigit()
        try:
            value = int(text, 8) if is_octal else int(text, 0)
        except ValueError:
            self._fail(f"{text[:40]!r} is no number", token)
        if value >= 1 << 64:
            self._fail(f"{text[:40]} does not fit 64 bits", token)
        return value

    def _decimal(self, text: str) -> float:
        """Return the value of a float literal, which is one of 64 bits."""
        value = float(text)
        digits = text.lower().partition("e")[0]
        if math.isinf(value) or (not value and digits.strip("0.")):
            self._fail(f"{text[:40]} lies outside the range of .f64")
        return value


def _fold(operator: str, left: int, right: int, line: int) -> int:
    """Return the value of an operation on 64-bit constants (PTX ISA 4.5.5)."""
    if operator in ("/", "%") and right == 0:
        raise PtxError("division by zero in a constant expression", line)
    if operator in ("<<", ">>") and not 0 <= right < 64:
        raise PtxError(f"shift by {right} in a constant expression", line)
    quotient = abs(left) // abs(right or 1) * (1 if (left < 0) == (right < 0) else -1)
    value = {
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&": lambda: left & right,
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: quotient,
        "%": lambda: left - right * quotient,
    }[operator]()
    return value if -(1 << 63) <= value < 1 << 64 else value & ((1 << 64) - 1)
