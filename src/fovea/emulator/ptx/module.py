"""From syntax tree to addresses: parameters, static shared memory, globals, constants, locals.

Lives here: layout of variables. Not here: decoding (`machine/blocks.py`) or running (`run.py`).
Invariant: dynamic shared memory follows all static shared variables of the kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fovea.emulator.arguments import check_kind, listed
from fovea.emulator.errors import LaunchError, PtxError, UnsupportedForm
from fovea.emulator.isa.instruction import Array
from fovea.emulator.machine.blocks import KernelProgram
from fovea.emulator.machine.calls import Signature
from fovea.emulator.machine.memory import CONST_WINDOW, SHARED_RESERVED_BYTES
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.parser import parse
from fovea.emulator.ptx.types import size_bytes

TARGETS = ("sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a",
           "sm_100f", "sm_101a", "sm_103", "sm_103a", "sm_103f", "sm_110", "sm_110a", "sm_120",
           "sm_120a")  # fmt: skip

# CUDA programming guide, table of technical specifications; parameters: PTX ISA 5.1.6
_CONST_BYTES, _LOCAL_BYTES, _PARAMETER_BYTES = 1 << 16, 1 << 19, 32764


# where the functions in tables of addresses seem to lie: nothing can be read there, and indirect
# calls are errors
_CODE_WINDOW = 0x7C << 56


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter: where it lies and what it is."""

    name: str
    type: str
    offset: int
    size: int
    is_array: bool


@dataclass(slots=True)
class Kernel:
    """A kernel with its parameter layout and compiled program."""

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    program: KernelProgram
    required_block: tuple[int, ...]
    max_block: tuple[int, ...]
    required_cluster: tuple[int, ...]
    static_bytes: int
    dynamic_align: int


