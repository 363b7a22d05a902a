"""Writes to memory that a kernel can only read are faults that say whose it is."""

import numpy as np
import pytest

from fovea import emulator

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.const .b32 table[4] = {5, 6, 7, 8};
.visible .entry k(.param .u64 p)
{
.reg .b64 %a; .reg .b32 %v; .shared .align 128 .b8 s[128]; .shared .align 8 .b64 bar;
"""
TO_ARRAY = "ld.param.u64 %a, [p];"
TO_TABLE = "mov.u64 %a, table; cvta.const.u64 %a, %a;"
TO_PARAMETER = "mov.b64 %a, p; cvta.param.u64 %a, %a;"
STORES = [
    "st.b32 [%a], 1;",
    "st.v2.b32 [%a], {1, 2};",
    "st.volatile.b32 [%a], 1;",
    "atom.add.u32 %v, [%a], 1;",
    "red.add.u32 [%a], 1;",
    "atom.cas.b32 %v, [%a], 0, 1;",
]
BULK = [
    "cp.async.bulk.global.shared::cta.bulk_group [%a], [s], 16; cp.async.bulk.commit_group;"
    " cp.async.bulk.wait_group 0;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%a], [s], 16;"
    " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
]
FILL = "st.shared.v4.b32 [s], {1, 2, 3, 4}; fence.proxy.async;"


def _launch(body: str, array: np.ndarray) -> None:
    emulator.load_ptx(f"{HEAD}{body}\nret;\n}}\n").launch("k", 1, 1, args=[array])


@pytest.mark.parametrize("store", [*STORES, *(FILL + bulk for bulk in BULK)])
def test_write_to_an_array_that_is_not_writeable_says_how_to_make_it(store: str) -> None:
    array = np.zeros(8, np.uint32)
    array.flags.writeable = False
    with pytest.raises(emulator.OutOfBounds) as info:
        _launch(TO_ARRAY + store, array)
    text = str(info.value)
    assert "write to args[0], a read-only array: it is not writeable; pass a writeable" in text
    assert "array.flags.writeable = True" in text
    assert info.value.line == 8
    assert not array.any()
    _launch(TO_ARRAY + store, array.copy())


@pytest.mark.parametrize("store", STORES[:-1])
def test_generic_write_to_constants_or_parameters_is_a_fault(store: str) -> None:
    array = np.zeros(8, np.uint32)
    with pytest.raises(emulator.OutOfBounds, match="write to the constant bank, which a kernel"):
        _launch(TO_TABLE + store, array)
    with pytest.raises(emulator.OutOfBounds, match="write to the kernel parameters, which a ker"):
        _launch(TO_PARAMETER + store, array)


def test_constants_are_the_same_in_every_launch() -> None:
    array = np.zeros(1, np.uint32)
    body = f"{TO_TABLE} ld.b32 %v, [%a+4]; {TO_ARRAY} st.global.b32 [%a], %v;"
    _launch(body, array)
    assert array[0] == 6


def test_modules_and_memory_show_what_they_hold() -> None:
    module = emulator.load_ptx(f"{HEAD}ret;\n}}\n.global .b32 g[3];\n.entry l() {{ ret; }}\n")
    assert repr(module) == "<Module for sm_90a: kernels k(.u64 p), l(); variables g>"
    assert module.kernels == ("k", "l")
    many = "".join(f".entry k{n}() {{ ret; }}\n" for n in range(11))
    head = HEAD.partition(".const")[0]
    assert repr(emulator.load_ptx(head + many)).endswith("k6(), k7() and 3 more>")
    assert repr(emulator.load_ptx(head)) == "<Module for sm_90a: kernels none>"
    memory = emulator.GlobalMemory()
    address = memory.register(np.zeros(3), "weights")
    assert repr(memory) == f"<GlobalMemory: weights (24 bytes at {address:#x})>"
