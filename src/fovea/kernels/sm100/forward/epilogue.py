"""The epilogue role: final scaling, lse, the judgement of rows, and O out through shared memory.

Lives here: what happens to O of a stream after its last product, while the softmax and the tensor
cores go on with the next query tile. Not here: how a redo is announced (`device/work.py`) and
computed (`softmax.py`). Invariant: a row that saw no key is written as exact zeros with lse -inf
(or the sink), whatever tensor memory held; a row that passes the judgement has the result that a
moving reference would have had, up to rounding, and others are redone.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import band_of_walk
from fovea.kernels.device.masking import Band
from fovea.kernels.device.packing import Row as Place
from fovea.kernels.device.pipeline import stage_of
from fovea.kernels.device.scheduler import split_of
from fovea.kernels.device.softmax import finite_reference, larger
from fovea.kernels.device.values import is_in_all_lanes, select, warp_in_warpgroup
from fovea.kernels.device.work import STOP, Work, demand_redo, receive, release_work
from fovea.kernels.portable.tensors import Outputs
from fovea.kernels.sm100 import tmem
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm100.forward.output import (
    Part,
    Row,
    Sums,
    write_part,
    write_rows,
    write_tile,
)
from fovea.kernels.sm100.forward.streams import num_rows, of_used_row, row_of, rows_of
from fovea.kernels.sm100.signals import tell, wait
from fovea.plan.combine import IDLE_SUM
from fovea.plan.numerics import (
    HUGE_REFERENCE,
    LN_2,
    LOG2_E,
    OPTIMISTIC_SUM_LIMIT,
    SOFTWARE_HUGE_REFERENCE,
    SOFTWARE_SUM_LIMIT,
)
from fovea.plan.roles import WARPGROUP_THREADS, WARPS_PER_WARPGROUP
from fovea.plan.sm100_tiles import STREAM_ROWS, STREAMS


@cute.jit
def run(plan: cutlass.Constexpr, problem: Problem, outputs: Outputs, shared: SharedTiles):
    """Write the results of every tile that this CTA works on.

    Run by one warpgroup. Waits on: work_full, statistics_full, o_full. Signals: statistics_empty,
    o_empty, work_empty. Owns: sO, the row flags.
    """
    use = cutlass.Int32(0)
    item = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        if is_in_all_lanes(work.tile_number >= 0):
            if cutlass.const_expr(plan.splits_columns):
                parts = (_take_halves(plan, shared, item),)
                _rows(plan, problem, outputs, shared, work, use, cutlass.Int32(0), parts)
            elif cutlass.const_expr(plan.splits_keys):
                parts = (
                    _take(plan, shared, item, cutlass.Int32(0)),
                    _take(plan, shared, item, cutlass.Int32(1)),
                )
                _rows(plan, problem, outputs, shared, work, use, cutlass.Int32(0), parts)
            else:
                for stream in cutlass.range(STREAMS, unroll=1):
                    parts = (_take(plan, shared, item, stream),)
                    _rows(plan, problem, outputs, shared, work, use, stream, parts)
            item += 1
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = receive(shared.work, use, plan.work_edge)
    # What is on its way out is read from this CTA's shared memory.
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def _take(plan, shared: SharedTiles, item: cutlass.Int32, stream: cutlass.Int32) -> Part:
    """Wait for a stream's results; return its part of this thread's row."""
    row_sum, reference, row_max = _numbers(plan, shared, item, stream)
    return _part(plan, shared, item, stream, row_sum, reference, row_max)


def _take_halves(plan, shared: SharedTiles, item: cutlass.Int32) -> Part:
    """Wait for the results of a row that two threads share, relative to one reference."""
    first, reference, row_max = _numbers(plan, shared, item, 0)
    second, _, _ = _numbers(plan, shared, item, 1)
    return _part(plan, shared, item, 0, first + second, reference, row_max)


def _numbers(
    plan, shared: SharedTiles, item: cutlass.Int32, group: cutlass.Int32 | int
) -> tuple[cutlass.Float32, cutlass.Float32, cutlass.Float32]:
    """Return what a softmax thread hands over: sum, reference, maximum."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    wait(shared.signals.statistics_full + group, item)
    row_sum = shared.statistics[0, group, thread]
    reference = shared.statistics[1, group, thread]
    row_max = shared.statistics[2, group, thread] if plan.joins_maxima else reference
    tell(shared.signals.statistics_empty + group)
    return row_sum, reference, row_max


