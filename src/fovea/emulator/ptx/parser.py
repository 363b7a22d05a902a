"""Tokens to syntax tree.

Lives here: the grammar of the module, functions and statements, with scopes. Not here: declarations
(`declarations.py`), operands (`operands.py`), which opcodes exist (`isa/`). Invariant: labels,
registers and variables in the tree are unique names.
"""

import re

from fovea.emulator.errors import PtxError, UnsupportedForm
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.declarations import SPACES, DeclarationParser
from fovea.emulator.ptx.lexer import Token
from fovea.emulator.ptx.scope import Scope

_LINKAGE = (".extern", ".visible", ".weak", ".common")
_PERFORMANCE = (".pragma",
                ".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".noreturn",
                ".explicitcluster", ".reqnctapercluster", ".maxclusterrank", ".blocksareclusters",
                ".unique", ".abi_preserve", ".abi_preserve_control")  # fmt: skip
_TEXT_LIMIT = 160
_ALONE = frozenset(["ret", "exit", "trap", "brkpt"])  # instructions without operands
_CLOSING = frozenset(["]", "}", ")"])
_LABEL_LIMIT = 1 << 16  # far more than the targets of any switch


def parse(text: str) -> syntax.ModuleSyntax:
    """Parse a PTX module.

    Raises:
        PtxError: with the line of the first thing that is wrong.
    """
    parser = _Parser(text)
    try:
        return parser.module()
    except RecursionError:
        raise PtxError("the text is nested too deeply", parser.line) from None


def _begins_statement(token: Token, *, is_first: bool) -> bool:
    """Return whether a token that begins a line begins a statement, not an operand.

    Args:
        token: it.
        is_first: it follows an opcode, whose operands may begin on a line of their own.
    """
    if token.kind in ("end", "directive") or token.text in ("@", "}"):
        return True
    if is_first:
        is_opcode = token.text in _ALONE or ("." in token.text and token.text[0] not in "%$_")
        return token.kind == "word" and is_opcode
    return token.kind == "word" or token.text == "{"


