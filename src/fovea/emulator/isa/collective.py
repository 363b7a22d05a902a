"""Checks of instructions that a warp executes as one: all lanes, and one value in all of them.

What lives here: those checks. Not here: the instructions. Invariant: what passes holds for all 32
lanes.
"""

from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa.instruction import ALL_LANES, Array, Instruction
from fovea.emulator.machine.meeting import meet_all


def check_aligned(i: Instruction, warp: Any, mask: Array) -> None:
    """Raise IllegalOperand unless all 32 lanes execute an `.aligned` instruction together.

    Lanes that have parted wait here until all have come (`machine/meeting.py`).
    """
    if mask is not ALL_LANES:
        problem = f"{i.opcode} is .aligned: all 32 lanes must execute it together"
        if warp.exited.any():
            raise IllegalOperand(problem, warp.where(i))
        meet_all(warp, i, mask, problem)


def check_uniform(i: Instruction, warp: Any, lanes: Array, name: str) -> int:
    """Return the value all lanes agree on.

    Raises:
        IllegalOperand: the lanes differ.
    """
    first = int(lanes[0])
    if (lanes != lanes[0]).any():
        lane = int(np.argmax(lanes != lanes[0]))
        raise IllegalOperand(
            f"{name} differs between lanes: {first:#x} in lane 0, {int(lanes[lane]):#x} in lane "
            f"{lane}",
            warp.where(i, lane=lane),
        )
    return first