def _part(
    plan,
    shared: SharedTiles,
    item: cutlass.Int32,
    output: cutlass.Int32 | int,
    row_sum: cutlass.Float32,
    reference: cutlass.Float32,
    row_max: cutlass.Float32,
) -> Part:
    """Wait for an O; return the part of this thread's row."""
    warp = warp_in_warpgroup()
    wait(shared.signals.o_full + output, item)
    tmem.after_wait()
    first = tmem.warp_rows(shared.tensor_memory, warp) + plan.column("o")
    stride = plan.stride("o") if plan.num_outputs > 1 else 0
    return Part(
        output=output,
        o=first + output * stride,
        row_sum=row_sum,
        reference=reference,
        row_max=row_max,
        weight=cutlass.Float32(1.0),
        # The largest term of a row with keys is at least 2^-LAZY_RESCALE_LOG2.
        is_dead=row_sum == 0.0,
    )


@cute.jit
def _rows(
    plan: cutlass.Constexpr,
    problem: Problem,
    outputs: Outputs,
    shared: SharedTiles,
    work: Work,
    use: cutlass.Int32,
    stream: cutlass.Int32,
    parts: tuple,
):
    """Write 128 rows of a query tile: those of one stream, or of both where they share them."""
    walk = work.walk
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    warp = warp_in_warpgroup()
    tile = rows_of(plan, shared.rank, stream)
    slot = stage_of(use, plan.work_edge)
    flag_slot = select(work.is_redo == 0, slot, work.is_redo - 1)
    in_head = walk.m_idx * plan.tile_m + tile * STREAM_ROWS + thread
    place = row_of(plan, in_head, walk, problem.group_size)
    band = band_of_walk(problem.band, walk)
    row = Row(
        walk=walk,
        place=place,
        num_rows=num_rows(plan, walk, band),
        thread=thread,
        warp=warp,
        tile=tile,
        flags=flag_slot * plan.flag_words + stream * WARPS_PER_WARPGROUP + warp,
        sums=_of_used_row(plan, place, band, _weigh(plan, outputs, place.head, parts)),
    )
    if cutlass.const_expr(plan.packs_heads):
        partials = problem.packing.partials
        if partials.num_splits == 1:
            write_tile(plan, outputs, shared, row)
        else:
            split = split_of(work.tile_number, problem.order)
            sums = _weigh(plan, outputs, place.head, parts, is_part=True)
            row = row._replace(sums=_of_used_row(plan, place, band, sums, is_part=True))
            write_part(plan, partials, shared, row, split)
    elif cutlass.const_expr(plan.is_optimistic):
        if work.is_redo == 0:
            doubt = write_tile(plan, outputs, shared, row)
            _judge(plan, shared, row, band, doubt, slot)
        else:
            write_rows(plan, outputs, shared, row)
    else:
        write_tile(plan, outputs, shared, row)


