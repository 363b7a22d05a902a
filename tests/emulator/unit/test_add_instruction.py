"""Adding an instruction as the README describes: form, accessors, asynchronous result, wait."""

from typing import Any

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator.async_engine import Operation
from fovea.emulator.isa import Instruction, instruction
from fovea.emulator.machine.warp import InFlight, Wait

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


@instruction("testload{.twice}.type d, a", source="this test", evidence="inferred",
             kind="copy", type="u32")  # fmt: skip
def decode_load(ins: Instruction) -> Any:
    """d = a (or 2 a), later."""
    read, factor = ins.read("a", "u32"), np.uint32(2 if ins.has("twice") else 1)
    operand: Any = ins.operands["d"]
    slot = ins.slot(operand).index

    def run(w: Any, mask: np.ndarray) -> None:
        value = read(w)

        def effect(operation: Operation) -> None:
            operation.results[0] = value * factor

        operation = w.cta.cluster.engine.submit(w, ins, [effect], kind="test load")
        w.queue("test").add(operation)
        w.registers[slot] = InFlight(operation, 0)

    return run


@instruction("testwait", source="this test", evidence="inferred", kind="sync")
def decode_wait(ins: Instruction) -> Any:
    """Wait for every testload."""

    def run(w: Any, mask: np.ndarray) -> Wait:
        operations = list(w.queue("test").open)
        return Wait(
            lambda: all(operation.is_complete for operation in operations),
            lambda: "test loads",
            lambda: w.observe(operations),
        )

    return run


def _run(body: str) -> np.ndarray:
    out = np.zeros((32, 2), np.uint32)
    text = (
        f"{HEAD}.visible .entry k(.param .u64 out) {{\n"
        ".reg .b64 %o, %i, %w; .reg .b32 %t, %a, %b, %c, %d;\n"
        "ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %i, %t, 8;\n"
        f"add.u64 %o, %o, %i;\n{body}\nst.global.v2.u32 [%o], {{%c, %d}}; ret;\n}}\n"
    )
    emulator.load_ptx(text).launch("k", 1, 32, args=[out])
    return out


def test_result_is_delivered_by_the_wait_through_moves_and_packs() -> None:
    out = _run(
        """testload.u32 %a, %t; testload.twice.u32 %b, %t;
        mov.b64 %w, {%a, %b}; mov.u32 %c, %a;
        testwait;
        mov.b64 {%a, %d}, %w;"""
    )
    lanes = np.arange(32, dtype=np.uint32)
    np.testing.assert_array_equal(out, np.stack((lanes, 2 * lanes), axis=1))


def test_register_in_flight_read_before_the_wait_is_a_race() -> None:
    with pytest.raises(emulator.RaceError, match="%a is still being written by test load") as info:
        _run("testload.u32 %a, %t;\nadd.u32 %c, %a, 1;\nmov.u32 %d, 0;\ntestwait;")
    assert info.value.line == 9


def test_packed_register_in_flight_read_before_the_wait_is_a_race() -> None:
    with pytest.raises(emulator.RaceError, match="%w is still being written"):
        _run("testload.u32 %a, %t; mov.b64 %w, {%a, %t};\nadd.u64 %w, %w, 1; testwait;")
