"""What asynchronous tcgen05 operations share: their order, CTA pairs and operands.

What lives here: the per-CTA pipeline of mma, cp and shift, descriptors, addresses. Not here:
the forms (`isa/tcgen05_memory.py`, `isa/tcgen05_mma.py`).

Order: an operation happens after every earlier operation of the same CTA group that its thread
issued, and after those of other warps whose issue it has seen (a barrier or mbarrier between).
That is more than the manual promises (it names pairs with one accumulator and shape) and is what
kernels rely on that overwrite P or S in tensor memory right after issuing the product that reads
it.

Invariant: operations that are not ordered so run in random order, and races between them are
reported.

Source: PTX ISA 9.7.16.6; evidence: inferred where it goes further.
"""

from collections.abc import Sequence
from typing import Any

from fovea.emulator.async_engine import Effect, Operation
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa.copy_engine import start
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.tensor_fence import note_issue, relied_on
from fovea.emulator.layout.descriptor import (
    CHUNK_BYTES,
    decode_tcgen05_descriptor,
    operand_chunks,
)
from fovea.emulator.machine.memory import SHARED_WINDOW, WINDOW_SHIFT

SM100 = "sm_100a,sm_100f,sm_103a,sm_103f,sm_110a"  # family targets: PTX ISA 8.8 and later


class Pipeline:
    """The operations of one CTA group in issue order.

    Attributes:
        issued: (operation, agent of the issuing warp, that warp's time at issue), newest last.
    """

    __slots__ = ("issued",)

    def __init__(self) -> None:
        self.issued: list[tuple[Operation, int, int]] = []

    def known_to(self, warp: Any) -> list[Operation]:
        """Return the newest operation of each issuing warp that `warp` knows to be issued."""
        seen, own = warp.access.clock.seen, warp.access.agent
        newest: dict[int, Operation] = {}
        for operation, agent, time in self.issued:
            if agent == own or time <= seen[agent]:
                newest[agent] = operation
        return list(newest.values())

    def add(self, operation: Operation, warp: Any) -> None:
        """Note an operation; ones that a later operation of the same warp covers are dropped."""
        agent = warp.access.agent
        time = int(warp.access.clock.seen[agent])
        # An older operation of the warp stays only while somebody may know it but not this one.
        self.issued = [
            entry
            for entry in self.issued
            if entry[1] != agent or (entry[2] != time and not entry[0].is_complete)
        ]
        self.issued.append((operation, agent, time))


def submit_tracked(
    i: Instruction, warp: Any, effects: Sequence[Effect], *, kind: str, group: int, lane: int
) -> Operation:
    """Start an operation of the pipeline, to be covered by the thread's next commit."""
    first = member_ctas(i, warp, group)[0]
    pipeline = first.state.setdefault("tcgen05.pipeline", Pipeline())
    channel = _channel(warp, lane, group)
    after = pipeline.known_to(warp)
    tensor = relied_on(warp, after)
    operation = start(warp, i, effects, kind=kind, channel=channel, after=after, tensor=tensor)
    note_issue(warp, operation, needs_fence=False)
    pipeline.add(operation, warp)
    warp.state.setdefault(("tcgen05.tracked", lane, group), []).append(operation)
    return operation


def commit_tracked(
    i: Instruction, warp: Any, effects: Sequence[Effect], *, group: int, lane: int
) -> Operation:
    """Start an operation that happens after all that the thread has issued before."""
    key = ("tcgen05.tracked", lane, group)
    channel, after = _channel(warp, lane, group), warp.state.get(key, ())
    operation = start(warp, i, effects, kind="tcgen05.commit", channel=channel, after=after)
    # The commit covers everything before it, so later commits need to come after it alone.
    warp.state[key] = [operation]
    return operation


def _channel(warp: Any, lane: int, group: int) -> tuple[Any, ...]:
    """Return the channel of what one thread issues to a CTA group: commits tell of it in order."""
    return ("tcgen05", warp.access.agent, lane, group)


def shared_address(i: Instruction, warp: Any, lane: int, address: int) -> int:
    """Return the 32-bit shared address of a generic address (32-bit ones pass).

    Raises:
        IllegalOperand: the address is not in shared memory.
    """
    window = address >> WINDOW_SHIFT
    if window == SHARED_WINDOW >> WINDOW_SHIFT or not address >> 32:
        return address & 0xFFFFFFFF
    raise IllegalOperand(
        f"address {address:#x} is not in shared memory", warp.where(i, lane=lane, address=address)
    )


def member_ctas(i: Instruction, warp: Any, group: int) -> tuple[Any, ...]:
    """Return the CTAs of a group, the even one first.

    Raises:
        IllegalOperand: a pair in a cluster without one.
    """
    if group == 1:
        return (warp.cta,)
    ctas = warp.cta.cluster.ctas
    even = warp.cta.rank & ~1
    if even + 1 >= len(ctas):
        raise IllegalOperand(
            f"cta_group::2 needs a pair of CTAs; the cluster has {len(ctas)}", warp.where(i)
        )
    return ctas[even], ctas[even + 1]


def descriptor_offsets(
    i: Instruction,
    warp: Any,
    value: int,
    name: str,
    rows: int,
    k_bytes: int,
    element_bytes: int,
    *,
    is_k_major: bool,
) -> Array:
    """Return the shared-memory offsets of the chunks a descriptor describes.

    Raises:
        IllegalOperand: the value is no usable descriptor.
    """
    try:
        table, first = operand_chunks(
            decode_tcgen05_descriptor(value),
            rows=rows,
            k_bytes=k_bytes,
            element_bytes=element_bytes,
            is_k_major=is_k_major,
        )
    except ValueError as error:
        raise IllegalOperand(f"descriptor of {name}: {error}", warp.where(i)) from error
    return (table + first) * CHUNK_BYTES
