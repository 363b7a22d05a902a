"""What a softmax thread keeps of its row, and the arithmetic on chunks of it.

Lives here: `RowState`, maxima, exponentials and sums of a row held in order. Not here: where the
values come from and go to (`softmax.py`), what a score is (`scores.py`). Invariant: P, row_sum and
O of a row refer to its `reference`, and which columns are exponentiated in software is a matter of
their position alone.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.ptx import pack_pair
from fovea.kernels.device.softmax import larger
from fovea.kernels.sm100.exp2 import Pair, both, distance, exp2_pair
from fovea.plan.numerics import EXP2_HIGHEST, EXP2_SPAN
from fovea.plan.sm100_tiles import CHUNK_COLUMNS

_CHAINS = 4  # of dependent maxima; one alone would wait for each result


class RowState(NamedTuple):
    """What the softmax keeps of a thread's row, in registers (mutable fragments of one element)."""

    row_max: cute.Tensor  # of all scores seen, -inf before
    row_sum: cute.Tensor
    reference: cute.Tensor  # log2 units


def make_state() -> RowState:
    """Return a state that is still to be begun."""
    return RowState(*(cute.make_rmem_tensor(1, cutlass.Float32) for _ in RowState._fields))


def begin(state: RowState) -> None:
    """Forget the row."""
    state.row_max[0] = -cutlass.Float32.inf
    state.row_sum[0] = cutlass.Float32(0.0)
    state.reference[0] = cutlass.Float32(0.0)


def maximum(values: list[cutlass.Float32]) -> cutlass.Float32:
    """Return the largest of a row's values; NaN if one is."""
    chains = values[:_CHAINS]
    for index, value in enumerate(values[_CHAINS:]):
        chains[index % _CHAINS] = larger(chains[index % _CHAINS], value)
    while len(chains) > 1:
        chains = [larger(a, b) for a, b in zip(chains[::2], chains[1::2], strict=True)]
    return chains[0]


def software_pairs(plan) -> frozenset[int]:
    """Return which pairs of columns of a chunk go to the FMA pipe: evenly spread."""
    pairs, software = CHUNK_COLUMNS // 2, plan.software_columns // 2
    return frozenset((2 * i + 1) * pairs // (2 * software) for i in range(software))


class Exponents(NamedTuple):
    """exponent = (value - anchor) * scale + offset + slope * column; what is None is 0.

    `below` gives the exponents' distances from the highest of the software exponential instead.
    """

    scale: cutlass.Float32
    offset: cutlass.Float32
    slope: cutlass.Float32 | None = None
    below: "Exponents | None" = None
    anchor: cutlass.Float32 | None = None

    def offsets(self, column: int) -> Pair:
        """Return what is added to a column and to the next."""
        if self.slope is None:
            return both(self.offset)
        return cute.arch.fma_packed_f32x2(
            both(self.slope),
            (cutlass.Float32(float(column)), cutlass.Float32(column + 1.0)),
            both(self.offset),
            rnd="rn",
            ftz=False,
        )


def make_exponents(
    plan,
    scale: cutlass.Float32,
    offset: cutlass.Float32,
    slope: cutlass.Float32 | None = None,
    anchor: cutlass.Float32 | None = None,
) -> Exponents:
    """Return the exponents of a KV tile, in both forms where the plan has both.

    With an anchor near the scores no digit is lost, however large they are.
    """
    below = None
    if plan.software_columns > 0:
        unit = cutlass.Float32(-1.0 / EXP2_SPAN)
        highest = cutlass.Float32(EXP2_HIGHEST / EXP2_SPAN)
        below = Exponents(
            scale * unit,
            cute.math.fma(offset, unit, highest),
            None if slope is None else slope * unit,
        )
    return Exponents(scale, offset, slope, below, anchor)


def exponentiate(
    plan, values: list[cutlass.Float32], first: int, exponents: Exponents, total: Pair
) -> tuple[list[cutlass.Int32], Pair]:
    """Return a chunk of P, two 16-bit values a register, and `total` with its sum added.

    The sums are of P before it is rounded, of even and odd columns.
    """
    in_software = software_pairs(plan)
    packed: list[cutlass.Int32] = []
    for pair in range(len(values) // 2):
        column = first + 2 * pair
        scores = (values[2 * pair], values[2 * pair + 1])
        if exponents.anchor is not None:
            scores = cute.arch.add_packed_f32x2(
                scores, both(-exponents.anchor), rnd="rn", ftz=False
            )
        if pair in in_software:
            below = exponents.below
            offsets = below.offsets(column)
            p = exp2_pair(
                (
                    distance(scores[0], below.scale, offsets[0]),
                    distance(scores[1], below.scale, offsets[1]),
                )
            )
        else:
            x = cute.arch.fma_packed_f32x2(
                scores, both(exponents.scale), exponents.offsets(column), rnd="rn", ftz=False
            )
            p = (cute.math.exp2(x[0], fastmath=True), cute.math.exp2(x[1], fastmath=True))
        total = cute.arch.add_packed_f32x2(total, p, rnd="rn", ftz=False)
        packed.append(pack_pair(p[0], p[1], _p_type(plan)))
    return packed, total


def _p_type(plan) -> type[cutlass.Numeric]:
    return cutlass.BFloat16 if plan.dtype == "bfloat16" else cutlass.Float16
