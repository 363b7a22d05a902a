"""PTX text to tokens.

Lives here: one regular expression. Not here: grammar (`parser.py`). Invariant: every token knows
its 1-based line; comments, line markers (`# 1 "x.cu"`) and the debug directives `.loc` and `.file`
leave no token, and what follows them on their line does.
"""

import re
from typing import NamedTuple

from fovea.emulator.errors import PtxError


class Token(NamedTuple):
    """One token.

    Attributes:
        kind: word, directive, number, string or punctuation.
        text: as written.
        line: 1-based line.
        start: offset in the text.
    """

    kind: str
    text: str
    line: int
    start: int


_TOKEN = re.compile(
    r"""
    (?P<newline>\n)
  | (?P<space>[ \t\r\f]+|//[^\n]*|/\*.*?\*/)
  | (?P<debug>\.loc\s+\d+\s+\d+\s+\d+(?:\s*,\s*function_name\s+[\w$.]+(?:\s*\+\s*\d+)?
      \s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?
      |\.file\s+\d+\s+"[^"\n]*"(?:\s*,\s*\d+\s*,\s*\d+)?
      |\#[ \t]*\d+[ \t]+"[^"\n]*"(?:[ \t]+\d+)*[ \t\r]*(?=\n|\Z))
  | (?P<number>0[fF][0-9a-fA-F]{8}(?![\w])|0[dD][0-9a-fA-F]{16}(?![\w])|0[xX][0-9a-fA-F]+U?
      |0[bB][01]+U?|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>(?:%[\w$]|[$A-Za-z_])[\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_][\w]*(?:::[\w]+)*)
  | (?P<string>"[^"\n]*")
  | (?P<punctuation><<|>>|&&|\|\||==|!=|<=|>=|[{}()\[\],;:<>@!=+\-*/|&^~?%])
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a PTX text, closed by one of kind "end".

    Raises:
        PtxError: a character starts no token.
    """
    tokens: list[Token] = []
    line, position, size = 1, 0, len(text)
    match = _TOKEN.match
    while position < size:
        found = match(text, position)
        if found is None:
            raise PtxError(f"unexpected character {text[position]!r}", line)
        kind = found.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind in ("space", "debug"):
            line += found[0].count("\n")
        else:
            tokens.append(Token(kind, found[0], line, position))
        position = found.end()
    tokens.append(Token("end", "", line, size))
    return tokens
