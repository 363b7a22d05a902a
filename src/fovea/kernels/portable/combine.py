"""The merge of results over parts of the keys: one CTA a row, its warps take turns with the parts.

Lives here: the kernel that follows a forward with split keys. Not here: the arithmetic that ends a
row (`device/softmax.py`), the choice of parts. Invariant: a part that saw no key weighs exactly 0
whatever its output holds, and the order of additions depends on the number of parts alone.
`reference/decode.py` is the specification.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.softmax import Closed, close_row, larger
from fovea.kernels.device.values import select
from fovea.plan.combine import REFERENCE, ROW_MAX, ROW_SUM, CombinePlan
from fovea.plan.roles import WARP_SIZE


class Partials(NamedTuple):
    """What the parts left: (part, batch, heads, seqlen_q, head_dim_v) and (plane, part, ...).

    The planes are those of `plan/combine.py`: reference (log2 units), sum, natural maximum.
    """

    mOut: cute.Tensor
    mRows: cute.Tensor
    num_splits: cutlass.Int32


class Merged(NamedTuple):
    """Where results go: O (batch, seqlen_q, heads, head_dim_v), the others (batch, heads, ...).

    Packed sequences are one batch entry of all rows.
    """

    mO: cute.Tensor
    mLSE: cute.Tensor
    mMaxScore: cute.Tensor | None
    mSink: cute.Tensor | None


class CombineKernel:
    """The merge of one plan."""

    def __init__(self, plan: CombinePlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(self, partials: Partials, merged: Merged, stream: Any):
        """Launch one CTA a row, behind the kernel that writes the parts."""
        batch, seqlen_q, heads, _ = merged.mO.shape
        self.kernel(partials, merged).launch(
            grid=(batch * seqlen_q * heads, 1, 1),
            block=(self.plan.threads, 1, 1),
            stream=stream,
            # Its CTAs start while those of the forward end, and wait below.
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, partials: Partials, merged: Merged):
        """Merge the parts of one row.

        The four warps add their parts up apart; the first adds the four sums and writes the row.
        """
        plan = self.plan
        row, _, _ = cute.arch.block_idx()
        _, seqlen_q, heads, _ = merged.mO.shape
        batch = row // (heads * seqlen_q)
        in_batch = row - batch * (heads * seqlen_q)
        head = in_batch // seqlen_q
        q_idx = in_batch - head * seqlen_q
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = SmemAllocator()
        shape = (plan.columns_per_lane, WARP_SIZE, plan.num_warps)
        sSums = smem.allocate_tensor(cutlass.Float32, cute.make_layout(shape), 16)

        # The next forward may come up: every CTA of this grid runs by now, and none waits for it.
        cute.arch.griddepcontrol_launch_dependents()
        # The forward's results are there, and visible, from here on.
        cute.arch.griddepcontrol_wait()
        place = (batch, head, q_idx)
        rParts = _load_parts(plan, partials, place, warp, lane)
        reference = _reference(partials, place, lane)
        rSum = cute.make_rmem_tensor(plan.columns_per_lane, cutlass.Float32)
        rSum.fill(0.0)
        _add_parts(plan, partials, place, reference, warp, rParts, rSum)
        step = plan.num_warps * plan.parts_at_once
        for first in cutlass.range(warp + step, partials.num_splits, step, unroll=1):
            rMore = _load_parts(plan, partials, place, first, lane)
            _add_parts(plan, partials, place, reference, first, rMore, rSum)
        cute.autovec_copy(rSum, sSums[None, lane, warp])
        cute.arch.sync_threads()
        if warp == 0:
            row_sum = _row_sum(partials, place, reference, lane)
            sink = None
            if cutlass.const_expr(plan.sink):
                sink = merged.mSink[head].to(cutlass.Float32)
            closed = close_row(reference, row_sum, sink)
            if cutlass.const_expr(plan.has_idle_rows):
                closed = _of_idle_row(partials, place, closed)
            for other in cutlass.range_constexpr(1, plan.num_warps):
                for column in cutlass.range_constexpr(plan.columns_per_lane):
                    rSum[column] = rSum[column] + sSums[column, lane, other]
            _write_output(plan, merged, place, rSum, closed, lane)
            if lane == 0:
                merged.mLSE[place] = closed.lse
            if cutlass.const_expr(plan.max_score):
                top = _top_score(partials, place, lane)
                if lane == 0:
                    merged.mMaxScore[place] = top


def _of_idle_row(partials: Partials, place: tuple, closed: Closed) -> Closed:
    """Return what a row comes to: nothing, the sink aside, where it belongs to no query."""
    is_idle = partials.mRows[ROW_SUM, 0, *place] < 0.0
    nothing = cutlass.Float32(-cutlass.Float32.inf)
    return closed._replace(
        lse=select(is_idle, nothing, closed.lse), is_dead=closed.is_dead | is_idle
    )


def _is_empty(partials: Partials, place: tuple, split: cutlass.Int32) -> cutlass.Boolean:
    """Return whether a part saw no key; its sum is 0, of idle rows negative."""
    return partials.mRows[ROW_SUM, split, *place] <= 0.0


def _weight(
    partials: Partials, place: tuple, split: cutlass.Int32, reference: cutlass.Float32
) -> cutlass.Float32:
    """Return what a part's sums are multiplied by: 2^(its reference - the common one), or 0."""
    own = partials.mRows[REFERENCE, split, *place]
    power = cute.math.exp2(own - reference, fastmath=True)
    return select(_is_empty(partials, place, split), cutlass.Float32(0.0), power)


