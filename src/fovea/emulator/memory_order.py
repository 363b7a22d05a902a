"""Release and acquire through memory: what strong accesses and fences hand on.

A store hands on what its warp has seen if it is a release, else what fences before it cover; a load
takes what was handed to its place if it is an acquire, else keeps it for a fence to come. Both
within scope: the narrowest of the fence's and the access's, on both sides. An atomic adds to what
lies at a place, a store replaces it (PTX ISA 8.7-9: morally strong
operations, release and acquire patterns, observation and causality order).

Fences count by warp and travel with clocks: behind a barrier, a fence of any thread that met there
counts. That is more than the manual says, which wants the fence and the access in one thread; code
such as `__threadfence(); __syncthreads(); if (thread 0) atomicAdd(...)` relies on it.

Lives here: the places, and what goes through them. Not here: clocks (`clocks.py`), which
instruction is what (`isa/load_store.py`, `isa/atomic.py`, `isa/system.py`). Invariant: what is
handed on is never more than the releasing warp had seen.
"""

from dataclasses import dataclass
from typing import Any

from fovea.emulator.clocks import Fences, Known, Levels, merged

_PLACES = 1 << 16  # places of one allocation whose clocks are kept apart
CTA, CLUSTER, GPU = range(3)
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU}

Key = tuple[int, int, int]  # scope, cluster, CTA: who may take what was handed on
Place = dict[Key, Known]


@dataclass(frozen=True, slots=True)
class Order:
    """How a strong access orders memory.

    Attributes:
        scope: CTA, CLUSTER or GPU (which stands for sys too: there is one GPU).
        is_acquire: whether it takes what was handed on.
        is_release: whether it hands on what its warp has seen.
        is_update: whether it is atomic, so adds to what lies at its place.
    """

    scope: int = GPU
    is_acquire: bool = False
    is_release: bool = False
    is_update: bool = False

    @property
    def strength(self) -> int:
        """What `Access.strength` is."""
        return self.scope + 1


class Places:
    """What was handed to the places of one allocation, by offset."""

    __slots__ = ("floor", "table")

    def __init__(self) -> None:
        self.table: dict[int, Place] = {}
        self.floor: Place = {}  # of places no longer kept apart

    def renew(self, offset: int, *, is_update: bool) -> Place:
        """Return what lies at an offset, to be added to."""
        place = self.table.get(offset) if is_update else None
        if place is None:
            if len(self.table) >= _PLACES:
                for old in self.table.values():
                    for key, known in old.items():
                        self.floor[key] = merged(self.floor.get(key, known), known)
                self.table.clear()
            place = self.table[offset] = {}
        return place


def _keys(w: Any) -> tuple[Key, Key, Key]:
    number = w.cta.cluster.number
    return (CTA, number, w.cta.rank), (CLUSTER, number, 0), (GPU, 0, 0)


def publish(w: Any, places: Places, offsets: set[int], order: Order) -> None:
    """Hand on what a strong store of a warp to `offsets` tells of; call it after the store."""
    clock = w.access.clock
    released = clock.fences.released
    if order.is_release:
        seen = clock.snapshot(w.cta.cluster.number)
        released = (seen, seen, seen)
    handed: list[tuple[Key, Known]] = [
        (key, known)
        for key, known in zip(_keys(w)[: order.scope + 1], released)
        if known is not None
    ]
    if not handed:
        if not order.is_update:
            for offset in offsets & places.table.keys():
                del places.table[offset]
        return
    for offset in offsets:
        place = places.renew(offset, is_update=order.is_update)
        for key, known in handed:
            place[key] = merged(place.get(key, known), known)
    if order.is_release:
        w.access.tick()  # what the warp does next was not handed on


def observe(w: Any, places: Places, offsets: set[int], order: Order) -> None:
    """Take, or keep for a fence, what was handed to the places of a strong load."""
    found = [places.table[offset] for offset in offsets & places.table.keys()]
    if places.floor:
        found.append(places.floor)
    if not found:
        return
    clock, number = w.access.clock, w.cta.cluster.number
    met = list(clock.fences.met)
    for scope, key in enumerate(_keys(w)[: order.scope + 1]):
        for place in found:
            known = place.get(key)
            if known is None:
                continue
            if order.is_acquire:
                clock.take(number, known)
            else:
                earlier = met[scope]
                met[scope] = known if earlier is None else merged(earlier, known)
    if any(new is not old for new, old in zip(met, clock.fences.met)):
        clock.fences = Fences(clock.fences.released, (met[0], met[1], met[2]))


def fence(w: Any, scope: int, *, is_acquire: bool, is_release: bool) -> None:
    """Acquire what relaxed loads of a warp have met; let relaxed stores to come release."""
    clock, number = w.access.clock, w.cta.cluster.number
    released, met = list(clock.fences.released), list(clock.fences.met)
    within = slice(scope + 1)
    if is_acquire:
        for known in met[within]:
            if known is not None:
                clock.take(number, known)
        met[within] = [None] * (scope + 1)
    if is_release:
        known = clock.snapshot(number)
        released[within] = [known] * (scope + 1)
    clock.fences = Fences(_levels(released), _levels(met))
    w.access.fence(is_acquire=is_acquire, is_release=is_release)


def _levels(values: list[Known | None]) -> Levels:
    return values[0], values[1], values[2]
