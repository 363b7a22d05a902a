"""The token cursor, and constant expressions: the lowest part of the parser.

Lives here: literals and what is computed of them. Not here: operands (`operands.py`). Invariant: an
integer constant is an `int` from -2^63 to 2^63 - 1 if its type is `.s64`, an `Unsigned` if `.u64`.
Source: PTX ISA 4.5 (constants); what ptxas makes of signs.
"""

import math
import operator
import struct
from collections.abc import Callable
from typing import NoReturn

from fovea.emulator.errors import PtxError
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.lexer import Token, tokenize
from fovea.emulator.ptx.types import LANES

_PRECEDENCE = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="),
               ("<<", ">>"), ("+", "-"), ("*", "/", "%"))  # fmt: skip
_ENDS = frozenset([";", ",", "}", "]", ")"])  # after a literal that is all of its expression
WARP_SIZE = "WARP_SZ"  # the one constant with a name (PTX ISA 4.4)


class Unsigned(int):
    """An integer constant of type `.u64`; others are of type `.s64`."""


class ConstantParser:
    """A cursor over the tokens of a text, and the constants it can read."""

    def __init__(self, text: str):
        self._text = text
        self._tokens = tokenize(text)
        self._at: int = 0

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
        if text == ";" and self._token.text != text:
            self._fail_unended(self._at)
        token = self._next()
        if token.text != text:
            self._fail(f"expected {text!r}, got {token.text or 'the end of the text'!r}", token)
        return token

    def _fail_unended(self, at: int) -> NoReturn:
        """Report that a `;` is missing before a token, at the line that it is missing in."""
        token, before = self._tokens[at], self._tokens[at - 1]
        is_same_line = token.line == before.line
        wanted = "',' or ';'" if is_same_line and token.kind in ("word", "number") else "';'"
        got = repr(token.text) if token.text else "the end of the text"
        place = "" if is_same_line else f" of line {token.line}"
        self._fail(f"expected {wanted} after {before.text!r}, got {got}{place}", before)

    def _fail(self, message: str, token: Token | None = None) -> NoReturn:
        raise PtxError(message, (token or self._token).line)

    # --- expressions ------------------------------------------------------------------------

    def _integer(self) -> int:
        """Parse a constant expression that must be an integer; return it as an `.s64`."""
        token = self._token
        value = self._constant()
        if not isinstance(value, int):
            self._fail("an integer constant is needed", token)
        return wrapped(value, is_unsigned=False)

    def _constant(self) -> int | float | syntax.Immediate:
        """Parse a constant expression; a lone `0f`/`0d` literal keeps its bits."""
        if self._token.kind == "number" and self._following in _ENDS:
            return self._atom()
        token = self._token
        value = self._binary(0)
        if not self._accept("?"):
            return value
        if not isinstance(value, int):
            self._fail("what stands before ? must be an integer", token)
        first = self._constant()
        self._expect(":")
        second = self._constant()
        if not isinstance(first, int) or not isinstance(second, int):
            self._fail("? and : choose between integers", token)
        return first if value else second

    def _binary(self, level: int) -> int | float | syntax.Immediate:
        if level == len(_PRECEDENCE):
            return self._atom()
        value = self._binary(level + 1)
        while self._token.text in _PRECEDENCE[level] and self._token.kind == "punctuation":
            after = self._tokens[self._at + 1]
            if self._token.text == "|" and after.kind == "word" and after.text != WARP_SIZE:
                break  # `5|%p`: a pair, not an expression
            token = self._next()
            right = self._binary(level + 1)
            value = self._fold(token, _number(value), _number(right))
        return value

    def _fold(
        self, token: Token, left: int | float | None, right: int | float | None
    ) -> int | float:
        sign = token.text
        if isinstance(left, int) and isinstance(right, int):
            if sign in ("/", "%") and right == 0:
                self._fail("division by zero in a constant expression", token)
            if sign in ("<<", ">>") and not 0 <= right < 64:
                self._fail(f"shift by {right} in a constant expression", token)
            return _folded(sign, left, right)
        if isinstance(left, float) and isinstance(right, float):
            if sign == "/" and not right:
                self._fail("division by zero in a constant expression", token)
            if sign in _ARITHMETIC:
                return float(_ARITHMETIC[sign](left, right))
            if sign in _COMPARISONS:
                return int(_COMPARISONS[sign](left, right))
        self._fail(
            f"{sign} takes two integers, or in some cases two decimals or 0d literals", token
        )

    def _atom(self) -> int | float | syntax.Immediate:
        token = self._next()
        text = token.text
        if token.kind == "punctuation":
            if text == "(" and self._token.kind == "directive":
                return self._cast()
            if text == "(":
                value = self._constant()
                self._expect(")")
                return value
            if text in ("+", "-", "~", "!"):
                return self._unary(token)
        if text == WARP_SIZE:
            return LANES
        if token.kind != "number":
            self._fail(f"expected a constant, got {text!r}", token)
        return self._literal(token)

    def _unary(self, token: Token) -> int | float:
        sign, value = token.text, _number(self._atom())
        if value is None:
            self._fail("no sign may stand before the bits of a float", token)
        if sign in "+-":
            signed = -value if sign == "-" else value
            is_unsigned = isinstance(value, Unsigned)
            return signed if isinstance(signed, float) else wrapped(signed, is_unsigned=is_unsigned)
        if not isinstance(value, int):
            self._fail(f"{sign} needs an integer", token)
        return wrapped(~value, is_unsigned=True) if sign == "~" else int(not value)

    def _cast(self) -> int:
        token = self._next()
        self._expect(")")
        if token.text not in (".s64", ".u64"):
            self._fail(f"a constant has no cast to {token.text} (to .s64 or .u64 it has)", token)
        value = self._atom()
        if not isinstance(value, int):
            self._fail("a cast needs an integer", token)
        return wrapped(value, is_unsigned=token.text == ".u64")

    # --- literals ---------------------------------------------------------------------------

    def _literal(self, token: Token) -> int | float | syntax.Immediate:
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
        digits = text.rstrip("U")
        is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
        try:
            value = int(digits, 8) if is_octal else int(digits, 0)
        except ValueError:
            self._fail(f"{text[:40]!r} is no number", token)
        if value >= 1 << 64:
            self._fail(f"{text[:40]} does not fit 64 bits", token)
        return Unsigned(value) if value >= 1 << 63 or digits != text else value

    def _decimal(self, text: str) -> float:
        """Return the value of a float literal, which is one of 64 bits."""
        value = float(text)
        digits = text.lower().partition("e")[0]
        if math.isinf(value) or (not value and digits.strip("0.")):
            self._fail(f"{text[:40]} lies outside the range of .f64")
        return value


