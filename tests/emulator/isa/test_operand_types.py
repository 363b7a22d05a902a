"""Declared types of registers against the types of instructions, as ptxas judges them.

`operand_types.txt` has what ptxas took for every operand of every kind of form.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from operand_probes import TYPES

from fovea.emulator import OperandTypeError, PtxError, load_ptx
from fovea.emulator.isa import find
from fovea.emulator.isa.instruction import Instruction, Program
from fovea.emulator.isa.operand_types import check_operand_types
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.parser import parse

TEXT = (Path(__file__).parent / "operand_types.txt").read_text()


def _sections() -> Iterator[tuple[str, list[tuple[str, set[str]]]]]:
    for part in TEXT.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        rows = [line.partition(" |") for line in lines if line]
        yield title.split()[1], [(text, set(names.split())) for text, _, names in rows]


def _retyped(operand: syntax.Operand, ptx_type: str) -> syntax.Operand:
    """Return an operand whose open registers (`%f16_13...`) have a type."""
    if isinstance(operand, syntax.Register):
        is_open = operand.name.startswith("%open")
        return syntax.Register(operand.name, operand.uid, ptx_type) if is_open else operand
    if isinstance(operand, syntax.Vector):
        return syntax.Vector(tuple(_retyped(item, ptx_type) for item in operand.items))
    if isinstance(operand, syntax.Pair):
        return syntax.Pair(_retyped(operand.first, ptx_type), _retyped(operand.second, ptx_type))
    if isinstance(operand, syntax.Memory):
        rest = tuple(_retyped(item, ptx_type) for item in operand.rest)
        return syntax.Memory(_retyped(operand.base, ptx_type), operand.offset, rest)
    return operand


def _taken(statement: syntax.Statement, target: str, ptx_type: str) -> bool:
    found = find(statement.opcode, len(statement.operands), statement.line, target)
    changed = syntax.Statement(
        statement.opcode,
        tuple(_retyped(operand, ptx_type) for operand in statement.operands),
        statement.guard,
        statement.line,
        statement.text,
    )
    program = Program(kernel="kernel", target=target)
    try:
        check_operand_types(Instruction(changed, program, found, 0))
    except OperandTypeError:
        return False
    return True


def _statements(target: str, rows: list[tuple[str, set[str]]]) -> list[syntax.Statement]:
    registers = " ".join(f".reg .{name} %{name}_<140>;" for name in TYPES)
    body = "\n".join(re.sub(r"@(\d*)", r"%open\1", text) for text, _ in rows)
    tree = parse(
        f".version 9.2\n.target {target}\n.address_size 64\n.shared .align 128 .b8 sm[1024];\n"
        f".visible .entry kernel() {{ {registers} .reg .b32 %open, %open<140>;\n{body}\nret; }}"
    )
    return [s for s in tree.functions["kernel"].body if isinstance(s, syntax.Statement)][:-1]


def _differences(is_taken_by_ptxas: bool) -> list[str]:
    """Return what ptxas takes and the emulator refuses, or the other way round."""
    found: list[str] = []
    for target, rows in _sections():
        for (text, taken), statement in zip(rows, _statements(target, rows), strict=True):
            for name in TYPES:
                if (name in taken) is is_taken_by_ptxas is not _taken(statement, target, name):
                    found.append(f"{text} with .{name}")
    return found


def _is_quirk(row: str) -> bool:
    """Return whether ptxas takes a type there that could not hold the operand."""
    text, _, name = row.rpartition(" with .")
    if name == "pred":  # as an element of a vector of 32-bit registers
        return True
    if name == "f16x2" and (".pred" in text or text.startswith("vote")):
        return True
    # addresses of 8 or 16 bits; of anything in some instructions
    is_integer = name in ("b32", "u32", "s32", "b64", "u64", "s64")
    return "[@" in text and (not is_integer or text.startswith(("tcgen05.cp", "tcgen05.shift")))


def test_types_that_ptxas_takes_are_taken():
    assert not [row for row in _differences(True) if not _is_quirk(row)]


def test_types_that_ptxas_refuses_are_refused():
    # `.f16x2` registers are taken for bits everywhere; sparse operands are not told apart by their
    # kinds, as ptxas does it for most of them
    known = ("ld.global.v4.f32 {", "mma.sp::")
    found = [row for row in _differences(False) if not row.endswith(" with .f16x2")]
    assert not [row for row in found if not row.startswith(known)]
    assert 0 < len(found) < 50


KERNEL = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry kernel()
{{
    .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %rd<4>; .reg .f64 %fd<4>;
    .reg .u32 %u<4>; .reg .pred %p<4>;
    mov.b32 %r1, 0; mov.b64 %rd1, 0; mov.b16 %h1, 0; mov.f32 %f1, 0f00000000; mov.u32 %u1, 0;
    {statement}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("statement", "register", "declared", "allowed"),
    [
        ("add.u32 %f2, %r1, %r1;", "%f2", "f32", "(allowed: .b32, .u32, .s32)"),
        ("add.f32 %f2, %f1, %u1;", "%u1", "u32", "(allowed: .b32, .f32)"),
        ("add.f32 %rd2, %f1, %f1;", "%rd2", "b64", "(allowed: .b32, .f32)"),
        ("add.f32 %f2, %fd1, %f1;", "%fd1", "f64", "(allowed: .b32, .f32)"),
        ("mov.b64 %rd2, %r1;", "%r1", "b32", "(allowed: .b64, .u64, .s64, .f64)"),
        ("and.b32 %p1, %r1, %r1;", "%p1", "pred", "(allowed: .b32, .u32, .s32, .f32)"),
        ("shl.b64 %rd2, %rd1, %rd1;", "%rd1", "b64", "operand b of `shl.type d, a, b`"),
        ("mul.wide.u32 %r2, %r1, %r1;", "%r2", "b32", "(allowed: .b64, .u64, .s64)"),
        ("ld.global.u32 %f2, [%rd1];", "%f2", "f32", "(allowed: .b32, .u32, .s32, .b64"),
        ("ld.global.u32 %r2, [%fd1];", "%fd1", "f64", "(allowed: .b32, .u32, .s32, .b64"),
        ("ld.global.v2.b32 {%f2, %u2}, [%rd1];", "%f2", "f32", "do not agree"),
        ("cvt.u32.u64 %r2, %r1;", "%r1", "b32", "(allowed: .b64, .u64, .s64, .b128)"),
        ("bar.sync %f1;", "%f1", "f32", "(allowed: .b32, .u32, .s32)"),
        ("mbarrier.init.shared.b64 [%r1], %rd1;", "%rd1", "b64", "operand count"),
        ("setp.eq.u32 %r2, %r1, %r1;", "%r2", "b32", "(allowed: .pred)"),
        ("selp.b32 %r2, %r1, %r1, !%r1;", "%r1", "b32", "(allowed: .pred)"),
    ],
)
def test_register_of_a_type_that_does_not_fit_is_an_error_before_the_launch(
    statement, register, declared, allowed
):
    module = load_ptx(KERNEL.format(statement=statement))
    with pytest.raises(OperandTypeError) as caught:
        module.launch("kernel", 1, 32)
    error = caught.value
    assert (error.register, error.declared, error.line) == (register, declared, 10)
    assert error.form
    assert allowed in str(error)


@pytest.mark.parametrize(
    "statement",
    [
        "add.u32 %r2, %u1, %r1;",
        "add.s32 %u2, %u1, %r1;",
        "add.f32 %r2, %f1, %r1;",
        "and.b32 %f2, %f1, %u1;",
        "cvt.u64.u32 %rd2, %rd1;",
        "cvt.u32.u8 %r2, %h1;",
        "mov.b64 %rd2, {%f1, %r1};",
        "mov.b32 {%h2, _}, %f1;",
        "shfl.sync.bfly.b32 %f2|%p1, %f1, 1, 31, -1;",
        "mov.b32 %f2, 0;",
    ],
)
def test_register_of_a_type_that_agrees_runs(statement):
    assert load_ptx(KERNEL.format(statement=statement)).launch("kernel", 1, 32).steps


@pytest.mark.parametrize("statement", ["add.f32 %f2, %f1, 1;", "setp.lt.f32 %p1, %f1, 0;"])
def test_integer_constant_where_a_float_is_needed_is_an_error(statement):
    module = load_ptx(KERNEL.format(statement=statement))
    with pytest.raises(
        PtxError, match=r"PTX line 10.*operand b is the integer [01].*write [01]\.0"
    ):
        module.launch("kernel", 1, 32)
