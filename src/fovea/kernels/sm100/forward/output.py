"""O of 128 rows on its way out: from tensor memory to global memory.

Lives here: `Row` and `Part`, and the ways that a whole tile and single rows are written. Not here:
what a row weighs and whether it has to be redone (`epilogue.py`). Invariant: a row that saw no key
is written as exact zeros, whatever tensor memory holds; nothing is written past the last row.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.packing import Row as Place
from fovea.kernels.device.ptx import pack_pair
from fovea.kernels.device.values import select
from fovea.kernels.portable.combine import Partials
from fovea.kernels.portable.tensors import Outputs
from fovea.kernels.sm100 import tmem
from fovea.kernels.sm100.forward.arguments import SharedTiles
from fovea.kernels.sm100.forward.streams import numbers_place
from fovea.kernels.sm100.signals import tell_products
from fovea.plan.combine import REFERENCE, ROW_MAX, ROW_SUM
from fovea.plan.roles import WARPGROUP_THREADS
from fovea.plan.sm100_tiles import CHUNK_COLUMNS, STREAM_ROWS

_BARRIER = 1  # the named barrier of the epilogue's warpgroup; 0 is the CTA's own
_VECTOR_COLUMNS = 8  # 16-bit values of a 16-byte store
_BLOCK_COLUMNS = 64  # of sO: 128 bytes, the swizzle's width


class Part(NamedTuple):
    """A row of one O."""

    output: cutlass.Int32 | int  # which O
    o: cutlass.Int32  # address in tensor memory, of this warp's lanes
    row_sum: cutlass.Float32
    reference: cutlass.Float32
    row_max: cutlass.Float32  # where the plan joins maxima
    weight: cutlass.Float32  # of O in the output
    is_dead: cutlass.Boolean  # no key seen: O may hold anything


class Sums(NamedTuple):
    """What the parts of a row come to."""

    reference: cutlass.Float32  # log2 units, of `row_sum`
    row_sum: cutlass.Float32
    lse: cutlass.Float32
    total: cutlass.Float32  # of the parts' sums, each relative to its own reference
    row_max: cutlass.Float32 | None  # where the plan joins maxima
    parts: tuple  # of Part


class Row(NamedTuple):
    """One row of a query tile: where it goes, its numbers, and what O of each stream weighs in it.

    The parts are the O that have a share in the row: one, or, if the streams split the keys and
    have an O each, both.
    """

    walk: Walk
    place: Place
    num_rows: cutlass.Int32  # that are written of the sequence
    thread: cutlass.Int32
    warp: cutlass.Int32  # in this warpgroup
    tile: cutlass.Int32  # which 128 rows of the query tile
    flags: cutlass.Int32  # index of the word with the flags of this warp's rows
    sums: Sums


@cute.jit
def write_tile(plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, row: Row):
    """Write every row; return NaN where an element of O is not finite, else 0.

    O goes through shared memory and the copy engine, which cuts off rows past the end, or, where
    shared memory has no room for it, from each thread straight to its row.
    """
    if cutlass.const_expr(plan.stages_o):
        # The output before has to have left shared memory.
        if row.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        _warpgroup_barrier()
    doubt = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
    for first in cutlass.range_constexpr(0, plan.head_dim_v, CHUNK_COLUMNS):
        values, doubt = _chunk(plan, row, first, doubt)
        if cutlass.const_expr(plan.stages_o):
            _stage(plan, shared, row, first, values)
        else:
            _write_vectors(plan, outputs, row, first, values)
    for part in row.sums.parts:
        tell_products(shared.signals.o_empty + part.output, plan)
    if cutlass.const_expr(plan.stages_o):
        # The copy engine reads through the async proxy what was stored through the generic one.
        cute.arch.fence_view_async_shared()
        _warpgroup_barrier()
        if row.warp == 0:
            _send(plan, outputs, shared, row)
    if row.place.q_idx < row.num_rows:
        place = numbers_place(plan, row.walk, row.place)
        outputs.mLSE[place] = row.sums.lse
        if cutlass.const_expr(plan.joins_maxima):
            outputs.mMaxScore[place] = row.sums.row_max
    return doubt[0] + doubt[1]


def _chunk(
    plan, row: Row, first: int, doubt: list[cutlass.Float32]
) -> tuple[list[cutlass.Float32], list[cutlass.Float32]]:
    """Return a chunk of the output, and `doubt` made NaN where O is not finite.

    A row without keys is 0, whatever O holds.
    """
    zero = cutlass.Float32(0.0)
    doubt = list(doubt)
    result: list[cutlass.Float32] = []
    for part in row.sums.parts:
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


def _stage(plan, shared: SharedTiles, row: Row, first: int, values: list[cutlass.Float32]) -> None:
    """Round a chunk of O into the thread's row of sO, 16 bytes a store.

    Rows are 128 bytes apart in a block of 64 columns, and chunks of 16 bytes are exchanged by the
    row's number modulo 8, so that eight threads' stores meet no bank twice.
    """
    words = cute.recast_ptr(shared.sO.iterator, dtype=cutlass.Int32)
    for start in range(0, len(values), _VECTOR_COLUMNS):
        column = first + start
        block = column // _BLOCK_COLUMNS * (STREAM_ROWS * _BLOCK_COLUMNS // 2)
        vector = column % _BLOCK_COLUMNS // _VECTOR_COLUMNS
        offset = block + row.thread * (_BLOCK_COLUMNS // 2) + ((row.thread & 7) ^ vector) * 4
        _store_vector(plan, words + offset, values[start : start + _VECTOR_COLUMNS])


def _store_vector(plan, target: cute.Pointer, values: list[cutlass.Float32]) -> None:
    """Round eight values and store them, 16 bytes at once."""
    packed = cute.make_rmem_tensor(4, cutlass.Int32)
    for word in range(4):
        low, high = values[2 * word], values[2 * word + 1]
        packed[word] = pack_pair(low, high, element_type(plan))
    cute.autovec_copy(packed, cute.make_tensor(target.align(16), cute.make_layout(4)))


@cute.jit
def _write_vectors(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    row: Row,
    first: cutlass.Constexpr,
    values: list,
):
    """Round a chunk of O into the thread's row of the output, as far as the tensor goes.

    Two stores fill a sector of 32 bytes, so memory is written once, though a warp meets 32 lines.
    """
    if row.place.q_idx < row.num_rows:
        gO = _output_row(plan, outputs, row)
        words = cute.recast_ptr(gO.iterator, dtype=cutlass.Int32)
        for start in cutlass.range_constexpr(0, len(values), _VECTOR_COLUMNS):
            if first + start < outputs.mO_rows.shape[-1]:
                vector = values[start : start + _VECTOR_COLUMNS]
                _store_vector(plan, words + (first + start) // 2, vector)


def _send(plan, outputs: Outputs, shared: SharedTiles, row: Row) -> None:
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
def write_rows(plan: cutlass.Constexpr, outputs: Outputs, shared: SharedTiles, row: Row):
    """Write the flagged rows of a redo straight to global memory.

    The first attempt's store of this tile must be complete, or it could land on top of these rows.
    A thread's own stores come in order.
    """
    if cutlass.const_expr(plan.stages_o):
        if row.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0)
        _warpgroup_barrier()
    walk = row.walk
    columns = outputs.mO_rows.shape[-1]
    is_flagged = ((shared.work.flags[row.flags] >> cute.arch.lane_idx()) & 1) != 0
    if is_flagged:
        outputs.mLSE[numbers_place(plan, walk, row.place)] = row.sums.lse
    for first in cutlass.range_constexpr(0, plan.head_dim_v, CHUNK_COLUMNS):
        values, _ = _chunk(plan, row, first, [cutlass.Float32(0.0)] * 2)
        _write_elements(plan, outputs, row, first, values, is_flagged, columns)
    for part in row.sums.parts:
        tell_products(shared.signals.o_empty + part.output, plan)


@cute.jit
def write_part(
    plan: cutlass.Constexpr,
    partials: Partials,
    shared: SharedTiles,
    row: Row,
    split: cutlass.Int32,
):
    """Leave the sums of one part of the keys, with what they refer to, for the merge."""
    number = numbers_place(plan, row.walk, row.place)
    # All packed sequences are one batch entry.
    place = (split, *((0, *number) if plan.features.varlen else number))
    is_row = row.place.q_idx < row.num_rows
    for first in cutlass.range_constexpr(0, plan.head_dim_v, CHUNK_COLUMNS):
        values, _ = _chunk(plan, row, first, [cutlass.Float32(0.0)] * 2)
        if is_row:
            target = partials.mOut[*place, None].iterator + first
            found = cute.make_rmem_tensor(CHUNK_COLUMNS, cutlass.Float32)
            for index in cutlass.range_constexpr(CHUNK_COLUMNS):
                found[index] = values[index]
            layout = cute.make_layout(CHUNK_COLUMNS)
            cute.autovec_copy(found, cute.make_tensor(target.align(16), layout))
    for part in row.sums.parts:
        tell_products(shared.signals.o_empty + part.output, plan)
    if is_row:
        partials.mRows[REFERENCE, *place] = row.sums.reference
        partials.mRows[ROW_SUM, *place] = row.sums.row_sum
        if cutlass.const_expr(plan.joins_maxima):
            partials.mRows[ROW_MAX, *place] = row.sums.row_max


@cute.jit
def _write_elements(
    plan: cutlass.Constexpr,
    outputs: Outputs,
    row: Row,
    first: cutlass.Constexpr,
    values: list,
    is_flagged: cutlass.Boolean,
    columns: cutlass.Int32,
):
    """Write a chunk of a flagged row, as far as the tensor goes."""
    dtype = element_type(plan)
    if is_flagged:
        gO = _output_row(plan, outputs, row)
        for index in cutlass.range_constexpr(len(values)):
            if first + index < columns:
                value = values[index].to(dtype)
                gO[first + index] = value


def _output_row(plan, outputs: Outputs, row: Row) -> cute.Tensor:
    """Return a row of O in global memory."""
    place = row.place
    if plan.features.varlen:
        return outputs.mO_rows[row.walk.sequence.row_begin + place.q_idx, place.head, None]
    return outputs.mO_rows[row.walk.batch, place.q_idx, place.head, None]


def _warpgroup_barrier() -> None:
    cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=WARPGROUP_THREADS)