def _number(value: int | float | syntax.Immediate) -> int | float | None:
    """Return what can be computed with: not the bits of an `.f32`."""
    if isinstance(value, syntax.Immediate):
        return value.value if value.bits_type == "f64" else None
    return value


def wrapped(value: int, *, is_unsigned: bool) -> int:
    """Return the low 64 bits of a value as an `Unsigned`, or with their sign."""
    value &= (1 << 64) - 1
    if is_unsigned:
        return Unsigned(value)
    return value - (1 << 64) if value >> 63 else value


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OF_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "|": lambda left, right: left | right,
    "^": lambda left, right: left ^ right,
    "&": lambda left, right: left & right,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


def _folded(sign: str, left: int, right: int) -> int:
    """Return the value of an operation on two integers, and with it its type."""
    if sign in ("&&", "||"):
        return int(bool(left and right) if sign == "&&" else bool(left or right))
    is_unsigned = isinstance(left, Unsigned)
    if sign in ("<<", ">>"):
        value = int(left) << right if sign == "<<" else int(left) >> right
        return wrapped(value, is_unsigned=is_unsigned)
    # the usual conversions of C; a remainder is always one of `.u64`
    is_unsigned = is_unsigned or isinstance(right, Unsigned) or sign == "%"
    if is_unsigned:
        left, right = (int(wrapped(value, is_unsigned=True)) for value in (left, right))
    if sign in _COMPARISONS:
        return int(_COMPARISONS[sign](left, right))
    if sign in _OF_INTEGERS:
        value = _OF_INTEGERS[sign](left, right)
    elif sign == "%":
        return wrapped(left % right, is_unsigned=False)
    else:
        value = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return wrapped(value, is_unsigned=is_unsigned)