def align_up(value: int, align: int) -> int:
    """Return the smallest multiple of `align` that is at least `value`."""
    return -(-value // align) * align


def _allocate(size: int, variable: syntax.Variable) -> Array:
    try:
        return np.zeros(size, np.uint8)
    except (MemoryError, ValueError):
        raise PtxError(
            f"no memory for the {size} bytes of {variable.name}", variable.line
        ) from None


def variable_bytes(variable: syntax.Variable) -> int:
    """Return the size of a variable (0 for an unsized array)."""
    return size_bytes(variable.type) * (variable.count or 0)


@dataclass(slots=True)
class Layout:
    """A module's variables at their addresses, and its kernels made on demand."""

    tree: syntax.ModuleSyntax
    variables: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    global_arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    constants: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict[tuple[str, str], Kernel])

    @classmethod
    def of(cls, text: str) -> "Layout":
        """Parse a text and lay out its module-level variables.

        Raises:
            PtxError: syntax, unknown target, or a variable that cannot be placed.
        """
        tree = parse(text)
        if tree.target not in TARGETS:
            raise PtxError(
                f".target {tree.target} is not known (known: {', '.join(TARGETS)}); compile for "
                "one of them"
            )
        layout = cls(tree)
        layout._place_module_variables()
        return layout

    def _place_module_variables(self) -> None:
        offset = 0
        constants: list[tuple[int, syntax.Variable]] = []
        for variable in self.tree.variables:
            if variable.space == "global":
                if variable.count is None or variable.is_extern:
                    raise PtxError(f"extern .global {variable.name} has no memory", variable.line)
                align = max(variable.align, 256)
                array = _allocate(variable_bytes(variable) + align, variable)
                start = -array.ctypes.data % align
                array = array[start : start + variable_bytes(variable)]
                self.global_arrays[variable.name] = array
                self.variables[variable.name] = ("global", array.ctypes.data)
            elif variable.space == "const":
                offset = align_up(offset, variable.align)
                constants.append((offset, variable))
                self.variables[variable.name] = ("const", CONST_WINDOW + offset)
                offset += variable_bytes(variable)
                if offset > _CONST_BYTES:
                    raise PtxError(f"{offset} bytes of .const exceed {_CONST_BYTES}", variable.line)
            elif variable.space != "shared":
                raise PtxError(f".{variable.space} {variable.name} at module level", variable.line)
        self.constants = np.zeros(offset, np.uint8)
        for start, variable in constants:
            self._initialise(self.constants[start : start + variable_bytes(variable)], variable)
        self.constants.flags.writeable = False  # for generic stores, which may lead here
        for variable in self.tree.variables:
            if variable.space == "global":
                self._initialise(self.global_arrays[variable.name], variable)

    def _initialise(self, memory: Array, variable: syntax.Variable) -> None:
        size = size_bytes(variable.type)
        for position, value in enumerate(variable.initial):
            if isinstance(value, syntax.Symbol):
                space, address = self.variables.get(value.name, ("", 0))
                if value.name in self.tree.functions:
                    number = [*self.tree.functions].index(value.name)
                    space, address = "const", _CODE_WINDOW + 16 * number
                if space not in ("global", "const"):
                    raise PtxError(
                        f"initial value {value.name} is no .global or .const variable",
                        variable.line,
                    )
                address += value.offset
                value = address if value.byte is None else address >> 8 * value.byte & 0xFF
            raw = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
            memory[position * size : (position + 1) * size] = np.frombuffer(raw, np.uint8)

    def kernel(self, name: str, tensor_load_wait: str = "auto") -> Kernel:
        """Return a kernel, decoding it at the first call.

        Raises:
            LaunchError: the module has no such kernel.
            PtxError: an instruction is wrong or not implemented.
        """
        found = self.kernels.get((name, tensor_load_wait)) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if found is None:
            check_kind("kernel", name, str, "the name of a kernel", "see Module.kernels")
            function = self.tree.functions.get(name)
            if function is None or not function.is_entry or not function.is_defined:
                names = [f.name for f in self.tree.functions.values() if f.is_entry]
                known = listed([repr(n) for n in names])
                raise LaunchError(
                    f"kernel={name!r} is not in the module (it has: {known}); name one of them"
                )
            found = self._make_kernel(function, tensor_load_wait)
            self.kernels[name, tensor_load_wait] = found
        return found

    def _make_kernel(self, function: syntax.Function, tensor_load_wait: str) -> Kernel:
        variables = dict(self.variables)
        called = self._called_functions(function)
        function = _with_functions(function, called)
        parameters, parameter_bytes = _place_parameters(function, variables)
        static_bytes, dynamic_align = self._place_shared(function, variables)
        local_bytes = _place_locals(function, variables)
        program = KernelProgram(
            function,
            self.tree.target,
            variables,
            static_bytes,
            local_bytes,
            tensor_load_wait,
            {f.name: _signature(f) for f in called},
        )
        program.decode_all()
        directives = function.directives
        return Kernel(
            name=function.name,
            parameters=parameters,
            parameter_bytes=parameter_bytes,
            program=program,
            required_block=directives.get("reqntid", ()),
            max_block=directives.get("maxntid", ()),
            required_cluster=directives.get("reqnctapercluster", ()),
            static_bytes=static_bytes,
            dynamic_align=dynamic_align,
        )

    def _called_functions(self, kernel: syntax.Function) -> list[syntax.Function]:
        """Return the device functions of the module that a kernel calls, directly or not.

        Raises:
            UnsupportedForm: a function calls itself, directly or not.
        """
        done: dict[str, syntax.Function] = {}
        under_way = {kernel.name: self._calls(kernel)}  # a stack: chains of calls may be long
        while under_way:
            caller, calls = next(reversed(under_way.items()))
            for item, function in calls:
                if function.name in under_way:
                    raise UnsupportedForm(
                        f"`{item.text}`: a recursive call of {function.name}; a function has one "
                        "set of registers and variables here",
                        item.line,
                        item.opcode,
                    )
                if function.name not in done:
                    under_way[function.name] = self._calls(function)
                    break
            else:
                del under_way[caller]
                if caller != kernel.name:
                    done[caller] = self.tree.functions[caller]
        return [*done.values()]

    def _calls(self, caller: syntax.Function) -> Iterator[tuple[syntax.Statement, syntax.Function]]:
        """Yield each call by name in a body, with the function of the module that it calls."""
        for item in caller.body:
            if not isinstance(item, syntax.Statement) or item.opcode.split(".")[0] != "call":
                continue
            for operand in item.operands:
                name = operand.name if isinstance(operand, syntax.Symbol) else ""
                function = self.tree.functions.get(name)
                if function is not None and function.is_defined:
                    yield item, function

    def _place_shared(
        self, function: syntax.Function, variables: dict[str, tuple[str, int]]
    ) -> tuple[int, int]:
        """Place static shared variables that the kernel names, then the dynamic ones."""
        named = _named_symbols(function)
        inner = [v for v in function.variables if v.space == "shared"]
        outer = [v for v in self.tree.variables if v.space == "shared" and v.name in named]
        offset = SHARED_RESERVED_BYTES
        dynamic = [v for v in inner + outer if v.count is None or v.is_extern]
        for variable in inner + outer:
            if variable in dynamic:
                continue
            offset = align_up(offset, variable.align)
            variables[variable.name] = ("shared", offset)
            offset += variable_bytes(variable)
        align = max((v.align for v in dynamic), default=1)
        if dynamic:
            offset = align_up(offset, align)
        for variable in dynamic:
            variables[variable.name] = ("shared", offset)
        return offset - SHARED_RESERVED_BYTES, align


