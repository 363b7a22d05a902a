"""Conditions and the warp: choice without a branch, branches that whole warps take.

Lives here: `select`, `is_in_all_lanes`, a lane's value in all, which warp this is. Not here:
anything on fragments. Invariant: `select`'s result has the DSL type of both values (the DSL's own
primitive returns an untyped value).
"""

from typing import TypeVar

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import select_

from fovea.plan.roles import WARP_SIZE, WARPS_PER_WARPGROUP

Scalar = TypeVar("Scalar", bound=cutlass.Numeric)


def select(condition: cutlass.Boolean, if_true: Scalar, if_false: Scalar) -> Scalar:
    """Return one of two values of the same type."""
    return type(if_false)(select_(condition, if_true, if_false))


def from_lane(value: Scalar, lane: cutlass.Int32) -> Scalar:
    """Return a lane's value in every lane of the warp."""
    return cute.arch.shuffle_sync(value, lane, mask_and_clamp=WARP_SIZE - 1)


def is_in_all_lanes(condition: cutlass.Boolean) -> cutlass.Boolean:
    """Return a condition that every lane of the warp knows to be the same in all.

    A vote tells the compiler. Without it counters and addresses in such a loop or branch count as
    divergent, and leave the uniform registers.
    """
    return cute.arch.vote_all_sync(condition)


def warp_in_warpgroup() -> cutlass.Int32:
    """Return which of its warpgroup's four warps this is, as the compiler knows to be uniform."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
