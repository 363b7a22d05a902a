"""Declarations of registers and variables, with initial values: the middle of the parser.

Lives here: `.space .type name[...] = {...}`. Not here: operands (`operands.py`), functions and
statements (`parser.py`). Invariant: initial values are those of the first elements, without a gap.
Source: PTX ISA 5.4 (variables), 5.4.4 (initializers).
"""

import math
from collections.abc import Sequence

import numpy as np

from fovea.emulator.errors import UnsupportedForm
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.constants import WARP_SIZE
from fovea.emulator.ptx.operands import OperandParser
from fovea.emulator.ptx.scope import Scope
from fovea.emulator.ptx.types import REGISTER_TYPES, is_float, is_scalar_type, size_bytes

SPACES = ("reg", "shared", "global", "const", "local", "param", "sreg")
_ALIGN_LIMIT = 1 << 20  # far more than any compiler asks for; addresses here keep to it
# bf16 and the other narrow formats are held in registers and variables of bits (PTX ISA 5.2.3)
_DECLARED = REGISTER_TYPES - {"bf16", "bf16x2"}
_HALVES = ("f16", "f16x2")  # of which ptxas takes no initial values
_BYTE = 0xFF


class DeclarationParser(OperandParser):
    """Declarations, of the module and of the function that is being parsed."""

    def __init__(self, text: str):
        super().__init__(text)
        self._module = syntax.ModuleSyntax()
        self._function: syntax.Function | None = None
        self._is_entry_signature = False

    def _attribute(self) -> None:
        self._next()
        if self._accept("("):
            while not self._accept(")"):
                self._next()

    def _declaration(
        self, scope: Scope, is_extern: bool, is_parameter: bool = False
    ) -> list[syntax.Variable]:
        """Parse `.space [.align n] .type name ...`; the `;` is eaten unless it is a parameter."""
        token = self._next()
        space = token.text[1:]
        align, ptx_type, lanes, is_pointer = 0, "", 1, False
        while self._token.kind == "directive":
            word = self._next().text[1:]
            if word == "align":
                # `.ptr .align n` speaks of what the pointer points to (PTX ISA 4.5.2.2)
                value = self._natural()
                if value <= 0 or value & (value - 1) or value > _ALIGN_LIMIT:
                    self._fail(f".align {value} must be a power of two up to {_ALIGN_LIMIT}", token)
                align = align if is_pointer else value
            elif word in ("v2", "v4", "v8"):
                lanes = int(word[1:])
            elif word == "attribute":
                self._at -= 1
                self._attribute()
            elif word == "ptr":
                is_pointer = True
            elif word in SPACES:
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
        is_vector = lanes > 1
        if ptx_type not in _DECLARED or (is_vector and ptx_type == "pred"):
            self._fail(f"no register can have type .{ptx_type} x {lanes}", token)
        if is_vector and lanes * size_bytes(ptx_type) > 16:
            self._fail(f"a vector of {lanes} .{ptx_type} exceeds 128 bits", token)
        count = None
        if self._accept("<"):
            count = self._natural()
            self._expect(">")
        scope.declare(token.text, ptx_type, count, token.line, lanes)

    def _variable(
        self, scope: Scope, space: str, ptx_type: str, lanes: int, align: int, is_extern: bool
    ) -> syntax.Variable:
        token = self._next()
        if token.kind != "word":
            self._fail(f"expected a variable name, got {token.text!r}", token)
        if ptx_type not in _DECLARED or ptx_type == "pred":
            self._fail(f"no variable in memory can have type .{ptx_type}", token)
        shape = self._dimensions(is_extern or space == "param")
        unique = token.text if scope.outer is None else f"{scope.number}:{token.text}"
        if space == "param" and self._is_entry_signature:
            unique = token.text
        if token.text in scope.variables and not is_extern:
            self._fail(f"variable {token.text} is declared twice in one scope", token)
        scope.variables[token.text] = unique
        if shape and lanes == 1:
            self._element_bytes[unique] = size_bytes(ptx_type)
        initial: tuple[syntax.Initial, ...] = ()
        if self._token.text == "=":
            if space not in ("global", "const") or is_extern:
                kind = "an .extern" if is_extern else f"a .{space}"
                self._fail(f"{kind} variable has no initial value")
            self._next()
            values: list[syntax.Initial] = []
            count = self._initial(values, scope, ptx_type, shape, lanes)
            initial = tuple(values)
            shape = [count if size is None else size for size in shape]
        if None in shape and not is_extern and space != "param":
            self._fail(f"{token.text} needs a size: only an .extern one may go without", token)
        sizes = [size for size in shape if size is not None]
        elements = None if len(sizes) < len(shape) else lanes * math.prod(sizes)
        align = align or size_bytes(ptx_type) * lanes
        variable = syntax.Variable(
            space, ptx_type, unique, align, elements, initial, token.line, is_extern
        )
        if self._function is not None and scope.outer is not None:
            is_static = space in ("global", "const")
            owner = self._module if is_static else self._function
            owner.variables.append(variable)
        return variable

    def _dimensions(self, may_be_empty: bool) -> list[int | None]:
        """Parse `[n][m]...`; the first may be `[]`."""
        shape: list[int | None] = []
        while self._accept("["):
            if not shape and self._accept("]"):
                shape.append(None)
                continue
            token = self._token
            size = self._integer()
            if size < 0 or (not size and not may_be_empty):
                self._fail(f"an array size must be a positive integer, got {size}", token)
            shape.append(size)
            self._expect("]")
        return shape

    # --- initial values ---------------------------------------------------------------------

    def _initial(
        self,
        values: list[syntax.Initial],
        scope: Scope,
        ptx_type: str,
        shape: Sequence[int | None],
        lanes: int,
        start: int = 0,
    ) -> int:
        """Append the initial values of an array from element `start` on; return how many rows.

        Elements that its braces leave out at the end are zero; a vector is given whole.
        """
        if not shape and lanes == 1:
            if start != len(values):
                raise UnsupportedForm(
                    "values after an incomplete row: the manual fills the row with zeros (PTX ISA "
                    "5.4.4), ptxas puts them in it; write all elements of the row",
                    self.line,
                    "{",
                )
            values.append(self._initial_value(scope, ptx_type))
            return 1
        token = self._token
        if token.text != "{":
            self._fail(f"expected {{ and the elements, got {token.text!r}", token)
        self._next()
        size, inner = (shape[0], shape[1:]) if shape else (lanes, ())
        row = math.prod(length or 0 for length in inner) * lanes if shape else 1
        count = 0
        while not self._accept("}"):
            if count:
                self._expect(",")
            if count == size and self._token.text != "}":
                self._fail(f"more than {size} initial values in these braces")
            self._initial(
                values, scope, ptx_type, inner, lanes if shape else 1, start + count * row
            )
            count += 1
        if not shape and count != lanes:
            self._fail(f"{count} initial values for a vector of {lanes}", token)
        return count

    def _initial_value(self, scope: Scope, ptx_type: str) -> int | syntax.Symbol:
        token = self._token
        if token.kind == "number" and self._following == "(":
            mask = self._natural()
            self._next()
            symbol = self._initial_address(scope)
            self._expect(")")
            byte = (mask.bit_length() - 1) // 8
            if not 0 <= byte < 8 or mask != _BYTE << 8 * byte:
                self._fail(f"mask {token.text} is not one of 0xff, 0xff00, 0xff0000, ...", token)
            if ptx_type not in ("u8", "u32", "u64"):
                self._fail(f"a byte of an address is no .{ptx_type} (.u8 is)", token)
            return syntax.Symbol(symbol.name, symbol.offset, byte)
        if token.kind == "word" and token.text != WARP_SIZE:
            if ptx_type not in ("u32", "u64"):
                self._fail(f"an address is no .{ptx_type} (.u64 is)", token)
            return self._initial_address(scope)
        value = self._constant()
        constant = value if isinstance(value, syntax.Immediate) else syntax.Immediate(value)
        return self._initial_constant(constant, ptx_type)

    def _initial_address(self, scope: Scope) -> syntax.Symbol:
        """Parse `name`, `name + offset` or `generic(name) + offset`."""
        token = self._next()
        if token.text == "generic":
            self._expect("(")
            token = self._next()
            self._expect(")")
        name = scope.variable(token.text)
        if name is None and token.text in self._module.functions:
            return syntax.Symbol(token.text, self._offset())
        if name is None:
            self._fail(f"initial value {token.text} is no variable declared before", token)
        return syntax.Symbol(name, self._offset())

    def _initial_constant(self, constant: syntax.Immediate, ptx_type: str) -> int:
        """Return the bits that a constant stores in an element, as ptxas stores it."""
        value = constant.value
        if ptx_type in _HALVES:
            self._fail(f"a variable of type .{ptx_type} has no initial value; declare it .b16")
        if constant.bits is None and isinstance(value, int):
            if is_float(ptx_type):
                self._fail(f"initial value {value} is an integer where .{ptx_type} is needed")
            return value
        if ptx_type[0] != "b" and not is_float(ptx_type):
            self._fail(f"initial value {value} is no integer, as .{ptx_type} needs")
        if constant.bits is not None and constant.bits_type == "f32":
            return constant.bits  # the low ones of a wider element
        if size_bytes(ptx_type) == 4:
            with np.errstate(over="ignore"):
                return int(np.float32(value).view(np.uint32))
        return int(np.float64(value).view(np.uint64))
