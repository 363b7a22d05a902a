"""Exchanges within a warp: shfl, vote, match, redux, elect, activemask.

Source: PTX ISA 9.7.9.5-6, 9.7.13.9-12. Invariant: a `.sync` form whose member mask does not equal
the lanes that execute it together with that mask is a fault, not a silent guess.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import ALL_LANES, Array, Decoded, Instruction
from fovea.emulator.ptx.types import LANES

_LANE = np.arange(LANES)
_FULL = 0xFFFFFFFF
_FULL_BYTES = b"\xff" * 4 * LANES


def pack_mask(lanes: Array) -> int:
    """Return 32 booleans as a bit mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def unpack_mask(bits: int) -> Array:
    """Return a bit mask as 32 booleans."""
    packed = np.frombuffer(bits.to_bytes(4, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").astype(np.bool_)


def check_members(ins: Instruction, w: Any, mask: Array, members: Array) -> tuple[Array, ...]:
    """Return the groups of executing lanes: each has a member mask, which names just its lanes.

    Lanes that execute it together may name different members, as tiles of a warp do; an H200 gives
    each tile its own result. Members that have exited are no matter.

    Raises:
        IllegalOperand: a member is elsewhere, or a lane that is no member executes.
    """
    # the element first: a register that holds nothing has none, which is an error of its own
    if members[0] == _FULL and mask is ALL_LANES and members.tobytes() == _FULL_BYTES:
        return (mask,)
    masks = sorted(set(members[mask].tolist()))
    groups = (mask,) if len(masks) == 1 else tuple(mask & (members == value) for value in masks)
    exited = pack_mask(w.exited)
    for wanted, group in zip(masks, groups):
        have = pack_mask(group)
        if have & ~wanted:
            lane = (have & ~wanted).bit_length() - 1
            raise IllegalOperand(
                f"{ins.opcode} is executed by lane {lane}, which member mask {wanted:#010x} leaves "
                "out",
                w.where(ins, lane=lane),
            )
        if wanted & ~have & ~exited:
            raise IllegalOperand(
                f"{ins.opcode} has member mask {wanted:#010x} but only lanes {have:#010x} execute "
                "it together with that mask",
                w.where(ins),
            )
    return groups


@instruction("shfl.sync.mode.b32 d|p, a, b, c, membermask", source="PTX ISA 9.7.9.6",
             evidence="manual-only", mode="up down bfly idx")  # fmt: skip
def shfl_sync(ins: Instruction) -> Decoded:
    """d = a of another lane; p = whether that lane is in range."""
    read_a, read_b = ins.read("a", "u32"), ins.read("b", "u32")
    read_c, read_members = ins.read("c", "u32"), ins.read("membermask", "u32")
    write_d = ins.write("d", "u32")
    write_p = ins.write("p", "pred") if "p" in ins.operands else None
    mode = ins["mode"]

    def run(w: Any, mask: Array) -> None:
        groups = check_members(ins, w, mask, read_members(w))
        value = read_a(w)
        source, valid = shuffle_lanes(mode, read_b(w), read_c(w))
        for group in groups:
            if group is ALL_LANES:
                continue
            outside = group & valid & ~group[source]
            if outside.any():
                lane = int(np.argmax(outside))
                raise IllegalOperand(
                    f"{ins.opcode}: lane {lane} reads from lane {int(source[lane])}, which does "
                    "not take part",
                    w.where(ins, lane=lane),
                )
        write_d(w, mask, value[source])
        if write_p is not None:
            write_p(w, mask, valid)

    return run


_cache: dict[tuple[str, bytes, bytes], tuple[Array, Array]] = {}


def shuffle_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Return (source lane, whether in range) of each lane."""
    key = (mode, b.tobytes(), c.tobytes())
    found = _cache.get(key)
    if found is None:
        amount, clamp = b.astype(np.int64) & 31, c.astype(np.int64) & 31
        segment = c.astype(np.int64) >> 8 & 31
        low = _LANE & segment
        high = low | clamp & ~segment
        if mode == "up":
            source = _LANE - amount
            valid = source >= high
        elif mode == "down":
            source = _LANE + amount
            valid = source <= high
        elif mode == "bfly":
            source = _LANE ^ amount
            valid = source <= high
        else:
            source = low | amount & ~segment
            valid = source <= high
        found = np.where(valid, source, _LANE), valid
        if len(_cache) < 4096:
            _cache[key] = found
    return found


@instruction("vote.sync.mode.pred d, a, membermask", source="PTX ISA 9.7.13.10",
             evidence="manual-only", mode="all any uni")  # fmt: skip
def vote_sync(ins: Instruction) -> Decoded:
    """d = whether all, any or equally many of the members' predicates hold."""
    read_a, read_members = ins.read("a", "pred"), ins.read("membermask", "u32")
    write, mode = ins.write("d", "pred"), ins["mode"]

    def run(w: Any, mask: Array) -> None:
        holds = read_a(w)
        for group in check_members(ins, w, mask, read_members(w)):
            chosen = holds[group]
            some, every = bool(chosen.any()), bool(chosen.all())
            value = {"all": every, "any": some, "uni": every or not some}[mode]
            write(w, group, np.full(LANES, value))

    return run


@instruction("vote.sync.ballot.b32 d, a, membermask", source="PTX ISA 9.7.13.10",
             evidence="manual-only")  # fmt: skip
def vote_ballot(ins: Instruction) -> Decoded:
    """d = bit mask of the members whose predicate holds."""
    read_a, read_members = ins.read("a", "pred"), ins.read("membermask", "u32")
    write = ins.write("d", "u32")

    def run(w: Any, mask: Array) -> None:
        holds = read_a(w)
        for group in check_members(ins, w, mask, read_members(w)):
            write(w, group, np.full(LANES, pack_mask(holds & group), np.uint32))

    return run


@instruction("activemask.b32 d", source="PTX ISA 9.7.13.12", evidence="manual-only")
def activemask(ins: Instruction) -> Decoded:
    """d = bit mask of the lanes that execute this together."""
    write = ins.write("d", "u32")
    return lambda w, mask: write(w, mask, np.full(LANES, pack_mask(mask), np.uint32))


@instruction("elect.sync d|p, membermask", source="PTX ISA 9.7.13.15", targets="sm_90+",
             evidence="manual-only",
             kind="control")  # fmt: skip
def elect_sync(ins: Instruction) -> Decoded:
    """p holds in one member (the lowest here, as on silicon); d = its lane."""
    read_members, write_p = ins.read("membermask", "u32"), ins.write("p", "pred")
    write_d = ins.write("d", "u32")

    def run(w: Any, mask: Array) -> None:
        for group in check_members(ins, w, mask, read_members(w)):
            leader = 0 if group is ALL_LANES else int(group.argmax())
            write_p(w, group, np.equal(_LANE, leader))
            write_d(w, group, np.full(LANES, leader, np.uint32))

    return run


@instruction("match.any.sync.type d, a, membermask", source="PTX ISA 9.7.13.11",
             evidence="manual-only", type="b32 b64")  # fmt: skip
def match_any(ins: Instruction) -> Decoded:
    """d = bit mask of the members with the same value."""
    read_a, read_members = ins.read("a", ins["type"]), ins.read("membermask", "u32")
    write = ins.write("d", "u32")

    def run(w: Any, mask: Array) -> None:
        value = read_a(w)
        same = value[:, None] == value[None, :]
        for group in check_members(ins, w, mask, read_members(w)):
            packed = np.packbits(same & group[None, :], axis=1, bitorder="little")
            write(w, group, np.ascontiguousarray(packed).view(np.uint32).ravel())

    return run


@instruction("match.all.sync.type d|p, a, membermask", source="PTX ISA 9.7.13.11",
             evidence="manual-only", type="b32 b64")  # fmt: skip
def match_all(ins: Instruction) -> Decoded:
    """d = the member mask if all values are equal, else 0; p says which."""
    read_a, read_members = ins.read("a", ins["type"]), ins.read("membermask", "u32")
    write_d = ins.write("d", "u32")
    write_p = ins.write("p", "pred") if "p" in ins.operands else None

    def run(w: Any, mask: Array) -> None:
        value = read_a(w)
        for group in check_members(ins, w, mask, read_members(w)):
            chosen = value[group]
            same = bool((chosen == chosen[0]).all())
            write_d(w, group, np.full(LANES, pack_mask(group) if same else 0, np.uint32))
            if write_p is not None:
                write_p(w, group, np.full(LANES, same))

    return run


@instruction("redux.sync.op.type d, a, membermask", source="PTX ISA 9.7.13.13",
             evidence="manual-only", op="add min max", type="u32 s32")  # fmt: skip
@instruction("redux.sync.op.type d, a, membermask", source="PTX ISA 9.7.13.13",
             evidence="manual-only", op="and or xor", type="b32")  # fmt: skip
def redux_sync(ins: Instruction) -> Decoded:
    """d = reduction of a over the members."""
    t = ins["type"]
    read_a, read_members = ins.read("a", t), ins.read("membermask", "u32")
    write = ins.write("d", t)
    reducers: dict[str, Callable[[Array], Any]] = {
        "add": lambda v: v.sum(dtype=v.dtype),
        "min": np.min,
        "max": np.max,
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    reduce = reducers[ins["op"]]

    def run(w: Any, mask: Array) -> None:
        value = read_a(w)
        for group in check_members(ins, w, mask, read_members(w)):
            write(w, group, np.full(LANES, reduce(value[group]), value.dtype))

    return run


@instruction(
    "redux.sync.op{.abs}{.NaN}.f32 d, a, membermask",
    source="PTX ISA 9.7.13.13",
    evidence="manual-only",
    targets="sm_100a,sm_100f,sm_103a,sm_103f",
    op="min max",
)
def redux_sync_f32(ins: Instruction) -> Decoded:
    """d = min or max of a over the members."""
    read_a, read_members = ins.read("a", "f32"), ins.read("membermask", "u32")
    write = ins.write("d", "f32")
    is_max, use_abs, keeps_nan = ins["op"] == "max", ins.has("abs"), ins.has("NaN")

    def reduce(chosen: Array) -> Any:
        if np.isnan(chosen).all() or (keeps_nan and np.isnan(chosen).any()):
            return fp.canonical_f32(np.full(1, np.nan, np.float32))[0]
        # a sum with the sign as tie break orders -0 below +0
        kept = chosen[~np.isnan(chosen)]
        order = np.lexsort((~np.signbit(kept), kept))
        return kept[order[-1 if is_max else 0]]

    def run(w: Any, mask: Array) -> None:
        value = read_a(w)
        for group in check_members(ins, w, mask, read_members(w)):
            result = reduce(np.abs(value[group]) if use_abs else value[group])
            write(w, group, np.full(LANES, result, np.float32))

    return run
