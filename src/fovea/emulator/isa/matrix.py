"""ldmatrix, stmatrix, movmatrix: 8x8 tiles between shared memory and the lanes of a warp.

Lives here: which lane holds what. Not here: mma.sync (`mma.py`). Invariant: one row of a tile is
16 consecutive, 16-byte aligned bytes of shared memory whose address one lane gives.
Source: PTX ISA 9.7.15.5.15-17.
"""

from typing import Any

import numpy as np

from fovea.emulator.errors import Misaligned
from fovea.emulator.isa import instruction
from fovea.emulator.isa.barrier import shared_place
from fovea.emulator.isa.collective import check_aligned
from fovea.emulator.isa.instruction import Array, Decoded, Instruction
from fovea.emulator.ptx.types import LANES, size_bytes

_LANE = np.arange(LANES)
_ROW = 16  # bytes of a row of a tile
_BLACKWELL = "sm_100,sm_100a,sm_100f,sm_101a,sm_103,sm_103a,sm_103f,sm_110,sm_110a,sm_120,sm_120a"


def _row_places(ins: Instruction, w: Any, addresses: Array, rows: int) -> tuple[Any, Array]:
    """Return (CTA, offsets of the rows); the rows lie in one CTA's shared memory."""
    cta, offset = shared_place(ins, w, int(addresses[0]), 0)
    offsets = addresses[:rows].astype(np.int64) - (int(addresses[0]) - offset)
    bad = offsets % _ROW != 0
    if bad.any():
        lane = int(np.argmax(bad))
        raise Misaligned(
            "a row address is not a multiple of 16",
            w.where(ins, lane=lane, address=int(addresses[lane]), space="shared"),
        )
    return cta, offsets


def _check_width(ins: Instruction, name: str) -> None:
    if ins.type_of(name) and size_bytes(ins.type_of(name)) not in (4, 8):
        raise ins.error("the address needs a 32- or 64-bit register")


# 16-bit tiles: lane T of tile m holds elements (T / 4, 2 (T % 4) and the next), a 32-bit word
_WORD_ROW, _WORD = _LANE // 4, _LANE % 4


def _words_to_lanes(rows: Array, is_transposed: bool) -> Array:
    """Return the 32 words of one tile of 8 rows x 16 bytes."""
    if not is_transposed:
        return np.ascontiguousarray(rows).view(np.uint32)[_WORD_ROW, _WORD]
    halves = np.ascontiguousarray(np.ascontiguousarray(rows).view(np.uint16).T)
    return halves.view(np.uint32)[_WORD_ROW, _WORD]


def _lanes_to_rows(words: Array, is_transposed: bool) -> Array:
    """Return 8 rows x 16 bytes of one tile from its 32 words."""
    tile = words.reshape(8, 4)
    if is_transposed:
        halves = np.ascontiguousarray(tile.view(np.uint16).T)
        return halves.view(np.uint8).reshape(8, _ROW)
    return np.ascontiguousarray(tile).view(np.uint8).reshape(8, _ROW)


@instruction("ldmatrix.sync.aligned.m8n8.num{.trans}{.space}.b16 r, [p]",
             "ldmatrix.sync.aligned.num{.trans}.m8n8{.space}.b16 r, [p]",
             source="PTX ISA 9.7.15.5.15", evidence="manual-only", kind="memory",
             num="x1 x2 x4", space="shared shared::cta")  # fmt: skip
def ldmatrix(ins: Instruction) -> Decoded:
    """r = the lane's pairs of elements of 1, 2 or 4 tiles."""
    num, transposed = int(ins["num"][1:]), ins.has("trans")
    _check_width(ins, "p")
    address, write = ins.address("p"), ins.write_vector("r", "b32")
    if len(ins.items("r")) != num:
        raise ins.error(f"r has {len(ins.items('r'))} registers, .{ins['num']} needs {num}")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        cta, offsets = _row_places(ins, w, address(w), 8 * num)
        rows = cta.shared.read_at(offsets, _ROW, w.touch(ins, mask))
        tiles = [rows[8 * m : 8 * m + 8] for m in range(num)]
        write(w, mask, [_words_to_lanes(tile, transposed) for tile in tiles])

    return run


