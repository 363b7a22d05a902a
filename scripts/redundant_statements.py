"""Statements of our kernels that may be left out, and what orders the same accesses without them.

Lives here: the tables that `emulator_faults.py` reads, one for each kernel it is run on. Not here:
the faults and their launches. Invariant: a statement is found by its number among those of its
opcode; should a kernel get more or fewer of them, the entry explains nothing until somebody has
looked again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundant:
    """Some statements of one opcode, and why each may be left out.

    Attributes:
        opcode: part of the statements' opcode.
        numbers: theirs among the statements of the opcode, from 1.
        of: how many the kernel has.
        reason: what orders the same accesses.
    """

    opcode: str
    numbers: tuple[int, ...]
    of: int
    reason: str


_ONE_CTA = "one CTA: bar.sync 0 orders the initialisation; the fence is for a cluster"
_CLUSTER_BARRIER = "the cluster barrier behind the initialisation releases and acquires by itself"
_FIRST_K = (
    "a K stage is released before the V stage of the step before, and the load role has waited for "
    "that V stage at the end of the tile before"
)
_FENCED = (
    "the wgmma.fence at the product issued just before follows the last access of these "
    "accumulators and of A (PTX ISA 9.7.15.7.1 asks for a fence between access and product)"
)
_ONE_WAIT = (
    "every warp has waited for its wgmma, and a wait of one warp covers the whole product, which "
    "read all rows; what is written after it is the warp's own rows"
)
_TURN = (
    "the turnstile orders no memory: it lets one warpgroup multiply while another exponentiates; "
    "arrivals that nobody waits for come in pairs, save in schedules that hang"
)
_IDLE = (
    "a warpgroup without rows reads nothing of the stage, and its turns keep it within a tile of "
    "the others, so that its arrival counts in the right phase"
)
_FIRST_SKIP = (
    "in the first tile of a CTA and in a redo each warpgroup has given back, one ring before, what "
    "the one ahead passes over without reading: its arrival counts in the right phase"
)
_LATER_STORE_WAIT = "the warp's next tcgen05.wait::st comes before its first signal"
_LATER_LOAD_WAIT = (
    "a later tcgen05.wait::ld of the warp comes before anybody is told, and registers wait for "
    "their own load (PTX ISA 9.7.16.6.4.5)"
)
_NOTHING_SINCE = (
    "the warp has touched no tensor memory since its last fence: what it tells of is in shared "
    "memory, or was read before it told of O"
)
_ANNOUNCED = (
    "the announcement received just before comes after the epilogue has given back the tile of "
    "this O, and so has read it"
)

_SM90_D128 = (
    Redundant(opcode="fence.mbarrier_init", numbers=(1,), of=1, reason=_ONE_CTA),
    Redundant(opcode="mbarrier.try_wait", numbers=(5,), of=28, reason=_FIRST_K),
    Redundant(opcode="mbarrier.try_wait", numbers=(19, 20, 21), of=28, reason=_IDLE),
    Redundant(opcode="wgmma.fence", numbers=(3, 5, 7), of=7, reason=_FENCED),
    Redundant(opcode="bar.sync", numbers=(3, 4), of=11, reason=_TURN),
    Redundant(opcode="bar.sync", numbers=(7, 10, 11), of=11, reason=_ONE_WAIT),
)
_SM90_D64 = (  # two CTAs share K and V
    Redundant(opcode="fence.mbarrier_init", numbers=(1,), of=1, reason=_CLUSTER_BARRIER),
    Redundant(opcode="mbarrier.try_wait", numbers=(10,), of=23, reason=_FIRST_K),
    Redundant(opcode="wgmma.fence", numbers=(3, 5, 7), of=7, reason=_FENCED),
    Redundant(opcode="bar.sync", numbers=(1, 2), of=8, reason=_TURN),
    Redundant(opcode="bar.sync", numbers=(4, 7, 8), of=8, reason=_ONE_WAIT),
)
_SM90_D64_CAUSAL = (  # four warpgroups that pass over what the diagonal hides from their rows
    Redundant(opcode="fence.mbarrier_init", numbers=(1,), of=1, reason=_ONE_CTA),
    Redundant(opcode="mbarrier.try_wait", numbers=(12,), of=27, reason=_FIRST_SKIP),
    Redundant(opcode="wgmma.fence", numbers=(3, 5, 7, 9), of=9, reason=_FENCED),
    Redundant(opcode="bar.sync", numbers=(2, 5, 6), of=6, reason=_ONE_WAIT),
)
_SM100_D128 = (
    Redundant(opcode="fence.mbarrier_init", numbers=(1,), of=1, reason=_ONE_CTA),
    Redundant(opcode="tcgen05.wait::st", numbers=(1,), of=5, reason=_LATER_STORE_WAIT),
    Redundant(
        opcode="tcgen05.wait::ld",
        numbers=(1, 2, 3, 4, 10, 11, 13, 14, 15, 17, 18, 19),
        of=20,
        reason=_LATER_LOAD_WAIT,
    ),
    Redundant(opcode="tcgen05.fence", numbers=(6, 7), of=18, reason=_NOTHING_SINCE),
    Redundant(opcode="mbarrier.try_wait", numbers=(33, 38, 39), of=39, reason=_ANNOUNCED),
)
_SM100_D128_CAUSAL = (  # with cluster launch control
    Redundant(opcode="fence.mbarrier_init", numbers=(1,), of=1, reason=_ONE_CTA),
    Redundant(
        opcode="tcgen05.wait::ld",
        numbers=(1, 2, 3, 4, 10, 11, 14, 15, 17, 18, 19, 21, 22, 23),
        of=24,
        reason=_LATER_LOAD_WAIT,
    ),
    Redundant(opcode="tcgen05.fence", numbers=(9,), of=20, reason=_NOTHING_SINCE),
    Redundant(opcode="mbarrier.try_wait", numbers=(34, 39, 40), of=40, reason=_ANNOUNCED),
)

# By architecture, head dim and mask, as `emulator_faults.py` is asked for them.
REDUNDANT: dict[str, tuple[Redundant, ...]] = {
    "sm90 d128": _SM90_D128,
    "sm90 d64": _SM90_D64,
    "sm90 d64 causal": _SM90_D64_CAUSAL,
    "sm100 d128": _SM100_D128,
    "sm100 d128 causal": _SM100_D128_CAUSAL,
}
