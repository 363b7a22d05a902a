"""The sense of the carry flag where additions and subtractions meet, as an H200 has it."""

import numpy as np
import pytest

from fovea import emulator

KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o)
{{
    .reg .b64 %o, %d; .reg .b32 %r, %s; .reg .b64 %a64, %b64; .reg .b32 %a, %b, %m;
    ld.param.u64 %o, [o]; mov.u32 %a, 5; mov.u32 %b, 3; mov.u32 %m, 0xffffffff;
    mov.u64 %a64, 5; mov.u64 %b64, 3;
    {body}
    st.global.u32 [%o], %s;
    ret;
}}
"""


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("sub.cc.u32 %r, %a, %b; addc.u32 %s, 0, 0;", 1),
        ("sub.cc.u32 %r, %b, %a; addc.u32 %s, 0, 0;", 0),
        ("sub.cc.s32 %r, %b, %a; addc.u32 %s, 0, 0;", 0),
        ("sub.cc.u32 %r, %a, %a; addc.u32 %s, 0, 0;", 1),
        ("sub.cc.u64 %d, %a64, %b64; addc.u32 %s, 0, 0;", 1),
        ("sub.cc.u64 %d, %b64, %a64; addc.u32 %s, 0, 0;", 0),
        ("sub.cc.u32 %r, %a, %b; subc.u32 %s, 0, 0;", 0),
        ("sub.cc.u32 %r, %b, %a; subc.u32 %s, 0, 0;", 0xFFFFFFFF),
        ("add.cc.u32 %r, %a, %b; subc.u32 %s, 0, 0;", 0xFFFFFFFF),
        ("add.cc.u32 %r, %m, %b; subc.u32 %s, 0, 0;", 0),
        ("add.cc.u32 %r, %m, %b; addc.cc.u32 %r, %m, %b; addc.u32 %s, 0, 0;", 1),
        ("sub.cc.u32 %r, %b, %a; subc.cc.u32 %r, 0, 0; addc.u32 %s, 0, 0;", 0),
        ("sub.cc.u32 %r, %b, %a; madc.lo.u32 %s, 0, 0, 0;", 0),
        ("mad.lo.cc.u32 %r, %m, %b, %a; subc.u32 %s, 0, 0;", 0),
    ],
)
def test_carry_is_set_where_a_subtraction_borrows_nothing(body, value):
    out = np.zeros(1, np.uint32)
    emulator.load_ptx(KERNEL.format(body=body)).launch("k", 1, 1, args=[out])
    assert out[0] == value