def _named_symbols(function: syntax.Function) -> set[str]:
    names: set[str] = set()

    def visit(operand: syntax.Operand) -> None:
        if isinstance(operand, syntax.Symbol):
            names.add(operand.name)
        elif isinstance(operand, syntax.Memory):
            visit(operand.base)
            for item in operand.rest:
                visit(item)
        elif isinstance(operand, syntax.Vector):
            for item in operand.items:
                visit(item)
        elif isinstance(operand, syntax.Pair):
            visit(operand.first)
            visit(operand.second)

    for item in function.body:
        if isinstance(item, syntax.Statement):
            for operand in item.operands:
                visit(operand)
    return names


def _place_parameters(
    function: syntax.Function, variables: dict[str, tuple[str, int]]
) -> tuple[tuple[Parameter, ...], int]:
    offset = 0
    placed: list[Parameter] = []
    for variable in function.parameters:
        size = variable_bytes(variable)
        offset = align_up(offset, variable.align)
        variables[variable.name] = ("param", offset)
        is_array = variable.count is not None and variable.count != 1
        placed.append(Parameter(variable.name, variable.type, offset, size, is_array))
        offset += size
        if offset > _PARAMETER_BYTES:
            raise PtxError(f"{offset} bytes of parameters exceed {_PARAMETER_BYTES}", variable.line)
    return tuple(placed), offset


def _place_locals(function: syntax.Function, variables: dict[str, tuple[str, int]]) -> int:
    offset = 0
    for variable in function.variables:
        if variable.space in ("local", "param"):
            offset = align_up(offset, variable.align)
            variables[variable.name] = ("local", offset)
            offset += variable_bytes(variable)
            if offset > _LOCAL_BYTES:
                raise PtxError(
                    f"{offset} bytes of local memory exceed {_LOCAL_BYTES}", variable.line
                )
    return align_up(offset, 16)


# --- device functions -----------------------------------------------------------------------------


def _signature(function: syntax.Function) -> Signature:
    return Signature(
        f"call:{function.name}",
        tuple((v.name, variable_bytes(v)) for v in function.results),
        tuple((v.name, variable_bytes(v)) for v in function.parameters),
    )


def _with_functions(kernel: syntax.Function, called: list[syntax.Function]) -> syntax.Function:
    """Return a kernel whose body is followed by the bodies of the functions it calls.

    Each function ends in one `ret` that its other returns jump to, so that lanes that part inside
    it meet there before they return.
    """
    if not called:
        return kernel
    body = list(kernel.body)
    body.append(syntax.Statement("exit", (), None, kernel.line, "exit"))
    variables = list(kernel.variables)
    targets = dict(kernel.branch_targets)
    for function in called:
        end = f"return:{function.name}"
        body.append(syntax.LabelMark(f"call:{function.name}", function.line))
        for item in function.body:
            if isinstance(item, syntax.Statement) and item.opcode.split(".")[0] == "ret":
                item = syntax.Statement(
                    "bra", (syntax.Label(end),), item.guard, item.line, item.text
                )
            body.append(item)
        body.append(syntax.LabelMark(end, function.line))
        body.append(syntax.Statement("ret", (), None, function.line, "ret"))
        variables += [*function.variables, *function.parameters, *function.results]
        targets |= function.branch_targets
    return syntax.Function(
        name=kernel.name,
        is_entry=True,
        parameters=kernel.parameters,
        line=kernel.line,
        body=body,
        variables=variables,
        branch_targets=targets,
        directives=kernel.directives,
    )
