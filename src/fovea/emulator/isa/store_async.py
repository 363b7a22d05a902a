"""Asynchronous stores and reductions of threads: st.async and red.async with an mbarrier.

What lives here: the forms that signal their bytes at an mbarrier of the destination's CTA. Not
here: bulk copies (`isa/bulk_copy.py`).

Invariant: each active thread stores and signals on its own; the destination's mbarrier gets exactly
the bytes that were stored.
"""

from typing import Any

import numpy as np

from fovea.emulator.arithmetic.reduction import check_reduction, reduce_elements
from fovea.emulator.async_engine import Effect, Operation
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import (
    SharedPlace,
    active_lanes,
    barrier_channel,
    complete_bytes,
    shared_place,
    start,
)
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.memory_order import CLUSTER
from fovea.emulator.ptx.types import size_bytes


@instruction(
    "st.async{.weak}{.cluster}{.shared::cluster}.mbarrier::complete_tx::bytes{.vec}.type "
    "[a], b, [mbar]",
    source="PTX ISA 9.7.9.12",
    targets="sm_90+",
    evidence="manual-only",
    kind="memory",
    vec="v2 v4",
    type="b32 b64 u32 u64 s32 s64 f32 f64",
)
def st_async(i: Instruction) -> Any:
    """Store to the shared memory of a CTA of the cluster and signal the bytes there."""
    return _store(i, None)


@instruction(
    "red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.op.type "
    "[a], b, [mbar]",
    source="PTX ISA 9.7.13.7",
    targets="sm_90+",
    evidence="manual-only",
    kind="memory",
    op="inc dec min max add and or xor",
    type="u32 s32 u64 b32",
)
def red_async(i: Instruction) -> Any:
    """Reduce into the shared memory of a CTA of the cluster and signal the bytes there."""
    try:
        check_reduction(i["op"], i["type"])
    except ValueError as error:
        raise i.error(str(error)) from error
    return _store(i, i["op"])


def _store(i: Instruction, reduction: str | None) -> Any:
    width = size_bytes(i["type"])
    count = int(i["vec"][1:] or 1) if reduction is None else 1
    if len(i.items("b")) != count:
        raise i.error(f"{len(i.items('b'))} values; the form stores {count}")
    # a generic address has its window above; one in .shared::cluster has nothing there
    low = -1 if i.has("shared::cluster") else 0xFFFFFFFF
    unsigned = f"b{8 * width}"
    target, barrier = i.address("a"), i.address("mbar")
    values = i.read_vector("b", unsigned)

    def run(warp: Any, mask: Array) -> None:
        targets, barriers = target(warp), barrier(warp)
        rows = np.stack(values(warp), axis=1)
        for lane in active_lanes(mask):
            to = shared_place(
                i,
                warp,
                lane,
                int(targets[lane]) & low,
                alignment=width * count,
                what="destination",
            )
            mbar = shared_place(
                i, warp, lane, int(barriers[lane]) & low, alignment=8, what="mbarrier"
            )
            if to.cta is not mbar.cta:
                raise IllegalOperand(
                    "mbarrier and destination are in different CTAs", warp.where(i, lane=lane)
                )
            data = np.ascontiguousarray(rows[lane]).view(np.uint8)
            start(
                warp,
                i,
                [_effect(to, mbar, data, reduction, i["type"])],
                kind=f"{i.opcode.split('.')[0]}.async",
                channel=barrier_channel([mbar]),
                is_async_proxy=False,
            )

    return run


def _effect(
    to: SharedPlace, mbar: SharedPlace, data: Array, reduction: str | None, element: str
) -> Effect:
    def effect(operation: Operation) -> None:
        new = data
        if reduction is not None:
            # Reductions are atomic: two of them on one word are no race.
            operation.access.strength = CLUSTER + 1
            old = to.cta.shared.read(to.offset, len(data), operation.access)
            new = reduce_elements(reduction, element, old, data)
        to.cta.shared.write(to.offset, new, operation.access)
        complete_bytes(mbar, len(data), operation)

    return effect
