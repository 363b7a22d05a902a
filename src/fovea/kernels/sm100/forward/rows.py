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
from fovea.kernels.sm100.exp2 import Pair, both, exp2_pair
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


def larger(a: cutlass.Float32, b: cutlass.Float32) -> cutlass.Float32:
    """Return the larger number, NaN if one is."""
    return cute.arch.fmax(a, b, nan=True)


def software_pairs(plan) -> frozenset[int]:
    """Return which pairs of columns of a chunk go to the FMA pipe: evenly spread."""
    pairs, software = CHUNK_COLUMNS // 2, plan.software_columns // 2
    return frozenset((2 * i + 1) * pairs // (2 * software) for i in range(software))


class Exponents(NamedTuple):
    """exponent = value * scale + offset + slope * column; the slope is None where it is 0."""

    scale: cutlass.Float32
    offset: cutlass.Float32
    slope: cutlass.Float32 | None = None


def exponentiate(
    plan, values: list[cutlass.Float32], first: int, exponents: Exponents, total: Pair
) -> tuple[list[cutlass.Int32], Pair]:
    """Return a chunk of P, two 16-bit values a register, and `total` with its sum added.

    The sums are of P before it is rounded, of even and odd columns.
    """
    in_software = software_pairs(plan)
    packed: list[cutlass.Int32] = []
    for pair in range(len(values) // 2):
        offset = both(exponents.offset)
        if exponents.slope is not None:
            column = float(first + 2 * pair)
            offset = cute.arch.fma_packed_f32x2(
                both(exponents.slope),
                (cutlass.Float32(column), cutlass.Float32(column + 1.0)),
                offset,
                rnd="rn",
                ftz=False,
            )
        x = cute.arch.fma_packed_f32x2(
            (values[2 * pair], values[2 * pair + 1]),
            both(exponents.scale),
            offset,
            rnd="rn",
            ftz=False,
        )
        if pair in in_software:
            p = exp2_pair(x)
        else:
            p = (cute.math.exp2(x[0], fastmath=True), cute.math.exp2(x[1], fastmath=True))
        total = cute.arch.add_packed_f32x2(total, p, rnd="rn", ftz=False)
        packed.append(pack_pair(p[0], p[1], _p_type(plan)))
    return packed, total


def _p_type(plan) -> type[cutlass.Numeric]:
    return cutlass.BFloat16 if plan.dtype == "bfloat16" else cutlass.Float16
