"""The KV tiles that the two CTAs of a cluster walk together: the union of what each visits.

Lives here: how two walks become one sequence of uses, and which of them is for whom. Not here: a
walk of one query tile (`kv_walk.py`), the loads. Invariant: both CTAs work out the same union, each
from the query tiles of both.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.values import select


class Union(NamedTuple):
    """The range of KV tiles that two CTAs walk, from its end down, and the other CTA's part."""

    end: cutlass.Int32
    uses: cutlass.Int32
    other_begin: cutlass.Int32
    other_end: cutlass.Int32


class Takers(NamedTuple):
    """Which CTAs take a KV tile of the union; at least one does."""

    own: cutlass.Boolean
    other: cutlass.Boolean


@cute.jit
def unite(own: Walk, other: Walk) -> tuple[Walk, Union]:
    """Return this CTA's walk with its place in the union, and the union.

    A query tile whose rows see no key visits one tile all the same: the union's first.
    """
    own_begin, own_end = _range_beside(own, other)
    other_begin, other_end = _range_beside(other, own)
    end = cutlass.max(own_end, other_end)
    uses = end - cutlass.min(own_begin, other_begin)
    walk = own._replace(
        visits=own_end - own_begin, range_end=own_end, lead=end - own_end, uses=uses
    )
    return walk, Union(end, uses, other_begin, other_end)


def _range_beside(walk: Walk, beside: Walk) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Return the tiles that a walk visits when it shares those of another."""
    end = select(walk.is_dead != 0, beside.range_end, walk.range_end)
    # Dead walks visit one tile.
    return end - walk.visits, end


def takers(walk: Walk, union: Union, n_idx: cutlass.Int32) -> Takers:
    """Return who takes a tile of the union."""
    return Takers(
        (n_idx < walk.range_end) & (n_idx >= walk.range_end - walk.visits),
        (n_idx < union.other_end) & (n_idx >= union.other_begin),
    )
