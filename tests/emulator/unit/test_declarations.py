"""Variables: arrays, vectors and their initial values, as ptxas lays them out."""

import numpy as np
import pytest

from fovea import emulator

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
OTHERS = ".global .u32 g[4]; .const .u32 c[4]; .shared .u32 s[4]; .func f() { ret; }\n"


def load(declaration: str) -> emulator.Module:
    """Return a module of some variables, a declaration in line 5, and an empty kernel."""
    return emulator.load_ptx(
        HEAD + OTHERS + declaration + "\n.visible .entry k(.param .u64 o) { ret; }"
    )


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        (".global .u32 A=1;", "01000000"),
        (".global .u32 A[3]={1,2};", "010000000200000000000000"),
        (".global .u32 A[2][2]={};", "00" * 16),
        (".global .u32 A[3][2]={{1,2},{3}};", "0100000002000000030000000000000000000000" + "0" * 8),
        (".global .u32 A[][2]={{1,2},{3,4}};", "01000000020000000300000004000000"),
        (".global .v2 .u16 A={1,2};", "01000200"),
        (".global .v2 .u16 A[2]={{1,2}};", "0100020000000000"),
        (".global .u8 A[4]={300,-1,0x1ff,WARP_SZ};", "2cffff20"),
        (".global .u32 A=-5000000000;", "000efad5"),
        (".global .f32 A[3]={1.0,0d3ff0000000000000,0f7f800001};", "0000803f0000803f0100807f"),
        (".global .f32 A=1e40;", "0000807f"),
        (".global .f64 A=1.5;", "000000000000f83f"),
        (".global .f64 A=0f3f800000;", "0000803f00000000"),
        (".global .b32 A=1.5;", "0000c03f"),
        (".global .b32 A=0d3ff1234567891234;", "2b1a893f"),
        (".global .b64 A=1.5;", "000000000000f83f"),
        (".global .b16 A=1.7;", "3333"),
    ],
)
def test_initial_values_are_laid_out_as_by_ptxas(declaration, expected):
    assert load(declaration)._layout.global_arrays["A"].tobytes().hex() == expected


def test_initial_addresses_and_their_bytes_are_those_of_the_variable():
    masks = ", ".join(f"0xff{'00' * byte}(g+4)" for byte in range(8))
    layout = load(
        f".global .u8 A[8] = {{{masks}}}; .global .u64 B[2] = {{g+4, generic(g)+-4}};"
    )._layout
    address = layout.global_arrays["g"].ctypes.data
    assert layout.global_arrays["A"].view(np.uint64).tolist() == [address + 4]
    assert layout.global_arrays["B"].view(np.uint64).tolist() == [address + 4, address - 4]


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".global .u32 A[2][2]={1,2,3,4};", "expected { and the elements"),
        (".global .u32 A[2][2]={{1,2},3,4};", "expected { and the elements"),
        (".global .u32 A[2][2]={{{1}},{3,4}};", "expected a constant"),
        (".global .u32 A[2][2]={{1,2,3}};", "more than 2 initial values"),
        (".global .u32 A[2]={1,2,3};", "more than 2 initial values"),
        (".global .u32 A[2]={1,2,};", "expected a constant"),
        (".global .u32 A[2]=1;", "expected { and the elements"),
        (".global .f64 A={0d3ff0000000000000};", "expected a constant"),
        (".global .v4 .u32 A={1,2};", "2 initial values for a vector of 4"),
        (".global .f32 A[2]={1,2};", "is an integer where .f32"),
        (".global .u32 A=1.5;", "no integer"),
        (".global .f16 A=1.5;", "declare it .b16"),
        (".global .u64 A=s;", "no .global or .const variable"),
        (".global .u64 A=later; .global .u32 later;", "no variable declared before"),
        (".reg .u32 A;", "a .reg variable stands in a function"),
        (".local .u32 A;", "a .local variable stands in a function"),
        (".param .u32 A;", "a .param variable stands in a function"),
        (".global .u32 A;;", "unexpected ';'"),
        (".global .b64 A=g;", "an address is no .b64"),
        (".global .u8 A=0x1ff(g);", "mask 0x1ff"),
        (".global .u32 A[2][2]={{1},{3,4}};", "incomplete row: .* ptxas puts them in it"),
        (".shared .u32 A=1;", "a .shared variable has no initial value"),
        (".extern .global .u32 A=1;", "an .extern variable has no initial value"),
        (".global .u32 A[0];", "a positive integer"),
        (".global .u32 A[];", "A needs a size"),
        (".shared .u32 A[];", "A needs a size"),
        (".global .u32 A[2][];", "expected a constant"),
        (".global .bf16 A;", "can have type .bf16"),
        (".global .pred A;", "can have type .pred"),
        (".global .e4m3x2 A;", "can have type .e4m3x2"),
    ],
)
def test_declaration_that_ptxas_refuses_is_an_error_with_its_line(declaration, message):
    with pytest.raises(emulator.PtxError, match=message) as caught:
        load(declaration)
    assert caught.value.line == 5


def test_variables_of_a_function_may_be_global_and_constant():
    body = """.global .u32 A[2]={3,4}; .const .u32 B=5; .reg .b64 %o; .reg .b32 %a, %b;
    ld.param.u64 %o, [o]; ld.global.u32 %a, [A+4]; ld.const.u32 %b, [B]; add.u32 %a, %a, %b;
    st.global.u32 [%o], %a;"""
    out = np.zeros(1, np.uint32)
    module = emulator.load_ptx(f"{HEAD}.visible .entry k(.param .u64 o) {{ {body} ret; }}")
    module.launch("k", 1, 1, args=[out])
    assert out[0] == 9


def test_table_of_functions_is_no_obstacle_to_kernels_that_do_not_call_through_it():
    layout = load(".global .u64 A[2] = {0, f};")._layout
    values = layout.global_arrays["A"].view(np.uint64).tolist()
    assert values[0] == 0 != values[1]
    assert layout.kernel("k").name == "k"
