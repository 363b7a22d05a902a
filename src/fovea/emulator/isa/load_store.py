"""ld, st, and the hints that go with them; st.bulk.

Lives here: addresses of lanes to segments, vectors, caches. Not here: bounds and races
(`machine/memory.py`), instructions that are hints alone (`cache_hint.py`).
Invariant: an address of a state space stays in that space; a generic
address may lead each lane to another segment.
Source: PTX ISA 9.7.9.8-13.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.errors import IllegalOperand, OutOfBounds
from fovea.emulator.isa import instruction
from fovea.emulator.isa.barrier import wide_address
from fovea.emulator.isa.instruction import ALL_LANES, Array, Decoded, Instruction, merge
from fovea.emulator.machine.memory import LOCAL_WINDOW, RANK_SHIFT, WINDOW_SHIFT, Segment
from fovea.emulator.memory_order import SCOPES, Order, observe, publish
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES, is_signed, size_bytes

_TYPES = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64"
_SHARED = "shared shared::cta shared::cluster"  # without hints, which are for global memory
_LD = dict(  # noqa: C408 - keywords of the decorator
    space=f"global {_SHARED} local param param::entry param::func const",
    vec="v2 v4 v8",
    type=_TYPES + " b128",
    cop="ca cg cs lu cv",
    scope="cta cluster gpu sys",
    eviction="L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    eviction2="L2::evict_normal L2::evict_first L2::evict_last",
    prefetch="L2::64B L2::128B L2::256B",
)
_ST = {**_LD, "cop": "wb cg cs wt", "space": f"global {_SHARED} local param param::func"}
_BULK_LIMIT = 1 << 24  # bytes of one st.bulk
_ORDERED = ("global", "shared")  # spaces whose memory threads share
_OWN_SHARED = ("shared", "shared::cta")
_NARROW_BITS = np.uint64(32)  # addresses in shared and local memory have no more (PTX ISA 6.4.1)

Groups = list[tuple[Segment, Array, Array | None]]


def segments_of(
    ins: Instruction, space: str, name: str = ""
) -> Callable[[Any, Array, Array], Groups]:
    """Return a function from addresses of active lanes to (segment, offsets, lane positions).

    Args:
        ins: the instruction.
        space: the state space of its address, "" of a generic one.
        name: the operand, if a wide address is to be judged.
    """
    find = _segments_of(ins, space)
    is_narrow = space.startswith("shared") or space == "local"
    if not name or not is_narrow or size_bytes(ins.type_of(name) or "b32") < size_bytes("b64"):
        return find

    def checked(w: Any, addresses: Array, mask: Array) -> Groups:
        wide = addresses >> _NARROW_BITS != 0
        if wide.any():
            position = int(np.argmax(wide))
            lane = position if mask is ALL_LANES else int(np.flatnonzero(mask)[position])
            where = w.where(ins, lane=lane, address=int(addresses[position]), space=space)
            raise OutOfBounds(
                f"{wide_address(space)}; convert it with cvta.to.{space}.u64, or leave .{space} "
                "out",
                where,
            )
        return find(w, addresses, mask)

    return checked


def _segments_of(ins: Instruction, space: str) -> Callable[[Any, Array, Array], Groups]:
    if space in _OWN_SHARED:
        shift = np.uint32(RANK_SHIFT)

        def own(w: Any, addresses: Array, mask: Array) -> Groups:
            cta = w.cta
            return [
                (cta.shared, addresses.astype(np.uint32) ^ (np.uint32(cta.rank) << shift), None)
            ]

        return own
    if space == "shared::cluster":
        return lambda w, addresses, mask: _remote(ins, w, addresses, mask)
    if space == "local":
        return lambda w, addresses, mask: [_local(w, addresses, mask)]
    if space.startswith("param"):
        return lambda w, addresses, mask: [(w.machine.parameters, addresses, None)]
    if space == "const":
        low = np.uint64((1 << WINDOW_SHIFT) - 1)
        return lambda w, addresses, mask: [(w.machine.constants, addresses & low, None)]
    return lambda w, addresses, mask: _generic(ins, w, addresses, mask, space)


def _remote(ins: Instruction, w: Any, addresses: Array, mask: Array) -> Groups:
    ranks = (addresses >> np.uint64(RANK_SHIFT)).astype(np.int64)
    low = np.uint64((1 << RANK_SHIFT) - 1)
    groups: Groups = []
    distinct = set(ranks.tolist())
    for rank in sorted(distinct):
        cta = w.cta.cluster.cta_of(rank << RANK_SHIFT)
        if cta is None:
            raise _no_such(ins, w, addresses, mask, int(np.argmax(ranks == rank)), "shared")
        if not cta.visit(w, ins):
            raise OutOfBounds(
                f"CTA {cta.index} has exited: its shared memory is gone (a cluster barrier before "
                "the exit is missing)",
                w.where(ins),
            )
        chosen = None if len(distinct) == 1 else np.flatnonzero(ranks == rank)
        part = addresses if chosen is None else addresses[chosen]
        groups.append((cta.shared, (part & low).astype(np.uint32), chosen))
    return groups


def state_space(ins: Instruction, name: str) -> str:
    """Return the state space of a memory operand; parameters of calls live in local memory."""
    space = ins["space"] or ("global" if ins.has("global") else "")
    memory = ins.operands[name]
    if isinstance(memory, syntax.Memory) and isinstance(memory.base, syntax.Symbol):
        own = ins.variable(memory.base.name)[0]
        # a generic access to a variable by its name is one to the variable's space
        if not space or (space.startswith("param") and own == "local"):
            return own
    return space


def _check_width(ins: Instruction, space: str, ptx_type: str) -> None:
    """Check what accesses of 256 bits, and hints of theirs alone, need (PTX ISA 9.7.9.8)."""
    bits = 8 * size_bytes(ptx_type) * int(ins["vec"][1:] or 1)
    if ins["eviction2"] and bits != 256:
        raise ins.error(f".{ins['eviction2']} needs .v8 of 32-bit or .v4 of 64-bit elements")
    if bits <= 128:
        return
    if bits > 256 or ins.entry.form.mnemonic == "ldu":
        raise ins.error(f"{bits} bits exceed the largest access")
    if not ins.program.target.startswith("sm_1"):
        raise ins.error(
            f"an access of 256 bits exists on sm_100 and later only, the module's target is "
            f"{ins.program.target}; correct its .target or make two accesses of 128 bits"
        )
    if space not in ("", "global"):
        raise ins.error(f"an access of 256 bits must be to global memory, not .{space}")


def _local(w: Any, addresses: Array, mask: Array) -> tuple[Segment, Array, Array | None]:
    size = w.machine.program.local_bytes
    lanes = np.arange(LANES, dtype=np.uint64)
    lanes = lanes if mask is ALL_LANES else lanes[mask]
    offsets = addresses & np.uint64((1 << WINDOW_SHIFT) - 1)
    outside = offsets >= size
    # an offset past the thread's own memory must not reach its neighbour's
    return (
        w.local_memory(),
        np.where(outside, np.uint64(LANES * size), lanes * np.uint64(size) + offsets),
        None,
    )


def _generic(ins: Instruction, w: Any, addresses: Array, mask: Array, space: str) -> Groups:
    if not len(addresses):
        return []
    machine = w.machine
    first, last = int(addresses.min()), int(addresses.max())
    segment = machine.memory.find(first)
    if segment is not None and last < segment.base + len(segment.data):
        return [(segment, addresses - np.uint64(segment.base), None)]
    groups: dict[int, tuple[Segment, list[int], list[int]]] = {}
    for position, address in enumerate(addresses.tolist()):
        if space == "global" and address >> WINDOW_SHIFT:
            raise _no_such(ins, w, addresses, mask, position, "global")
        if address >> WINDOW_SHIFT == LOCAL_WINDOW >> WINDOW_SHIFT:
            lane = position if mask is ALL_LANES else int(np.flatnonzero(mask)[position])
            size = machine.program.local_bytes
            offset = address & ((1 << WINDOW_SHIFT) - 1)
            found = (w.local_memory(), lane * size + offset if offset < size else LANES * size)
        else:
            found = machine.segment(w, address)
        if found is None:
            raise _no_such(ins, w, addresses, mask, position, space or "generic")
        group = groups.setdefault(id(found[0]), (found[0], [], []))
        group[1].append(found[1])
        group[2].append(position)
    return [
        (segment, np.array(offsets, np.uint64), np.array(positions))
        for segment, offsets, positions in groups.values()
    ]


def _no_such(
    ins: Instruction, w: Any, addresses: Array, mask: Array, position: int, space: str
) -> OutOfBounds:
    address = int(addresses[position])
    lane = position if mask is ALL_LANES else int(np.flatnonzero(mask)[position])
    near = w.machine.memory.nearest(address) if not address >> WINDOW_SHIFT else "no such window"
    return OutOfBounds(
        f"nothing lies at this address: {near}",
        w.where(ins, lane=lane, address=address, space=space),
    )


def _spread(values: Array, mask: Array) -> Array:
    """Put values of active lanes at their places among 32 (zero elsewhere)."""
    full = np.zeros((len(values), LANES), values.dtype)
    full[:, mask] = values
    return full


def order_of(ins: Instruction) -> Order | None:
    """Return how the access of a load or store orders memory (None: it is weak)."""
    if ins.has("volatile"):
        return Order()  # PTX ISA 9.7.9.8: as relaxed with the scope of the system
    words = ("relaxed", "acquire", "release")
    if not any(ins.has(word) for word in words):
        return None
    scope = SCOPES[ins["scope"] or "sys"]
    return Order(scope, is_acquire=ins.has("acquire"), is_release=ins.has("release"))


def _places(offsets: Array, item: int, count: int) -> set[int]:
    """Return the offsets of all elements of an access: each is a place of its own."""
    first = offsets.tolist()
    if count == 1:
        return set(first)
    return {offset + item * element for offset in first for element in range(count)}


def _used_bytes(ins: Instruction, width: int) -> Array | None:
    """Return which bytes of a load its pragma says are used (None: all)."""
    mask = ins.used_bytes
    if mask is None or ins.entry.form.mnemonic != "ld":
        return None
    used = np.array([mask >> position & 1 for position in range(width)], np.bool_)
    return None if used.all() else used


def load_lanes(
    ins: Instruction, name: str, space: str, item: int, count: int, order: Order | None = None
) -> Callable[[Any, Array], Array]:
    """Return `load(warp, mask) -> (count, 32)` unsigned values at a memory operand."""
    address = ins.address(name)
    used = _used_bytes(ins, item * count)
    segments = segments_of(ins, space, name)
    # PTX ISA 9.7.9.8-10: of both, the kernel may only read the memory
    is_constant = ins.has("nc") or ins.entry.form.mnemonic == "ldu"

    def load(w: Any, mask: Array) -> Array:
        addresses = address(w)
        if mask is not ALL_LANES:
            addresses = addresses[mask]
        access = w.touch(ins, mask)
        groups = segments(w, addresses, mask)
        if order is not None:
            access.strength = order.strength
            w.looked = w.machine.step
            for segment, offsets, _ in groups:
                if segment.space in _ORDERED:
                    observe(w, segment.places, _places(offsets, item, count), order)
        if len(groups) == 1 and groups[0][2] is None:
            values = groups[0][0].load(groups[0][1], item, count, access, used)
        else:
            values = np.zeros((count, len(addresses)), f"u{item}")
            for segment, offsets, positions in groups:
                values[:, positions] = segment.load(offsets, item, count, access, used)
        if is_constant:
            for segment, offsets, _ in groups:
                segment.check_constant(offsets, item * count, access)
        return values if mask is ALL_LANES else _spread(values, mask)

    return load


def store_lanes(
    ins: Instruction, name: str, space: str, item: int, order: Order | None = None
) -> Callable[[Any, Array, Array], None]:
    """Return `store(warp, mask, (count, 32) values)` at a memory operand."""
    address = ins.address(name)
    segments = segments_of(ins, space, name)

    def store(w: Any, mask: Array, values: Array) -> None:
        addresses = address(w)
        if mask is not ALL_LANES:
            addresses, values = addresses[mask], values[:, mask]
        access = w.touch(ins, mask)
        if order is not None:
            access.strength = order.strength
            w.machine.notify()
        for segment, offsets, positions in segments(w, addresses, mask):
            part = values if positions is None else values[:, positions]
            segment.store(offsets, part, item, access)
            if order is not None and segment.space in _ORDERED:
                publish(w, segment.places, _places(offsets, item, len(values)), order)

    return store


# --- ld -----------------------------------------------------------------------------------------


@instruction(
    "ld{.weak}{.space}{.cop}{.vec}.type d, [a]",
    "ld{.weak}{.global}{.cop}{.L2::cache_hint}{.prefetch}{.vec}.type d, [a]{, cache-policy}",
    "ld{.weak}{.global}{.eviction}{.eviction2}{.L2::cache_hint}{.prefetch}{.vec}.type"
    " d, [a]{, cache-policy}",
    "ld.global{.cop}.nc{.eviction}{.eviction2}{.L2::cache_hint}{.prefetch}{.vec}.type"
    " d, [a]{, cache-policy}",
    "ld.global{.eviction}{.eviction2}{.L2::cache_hint}{.prefetch}.nc{.vec}.type"
    " d, [a]{, cache-policy}",
    "ld.volatile{.global}{.prefetch}{.vec}.type d, [a]",
    "ld.relaxed.scope{.global}{.eviction}{.eviction2}{.L2::cache_hint}{.prefetch}{.vec}.type"
    " d, [a]{, cache-policy}",
    "ld.acquire.scope{.global}{.eviction}{.eviction2}{.L2::cache_hint}{.prefetch}{.vec}.type"
    " d, [a]{, cache-policy}",
    "ld.mmio.relaxed.sys{.global}.type d, [a]",
    "ldu{.global}{.vec}.type d, [a]",
    source="PTX ISA 9.7.9.8-10", evidence="manual-only", kind="memory", **_LD,
)  # fmt: skip
@instruction(
    "ld.volatile.space{.vec}.type d, [a]",
    source="PTX ISA 9.7.9.8", evidence="manual-only", kind="memory",
    **{**_LD, "space": f"{_SHARED} local"},
)  # fmt: skip
@instruction(
    "ld.relaxed.scope.space{.vec}.type d, [a]",
    "ld.acquire.scope.space{.vec}.type d, [a]",
    source="PTX ISA 9.7.9.8", evidence="manual-only", kind="memory", **{**_LD, "space": _SHARED},
)  # fmt: skip
def ld(ins: Instruction) -> Decoded:
    """d = the value at [a]."""
    ptx_type = ins["type"]
    space = state_space(ins, "a")
    _check_width(ins, space, ptx_type)
    if ptx_type == "b128":
        return _ld_b128(ins, space)
    count = len(ins.items("d"))
    if count != int(ins["vec"][1:] or 1):
        raise ins.error(f"d has {count} elements, the form has {ins['vec'] or 'one'}")
    memory = ins.operands["a"]
    if space.startswith("param") and isinstance(memory, syntax.Memory):
        constant = _ld_parameter(ins, memory, ptx_type, count)
        if constant is not None:
            return constant
    item = size_bytes(ptx_type)
    load = load_lanes(ins, "a", space, item, count, order_of(ins))
    signed = f"s{8 * item}" if is_signed(ptx_type) else f"u{8 * item}"
    if count > 1:
        write_all = ins.write_vector("d", signed)
        return lambda w, mask: write_all(w, mask, load(w, mask))
    write = ins.write("d", signed)
    return lambda w, mask: write(w, mask, load(w, mask)[0])


def _ld_b128(ins: Instruction, space: str) -> Any:
    load, write = load_lanes(ins, "a", space, 8, 2, order_of(ins)), ins.write("d", "b128")

    def run(w: Any, mask: Array) -> None:
        pair = np.ascontiguousarray(load(w, mask).T)
        write(w, mask, pair.view(np.dtype((np.void, 16))).ravel())

    return run


def _ld_parameter(ins: Instruction, memory: syntax.Memory, ptx_type: str, count: int) -> Any:
    """Return an action for a parameter at a constant offset: one value for all lanes."""
    if not isinstance(memory.base, syntax.Symbol):
        return None
    space, base = ins.variable(memory.base.name)
    if space != "param":
        return None
    offset, item = base + memory.offset, size_bytes(ptx_type)
    signed = f"s{8 * item}" if is_signed(ptx_type) else f"u{8 * item}"
    write_all = ins.write_vector("d", signed)
    zeros = np.zeros(LANES, np.uint64)

    def run(w: Any, mask: Array) -> None:
        access = w.touch(ins, mask)
        lane = zeros[:1] + np.uint64(offset)
        values = w.machine.parameters.load(lane, item, count, access)
        columns: Array = np.repeat(values, LANES, axis=1)
        write_all(w, mask, columns)

    return run


# --- st -----------------------------------------------------------------------------------------


@instruction(
    "st{.weak}{.space}{.cop}{.vec}.type [a], b",
    "st{.weak}{.global}{.cop}{.L2::cache_hint}{.vec}.type [a], b{, cache-policy}",
    "st{.weak}{.global}{.eviction}{.eviction2}{.L2::cache_hint}{.vec}.type"
    " [a], b{, cache-policy}",
    "st.volatile{.global}{.vec}.type [a], b",
    "st.relaxed.scope{.global}{.eviction}{.eviction2}{.L2::cache_hint}{.vec}.type"
    " [a], b{, cache-policy}",
    "st.release.scope{.global}{.eviction}{.eviction2}{.L2::cache_hint}{.vec}.type"
    " [a], b{, cache-policy}",
    "st.mmio.relaxed.sys{.global}.type [a], b",
    source="PTX ISA 9.7.9.11", evidence="manual-only", kind="memory", **_ST,
)  # fmt: skip
@instruction(
    "st.volatile.space{.vec}.type [a], b",
    source="PTX ISA 9.7.9.11", evidence="manual-only", kind="memory",
    **{**_ST, "space": f"{_SHARED} local"},
)  # fmt: skip
@instruction(
    "st.relaxed.scope.space{.vec}.type [a], b",
    "st.release.scope.space{.vec}.type [a], b",
    source="PTX ISA 9.7.9.11", evidence="manual-only", kind="memory", **{**_ST, "space": _SHARED},
)  # fmt: skip
def st(ins: Instruction) -> Decoded:
    """[a] = b."""
    ptx_type = ins["type"]
    space = state_space(ins, "a")
    _check_width(ins, space, ptx_type)
    if ptx_type == "b128":
        store, read = store_lanes(ins, "a", space, 8, order_of(ins)), ins.read("b", "b128")
        return lambda w, mask: store(
            w, mask, np.ascontiguousarray(read(w).view(np.uint64).reshape(-1, 2).T)
        )
    count = len(ins.items("b"))
    if count != int(ins["vec"][1:] or 1):
        raise ins.error(f"b has {count} elements, the form has {ins['vec'] or 'one'}")
    item = size_bytes(ptx_type)
    store = store_lanes(ins, "a", space, item, order_of(ins))
    reads = [ins.read_operand(part, _raw(ins, part, ptx_type)) for part in ins.items("b")]
    unsigned = np.dtype(f"u{item}")
    if count == 1:
        read = reads[0]
        return lambda w, mask: store(w, mask, read(w).view(unsigned)[None])

    def run(w: Any, mask: Array) -> None:
        store(w, mask, np.array([read(w).view(unsigned) for read in reads]))

    return run


def _raw(ins: Instruction, operand: syntax.Operand, ptx_type: str) -> str:
    """Return the type a stored operand is read as: raw bits, but a literal by its own type."""
    if isinstance(operand, syntax.Register):
        return f"u{8 * size_bytes(ptx_type)}"
    return ptx_type


# --- bulk initialisation --------------------------------------------------------------------------


@instruction("st.bulk{.weak}{.shared::cta} [a], size, initval", source="PTX ISA 9.7.9.13",
             evidence="manual-only", kind="memory", targets="sm_100,sm_100a,sm_100f,sm_103,sm_103a,"
             "sm_103f,sm_110,sm_110a,sm_120,sm_120a")  # fmt: skip
def st_bulk(ins: Instruction) -> Decoded:
    """Fill `size` bytes of the CTA's shared memory with zeros."""
    if ins.immediate("initval"):
        raise ins.error(f"initval {ins.immediate('initval')} must be 0")
    read_address, read_size = ins.address("a"), ins.read("size", "u64")
    segments = segments_of(ins, "shared::cta")

    def run(w: Any, mask: Array) -> None:
        addresses, sizes = read_address(w), read_size(w)
        access = w.touch(ins, mask)
        for lane in np.flatnonzero(mask).tolist():
            size, address = int(sizes[lane]), int(addresses[lane])
            if size % 8 or size > _BULK_LIMIT or address % 8:
                raise IllegalOperand(
                    f"{size} bytes at {address:#x}: both must be multiples of 8, the size up to "
                    f"{_BULK_LIMIT}",
                    w.where(ins, lane=lane, address=address, space="shared"),
                )
            for segment, offsets, _ in segments(w, addresses[lane : lane + 1], mask):
                segment.write(int(offsets[0]), np.zeros(size, np.uint8), access)
            w.machine.counters.add("shared_store_bytes", size)

    return run


__all__ = ["load_lanes", "merge", "store_lanes"]
