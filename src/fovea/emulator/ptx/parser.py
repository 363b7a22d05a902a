"""Tokens to syntax tree.

Lives here: the grammar of declarations, statements and operands, with scopes. Not here: which
opcodes exist (`isa/`). Invariant: labels, registers and variables in the tree are unique names.
"""

import struct
from typing import NoReturn

from fovea.emulator.errors import PtxError
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.lexer import Token, tokenize
from fovea.emulator.ptx.scope import Scope
from fovea.emulator.ptx.types import REGISTER_TYPES, SPECIAL_REGISTERS, is_scalar_type, size_bytes

_SPACES = ("reg", "shared", "global", "const", "local", "param", "sreg")
_LINKAGE = (".extern", ".visible", ".weak", ".common")
_PERFORMANCE = (".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".noreturn",
                ".explicitcluster", ".reqnctapercluster", ".maxclusterrank", ".blocksareclusters",
                ".unique", ".abi_preserve", ".abi_preserve_control")  # fmt: skip
_PRECEDENCE = (("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_TEXT_LIMIT = 160


def parse(text: str) -> syntax.ModuleSyntax:
    """Parse a PTX module.

    Raises:
        PtxError: with the line of the first thing that is wrong.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PtxError(f"PTX must be a str, got {type(text).__name__}")
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        self._text = text
        self._tokens = tokenize(text)
        self._at = 0
        self._module = syntax.ModuleSyntax()
        self._scopes = 0
        self._globals = Scope(0, None)
        self._function: syntax.Function | None = None
        self._pending: list[Scope] = []  # the scope of each item of the body, for labels
        self._target_scopes: dict[str, Scope] = {}

    # --- tokens -----------------------------------------------------------------------------

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _next(self) -> Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

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

    # --- module level -----------------------------------------------------------------------

    def module(self) -> syntax.ModuleSyntax:
        while self._token.kind != "end":
            text = self._token.text
            if text == ".version":
                self._next()
                self._module.version = self._next().text
            elif text == ".target":
                self._next()
                self._module.target = self._next().text
                while self._accept(","):
                    self._next()
            elif text == ".address_size":
                self._next()
                self._module.address_size = int(self._next().text)
            elif text == ".section":
                self._skip_section()
            elif text in (".pragma", ".alias"):
                while not self._accept(";"):
                    self._next()
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
        elif self._token.text[1:] in _SPACES and self._token.kind == "directive":
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
        parameters = self._parameters(scope) if self._token.text == "(" else []
        function = syntax.Function(token.text, is_entry, parameters, token.line, results)
        self._function = function
        while self._token.text in _PERFORMANCE or self._token.text == ".pragma":
            name = self._next().text
            values: list[int] = []
            while self._token.kind in ("number", "string") or self._token.text == ",":
                item = self._next()
                if item.kind == "number":
                    values.append(int(item.text, 0))
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
            if is_extern:
                self._fail("an .extern function has no body")
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
                self._fail("functions with .reg parameters are not supported")
            found += self._declaration(scope, is_extern=False, is_parameter=True)
            if self._token.text != ")":
                self._expect(",")
        return found

    def _attribute(self) -> None:
        self._next()
        if self._accept("("):
            while not self._accept(")"):
                self._next()

    # --- declarations -----------------------------------------------------------------------

    def _declaration(
        self, scope: Scope, is_extern: bool, is_parameter: bool = False
    ) -> list[syntax.Variable]:
        """Parse `.space [.align n] .type name ...`; the `;` is eaten unless it is a parameter."""
        token = self._next()
        space = token.text[1:]
        align, ptx_type, lanes = 0, "", 1
        while self._token.kind == "directive":
            word = self._next().text[1:]
            if word == "align":
                align = int(self._next().text, 0)
            elif word in ("v2", "v4", "v8"):
                lanes = int(word[1:])
            elif word == "attribute":
                self._at -= 1
                self._attribute()
            elif word == "ptr" or word in _SPACES:
                continue
            elif is_scalar_type(word):
                ptx_type = word
            elif word in ("texref", "samplerref", "surfref"):
                self._fail(f".{word} variables are not supported", token)
            else:
                self._fail(f"unknown type or attribute .{word}", token)
        if not ptx_type:
            self._fail("a declaration needs a type", token)
        found: list[syntax.Variable] = []
        while True:
            if space == "reg":
                self._register(scope, ptx_type, lanes)
            else:
                found.append(self._variable(scope, space, ptx_type, lanes, align, is_extern))
            if is_parameter or not self._accept(","):
                break
        if not is_parameter:
            self._expect(";")
        return found

    def _register(self, scope: Scope, ptx_type: str, lanes: int) -> None:
        token = self._next()
        if ptx_type not in REGISTER_TYPES or lanes != 1:
            self._fail(f"no register can have type .{ptx_type} x {lanes}", token)
        count = None
        if self._accept("<"):
            count = int(self._next().text, 0)
            self._expect(">")
        scope.declare(token.text, ptx_type, count, token.line)

    def _variable(
        self, scope: Scope, space: str, ptx_type: str, lanes: int, align: int, is_extern: bool
    ) -> syntax.Variable:
        token = self._next()
        if token.kind != "word":
            self._fail(f"expected a variable name, got {token.text!r}", token)
        count: int | None = lanes
        while self._accept("["):
            if self._accept("]"):
                count = None
                continue
            size = self._constant()
            if not isinstance(size, int) or size < 0:
                self._fail("an array size must be a non-negative integer", token)
            count = size if count is None else count * size
            self._expect("]")
        unique = token.text if scope.outer is None else f"{scope.number}:{token.text}"
        if space == "param" and scope.outer is not None and self._function is None:
            unique = token.text
        scope.variables[token.text] = unique
        initial: tuple[int | float | syntax.Symbol, ...] = ()
        if self._accept("="):
            initial = self._initial_values(scope)
            if count is None:
                count = len(initial)
        align = align or size_bytes(ptx_type) * lanes
        variable = syntax.Variable(
            space, ptx_type, unique, align, count, initial, token.line, is_extern
        )
        if self._function is not None and scope.outer is not None:
            self._function.variables.append(variable)
        return variable

    def _initial_values(self, scope: Scope) -> tuple[int | float | syntax.Symbol, ...]:
        if self._accept("{"):
            values: list[int | float | syntax.Symbol] = []
            while not self._accept("}"):
                values += self._initial_values(scope)
                if self._token.text != "}":
                    self._expect(",")
            return tuple(values)
        if self._token.kind == "word":
            name = self._next().text
            if name == "generic":
                self._expect("(")
                name = self._next().text
                self._expect(")")
            offset = int(self._constant()) if self._accept("+") else 0
            return (syntax.Symbol(scope.variable(name) or name, offset),)
        value = self._constant()
        return (value.value if isinstance(value, syntax.Immediate) else value,)

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
                if token.text in (".pragma", ".callprototype"):
                    while not self._accept(";"):
                        self._next()
                elif token.text == ".section":
                    self._skip_section()
                elif token.text[1:] in _SPACES:
                    self._declaration(scope, is_extern=False)
                else:
                    self._fail(f"unexpected directive {token.text}", token)
            elif token.kind == "word" and self._tokens[self._at + 1].text == ":":
                self._label(scope)
            elif not self._accept(";"):
                self._statement(scope)

    def _label(self, scope: Scope) -> None:
        token = self._next()
        self._expect(":")
        assert self._function is not None
        if token.text in scope.labels:
            self._fail(f"label {token.text} is defined twice", token)
        scope.labels.add(token.text)
        unique = f"{scope.number}:{token.text}"
        if self._token.text in (".branchtargets", ".calltargets"):
            self._next()
            targets = [self._next().text]
            while self._accept(","):
                targets.append(self._next().text)
            self._expect(";")
            self._function.branch_targets[unique] = tuple(targets)
            self._target_scopes[unique] = scope
        elif self._token.text == ".callprototype":
            while not self._accept(";"):
                self._next()
        else:
            self._function.body.append(syntax.LabelMark(unique, token.line))
            self._pending.append(scope)

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
        token = self._next()
        if token.kind != "word":
            self._fail(f"expected an instruction, got {token.text!r}", token)
        mnemonic = token.text.split(".")[0]
        operands: list[syntax.Operand] = []
        if mnemonic == "call":
            operands = self._call_operands(scope)
        elif self._token.text != ";":
            operands.append(self._operand(scope))
            while self._accept(","):
                operands.append(self._operand(scope))
        end = self._expect(";")
        text = " ".join(self._text[first.start : end.start].split())[:_TEXT_LIMIT]
        assert self._function is not None
        self._function.body.append(
            syntax.Statement(token.text, tuple(operands), guard, token.line, text)
        )
        self._pending.append(scope)

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
            self._accept(",")
        return parts

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
        elif token.kind == "word":
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
        if token.text == "WARP_SZ":
            return syntax.Immediate(32)
        unique = scope.variable(token.text)
        if unique is None and token.text.startswith("%"):
            if token.text.partition(".")[0] not in SPECIAL_REGISTERS:
                self._fail(f"register {token.text} is not declared", token)
            return syntax.SpecialRegister(token.text)
        offset = 0
        if self._token.text in "+-" and self._token.kind == "punctuation":
            sign = -1 if self._next().text == "-" else 1
            offset = sign * int(self._next().text, 0)
        return syntax.Symbol(unique or token.text, offset)

    def _memory(self, scope: Scope) -> syntax.Memory:
        token = self._expect("[")
        if self._token.kind == "word":
            base = self._name(scope)
        else:
            value = self._constant()
            base = value if isinstance(value, syntax.Immediate) else syntax.Immediate(value)
        offset = 0
        if isinstance(base, syntax.Symbol):
            base, offset = syntax.Symbol(base.name), base.offset
        while self._token.text in ("+", "-"):
            sign = -1 if self._next().text == "-" else 1
            value = self._constant()
            if not isinstance(value, int):
                self._fail("an address offset must be an integer", token)
            offset += sign * value
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
            if level == 0 and self._tokens[self._at + 1].kind == "word":
                break  # `5|%p`: a pair, not an expression
            operator = self._next().text
            right = self._constant(level + 1)
            if not isinstance(value, int) or not isinstance(right, int):
                self._fail("constant expressions are of integers")
            value = _fold(operator, value, right)
        return value

    def _atom(self) -> int | float | syntax.Immediate:
        token = self._next()
        if token.text == "-":
            value = self._atom()
            if isinstance(value, syntax.Immediate):
                return -value.value
            return -value
        if token.text == "~":
            value = self._atom()
            if not isinstance(value, int):
                self._fail("~ needs an integer", token)
            return ~value
        if token.text == "(":
            value = self._constant()
            self._expect(")")
            return value
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
            return float(text)
        text = text.rstrip("U")
        is_octal = len(text) > 1 and text[0] == "0" and text.isdigit()
        return int(text, 8) if is_octal else int(text, 0)

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
        scopes = self._target_scopes
        for name, targets in function.branch_targets.items():
            unique_targets: list[str] = []
            for target in targets:
                unique = scopes[name].label(target)
                if unique is None:
                    raise PtxError(f".branchtargets: no label {target}", function.line)
                unique_targets.append(unique)
            function.branch_targets[name] = tuple(unique_targets)


def _fold(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%") and right == 0:
        raise PtxError("division by zero in a constant expression")
    return {
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&": lambda: left & right,
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: int(left / right),
        "%": lambda: left - right * int(left / right),
    }[operator]()
