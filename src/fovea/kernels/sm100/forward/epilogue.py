"""The epilogue role: final scaling, lse, the judgement of rows, and O out through shared memory.

Lives here: what happens to O of a stream after its last product, while the softmax and the tensor
cores go on with the next query tile. Not here: how a redo is announced (`device/work.py`) and
computed (`softmax.py`). Invariant: a row that saw no key is written as exact zeros with lse -inf
(or the sink), whatever tensor memory held; a row that passes the judgement has the result that a
moving reference would have had, up to rounding, and others are redone.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.pipeline import stage_of
from fovea.kernels.device.ptx import pack_pair
from fovea.kernels.device.softmax import finite_reference
from fovea.kernels.device.values import is_in_all_lanes, select
from fovea.kernels.device.work import STOP, Work, demand_redo, receive, release_work
from fovea.kernels.sm100 import tmem
from fovea.kernels.sm100.forward.arguments import Outputs, Problem, SharedTiles
from fovea.kernels.sm100.forward.rows import larger
from fovea.kernels.sm100.signals import tell, wait
from fovea.kernels.sm100.umma import element_type
from fovea.plan.numerics import LN_2, LOG2_E, OPTIMISTIC_SUM_LIMIT
from fovea.plan.roles import WARPGROUP_THREADS
from fovea.plan.sm100 import CHUNK_COLUMNS, STREAM_ROWS, STREAMS, WARPS_PER_WARPGROUP

_BARRIER = 1  # the named barrier of this warpgroup; 0 is the CTA's own
_VECTOR_COLUMNS = 8  # 16-bit values of a 16-byte store
_BLOCK_COLUMNS = 64  # of sO: 128 bytes, the swizzle's width


class _Row(NamedTuple):
    """One row of a query tile: where it goes, its numbers, and what O of each stream weighs in it.

    The parts are those streams that have a share in the row: one, or, if they split the keys, both.
    """

    walk: Walk
    q_idx: cutlass.Int32
    thread: cutlass.Int32
    warp: cutlass.Int32  # in this warpgroup
    tile: cutlass.Int32  # which 128 rows of the query tile
    flag: cutlass.Int32  # index of the row's flag
    lse: cutlass.Float32
    total: cutlass.Float32  # of the parts' sums, each relative to its own reference
    parts: tuple  # of _Part


class _Part(NamedTuple):
    """What a stream has of a row."""

    stream: cutlass.Int32 | int
    o: cutlass.Int32  # address in tensor memory, of this warp's lanes
    row_sum: cutlass.Float32
    reference: cutlass.Float32
    row_max: cutlass.Float32  # where the plan joins maxima
    weight: cutlass.Float32  # of O in the output
    is_dead: cutlass.Boolean  # no key seen: O may hold anything


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
            if cutlass.const_expr(plan.splits_keys):
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


def _take(plan, shared: SharedTiles, item: cutlass.Int32, stream: cutlass.Int32) -> _Part:
    """Wait for a stream's results; return its part of this thread's row."""
    signals = shared.signals
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
    wait(signals.statistics_full + stream, item)
    row_sum = shared.statistics[0, stream, thread]
    reference = shared.statistics[1, stream, thread]
    row_max = shared.statistics[2, stream, thread] if plan.joins_maxima else reference
    tell(signals.statistics_empty + stream)
    wait(signals.o_full + stream, item)
    tmem.after_wait()
    address = tmem.warp_rows(shared.tensor_memory, warp)
    return _Part(
        stream=stream,
        o=address + plan.column("o") + stream * plan.stride("o"),
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
    tile: cutlass.Int32,
    parts: tuple,
):
    """Write 128 rows of a query tile."""
    walk = work.walk
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
    in_tile = tile * STREAM_ROWS + thread
    slot = stage_of(use, plan.work_edge)
    flag_slot = select(work.is_redo == 0, slot, work.is_redo - 1)
    lse, total, weighed = _weigh(plan, outputs, walk, parts)
    row = _Row(
        walk=walk,
        q_idx=walk.m_idx * plan.tile_m + in_tile,
        thread=thread,
        warp=warp,
        tile=tile,
        flag=flag_slot * plan.tile_m + in_tile,
        lse=lse,
        total=total,
        parts=weighed,
    )
    if cutlass.const_expr(plan.is_optimistic):
        if work.is_redo == 0:
            doubt = _write_tile(plan, outputs, shared, row)
            _judge(plan, problem, shared, row, doubt, slot)
        else:
            _write_rows(plan, outputs, shared, row)
    else:
        _write_tile(plan, outputs, shared, row)


def _weigh(plan, outputs: Outputs, walk: Walk, parts: tuple) -> tuple:
    """Return lse, the sum of the parts' sums, and the parts with their weights.

    Several parts, and a sink, meet at the largest of their references, or a power could overflow.
    """
    minus_inf, zero = cutlass.Float32(-cutlass.Float32.inf), cutlass.Float32(0.0)
    is_dead = parts[0].is_dead
    for part in parts[1:]:
        is_dead = is_dead & part.is_dead
    joined = parts[0].reference
    sink_log2 = None
    if plan.features.sink:
        sink_log2 = outputs.mSink[walk.head].to(cutlass.Float32) * LOG2_E
    if plan.features.sink or len(parts) > 1:
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
        if plan.features.sink or len(parts) > 1:
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
        part._replace(weight=select(part.is_dead, zero, power * inverse))
        for part, power in zip(parts, powers, strict=True)
    )
    return lse, total, weighed


@cute.jit
def _write_tile(plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, row: _Row):
    """Write every row; return NaN where an element of O is not finite, else 0.

    O goes through shared memory and the copy engine, which cuts off rows past the end.
    """
    # The output before has to have left shared memory.
    if row.warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    _warpgroup_barrier()
    doubt = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
    for first in cutlass.range_constexpr(0, plan.head_dim_v, CHUNK_COLUMNS):
        values, doubt = _chunk(plan, row, first, doubt)
        _stage(plan, shared, row, first, values)
    for part in row.parts:
        tell(shared.signals.o_empty + part.stream)
    # The copy engine reads through the async proxy what was stored through the generic one.
    cute.arch.fence_view_async_shared()
    _warpgroup_barrier()
    if row.warp == 0:
        _send(plan, outputs, shared, row)
    if row.q_idx < outputs.mLSE.shape[2]:
        outputs.mLSE[row.walk.batch, row.walk.head, row.q_idx] = row.lse
        if cutlass.const_expr(plan.joins_maxima):
            row_max = larger(row.parts[0].row_max, row.parts[1].row_max)
            outputs.mMaxScore[row.walk.batch, row.walk.head, row.q_idx] = row_max
    return doubt[0] + doubt[1]


def _chunk(
    plan, row: _Row, first: int, doubt: list[cutlass.Float32]
) -> tuple[list[cutlass.Float32], list[cutlass.Float32]]:
    """Return a chunk of the output, and `doubt` made NaN where O is not finite.

    A row without keys is 0, whatever O holds.
    """
    zero = cutlass.Float32(0.0)
    doubt = list(doubt)
    result: list[cutlass.Float32] = []
    for part in row.parts:
        values = tmem.load(part.o + first, CHUNK_COLUMNS)
        for index, found in enumerate(values):
            value = select(part.is_dead, zero, found)
            if plan.is_optimistic:
                # 0 * o is NaN where o is infinite or NaN, and 0 elsewhere.
                doubt[index % 2] = cute.math.fma(value, zero, doubt[index % 2])
            term = value * part.weight
            if len(result) < len(values):
                result.append(term)
            else:
                result[index] = result[index] + term
    return result, doubt


def _stage(plan, shared: SharedTiles, row: _Row, first: int, values: list[cutlass.Float32]) -> None:
    """Round a chunk of O into the thread's row of sO, 16 bytes a store.

    Rows are 128 bytes apart in a block of 64 columns, and chunks of 16 bytes are exchanged by the
    row's number modulo 8, so that eight threads' stores meet no bank twice.
    """
    dtype = element_type(plan)
    words = cute.recast_ptr(shared.sO.iterator, dtype=cutlass.Int32)
    for start in range(0, len(values), _VECTOR_COLUMNS):
        column = first + start
        block = column // _BLOCK_COLUMNS * (STREAM_ROWS * _BLOCK_COLUMNS // 2)
        vector = column % _BLOCK_COLUMNS // _VECTOR_COLUMNS
        offset = block + row.thread * (_BLOCK_COLUMNS // 2) + ((row.thread & 7) ^ vector) * 4
        packed = cute.make_rmem_tensor(4, cutlass.Int32)
        for word in range(4):
            low, high = values[start + 2 * word], values[start + 2 * word + 1]
            packed[word] = pack_pair(low, high, dtype)
        target = cute.make_tensor((words + offset).align(16), cute.make_layout(4))
        cute.autovec_copy(packed, target)


def _send(plan, outputs: Outputs, shared: SharedTiles, row: _Row) -> None:
    """Send the staged rows to global memory. Run by one warp."""
    gO = cute.local_tile(
        outputs.mO[None, None, row.walk.head, row.walk.batch],
        (STREAM_ROWS, plan.head_dim_v),
        (row.walk.m_idx * (plan.tile_m // STREAM_ROWS) + row.tile, 0),
    )
    tOsO, tOgO = cpasync.tma_partition(
        outputs.atom_o,
        0,
        cute.make_layout(1),
        cute.group_modes(shared.sO[None, None, 0], 0, 2),
        cute.group_modes(gO, 0, 2),
    )
    cute.copy(outputs.atom_o, tOsO, tOgO)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _judge(
    plan: cutlass.Constexpr,
    problem: Problem,
    shared: SharedTiles,
    row: _Row,
    doubt: cutlass.Float32,
    slot: cutlass.Int32,
):
    """Flag a row whose sum or output came too near overflow, and ask for it once more.

    Its reference is one of its own scores, so its largest term is not small: it can only overflow.
    """
    fits = row.total + doubt < OPTIMISTIC_SUM_LIMIT  # false for NaN
    # Rows past the end are never stored, so whatever became of them is right.
    is_bad = (fits ^ cutlass.Boolean(True)) & (row.q_idx < problem.band.seqlen_q)
    shared.work.flags[row.flag] = cutlass.Uint8(is_bad)
    if cute.arch.vote_any_sync(is_bad):
        if cute.arch.lane_idx() == 0:
            warp = STREAMS * WARPS_PER_WARPGROUP + row.warp
            demand_redo(shared.work, slot, warp, plan.work_edge)


@cute.jit
def _write_rows(plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, row: _Row):
    """Write the flagged rows of a redo straight to global memory.

    The first attempt's store of this tile must be complete, or it could land on top of these rows.
    """
    if row.warp == 0:
        cute.arch.cp_async_bulk_wait_group(0)
    _warpgroup_barrier()
    walk = row.walk
    columns = outputs.mO_rows.shape[3]
    is_flagged = shared.work.flags[row.flag] != 0
    if is_flagged:
        outputs.mLSE[walk.batch, walk.head, row.q_idx] = row.lse
    for first in cutlass.range_constexpr(0, plan.head_dim_v, CHUNK_COLUMNS):
        values, _ = _chunk(plan, row, first, [cutlass.Float32(0.0)] * 2)
        _write_elements(plan, outputs, row, first, values, is_flagged, columns)
    for part in row.parts:
        tell(shared.signals.o_empty + part.stream)


@cute.jit
def _write_elements(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    row: _Row,
    first: cutlass.Constexpr,
    values: list,
    is_flagged: cutlass.Boolean,
    columns: cutlass.Int32,
):
    """Write a chunk of a flagged row, as far as the tensor goes."""
    dtype = element_type(plan)
    if is_flagged:
        for index in cutlass.range_constexpr(len(values)):
            if first + index < columns:
                value = values[index].to(dtype)
                outputs.mO_rows[row.walk.batch, row.q_idx, row.walk.head, first + index] = value


def _warpgroup_barrier() -> None:
    cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=WARPGROUP_THREADS)
