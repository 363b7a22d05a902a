"""Declarations: alignment of pointer parameters, vector registers."""

import numpy as np
import pytest

from fovea import emulator

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def kernel(signature: str, body: str) -> str:
    """Return a module of one kernel `k`."""
    return f"{HEAD}.visible .entry k({signature})\n{{\n{body}\nret;\n}}\n"


def test_align_of_a_pointer_parameter_belongs_to_the_pointee() -> None:
    signature = ".param .u32 n, .param .u64 .ptr .global .align 1 out"
    body = """.reg .b64 %p; .reg .b32 %n; ld.param.u64 %p, [out]; ld.param.u32 %n, [n];
    st.global.b32 [%p], %n;"""
    out = np.zeros(1, np.uint32)
    module = emulator.load_ptx(kernel(signature, body))
    module.launch("k", 1, 1, args=[7, out])  # offset 4 would be a misaligned parameter load
    assert out[0] == 7


def test_large_align_of_a_pointee_leaves_parameters_where_they_are() -> None:
    signature = ".param .u64 .ptr .align 128 a, .param .u64 .ptr .shared .align 64 b, .param .u32 c"
    module = emulator.load_ptx(kernel(signature, ""))
    offsets = [p.offset for p in module._layout.kernel("k").parameters]
    assert offsets == [0, 8, 16]


def test_align_before_a_type_still_places_the_parameter() -> None:
    module = emulator.load_ptx(kernel(".param .u32 c, .param .align 64 .b8 map[128]", ""))
    assert [p.offset for p in module._layout.kernel("k").parameters] == [0, 64]


def test_vector_register_and_its_components_name_the_same_registers() -> None:
    out = np.zeros(8, np.uint32)
    body = """.reg .b64 %p; .reg .v4 .b32 abcd; .reg .v2 .b32 pair<3>; .reg .b32 %s;
    ld.param.u64 %p, [out];
    mov.b32 abcd.x, 1; mov.b32 abcd.y, 2; mov.b32 abcd.b, 3; mov.b32 abcd.w, 4;
    st.global.v4.b32 [%p], abcd;
    ld.global.v2.b32 pair2, [%p+8];
    add.u32 %s, pair2.x, pair2.g;
    st.global.b32 [%p+16], %s;"""
    emulator.load_ptx(kernel(".param .u64 out", body)).launch("k", 1, 1, args=[out])
    assert out.tolist() == [1, 2, 3, 4, 7, 0, 0, 0]


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".reg .v4 .pred v;", "no register can have type .pred x 4"),
        (".reg .v4 .b64 v;", "exceeds 128 bits"),
        (".reg .v2 .b32 v; mov.b32 v.z, 1;", r"v\.z"),
        (".reg .v2 .b32 v; .reg .b32 %a; add.u32 %a, v, 1;", "cannot be read"),
    ],
)
def test_wrong_use_of_vector_registers_is_an_error_with_its_line(
    declaration: str, message: str
) -> None:
    with pytest.raises(emulator.PtxError, match=message) as info:
        emulator.load_ptx(kernel("", declaration)).launch("k", 1, 32)
    assert info.value.line == 6


def test_vector_of_one_register_is_the_register() -> None:
    out = np.arange(4, dtype=np.uint8)
    body = """.reg .b64 %p; .reg .b16 %h;
    ld.param.u64 %p, [out]; ld.global.b8 { %h }, [ %p + 3 ]; st.global.b8 [ %p + 0 ], { %h };"""
    emulator.load_ptx(kernel(".param .u64 out", body)).launch("k", 1, 1, args=[out])
    assert out.tolist() == [3, 1, 2, 3]


def test_register_and_a_family_of_the_same_name_are_different_registers() -> None:
    # as Triton's conversion from fp8 declares them
    out = np.zeros(3, np.uint32)
    body = """.reg .b64 %p; .reg .b32 a; .reg .b32 a<2>; ld.param.u64 %p, [out];
    mov.b32 a, 7; mov.b32 a0, 8; mov.b32 a1, 9;
    st.global.b32 [%p], a; st.global.b32 [%p+4], a0; st.global.b32 [%p+8], a1;"""
    module = emulator.load_ptx(kernel(".param .u64 out", body))
    module.launch("k", 1, 1, args=[out])
    assert out.tolist() == [7, 8, 9]


@pytest.mark.parametrize("twice", [".reg .b32 a; .reg .f32 a;", ".reg .b32 a<2>; .reg .f32 a<3>;"])
def test_register_declared_twice_is_an_error_with_its_line(twice: str) -> None:
    with pytest.raises(emulator.PtxError, match="declared twice") as info:
        emulator.load_ptx(kernel("", twice))
    assert info.value.line == 6


