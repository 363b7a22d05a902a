"""Exchanges within a warp: shfl, vote, match, redux, elect, activemask.

Source: PTX ISA 9.7.9.5-6, 9.7.13.9-12. Lives here: what the lanes of one member mask compute. Not
here: how they meet (`machine/meeting.py`). Invariant: an exchange is among the lanes of one member
mask that have not exited, and all of them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import (
    ALL_LANES,
    Action,
    Array,
    Decoded,
    Instruction,
    Read,
    Write,
)
from fovea.emulator.machine.meeting import FULL, Exchange, exchange_by_mask, pack_mask
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES

_LANE = np.arange(LANES)
_FULL_MASKS = np.full(LANES, FULL, np.uint32).tobytes()


def exchange(
    ins: Instruction,
    compute: Callable[..., tuple[Array, ...]],
    reads: tuple[Read, ...] = (),
    writes: tuple[Write | None, ...] = (),
) -> Action:
    """Return the action of a `.sync` instruction: `compute` for the lanes of each member mask."""
    members = ins.operands["membermask"]
    read_members = ins.read("membermask", "u32")
    whole = Exchange(ins, reads, writes, compute)
    run_all = whole.run
    is_full = isinstance(members, syntax.Immediate) and read_members(None)[0] == FULL

    def run_constant(w: Any, mask: Array) -> None:
        if mask is ALL_LANES:
            run_all(w, mask)
        else:
            exchange_by_mask(w, whole, mask, read_members(w))

    def run(w: Any, mask: Array) -> None:
        named = read_members(w)
        # an element first: a register that holds nothing has none, which is an error of its own
        if named[0] == FULL and mask is ALL_LANES and named.tobytes() == _FULL_MASKS:
            run_all(w, mask)
        else:
            exchange_by_mask(w, whole, mask, named)

    return run_constant if is_full else run


@instruction("shfl.sync.mode.b32 d|p, a, b, c, membermask", source="PTX ISA 9.7.9.6",
             evidence="manual-only", mode="up down bfly idx")  # fmt: skip
def shfl_sync(ins: Instruction) -> Decoded:
    """d = a of another lane; p = whether that lane is in range."""
    mode = ins["mode"]

    def compute(w: Any, mask: Array, value: Array, b: Array, c: Array) -> tuple[Array, ...]:
        source, valid = shuffle_lanes(mode, b, c)
        if mask is not ALL_LANES:
            outside = mask & valid & ~mask[source]
            if outside.any():
                lane = int(np.argmax(outside))
                raise IllegalOperand(
                    f"{ins.opcode}: lane {lane} reads from lane {int(source[lane])}, which does "
                    "not take part",
                    w.where(ins, lane=lane),
                )
        return value[source], valid

    reads = (ins.read("a", "u32"), ins.read("b", "u32"), ins.read("c", "u32"))
    write_p = ins.write("p", "pred") if "p" in ins.operands else None
    return exchange(ins, compute, reads, (ins.write("d", "u32"), write_p))


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
    mode = ins["mode"]

    def compute(w: Any, mask: Array, value: Array) -> tuple[Array]:
        chosen = value[mask]
        some, every = bool(chosen.any()), bool(chosen.all())
        result = {"all": every, "any": some, "uni": every or not some}[mode]
        return (np.full(LANES, result),)

    return exchange(ins, compute, (ins.read("a", "pred"),), (ins.write("d", "pred"),))


@instruction("vote.sync.ballot.b32 d, a, membermask", source="PTX ISA 9.7.13.10",
             evidence="manual-only")  # fmt: skip
def vote_ballot(ins: Instruction) -> Decoded:
    """d = bit mask of the members whose predicate holds."""

    def compute(w: Any, mask: Array, value: Array) -> tuple[Array]:
        return (np.full(LANES, pack_mask(value & mask), np.uint32),)

    return exchange(ins, compute, (ins.read("a", "pred"),), (ins.write("d", "u32"),))


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

    def compute(w: Any, mask: Array) -> tuple[Array, Array]:
        leader = 0 if mask is ALL_LANES else int(mask.argmax())
        return np.full(LANES, leader, np.uint32), np.equal(_LANE, leader)

    return exchange(ins, compute, (), (ins.write("d", "u32"), ins.write("p", "pred")))


@instruction("match.any.sync.type d, a, membermask", source="PTX ISA 9.7.13.11",
             evidence="manual-only", type="b32 b64")  # fmt: skip
def match_any(ins: Instruction) -> Decoded:
    """d = bit mask of the members with the same value."""

    def compute(w: Any, mask: Array, value: Array) -> tuple[Array]:
        equal = (value[:, None] == value[None, :]) & mask[None, :]
        packed = np.packbits(equal, axis=1, bitorder="little")
        return (np.ascontiguousarray(packed).view(np.uint32).ravel(),)

    return exchange(ins, compute, (ins.read("a", ins["type"]),), (ins.write("d", "u32"),))


@instruction("match.all.sync.type d|p, a, membermask", source="PTX ISA 9.7.13.11",
             evidence="manual-only", type="b32 b64")  # fmt: skip
def match_all(ins: Instruction) -> Decoded:
    """d = the member mask if all values are equal, else 0; p says which."""

    def compute(w: Any, mask: Array, value: Array) -> tuple[Array, Array]:
        chosen = value[mask]
        same = bool((chosen == chosen[0]).all())
        return np.full(LANES, pack_mask(mask) if same else 0, np.uint32), np.full(LANES, same)

    write_p = ins.write("p", "pred") if "p" in ins.operands else None
    writes = (ins.write("d", "u32"), write_p)
    return exchange(ins, compute, (ins.read("a", ins["type"]),), writes)


@instruction("redux.sync.op.type d, a, membermask", source="PTX ISA 9.7.13.13",
             evidence="manual-only", op="add min max", type="u32 s32")  # fmt: skip
@instruction("redux.sync.op.type d, a, membermask", source="PTX ISA 9.7.13.13",
             evidence="manual-only", op="and or xor", type="b32")  # fmt: skip
def redux_sync(ins: Instruction) -> Decoded:
    """d = reduction of a over the members."""
    t = ins["type"]
    reducers: dict[str, Callable[[Array], Any]] = {
        "add": lambda v: v.sum(dtype=v.dtype),
        "min": np.min,
        "max": np.max,
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    reduce = reducers[ins["op"]]

    def compute(w: Any, mask: Array, value: Array) -> tuple[Array]:
        return (np.full(LANES, reduce(value[mask]), value.dtype),)

    return exchange(ins, compute, (ins.read("a", t),), (ins.write("d", t),))


@instruction(
    "redux.sync.op{.abs}{.NaN}.f32 d, a, membermask",
    source="PTX ISA 9.7.13.13",
    evidence="manual-only",
    targets="sm_100a,sm_100f,sm_103a,sm_103f",
    op="min max",
)
def redux_sync_f32(ins: Instruction) -> Decoded:
    """d = min or max of a over the members."""
    is_max, use_abs, keeps_nan = ins["op"] == "max", ins.has("abs"), ins.has("NaN")

    def compute(w: Any, mask: Array, value: Array) -> tuple[Array]:
        chosen = np.abs(value[mask]) if use_abs else value[mask]
        if np.isnan(chosen).all() or (keeps_nan and np.isnan(chosen).any()):
            result = fp.canonical_f32(np.full(1, np.nan, np.float32))[0]
        else:
            # a sum with the sign as tie break orders -0 below +0
            kept = chosen[~np.isnan(chosen)]
            order = np.lexsort((~np.signbit(kept), kept))
            result = kept[order[-1 if is_max else 0]]
        return (np.full(LANES, result, np.float32),)

    return exchange(ins, compute, (ins.read("a", "f32"),), (ins.write("d", "f32"),))
