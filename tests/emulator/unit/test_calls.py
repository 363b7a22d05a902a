"""Calls of device functions, vprintf and __assertfail."""

import numpy as np
import pytest

from fovea import emulator

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"

FUNCTIONS = """
.func (.param .b32 func_retval0) square(.param .b32 square_param_0)
{
    .reg .b32 %x; .reg .pred %p;
    ld.param.b32 %x, [square_param_0];
    setp.gt.u32 %p, %x, 100;
    @%p bra BIG;
    mul.lo.u32 %x, %x, %x;
    st.param.b32 [func_retval0], %x;
    ret;
BIG:
    mov.u32 %x, 7;
    st.param.b32 [func_retval0], %x;
    ret;
}
.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
{
    .reg .b32 %x, %y;
    ld.param.b32 %x, [twice_param_0];
    {
    .param .b32 param0; .param .b32 retval0;
    st.param.b32 [param0], %x;
    call.uni (retval0), square, (param0);
    ld.param.b32 %y, [retval0];
    }
    add.u32 %y, %y, %x;
    st.param.b32 [func_retval0], %y;
    ret;
}
"""

KERNEL = """
.visible .entry k(.param .u64 out)
{
    .reg .b64 %o, %i; .reg .b32 %t, %v;
    ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %i, %t, 4; add.u64 %o, %o, %i;
    mul.lo.u32 %t, %t, 5;
    {
    .param .b32 param0; .param .b32 retval0;
    st.param.b32 [param0], %t;
    call.uni (retval0), twice, (param0);
    ld.param.b32 %v, [retval0];
    }
    shfl.sync.idx.b32 %v, %v, %t, 31, -1;
    shfl.sync.bfly.b32 %v, %v, 0, 31, -1;
    st.global.u32 [%o], %v;
    ret;
}
"""


def test_divergent_calls_return_together_with_their_values() -> None:
    out = np.zeros(32, np.uint32)
    emulator.load_ptx(HEAD + FUNCTIONS + KERNEL).launch("k", 1, 32, args=[out])
    x = np.arange(32, dtype=np.uint32) * 5
    value = np.where(x > 100, 7, x * x) + x
    np.testing.assert_array_equal(out, value[x % 32])


def test_unknown_external_function_is_refused() -> None:
    text = HEAD + ".extern .func other();\n.visible .entry k() { call other; ret; }"
    with pytest.raises(emulator.UnsupportedForm, match="call of other"):
        emulator.load_ptx(text).launch("k", 1, 32)


PRINT = (
    HEAD
    + """.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
.global .align 1 .b8 message[20] = {116, 61, 37, 100, 32, 120, 61, 37, 46, 50, 102, 0};
.visible .entry k()
{
    .local .align 8 .b8 depot[16];
    .reg .b64 %l, %g; .reg .b32 %t; .reg .f64 %d; .reg .pred %p;
    mov.u64 %l, depot; cvta.local.u64 %g, %l; mov.u32 %t, %tid.x;
    setp.ne.u32 %p, %t, 3; @%p exit;
    cvt.rn.f64.u32 %d, %t; st.local.u32 [%l], %t; st.local.f64 [%l+8], %d;
    {
    .param .b64 param0; .param .b64 param1; .param .b32 retval0; .reg .b64 %m;
    mov.u64 %m, message; cvta.global.u64 %m, %m;
    st.param.b64 [param0], %m; st.param.b64 [param1], %g;
    call.uni (retval0), vprintf, (param0, param1);
    }
    ret;
}
"""
)


def test_printed_text_is_in_the_result() -> None:
    result = emulator.load_ptx(PRINT).launch("k", 1, 32)
    assert result.printed == ("t=3 x=3.00",)


RECURSIVE = """
.func (.param .b32 r) first(.param .b32 a);
.func (.param .b32 r) second(.param .b32 a)
{
    call.uni (r), first, (a);
    ret;
}
.func (.param .b32 r) first(.param .b32 a)
{
    call.uni (r), second, (a);
    ret;
}
"""


@pytest.mark.parametrize(
    ("functions", "call", "words"),
    [
        (RECURSIVE, "call.uni (r), first, (a);", "recursive call of first"),
        (FUNCTIONS, "call (r), %f, (a), type;", "indirect call"),
        (FUNCTIONS, "mov.u64 %f, square;", "square is no variable"),
    ],
)
def test_call_that_is_not_implemented_is_an_error_that_names_it(functions, call, words):
    kernel = f"""
    .visible .entry k()
    {{
        .reg .b64 %f; .param .b32 a; .param .b32 r;
        mov.u64 %f, 0; st.param.b32 [a], 3;
        type: .callprototype (.param .b32 _) _ (.param .b32 _);
        {call}
        ret;
    }}
    """
    with pytest.raises(emulator.PtxError, match=words) as caught:
        emulator.load_ptx(HEAD + functions + kernel).launch("k", 1, 32, args=[])
    assert caught.value.line > 0


def printed(layout: str, *words: int) -> str:
    """Return what lane 0 prints of 8-byte arguments."""
    raw = ", ".join(str(byte) for byte in layout.encode() + b"\0")
    stores = "".join(f"st.local.b64 [l+{8 * n}], {word};" for n, word in enumerate(words))
    text = f"""{HEAD}.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
    .global .b8 text[] = {{{raw}}}; .global .b8 word[] = {{116, 114, 117, 110, 99, 0}};
    .visible .entry k() {{ .local .align 8 .b8 l[64]; .reg .b64 %l, %m; .reg .b64 %w;
    .param .b64 p; .param .b64 q; .param .b32 r; mov.u64 %w, word; {stores}
    mov.u64 %l, l; cvta.local.u64 %l, %l; mov.u64 %m, text;
    st.param.b64 [p], %m; st.param.b64 [q], %l; call.uni (r), vprintf, (p, q); ret; }}"""
    return emulator.load_ptx(text).launch("k", 1, 1).printed[0]


@pytest.mark.parametrize(
    ("layout", "words", "expected"),
    [
        ("%10s|", ["%w"], "     trunc|"),
        ("%-10s|", ["%w"], "trunc     |"),
        ("%.2s|", ["%w"], "tr|"),
        ("%*d|", [6 | 42 << 32], "    42|"),
        ("%.*f|", [2, 0x400921FB54442D18], "3.14|"),
        ("%a %A", [0x3FF0000000000000, 0x4008000000000000], "0x1p+0 0X1.8P+1"),
        ("%lld %lu %zu %%", [(1 << 64) - 5, 6, 7], "-5 6 7 %"),
        ("%p", [0x1234], "0x1234"),
    ],
)
def test_printf_keeps_widths_and_precisions(layout, words, expected):
    assert printed(layout, *words) == expected


def test_long_chain_of_functions_is_no_limit():
    functions = ".func f0() { ret; }\n" + "".join(
        f".func f{n}() {{ call f{n - 1}; ret; }}\n" for n in range(1, 2000)
    )
    text = f"{HEAD}{functions}.visible .entry k() {{ call f1999; ret; }}"
    emulator.load_ptx(text).launch("k", 1, 1)
