"""Masks that are nothing but a band beside the diagonal, found in their graphs.

Lives here: the reading of a mask such as `(q_idx >= kv_idx) & (q_idx - kv_idx < window)` as limits
of `kv_idx - q_idx`. Not here: what is done with them (`plan/kernel_calls.py`). Invariant: a mask
that is read is true exactly inside its limits, for every value of its run-time numbers.
"""

from functools import lru_cache
from typing import NamedTuple

from fovea.mods.graph import Graph, Node

# Beyond any distance of two positions, and far from the end of 64 bits.
_FAR = 2**62
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}


class _Linear(NamedTuple):
    """q * q_idx + kv * kv_idx + constant + the sum of factor * scalars[slot]."""

    q: int = 0
    kv: int = 0
    constant: int = 0
    scalars: tuple[tuple[int, int], ...] = ()  # (slot, factor)

    def plus(self, other: "_Linear", sign: int) -> "_Linear":
        return _Linear(
            self.q + sign * other.q,
            self.kv + sign * other.kv,
            self.constant + sign * other.constant,
            (*self.scalars, *((slot, sign * factor) for slot, factor in other.scalars)),
        )

    def times(self, factor: int) -> "_Linear":
        return _Linear(
            self.q * factor,
            self.kv * factor,
            self.constant * factor,
            tuple((slot, factor * each) for slot, each in self.scalars),
        )

    def number(self, scalars: tuple[int | float, ...]) -> int:
        """Return all but the positions' part."""
        return self.constant + sum(factor * int(scalars[slot]) for slot, factor in self.scalars)


class BandMask(NamedTuple):
    """A mask that is true where every `above` <= kv_idx - q_idx <= every `below`."""

    above: tuple[_Linear, ...]
    below: tuple[_Linear, ...]

    def limits(self, scalars: tuple[int | float, ...]) -> tuple[int | None, int | None]:
        """Return the least and the largest kv_idx - q_idx, None where there is no limit.

        Which of them is None is the same for all run-time numbers.
        """
        above = [_near(bound.number(scalars)) for bound in self.above]
        below = [_near(bound.number(scalars)) for bound in self.below]
        return max(above, default=None), min(below, default=None)


def _near(distance: int) -> int:
    return max(-_FAR, min(distance, _FAR))


@lru_cache(maxsize=256)
def band_of_mask(graph: Graph) -> BandMask | None:
    """Return the band that a mask is, None for any other mask."""
    above: list[_Linear] = []
    below: list[_Linear] = []
    pending = [graph.nodes[graph.output]]
    while pending:
        node = pending.pop()
        if node.op == "and" and node.dtype == "b1":
            pending.extend(graph.nodes[argument] for argument in node.args)
            continue
        bound = _bound(node, graph)
        if bound is None:
            return None
        is_above, linear = bound
        (above if is_above else below).append(linear)
    return BandMask(tuple(above), tuple(below))


def _bound(node: Node, graph: Graph) -> tuple[bool, _Linear] | None:
    """Return (whether it is the least distance, the distance) of a comparison."""
    if node.op not in _MIRRORED:
        return None
    left, right = (_linear(graph.nodes[argument], graph) for argument in node.args)
    if left is None or right is None:
        return None
    # difference op 0
    difference, op = left.plus(right, -1), node.op
    if (difference.q, difference.kv) == (1, -1):
        difference, op = difference.times(-1), _MIRRORED[op]
    if (difference.q, difference.kv) != (-1, 1):
        return None
    # kv_idx - q_idx + rest op 0
    distance = difference._replace(q=0, kv=0).times(-1)
    strict = {"lt": -1, "gt": 1}.get(op, 0)
    return op in ("ge", "gt"), distance._replace(constant=distance.constant + strict)


def _linear(node: Node, graph: Graph) -> _Linear | None:
    """Return a 64-bit integer node as a linear form, None where it is none."""
    if node.dtype != "i64":
        return None
    match node.op:
        case "q_idx":
            return _Linear(q=1)
        case "kv_idx":
            return _Linear(kv=1)
        case "const":
            return _Linear(constant=int(node.attrs[0]))
        case "scalar":
            return _Linear(scalars=((int(node.attrs[0]), 1),))
        case "add" | "sub":
            left, right = (_linear(graph.nodes[argument], graph) for argument in node.args)
            if left is None or right is None:
                return None
            return left.plus(right, 1 if node.op == "add" else -1)
        case "neg":
            operand = _linear(graph.nodes[node.args[0]], graph)
            return None if operand is None else operand.times(-1)
        case _:
            return None
