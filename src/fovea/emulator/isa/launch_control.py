"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started.

What lives here: try_cancel and query_cancel. Not here: which clusters start when (`schedule.py`).

The response is written by the async proxy where the last one was read by the generic one, and needs
a proxy fence between: the manual's example has one after the read, and so have the programming
guide's, CUTLASS's and CuTe-DSL's, though an mbarrier orders the two as for stages of copies.

Invariant: a cluster is either started or cancelled by exactly one request. The manual promises
neither an order nor success: unless work is eager, which cluster is taken and whether a request is
declined while some are left (as for a kernel that preempts this one) go by the seed. The response
is (x, y, z, mark) of the first CTA as 32-bit words, which the manual calls opaque.

Source: PTX ISA 9.7.13.17-18; of preemption, CUDA programming guide, "Work Stealing with Cluster
Launch Control".
"""

from dataclasses import replace
from typing import Any

import numpy as np

from fovea.emulator.async_engine import Effect, Operation
from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.copy_engine import (
    SharedPlace,
    barrier_channel,
    complete_bytes,
    issues,
    own_shared_place,
    start,
)
from fovea.emulator.isa.instruction import Array, Decoded, Instruction
from fovea.emulator.isa.tensor_core import shared_address

_TARGETS = "sm_100,sm_100a,sm_100f,sm_103,sm_103a,sm_103f,sm_110,sm_110a,sm_120,sm_120a"
_RESPONSE_BYTES = 16
_CANCELLED = 0x0C7A1D  # marks the response of a request that has succeeded
_DECLINED_SHARE = 0.125  # of requests, though a cluster is left
_UNORDERED_SHARE = 0.25  # of the others, which get any cluster that is left, not the next


@instruction(
    "clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes"
    "{.multicast::cluster::all}.b128 [addr], [mbar]",
    source="PTX ISA 9.7.13.17",
    evidence="manual-only",
    targets=_TARGETS,
    kind="copy",
)
def clusterlaunchcontrol_try_cancel(i: Instruction) -> Any:
    """Ask for a cluster that has not started; the response comes to shared memory later."""
    address, barrier = i.address("addr"), i.address("mbar")
    is_multicast = i.has("multicast::cluster::all")

    def place(warp: Any, lane: int, value: int, alignment: int, what: str) -> SharedPlace:
        value = shared_address(i, warp, lane, value)
        return own_shared_place(i, warp, lane, value, alignment=alignment, what=what)

    def run(warp: Any, mask: Array) -> None:
        if warp.cta.has_seen_decline:
            raise IllegalOperand(
                "a request after this CTA has seen one fail, which the manual leaves undefined; "
                "stop asking once is_canceled is false",
                warp.where(i),
            )
        addresses, barriers = address(warp), barrier(warp)
        for lane, *_ in issues(mask, addresses, barriers):
            to = place(warp, lane, int(addresses[lane]), _RESPONSE_BYTES, "response")
            mbar = place(warp, lane, int(barriers[lane]), 8, "mbarrier")
            size = len(warp.cta.cluster.ctas) if is_multicast else 1
            ranks = range(size) if is_multicast else (warp.cta.rank,)
            response: list[Array] = []
            effects = [_effect(to.in_cta(rank), mbar.in_cta(rank), response) for rank in ranks]
            channel = barrier_channel([mbar.in_cta(rank) for rank in ranks])
            start(warp, i, effects, kind="launch cancellation", channel=channel)

    return run


def _effect(to: SharedPlace, mbar: SharedPlace, response: list[Array]) -> Effect:
    def effect(operation: Operation) -> None:
        if not response:
            response.append(_cancel(operation.access.warp.machine))
        access = replace(operation.access, needs_fenced_reads=True)
        to.cta.shared.write(to.offset, response[0], access)
        complete_bytes(mbar, _RESPONSE_BYTES, operation)

    return effect


def _cancel(machine: Any) -> Array:
    """Cancel a cluster that has not started, or decline; return the response."""
    number = machine.next_cluster
    while number in machine.cancelled:
        number += 1
    is_free = machine.options.async_delay != "eager"
    if number >= machine.num_clusters or (is_free and machine.random.random() < _DECLINED_SHARE):
        return np.zeros(4, np.uint32)
    if is_free and machine.random.random() < _UNORDERED_SHARE:
        left = [n for n in range(number, machine.num_clusters) if n not in machine.cancelled]
        number = machine.random.choice(left)
    machine.cancelled.add(number)
    gx, gy, _ = machine.cluster_grid
    index = (number % gx, number // gx % gy, number // (gx * gy))
    first = [at * size for at, size in zip(index, machine.cluster_shape)]
    return np.array([*first, _CANCELLED], np.uint32)


# --- reading the response -------------------------------------------------------------------------


def _words(lanes: Array) -> Array:
    return np.ascontiguousarray(lanes).view(np.uint32).reshape(-1, 4)


@instruction(
    "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, response",
    source="PTX ISA 9.7.13.18",
    evidence="manual-only",
    targets=_TARGETS,
)
def clusterlaunchcontrol_query_cancel(i: Instruction) -> Decoded:
    """p = whether a cluster was cancelled."""
    read, write = i.read("response", "b128"), i.write("p", "pred")

    def run(w: Any, mask: Array) -> None:
        is_cancelled = _words(read(w))[:, 3] == _CANCELLED
        if not is_cancelled[mask].all():
            w.cta.has_seen_decline = True
        write(w, mask, is_cancelled)

    return run


@instruction(
    "clusterlaunchcontrol.query_cancel.what.b32.b128 d, response",
    source="PTX ISA 9.7.13.18",
    evidence="manual-only",
    targets=_TARGETS,
    what="get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z",
)
def clusterlaunchcontrol_first_ctaid_part(i: Instruction) -> Decoded:
    """d = one coordinate of the first CTA of the cancelled cluster."""
    part = "xyz".index(i["what"][-1])
    read, write = i.read("response", "b128"), i.write("d", "b32")
    return lambda w, mask: write(w, mask, _words(read(w))[:, part].copy())


@instruction(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 d, response",
    source="PTX ISA 9.7.13.18",
    evidence="manual-only",
    targets=_TARGETS,
)
def clusterlaunchcontrol_first_ctaid(i: Instruction) -> Decoded:
    """d = {x, y, z, unspecified} of the first CTA of the cancelled cluster."""
    if len(i.items("d")) != 4:
        raise i.error(f"{len(i.items('d'))} registers; the form writes 4")
    read, write = i.read("response", "b128"), i.write_vector("d", "b32")
    return lambda w, mask: write(w, mask, list(_words(read(w)).T.copy()))