def run(body: str, top: str = "", block: int = 1) -> list[int]:
    """Return the words that a kernel stored; `%p` is their address, `%a` to `%d` are registers."""
    out = np.zeros(8, np.uint32)
    registers = ".reg .b64 %p; .reg .b32 %a, %b, %c, %d; ld.param.u64 %p, [out];"
    text = kernel(".param .u64 out", f"{registers}\n{body}").replace(HEAD, HEAD + top)
    emulator.load_ptx(text).launch("k", 1, block, args=[out])
    return out.tolist()


@pytest.mark.parametrize(
    "debug",
    [
        ".loc 1 2 3",
        ".loc\t1 2\n3",
        ".loc 1 4 0, function_name $L__info_string0, inlined_at 1 2 3",
        ".loc 1 4 0, function_name F + 12, inlined_at 1 2 3",
        '# 4 "x.cu"\n',
        '#4 "x.cu" 2 3\n',
    ],
)
def test_what_follows_debug_information_on_its_line_is_read(debug: str) -> None:
    body = f"mov.u32 %a, 1; {debug} mov.u32 %a, 2; st.global.u32 [%p], %a;"
    assert run(body)[0] == 2
    with pytest.raises(emulator.PtxError) as info:
        run(f"{debug} nonsense %a;\n")
    assert info.value.line == 7 + debug.count("\n")


@pytest.mark.parametrize("text", [";", "{;}", "mov.u32 %a, 1;;", "{ };", ".loc 1 2 3;", ".loc 1 2",
                                  "#line 5", "# 1", '# "x.cu"'])  # fmt: skip
def test_statement_of_nothing_and_unfinished_debug_information_are_errors(text: str) -> None:
    with pytest.raises(emulator.PtxError) as info:
        run(text)
    assert info.value.line in (7, 8)


def test_list_of_targets_may_number_its_labels() -> None:
    body = """mov.u32 %a, 2; T: .branchtargets A<2>, B; brx.idx %a, T;
    A0: A1: mov.u32 %b, 5; bra E; B: mov.u32 %b, 6; E: st.global.u32 [%p], %b;"""
    assert run(body)[0] == 6
    with pytest.raises(emulator.PtxError, match="no label A2") as info:
        run("A0: A1: mov.u32 %a, 1;\nT: .branchtargets A<3>;")
    assert info.value.line == 8


def test_list_of_call_targets_belongs_to_the_indirect_call() -> None:
    top = ".func f() { ret; }\n"
    assert run("T: .calltargets f; mov.u32 %a, 4; st.global.u32 [%p], %a;", top)[0] == 4
    with pytest.raises(emulator.UnsupportedForm, match="indirect call"):
        run("T: .calltargets f; call %p, T;", top)


def test_element_of_an_array_is_an_address_that_counts_elements() -> None:
    top = ".global .u32 A[4]={5,6}; .shared .align 8 .u32 s[4];\n"
    body = """ld.global.u32 %a, A[1]; st.shared.u32 s[1+1], %a; mov.u32 %b, s[2];
    ld.shared.u32 %b, [%b]; ld.shared.u32 %c, [s+8]; add.u32 %c, %c, %b; st.global.u32 [%p], %c;"""
    assert run(body, top)[0] == 12
    for wrong in ("ld.shared.u32 %a, z[1];", "ld.shared.u32 %a, s[%a];", "add.u32 %a, %a, s[1];",
                  "ld.shared.u32 %a, s;", "ld.shared.u32 %a, w[0];"):  # fmt: skip
        with pytest.raises(emulator.PtxError):
            run(wrong, top + ".shared .u32 z; .shared .v2 .u32 w[2];")


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("mov.v4.u32 {%a, %b, %c, %d}, %ntid; st.global.v4.u32 [%p], {%a, %b, %c, %d};", [1] * 3),
        ("mov.v4.u32 {_, %b, _, %d}, %nctaid; st.global.v2.u32 [%p], {%b, %d};", [1, 0]),
        ("mov.u32 %a, 5; mov.u32 %b, 7; mov.v2.b32 {%a, %b}, {%b, %a};"
         "st.global.v2.u32 [%p], {%a, %b};", [7, 5]),
        (".reg .v2 .f32 v, w; mov.v2.f32 v, {0f3f800000, 2.0}; mov.v2.f32 w, v;"
         "st.global.v2.f32 [%p], w;", [0x3F800000, 0x40000000]),
        ("mov.u32 %a, %tid.w; add.u32 %a, %a, 3; st.global.u32 [%p], %a;", [3]),
        ("mov.u32 %a, %reserved_smem_offset_1; st.global.u32 [%p], %a;", [0]),
        (".reg .b64 %g; mov.u64 %g, %current_graph_exec; st.global.u64 [%p], %g;", [0]),
    ],
)  # fmt: skip
def test_vectors_move_whole(body: str, values: list[int]) -> None:
    assert run(body)[: len(values)] == values


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("mov.v2.u32 {%a, %b}, %tid;", "name a component"),
        ("mov.v2.u32 {%a, %b}, {%a, %b, %c};", "must be vectors of 2"),
        ("mov.v4.u64 {%p, %p, %p, %p}, {%p, %p, %p, %p};", "exceeds 128 bits"),
        ("mov.u32 %a, %laneid.x;", "has no component"),
        ("mov.u32 %a, %tid.q;", "has a component x, y, z or w"),
        ("mov.u32 %a, %envreg3;", "%envreg3 is not implemented"),
        ("mov.u32 %a, %pm0;", "%pm0 is not implemented"),
        ("mov.u32 %a, %envreg32;", "not declared"),
        (".shared .u32 s; ld.global.u32 %a, [s];", "s is a .shared variable"),
    ],
)
def test_wrong_move_is_an_error_with_its_line(statement: str, message: str) -> None:
    with pytest.raises(emulator.PtxError, match=message) as info:
        run(statement)
    assert info.value.line == 7
    assert "1:" not in str(info.value)