class _Parser(DeclarationParser):
    def __init__(self, text: str):
        super().__init__(text)
        self._scopes = 0
        self._globals = Scope(0, None)
        self._used_bytes: int | None = None  # of a pragma that stands before the next instruction
        self._pending: list[Scope] = []  # the scope of each item of the body, for labels
        self._target_lists: dict[str, tuple[Token, Scope]] = {}

    # --- module level -----------------------------------------------------------------------

    def _version(self) -> str:
        token = self._next()
        if re.fullmatch(r"[1-9]\.[0-9]", token.text) is None:
            raise PtxError(
                f".version {token.text} is none (1.0 to 9.9 are, such as 8.7)", token.line
            )
        return token.text

    def module(self) -> syntax.ModuleSyntax:
        while self._token.kind != "end":
            text = self._token.text
            if text == ".version":
                self._next()
                self._module.version = self._version()
            elif text == ".target":
                self._next()
                self._module.target = self._next().text
                while self._accept(","):
                    self._next()
            elif text == ".address_size":
                self._next()
                self._module.address_size = self._natural()
            elif text == ".section":
                self._skip_section()
            elif text in (".pragma", ".alias"):
                self._next()
                while self._token.kind in ("string", "word") or self._token.text == ",":
                    self._next()
                self._expect(";")
            else:
                self._top_declaration()
        if not self._module.version or not self._module.target:
            raise PtxError("the text has no .version and .target directives: is it PTX?")
        if self._module.address_size != 64:
            raise PtxError(f".address_size {self._module.address_size} is not supported (64 is)")
        return self._module

    def _skip_section(self) -> None:
        while not self._accept("{"):
            self._next()
        while not self._accept("}"):
            if self._next().kind == "end":
                self._fail("unfinished .section")

    def _top_declaration(self) -> None:
        linkage: set[str] = set()
        while self._token.text in _LINKAGE:
            linkage.add(self._next().text)
        if self._token.text in (".entry", ".func"):
            self._parse_function(is_extern=".extern" in linkage)
        elif self._token.text in (".reg", ".local", ".param", ".sreg"):
            self._fail(f"a {self._token.text} variable stands in a function, not in the module")
        elif self._token.text[1:] in SPACES and self._token.kind == "directive":
            for variable in self._declaration(self._globals, is_extern=".extern" in linkage):
                self._module.variables.append(variable)
        else:
            self._fail(f"unexpected {self._token.text or 'end of text'!r} at module level")

    def _parse_function(self, is_extern: bool) -> None:
        is_entry = self._next().text == ".entry"
        self._scopes += 1
        scope = Scope(self._scopes, self._globals)
        results: list[syntax.Variable] = []
        if not is_entry:
            while self._token.kind == "directive":  # .attribute(...) before the name
                self._attribute()
            if self._token.text == "(":
                results = self._parameters(scope)
        token = self._next()
        if token.kind != "word":
            self._fail(f"expected a function name, got {token.text!r}", token)
        self._is_entry_signature = is_entry
        parameters = self._parameters(scope) if self._token.text == "(" else []
        self._is_entry_signature = False
        function = syntax.Function(token.text, is_entry, parameters, token.line, results)
        self._function = function
        while self._token.text in _PERFORMANCE:
            name = self._next().text
            values: list[int] = []
            item = self._token
            while item.kind in ("number", "string") or item.text == ",":
                self._next()
                if item.kind == "number" and item.text.isdigit():
                    values.append(int(item.text))
                item = self._token
            self._accept(";")
            function.directives[name[1:]] = tuple(values)
        known = self._module.functions.get(function.name)
        if known is not None and known.is_defined and self._token.text == "{":
            self._fail(f"function {function.name} is defined twice", token)
        if self._accept(";"):
            function.is_defined = False
            if known is None:
                self._module.functions[function.name] = function
        else:
            if is_extern and self._token.text == "{":
                self._fail("an .extern function has no body")
            if is_extern:
                self._fail_unended(self._at)
            self._module.functions[function.name] = function
            self._expect("{")
            self._pending = []
            self._block(scope)
            self._resolve_labels(function)
        self._function = None

    def _parameters(self, scope: Scope) -> list[syntax.Variable]:
        self._expect("(")
        found: list[syntax.Variable] = []
        while not self._accept(")"):
            if self._token.text == ".reg":
                raise UnsupportedForm(
                    "functions with .reg parameters are not implemented; declare them as .param",
                    self.line,
                    ".func",
                )
            found += self._declaration(scope, is_extern=False, is_parameter=True)
            if self._token.text != ")":
                self._expect(",")
        return found

    # --- statements -------------------------------------------------------------------------

    def _block(self, scope: Scope) -> None:
        while not self._accept("}"):
            token = self._token
            if token.kind == "end":
                self._fail("the function body is not closed")
            if self._accept("{"):
                self._scopes += 1
                self._block(Scope(self._scopes, scope))
            elif token.kind == "directive":
                if token.text == ".pragma":
                    self._pragma()
                elif token.text == ".callprototype":
                    while not self._accept(";"):
                        self._next()
                elif token.text == ".section":
                    self._skip_section()
                elif token.text[1:] in SPACES:
                    self._declaration(scope, is_extern=False)
                else:
                    self._fail(f"unexpected directive {token.text}", token)
            elif token.kind == "word" and self._following == ":":
                self._label(scope)
            elif token.text == ";":
                self._fail("a `;` that ends nothing")
            else:
                self._statement(scope)

    def _pragma(self) -> None:
        """Parse `.pragma "...", ...;`: only `used_bytes_mask` says what an instruction does."""
        self._next()
        while self._token.kind == "string" or self._token.text == ",":
            token = self._next()
            name, _, value = token.text.strip('"').strip().partition(" ")
            if token.kind != "string" or name != "used_bytes_mask":
                continue
            try:
                self._used_bytes = int(value, 0)
            except ValueError:
                self._fail(f"used_bytes_mask {value!r} is not a number such as 0xfff", token)
        self._expect(";")

    def _label(self, scope: Scope) -> None:
        token = self._next()
        self._expect(":")
        assert self._function is not None
        if token.text in scope.labels:
            self._fail(f"label {token.text} is defined twice", token)
        scope.labels.add(token.text)
        unique = f"{scope.number}:{token.text}"
        if self._token.text == ".branchtargets":
            self._target_lists[unique] = (self._next(), scope)
            self._function.branch_targets[unique] = self._branch_targets()
        elif self._token.text in (".callprototype", ".calltargets"):
            # of indirect calls, which are an error where they stand
            while not self._accept(";"):
                self._next()
        else:
            self._function.body.append(syntax.LabelMark(unique, token.line))
            self._pending.append(scope)

    def _branch_targets(self) -> tuple[str, ...]:
        """Parse `label, stem<n>, ...;`, of which the latter means stem0 to stem<n-1>."""
        targets: list[str] = []
        while not targets or self._accept(","):
            name = self._next().text
            if not self._accept("<"):
                targets.append(name)
                continue
            token = self._token
            count = self._natural()
            if not 0 < count <= _LABEL_LIMIT:
                self._fail(f"{name}<{count}> must name 1 to {_LABEL_LIMIT} labels", token)
            self._expect(">")
            targets += [f"{name}{number}" for number in range(count)]
        self._expect(";")
        return tuple(targets)

    def _statement(self, scope: Scope) -> None:
        first = self._token
        guard = None
        if self._accept("@"):
            is_negated = self._accept("!")
            token = self._next()
            register = scope.register(token.text)
            if register is None or register.type != "pred":
                self._fail(f"guard {token.text} is not a predicate register", token)
            guard = syntax.Guard(register, is_negated)
        opcode, token = self._at, self._next()
        if token.kind != "word":
            self._fail(f"expected an instruction, got {token.text!r}", token)
        try:
            operands = self._operands(scope, token.text.split(".")[0])
            end = self._expect(";")
        except PtxError:
            self._check_ended(opcode)
            raise
        text = " ".join(self._text[first.start : end.start].split())[:_TEXT_LIMIT]
        assert self._function is not None
        used, self._used_bytes = self._used_bytes, None
        self._function.body.append(
            syntax.Statement(token.text, tuple(operands), guard, token.line, text, used)
        )
        self._pending.append(scope)

    def _operands(self, scope: Scope, mnemonic: str) -> list[syntax.Operand]:
        if mnemonic == "call":
            return self._call_operands(scope)
        if mnemonic in _ALONE or self._token.text == ";":
            return []
        if self._token.text in _ALONE and self._following == ";":
            self._fail_unended(self._at)
        operands = [self._operand(scope)]
        while self._accept(","):
            operands.append(self._operand(scope))
        return operands

    def _check_ended(self, opcode: int) -> None:
        """Fail for want of a `;` if a statement that is wrong seems to run into the next one.

        It does where a line ends in what may end a statement and the next begins with what begins
        one, or where a `}` closes no vector.
        """
        depth = 0
        for at in range(opcode + 1, self._at + 1):
            before, token = self._tokens[at - 1], self._tokens[at]
            is_first = at == opcode + 1
            is_end = before.kind in ("word", "number") or before.text in _CLOSING
            if token.text == "}" and not depth and is_end:
                self._fail_unended(at)
            if token.line > before.line and is_end and _begins_statement(token, is_first=is_first):
                self._fail_unended(at)
            depth += (token.text == "{") - (token.text == "}")

    def _call_operands(self, scope: Scope) -> list[syntax.Operand]:
        """Parse `(results), function, (arguments)`, each part but the function optional."""
        parts: list[syntax.Operand] = []
        while self._token.text != ";":
            if self._accept("("):
                items: list[syntax.Operand] = []
                while not self._accept(")"):
                    items.append(self._operand(scope))
                    self._accept(",")
                parts.append(syntax.Vector(tuple(items)))
            else:
                parts.append(self._operand(scope))
            if not self._accept(","):
                break
        return parts

    # --- labels -----------------------------------------------------------------------------

    def _resolve_labels(self, function: syntax.Function) -> None:
        for position, (statement, scope) in enumerate(zip(function.body, self._pending)):
            if isinstance(statement, syntax.LabelMark):
                continue
            mnemonic = statement.opcode.split(".")[0]
            if mnemonic not in ("bra", "brx"):
                continue
            target = statement.operands[-1] if statement.operands else None
            unique = scope.label(target.name) if isinstance(target, syntax.Symbol) else None
            if unique is None:
                raise PtxError(f"`{statement.text}`: no such label", statement.line)
            operands = (*statement.operands[:-1], syntax.Label(unique))
            function.body[position] = syntax.Statement(
                statement.opcode, operands, statement.guard, statement.line, statement.text
            )
        for name, targets in function.branch_targets.items():
            token, scope = self._target_lists[name]
            unique_targets: list[str] = []
            for target in targets:
                unique = scope.label(target)
                if unique is None:
                    self._fail(f".branchtargets: no label {target}", token)
                unique_targets.append(unique)
            function.branch_targets[name] = tuple(unique_targets)
