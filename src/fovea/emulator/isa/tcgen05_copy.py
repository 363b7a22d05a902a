"""Copies inside the tensor core: tcgen05.cp from shared to tensor memory, and tcgen05.shift.

What lives here: the two forms. Not here: loads and stores of threads (`isa/tcgen05_memory.py`),
products (`isa/tcgen05_mma.py`).

Invariant: both run in the pipeline of products, in the order `isa/tensor_core.py` says.
"""

from typing import Any

import numpy as np

from fovea.emulator.async_engine import Operation
from fovea.emulator.errors import IllegalOperand, OutOfBounds
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import issues
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tcgen05_product import unpacked
from fovea.emulator.isa.tensor_core import (
    SM100,
    descriptor_offsets,
    member_ctas,
    submit_tracked,
)
from fovea.emulator.layout.descriptor import CHUNK_BYTES

_SOURCE = "PTX ISA 9.7.16"

# Shape -> rows of the source, bytes of a row.
_COPY_SHAPES = {
    "128x256b": (128, 32),
    "128x128b": (128, 16),
    "64x128b": (64, 16),
    "32x128b": (32, 16),
    "4x256b": (4, 32),
}
# Multicast -> for each group of 32 source rows, the warps whose lanes receive it.
_COPY_TARGETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "": ((0,), (1,), (2,), (3,)),
    "warpx2::02_13": ((0, 2), (1, 3)),
    "warpx2::01_23": ((0, 1), (2, 3)),
    "warpx4": ((0, 1, 2, 3),),
}
_BITS = {"b6x16_p32": 6, "b4x16_p64": 4}  # of an element that decompression makes a byte of
_FP4_SHIFT = 2  # a 4-bit element comes to lie in the middle of its byte


@instruction(
    "tcgen05.cp.group.shape{.multicast} [taddr], s-desc",
    source=f"{_SOURCE}.9.2",
    evidence="manual-only",
    targets=SM100,
    kind="copy",
    group="cta_group::1 cta_group::2",
    shape=" ".join(_COPY_SHAPES),
    multicast="warpx2::02_13 warpx2::01_23 warpx4",
)
@instruction(
    "tcgen05.cp.group.shape{.multicast}.b8x16.src_fmt [taddr], s-desc",
    source=f"{_SOURCE}.9.2 (which bits of a byte is inferred)",
    evidence="inferred",
    targets=SM100,
    kind="copy",
    group="cta_group::1 cta_group::2",
    shape=" ".join(_COPY_SHAPES),
    multicast="warpx2::02_13 warpx2::01_23 warpx4",
    src_fmt=" ".join(_BITS),
)
def tcgen05_cp(i: Instruction) -> Any:
    """Copy a matrix from shared to tensor memory, asynchronously.

    With a source format every 16 bytes of a row hold 16 packed elements and padding, and each
    element becomes a byte. Rows of 4x256b go to one lane of each warp.
    """
    rows, row_bytes = _COPY_SHAPES[i["shape"]]
    targets, step = _COPY_TARGETS[i["multicast"]], 1 if rows == 4 else 32
    bits = _BITS.get(i["src_fmt"], 8)
    if step * len(targets) != rows:
        raise i.error(f".{i['shape']} does not go with multicast .{i['multicast'] or 'none'}")
    address, read_descriptor = i.address("taddr"), i.read("s-desc", "b64")
    group = int(i["group"][-1])

    def issue(warp: Any, lane: int) -> None:
        taddr = int(address(warp)[lane])
        if taddr >> 16:
            raise IllegalOperand(
                f"tcgen05.cp to lane {taddr >> 16}; it must be 0",
                warp.where(i, address=taddr, space="tensor"),
            )
        offsets = descriptor_offsets(
            i, warp, int(read_descriptor(warp)[lane]), "source", rows, row_bytes, 1, is_k_major=True
        )

        def effect(operation: Operation) -> None:
            for cta in member_ctas(i, warp, group):
                chunks = cta.shared.read_at(offsets, CHUNK_BYTES, operation.access)
                if bits < 8:
                    chunks = unpacked(chunks, bits) << np.uint8(_FP4_SHIFT if bits == 4 else 0)
                cells = np.ascontiguousarray(chunks).reshape(rows, row_bytes).view(np.uint32)
                for part, warps in enumerate(targets):
                    for target in warps:
                        block = cells[step * part : step * part + step]
                        cta.tmem.write(32 * target, taddr & 0xFFFF, block, operation.access)

        submit_tracked(i, warp, [effect], kind="tcgen05.cp", group=group, lane=lane)

    def run(warp: Any, mask: Array) -> None:
        for lane, *_ in issues(mask, address(warp), read_descriptor(warp)):
            issue(warp, lane)

    return run


@instruction(
    "tcgen05.shift.group.down [taddr]",
    source=f"{_SOURCE}.9.3",
    evidence="inferred",
    targets=SM100,
    kind="copy",
    group="cta_group::1 cta_group::2",
)
def tcgen05_shift(i: Instruction) -> Any:
    """Move the first 31 of 32 lanes of 8 columns down by one lane, asynchronously."""
    address = i.address("taddr")
    group = int(i["group"][-1])

    def issue(warp: Any, thread: int) -> None:
        taddr = int(address(warp)[thread])
        lane, column = taddr >> 16, taddr & 0xFFFF
        where = warp.where(i, address=taddr, space="tensor")
        if lane % 32:
            raise IllegalOperand(f"lane {lane} is no multiple of 32", where)
        if lane >= 128:
            raise OutOfBounds(f"lane {lane} is outside of tensor memory", where)

        def effect(operation: Operation) -> None:
            for cta in member_ctas(i, warp, group):
                cells = cta.tmem.read(lane, 31, column, 8, operation.access)
                cta.tmem.write(lane + 1, column, cells, operation.access)

        submit_tracked(i, warp, [effect], kind="tcgen05.shift", group=group, lane=thread)

    def run(warp: Any, mask: Array) -> None:
        for thread, *_ in issues(mask, address(warp)):
            issue(warp, thread)

    return run