@cute.jit
def _reference(partials: Partials, place: tuple, lane: cutlass.Int32) -> cutlass.Float32:
    """Return the largest reference of the parts that saw a key; 0 where none did."""
    top = cutlass.Float32(-cutlass.Float32.inf)
    for split in cutlass.range(lane, partials.num_splits, WARP_SIZE, unroll=1):
        own = partials.mRows[REFERENCE, split, *place]
        top = select(_is_empty(partials, place, split), top, cute.arch.fmax(top, own))
    top = _over_lanes(top, cute.arch.fmax)
    return select(top == -cutlass.Float32.inf, cutlass.Float32(0.0), top)


@cute.jit
def _row_sum(
    partials: Partials, place: tuple, reference: cutlass.Float32, lane: cutlass.Int32
) -> cutlass.Float32:
    """Return the sum over all keys, relative to the common reference."""
    total = cutlass.Float32(0.0)
    for split in cutlass.range(lane, partials.num_splits, WARP_SIZE, unroll=1):
        weight = _weight(partials, place, split, reference)
        total = total + weight * partials.mRows[ROW_SUM, split, *place]
    return _over_lanes(total, lambda a, b: a + b)


@cute.jit
def _top_score(partials: Partials, place: tuple, lane: cutlass.Int32) -> cutlass.Float32:
    """Return the largest score; -inf where there is no key."""
    top = cutlass.Float32(-cutlass.Float32.inf)
    for split in cutlass.range(lane, partials.num_splits, WARP_SIZE, unroll=1):
        top = larger(top, partials.mRows[ROW_MAX, split, *place])
    return _over_lanes(top, larger)


def _nth_split(plan: CombinePlan, warp: cutlass.Int32, nth: cutlass.Int32 | int) -> cutlass.Int32:
    """Return the n-th part of a warp's share."""
    return warp + nth * plan.num_warps


@cute.jit
def _load_parts(
    plan: cutlass.Constexpr,
    partials: Partials,
    place: tuple,
    first: cutlass.Int32,
    lane: cutlass.Int32,
) -> cute.Tensor:
    """Return this lane's columns of some parts, all asked for at once; parts past the last repeat.

    A loop with an exit between the loads would wait for each part in turn.
    """
    width = plan.columns_per_lane
    rParts = cute.make_rmem_tensor((width, plan.parts_at_once), cutlass.Float32)
    for nth in cutlass.range_constexpr(plan.parts_at_once):
        split = cutlass.min(_nth_split(plan, first, nth), partials.num_splits - 1)
        mRow = partials.mOut[split, *place, None]
        cute.autovec_copy(cute.local_tile(mRow, (width,), (lane,)), rParts[None, nth])
    return rParts


@cute.jit
def _add_parts(
    plan: cutlass.Constexpr,
    partials: Partials,
    place: tuple,
    reference: cutlass.Float32,
    first: cutlass.Int32,
    rParts: cute.Tensor,
    rSum: cute.Tensor,
):
    """Add loaded parts to this lane's columns, each with its weight."""
    weights = []
    for nth in cutlass.range_constexpr(plan.parts_at_once):
        split = _nth_split(plan, first, nth)
        weight = _weight(partials, place, cutlass.min(split, partials.num_splits - 1), reference)
        weights.append(select(split < partials.num_splits, weight, cutlass.Float32(0.0)))
    for nth in cutlass.range_constexpr(plan.parts_at_once):
        for column in cutlass.range_constexpr(plan.columns_per_lane):
            # Never 0 * x: a part without keys may have met an infinite V.
            term = weights[nth] * rParts[column, nth]
            term = select(weights[nth] == 0.0, cutlass.Float32(0.0), term)
            rSum[column] = rSum[column] + term


@cute.jit
def _write_output(
    plan: cutlass.Constexpr,
    merged: Merged,
    place: tuple,
    rSum: cute.Tensor,
    closed: Closed,
    lane: cutlass.Int32,
):
    """Divide this lane's columns by the row's sum and write those that the tensor has."""
    batch, head, q_idx = place
    width = plan.columns_per_lane
    rOut = cute.make_rmem_tensor(width, element_type(plan))
    for column in cutlass.range_constexpr(width):
        value = select(closed.is_dead, cutlass.Float32(0.0), rSum[column] * closed.inverse)
        rOut[column] = value.to(element_type(plan))
    # Whole lanes are inside or outside: head_dim_v is a multiple of 8, a lane has 2, 4 or 8.
    if lane * width < merged.mO.shape[3]:
        mRow = merged.mO[batch, q_idx, head, None]
        cute.autovec_copy(rOut, cute.local_tile(mRow, (width,), (lane,)))


def _over_lanes(value: cutlass.Float32, operation) -> cutlass.Float32:
    """Return a sum or maximum over the warp, the same bits in every lane."""
    for offset in (1, 2, 4, 8, 16):
        value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value