# --- a `;` that is missing ------------------------------------------------------------------------

_UNENDED = [
    ("ret", "ret", "}"),
    (".reg .b32 %a;\nmov.u32 %a, 1", "1", "ret"),
    ("exit", "exit", "ret"),
    ("bar.sync 0", "0", "L"),
    (".reg .b32 %a", "%a", ".reg"),
    (".reg .b32 %a", "%a", "add.u32"),
    (".reg .b32 %a;\nmov.u32 %a, 1", "1", "{"),
    (".reg .b32 %a<4>; .reg .b64 %b;\nmov.b64 {%a0, %a1}, %b", "%b", "ret"),
    (".reg .b32 %a;\nld.global.u32 %a, [0]", "]", "ret"),
    (".reg .b32 %a; .reg .pred %p;\nmov.u32 %a, 1", "1", "@"),
    ('.pragma "nounroll"', '"nounroll"', "ret"),
    (".shared .b32 g[2]", "]", "ret"),
    (".param .b32 q;\ncall.uni (q), f, (q)", ")", "ret"),
    ("T: .branchtargets A, B", "B", "A"),
    ("membar.gl", "membar.gl", "add.u32"),
    ("ret", "ret", "the end of the text"),
]
_NEXT = {"L": "L: ret;", ".reg": ".reg .b32 %c;", "@": "@%p ret;", "A": "A: ret;", "{": "{ ret; }",
         "add.u32": "add.u32 %a, 1, 2;", "ret": "ret;", "}": ""}  # fmt: skip


@pytest.mark.parametrize(("body", "last", "following"), _UNENDED)
def test_missing_semicolon_is_reported_where_it_is_missing(body, last, following):
    text = f"{HEAD}.visible .entry k()\n{{\n{body}\n"
    line = text.count("\n")
    if following in _NEXT:
        text += f"{_NEXT[following]}\n}}\n"
    with pytest.raises(emulator.PtxError) as info:
        emulator.load_ptx(text)
    assert info.value.line == line
    assert f"expected ';' after {last!r}, got " in str(info.value)
    assert following in str(info.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (".global .b32 g[2]\n.visible .entry k() { ret; }", 4),
        (".extern .func f(.param .b32 a)\n.visible .entry k() { ret; }", 4),
        ('.pragma "x"\n.visible .entry k() { ret; }', 4),
        (".visible .entry k() { ret }", 4),
    ],
)
def test_missing_semicolon_of_the_module_is_reported_where_it_is_missing(text, line):
    with pytest.raises(emulator.PtxError, match="expected ';' after") as info:
        emulator.load_ptx(HEAD + text)
    assert info.value.line == line


def test_statement_of_several_lines_keeps_its_own_error():
    body = ".reg .b32 %a;\nadd.u32\n  %a,\n  1,\n  %b;"
    with pytest.raises(emulator.PtxError, match="register %b is not declared") as info:
        emulator.load_ptx(f"{HEAD}.visible .entry k()\n{{\n{body}\nret;\n}}\n")
    assert info.value.line == 10
    emulator.load_ptx(
        f"{HEAD}.visible .entry k()\n{{\n.reg .b32 %a<3>;\nadd.u32\n  %a0,\n  1\n, 2;\nret;\n}}\n"
    )


def test_missing_comma_is_reported():
    with pytest.raises(emulator.PtxError, match="expected ',' or ';' after '1', got '2'"):
        emulator.load_ptx(f"{HEAD}.entry k() {{ .reg .b32 %a; add.u32 %a, 1 2; ret; }}")
