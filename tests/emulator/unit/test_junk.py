"""Reads of what nobody wrote: a fault if the bytes decide something, else a warning."""

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import Options

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
# words 0..15 of s are written, thread t reads word t and knows of it by %in
ROWS = """.visible .entry k(.param .u64 out)
{{
    .shared .align 16 .b8 s[128];
    .reg .b32 %t, %s, %v, %w; .reg .f32 %f, %g; .reg .b64 %out, %o; .reg .pred %in, %p;
    ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; setp.lt.u32 %in, %t, 16;
    mul.wide.u32 %o, %t, 4; add.u64 %out, %out, %o;
    mov.u32 %s, s; mad.lo.u32 %s, %t, 4, %s;
    @%in st.shared.b32 [%s], %t;
    bar.sync 0;
    ld.shared.b32 %v, [%s];
    {body}
    ret;
}}
"""


def launch(body: str, **options) -> tuple[np.ndarray, emulator.Result]:
    out = np.full(64, 99, np.uint32)
    result = emulator.load_ptx(HEAD + ROWS.format(body=body)).launch(
        "k", 1, 32, args=[out], options=Options(**options)
    )
    return out, result


DROPPED = {
    "a guarded store": "add.u32 %v, %v, 1; @%in st.global.b32 [%out], %v;",
    "a select": """add.u32 %v, %v, 1; selp.b32 %v, %v, 5, %in;
        @%in st.global.b32 [%out], %v;""",
    "a shuffle and a store to shared memory": """shfl.sync.bfly.b32 %w, %v, 1, 31, -1;
        st.shared.b32 [%s], %w; shfl.sync.bfly.b32 %v, %w, 1, 31, -1; add.u32 %v, %v, 1;
        @%in st.global.b32 [%out], %v;""",
}


@pytest.mark.parametrize("name", list(DROPPED))
def test_unwritten_bytes_that_are_dropped_are_a_warning(name):
    for seed in range(3):
        out, result = launch(DROPPED[name], seed=seed)
        assert out.tolist() == [*range(1, 17), *[99] * 48]
        (warning,) = result.warnings
        assert warning.startswith("PTX line 13 `ld.shared.b32 %v, [%s]`")


USED = {
    "stored": "st.global.b32 [%out], %v;",
    "added up": "redux.sync.add.s32 %w, %v, -1; st.global.b32 [%out], %w;",
    "the largest": "redux.sync.max.u32 %w, %v, -1; st.global.b32 [%out], %w;",
    "squared": """mov.b32 %f, %v; mul.f32 %f, %f, %f; st.global.f32 [%out], %f;""",
    "compared and branched on": """setp.gt.s32 %p, %v, 5; @%p bra STORE; bra END;
        STORE: st.global.b32 [%out], 1;
        END:""",
    "an address": """and.b32 %v, %v, 12; cvt.u64.u32 %o, %v; add.u64 %out, %out, %o;
        @!%in st.global.b32 [%out], 1;""",
    "one bit of it": """and.b32 %v, %v, 4; setp.ne.u32 %p, %v, 0; selp.b32 %v, 1, 0, %p;
        @!%in st.global.b32 [%out], %v;""",
    "the difference of two": """shfl.sync.bfly.b32 %w, %v, 1, 31, -1; sub.u32 %w, %w, %v;
        @!%in st.global.b32 [%out], %w;""",
    "whether two are equal": """shfl.sync.bfly.b32 %w, %v, 2, 31, -1; setp.eq.u32 %p, %w, %v;
        selp.b32 %v, 1, 0, %p; @!%in st.global.b32 [%out], %v;""",
    "a wild address": """cvt.u64.u32 %o, %v; add.u64 %out, %out, %o;
        ld.global.b32 %w, [%out];""",
}


@pytest.mark.parametrize("name", list(USED))
def test_unwritten_bytes_that_decide_something_are_a_fault(name):
    for seed in range(3):
        with pytest.raises(emulator.UninitialisedRead) as info:
            launch(USED[name], seed=seed)
        assert info.value.line == 13


# a warp of which no lane takes the load goes on with the register
BRANCH = """setp.ge.u32 %p, %t, {first}; @%p bra PAST;
    ld.global.b32 %w, [%out];
    PAST: add.u32 %w, %w, 1;
    {guard} st.global.b32 [%out], %w;"""