def _weigh(
    plan, outputs: Outputs, head: cutlass.Int32, parts: tuple, *, is_part: bool = False
) -> Sums:
    """Return what the parts of a row come to, each with its weight.

    Several parts, and a sink, meet at the largest of their references, or a power could overflow.
    With `is_part` more keys are elsewhere: the sink is left out, and O stays as large as its sum.
    """
    has_sink = plan.features.sink and not is_part
    minus_inf, zero = cutlass.Float32(-cutlass.Float32.inf), cutlass.Float32(0.0)
    is_dead = parts[0].is_dead
    for part in parts[1:]:
        is_dead = is_dead & part.is_dead
    joined = parts[0].reference
    sink_log2 = None
    if has_sink:
        sink_log2 = outputs.mSink[head].to(cutlass.Float32) * LOG2_E
    if has_sink or len(parts) > 1:
        joined = minus_inf if sink_log2 is None else sink_log2
        for part in parts:
            # A reference of NaN passes the maximum by; its own power brings it back.
            own = select(part.is_dead, minus_inf, part.reference)
            joined = cute.arch.fmax(joined, own)
        joined = finite_reference(joined)
    row_sum, total = zero, zero
    powers = []
    for part in parts:
        power = cutlass.Float32(1.0)
        if has_sink or len(parts) > 1:
            power = cute.math.exp2(part.reference - joined, fastmath=True)
            power = select(part.is_dead, zero, power)
        powers.append(power)
        row_sum = row_sum + part.row_sum * power
        total = total + part.row_sum
    if sink_log2 is not None:
        row_sum = row_sum + cute.math.exp2(sink_log2 - joined, fastmath=True)
    inverse = cute.arch.rcp_approx(row_sum)
    lse = (joined + cute.math.log2(row_sum, fastmath=True)) * LN_2
    if sink_log2 is None:
        lse = select(is_dead, minus_inf, lse)
    weighed = tuple(
        part._replace(weight=select(part.is_dead, zero, power if is_part else power * inverse))
        for part, power in zip(parts, powers, strict=True)
    )
    row_max = None
    if plan.joins_maxima:
        row_max = parts[0].row_max
        for part in parts[1:]:
            row_max = larger(row_max, part.row_max)
    return Sums(joined, row_sum, lse, total, row_max, weighed)


def _of_used_row(plan, place: Place, band: Band, sums: Sums, *, is_part: bool = False) -> Sums:
    """Return a row's sums, those of a row that sees nothing, the sink neither, where it is idle.

    A merge knows idle rows by their negative sums.
    """
    if not plan.features.varlen:
        return sums
    is_used = place.q_idx < band.seqlen_q
    zero = cutlass.Float32(0.0)
    parts = tuple(
        part._replace(
            weight=select(is_used, part.weight, zero),
            is_dead=part.is_dead | (is_used ^ cutlass.Boolean(True)),
        )
        for part in sums.parts
    )
    row_max = sums.row_max
    if row_max is not None:
        row_max = of_used_row(plan, place.q_idx, band, row_max)
    return sums._replace(
        row_sum=select(is_used, sums.row_sum, cutlass.Float32(IDLE_SUM if is_part else 0.0)),
        lse=of_used_row(plan, place.q_idx, band, sums.lse),
        row_max=row_max,
        parts=parts,
    )


@cute.jit
def _judge(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    row: Row,
    band: Band,
    doubt: cutlass.Float32,
    slot: cutlass.Int32,
):
    """Flag a row whose sum or output came too near overflow, and ask for it once more.

    Its reference is one of its own scores, so its largest term is not small: it can only overflow.
    A huge reference makes inexact exponents.
    """
    limit, huge = OPTIMISTIC_SUM_LIMIT, HUGE_REFERENCE
    if plan.software_columns > 0:
        limit, huge = SOFTWARE_SUM_LIMIT, SOFTWARE_HUGE_REFERENCE
    is_huge = cute.math.absf(row.sums.reference) >= huge
    fits = row.sums.total + doubt < select(is_huge, cutlass.Float32(0.0), cutlass.Float32(limit))
    # Rows past the end are never stored, so whatever became of them is right.
    is_bad = (fits ^ cutlass.Boolean(True)) & (row.place.q_idx < band.seqlen_q)
    bits = cute.arch.vote_ballot_sync(is_bad)
    if cute.arch.lane_idx() == 0:
        shared.work.flags[row.flags] = cutlass.Int32(bits)
    if cute.arch.vote_any_sync(is_bad):
        if cute.arch.lane_idx() == 0:
            warp = STREAMS * WARPS_PER_WARPGROUP + row.warp
            demand_redo(shared.work, slot, warp, plan.work_edge)