@instruction("stmatrix.sync.aligned.m8n8.num{.trans}{.space}.b16 [p], r",
             source="PTX ISA 9.7.15.5.16", evidence="manual-only", kind="memory",
             num="x1 x2 x4", space="shared shared::cta")  # fmt: skip
def stmatrix(ins: Instruction) -> Decoded:
    """Store the lanes' pairs of elements of 1, 2 or 4 tiles."""
    num, transposed = int(ins["num"][1:]), ins.has("trans")
    _check_width(ins, "p")
    address, read = ins.address("p"), ins.read_vector("r", "b32")
    if len(ins.items("r")) != num:
        raise ins.error(f"r has {len(ins.items('r'))} registers, .{ins['num']} needs {num}")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        values = read(w)
        cta, offsets = _row_places(ins, w, address(w), 8 * num)
        rows = np.concatenate([_lanes_to_rows(value, transposed) for value in values])
        cta.shared.write_at(offsets, rows, _ROW, w.touch(ins, mask))

    return run


@instruction("ldmatrix.sync.aligned.m16n16.num.trans{.space}.b8 r, [p]",
             source="PTX ISA 9.7.15.5.15", evidence="inferred", kind="memory",
             targets=_BLACKWELL, num="x1 x2", space="shared shared::cta")  # fmt: skip
def ldmatrix_b8(ins: Instruction) -> Decoded:
    """r = four transposed bytes for each half of 1 or 2 tiles of 16 x 16 bytes."""
    num = int(ins["num"][1:])
    address, write = ins.address("p"), ins.write_vector("r", "b32")
    if len(ins.items("r")) != 2 * num:
        raise ins.error(f"r has {len(ins.items('r'))} registers, .{ins['num']} needs {2 * num}")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        cta, offsets = _row_places(ins, w, address(w), 16 * num)
        rows = cta.shared.read_at(offsets, _ROW, w.touch(ins, mask))
        values: list[Array] = []
        for m in range(num):
            turned = np.ascontiguousarray(rows[16 * m : 16 * m + 16].T).view(np.uint32)
            values += [turned[_WORD_ROW, _WORD], turned[_WORD_ROW + 8, _WORD]]
        write(w, mask, values)

    return run


@instruction("stmatrix.sync.aligned.m16n8.num.trans{.space}.b8 [p], r",
             source="PTX ISA 9.7.15.5.16", evidence="inferred", kind="memory",
             targets=_BLACKWELL, num="x1 x2 x4", space="shared shared::cta")  # fmt: skip
def stmatrix_b8(ins: Instruction) -> Decoded:
    """Store 1, 2 or 4 tiles of 16 x 8 bytes transposed: 8 rows of 16 bytes in memory."""
    num = int(ins["num"][1:])
    address, read = ins.address("p"), ins.read_vector("r", "b32")
    if len(ins.items("r")) != num:
        raise ins.error(f"r has {len(ins.items('r'))} registers, .{ins['num']} needs {num}")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        cta, offsets = _row_places(ins, w, address(w), 8 * num)
        rows = [np.ascontiguousarray(value).view(np.uint8).reshape(8, 4, 2, 2) for value in read(w)]
        # lane T holds bytes of rows T / 4 and T / 4 + 8 (pairs), columns 2 (T % 4) and the next
        turned = [tile.transpose(1, 3, 2, 0).reshape(8, _ROW) for tile in rows]
        cta.shared.write_at(offsets, np.concatenate(turned), _ROW, w.touch(ins, mask))

    return run


@instruction("movmatrix.sync.aligned.m8n8.trans.b16 d, a", source="PTX ISA 9.7.15.5.17",
             evidence="manual-only")  # fmt: skip
def movmatrix(ins: Instruction) -> Decoded:
    """d = the tile held by the warp, transposed."""
    read, write = ins.read("a", "b32"), ins.write("d", "b32")

    def run(w: Any, mask: Array) -> None:
        check_aligned(ins, w, mask)
        write(w, mask, _words_to_lanes(_lanes_to_rows(read(w), False), True))

    return run