def test_unwritten_register_that_is_dropped_is_a_warning():
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    body = BRANCH.format(first=32, guard="@!%p")
    out = np.full(64, 99, np.uint32)
    result = emulator.load_ptx(text.format(body=body)).launch("k", 1, 64, args=[out])
    assert out.tolist() == [100] * 32 + [99] * 32
    (warning,) = result.warnings
    assert "register %w was never written; what it holds changes no result" in warning


def test_unwritten_register_that_decides_something_is_a_fault():
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    module = emulator.load_ptx(text.format(body=BRANCH.format(first=32, guard="")))
    with pytest.raises(emulator.UninitialisedRead, match="register %w was never written"):
        module.launch("k", 1, 64, args=[np.full(64, 99, np.uint32)])


def test_fault_leaves_memory_as_it_was():
    out = np.full(64, 99, np.uint32)
    module = emulator.load_ptx(HEAD + ROWS.format(body=USED["stored"]))
    with pytest.raises(emulator.UninitialisedRead):
        module.launch("k", 1, 32, args=[out])
    assert (out == 99).all()


def test_read_modify_write_of_memory_happens_once():
    body = "@%in red.global.add.u32 [%out], %v;"
    out, result = launch(body)
    assert out.tolist() == [*range(99, 99 + 16), *[99] * 48]
    assert len(result.warnings) == 1


def test_dropped_read_that_nothing_orders_with_its_write_is_still_a_fault():
    body = """{barrier} setp.ge.u32 %p, %t, 32; @%p ld.shared.b32 %w, [s+64];
        setp.eq.u32 %p, %t, 0; {barrier} @%p st.shared.b32 [s+64], 7;"""
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    for barrier, expected in (("bar.sync 0;", 0), ("", 20)):
        module, found = emulator.load_ptx(text.format(body=body.format(barrier=barrier))), 0
        for seed in range(20):
            try:
                module.launch(
                    "k", 1, 64, args=[np.zeros(64, np.uint32)], options=Options(seed=seed)
                )
            except (emulator.RaceError, emulator.UninitialisedRead):
                found += 1
        assert found == expected


LOCAL = """.local .align 4 .b8 l[16]; .reg .b16 %h;
    ld.local.u8 %h, [l+{place}]; st.local.u8 [l+8], %h; st.local.u32 [l], %t;
    ld.local.u32 %v, [l]; add.u32 %v, %v, 1; st.global.b32 [%out], %v;"""


def test_copy_of_unwritten_local_memory_that_is_dropped_is_a_warning():
    # as a compiler copies objects of empty classes
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    out = np.zeros(32, np.uint32)
    result = emulator.load_ptx(text.format(body=LOCAL.format(place=4))).launch(
        "k", 1, 32, args=[out]
    )
    assert out.tolist() == list(range(1, 33))
    (warning,) = result.warnings
    assert "`ld.local.u8 %h, [l+4]`" in warning


def test_unwritten_local_memory_that_is_stored_is_a_fault():
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    body = ".local .b32 l[2]; ld.local.u32 %v, [l]; st.global.b32 [%out], %v;"
    with pytest.raises(emulator.UninitialisedRead, match="local memory"):
        emulator.load_ptx(text.format(body=body)).launch("k", 1, 32, args=[np.zeros(32, np.uint32)])


@pytest.mark.parametrize("operation", ["xor.b32 %v, %v, %w", "sub.u32 %v, %v, %w"])
def test_function_of_two_unwritten_registers_is_a_fault(operation):
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    module = emulator.load_ptx(text.format(body=f"{operation}; st.global.b32 [%out], %v;"))
    with pytest.raises(emulator.UninitialisedRead, match="was never written"):
        module.launch("k", 1, 32, args=[np.zeros(32, np.uint32)])


def test_unwritten_predicates_are_true_and_false():
    text = HEAD + ROWS.replace("ld.shared.b32 %v, [%s];", "")
    body = (
        ".reg .pred %a, %b; xor.pred %p, %a, %b; selp.b32 %v, 1, 0, %p; st.global.b32 [%out], %v;"
    )
    with pytest.raises(emulator.UninitialisedRead, match="was never written"):
        emulator.load_ptx(text.format(body=body)).launch("k", 1, 32, args=[np.zeros(32, np.uint32)])
