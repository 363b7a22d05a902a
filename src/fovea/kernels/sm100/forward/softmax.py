"""The softmax role: a warpgroup a stream, a thread a row of S, from tensor memory to P in it.

Lives here: the walk through query tiles and their KV tiles, the step that looks for a row's maximum
and the one that does not. In optimistic plans a row keeps the maximum of the first tile in which it
sees a key; a warp all of whose rows have one exponentiates chunks of S as they come, without a
maximum, a rescaling or a word to anyone but the tensor cores. Otherwise the reference moves where
the maximum has risen by more than LAZY_RESCALE_LOG2, and O with it (FlashAttention-4's conditional
rescaling, arXiv 2603.05451), in tensor memory and by these threads: S being there says that O is at
rest. Where the streams share their O (`plan.splits_columns`) two threads have half a row each, and
the same maxima and reference. Not here: the arithmetic of a row (`rows.py`). Invariant: P is told
to the tensor cores part by part, each once a KV tile.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import Visit, Walk, band_of_walk, kv_tile
from fovea.kernels.device.mods import ModTable
from fovea.kernels.device.score import Scalars, TileKind, exponent_scale
from fovea.kernels.device.softmax import finite_reference, larger
from fovea.kernels.device.values import is_in_all_lanes, select, warp_in_warpgroup
from fovea.kernels.device.work import STOP, Work, receive, release_work
from fovea.kernels.portable.tensors import Outputs
from fovea.kernels.sm100 import tmem
from fovea.kernels.sm100.exp2 import Pair, both
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm100.forward.rows import (
    Exponents,
    RowState,
    begin,
    exponentiate,
    make_exponents,
    make_state,
    maximum,
)
from fovea.kernels.sm100.forward.scores import (
    ScoreContext,
    TileScores,
    make_score_context,
    start_bits,
)
from fovea.kernels.sm100.forward.streams import (
    Place,
    Turns,
    after,
    num_rows,
    num_softmax_turns,
    numbers_place,
    of_used_row,
    row_of,
    rows_of,
    softmax_step,
    softmax_turns,
    which,
)
from fovea.kernels.sm100.signals import tell, tell_products, wait, wait_before
from fovea.plan.numerics import LAZY_RESCALE_LOG2, LOG2_E
from fovea.plan.roles import WARP_SIZE, WARPGROUP_THREADS, WARPS_PER_WARPGROUP
from fovea.plan.sm100_tiles import CHUNK_COLUMNS, STREAM_ROWS, STREAMS

# Of S, that a loop over a row takes at a time: mods that need it also need registers.
_LOOP_COLUMNS = 16
_FIRST_PAIR_BARRIER = 2  # named barriers of two warps that share rows; 1 is the epilogue's


class _Stream(NamedTuple):
    """What stays the same over all tiles of one thread, or of one stream's tiles."""

    problem: Problem
    shared: SharedTiles
    state: RowState
    group: cutlass.Int32  # the warpgroup
    stream: cutlass.Int32
    row: cutlass.Int32  # in the stream
    first_column: cutlass.Int32 | int  # of S: where this thread's part of a row begins
    s: cutlass.Int32  # addresses in tensor memory, of this warp's lanes and this thread's columns
    p: cutlass.Int32
    o: cutlass.Int32


@cute.jit
def run(
    plan: cutlass.Constexpr,
    problem: Problem,
    scalars: Scalars,
    mods: ModTable,
    outputs: Outputs,
    shared: SharedTiles,
):
    """Turn S into P for every tile that this CTA works on.

    Run by the softmax warpgroups. Waits on: work_full, s_full, statistics_empty. Signals: p_full,
    statistics_full, work_empty.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    this = _stream(plan, problem, shared, warp)
    # A stream may have no KV tile of a query tile; the epilogue reads its O all the same.
    for first in cutlass.range_constexpr(0, _output_columns(plan), CHUNK_COLUMNS):
        tmem.store(this.o + first, [cutlass.Float32(0.0)] * CHUNK_COLUMNS)
    tmem.finish_stores()
    use = cutlass.Int32(0)
    place = Place(cutlass.Int32(0), cutlass.Int32(0))
    item = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        if is_in_all_lanes(work.tile_number >= 0):
            band = band_of_walk(problem.band, work.walk)
            turns = softmax_turns(plan, work.walk, band, this.group)
            _query_tile(plan, this, scalars, mods, outputs, work, turns, place)
            _hand_over(plan, this, item)
            place = after(plan, place, turns)
            item += 1
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = receive(shared.work, use, plan.work_edge)


def _stream(plan, problem: Problem, shared: SharedTiles, warp: cutlass.Int32) -> _Stream:
    """Return what a thread knows before its first tile."""
    group = warp // WARPS_PER_WARPGROUP
    first = tmem.warp_rows(shared.tensor_memory, warp % WARPS_PER_WARPGROUP)
    this = _Stream(
        problem=problem,
        shared=shared,
        state=make_state(),
        group=group,
        stream=group,
        row=cute.arch.thread_idx()[0] % WARPGROUP_THREADS,
        first_column=0,
        s=first + plan.column("s"),
        p=first + plan.column("p"),
        o=first + plan.column("o"),
    )
    if not plan.splits_columns:
        return _of_stream(plan, this, group)._replace(o=this.o + group * plan.stride("o"))
    first_column = group * plan.softmax_columns
    return this._replace(
        first_column=first_column,
        s=this.s + first_column,
        p=this.p + first_column,
        o=this.o + group * _output_columns(plan),
    )


def _of_stream(plan, this: _Stream, stream: cutlass.Int32) -> _Stream:
    """Return the S and P of a stream, given those of the first."""
    return this._replace(
        stream=stream,
        s=this.s + stream * plan.stride("s"),
        p=this.p + stream * plan.stride("p"),
    )


def _output_columns(plan) -> int:
    """Return the columns of O that a thread rescales."""
    return plan.head_dim_v // (STREAMS if plan.splits_columns else 1)


@cute.jit
def _query_tile(
    plan: cutlass.Constexpr,
    this: _Stream,
    scalars: Scalars,
    mods: ModTable,
    outputs: Outputs,
    work: Work,
    turns: Turns,
    place: Place,
):
    """Do the softmax of one query tile's row, on the KV tiles of this stream."""
    walk = work.walk
    band = band_of_walk(this.problem.band, walk)
    rows = rows_of(plan, this.shared.rank, 0 if plan.splits_keys else this.group)
    in_head = walk.m_idx * plan.tile_m + rows * STREAM_ROWS + this.row
    row = row_of(plan, in_head, walk, this.problem.group_size)
    q_idx = row.q_idx
    context = make_score_context(plan, row, walk, band, scalars, mods)
    state = this.state
    begin(state)
    last = walk.visits - 1
    lists = this.problem.block_lists
    begin_visit = cutlass.min(turns.begin, last)
    n_idx = kv_tile(walk, begin_visit, lists, plan)
    bits = start_bits(plan, lists, walk, begin_visit, q_idx)
    for index in cutlass.range(num_softmax_turns(plan, turns), unroll=1):
        step = softmax_step(plan)
        visit = turns.begin + step * index
        at = _visit(plan, walk, turns, visit, n_idx)._replace(bits=bits)
        # From memory where there are block lists: asked for a whole KV tile before it is needed.
        next_visit = cutlass.min(visit + step, last)
        n_idx = kv_tile(walk, next_visit, lists, plan)
        bits = start_bits(plan, lists, walk, next_visit, q_idx)
        stream, time = which(plan, place, this.group, index)
        if cutlass.const_expr(plan.splits_columns):
            here = _of_stream(plan, this, stream)
        else:
            here = this
        done = place.first + index  # products before this one
        wait(this.shared.signals.s_full + stream, time)
        tmem.after_wait()
        if cutlass.const_expr(plan.is_optimistic):
            lacks_reference = state.row_max[0] == -cutlass.Float32.inf
            if cute.arch.vote_any_sync(lacks_reference) | (work.is_redo != 0):
                _seeking_step(plan, here, context, at, done, work.is_redo, TileKind.ANY)
            elif _is_hidden_in(plan, at, by_position=True):
                _keeping_step(plan, here, context, at, TileKind.ANY)
            elif _is_hidden_in(plan, at, by_position=False):
                _keeping_step(plan, here, context, at, TileKind.MASKED)
            else:
                _keeping_step(plan, here, context, at, TileKind.PLAIN)
        else:
            moves = cutlass.Int32(1)
            if at.is_cut | at.is_partial:
                _seeking_step(plan, here, context, at, done, moves, TileKind.ANY)
            else:
                _seeking_step(plan, here, context, at, done, moves, TileKind.PLAIN)
    if cutlass.const_expr(plan.features.max_score):
        if cutlass.const_expr(not plan.features.modifies_score):
            state.row_max[0] = state.row_max[0] * scalars.scale
        if cutlass.const_expr(not plan.joins_maxima):
            if (q_idx < num_rows(plan, walk, band)) & _is_of_first_group(plan, this):
                row_max = of_used_row(plan, q_idx, band, state.row_max[0])
                outputs.mMaxScore[numbers_place(plan, walk, row)] = row_max


def _is_of_first_group(plan, this: _Stream) -> cutlass.Boolean | bool:
    """Return whether a thread speaks for its row; two that share one know the same."""
    return this.group == 0 if plan.splits_columns else True


def _visit(plan, walk: Walk, turns: Turns, visit: cutlass.Int32, n_idx: cutlass.Int32) -> Visit:
    """Return what a thread has to know of a KV tile."""
    is_partial = cutlass.Boolean(False)
    if plan.features.block_lists:
        is_partial = visit < walk.partial_visits
    return Visit(n_idx, is_partial, (n_idx < turns.plain_begin) | (n_idx >= turns.plain_end))


def _is_hidden_in(plan, at: Visit, *, by_position: bool) -> cutlass.Boolean | bool:
    """Return whether a keeping step has to mask a tile: by position, or else by its block alone.

    A Python bool where the variant never does: without limits only the tile at the end of the keys
    is cut, and that comes first and finds a reference.
    """
    if by_position:
        return at.is_cut if plan.is_dynamic else False
    return at.is_partial if plan.features.block_lists else False


@cute.jit
def _seeking_step(
    plan: cutlass.Constexpr,
    this: _Stream,
    context: ScoreContext,
    at: Visit,
    done: cutlass.Int32,
    moves: cutlass.Int32,
    tile: cutlass.Constexpr,
):
    """Exponentiate a tile, the row's maximum found first; with `moves`, past the first tile too."""
    state = this.state
    values = []
    if cutlass.const_expr(plan.loops_over_chunks):
        tile_max = _maximum_in_a_loop(plan, this, context, at, tile)
    else:
        scores = TileScores(plan, context, at, tile, this.first_column)
        started = []
        for first in cutlass.range_constexpr(0, plan.softmax_columns, CHUNK_COLUMNS):
            started.append(tmem.start_load(this.s + first, CHUNK_COLUMNS))
        for index in cutlass.range_constexpr(len(started)):
            chunk = tmem.finish_load(started[index])
            values = values + scores.apply(chunk, index * CHUNK_COLUMNS)
        tile_max = maximum(values)
    scale = exponent_scale(plan, context.scalars)
    if cutlass.const_expr(plan.splits_columns):
        tile_max = _of_both_halves(this, tile_max, done)
    factor, lead = _new_reference(state, tile_max, scale, moves)
    if cute.arch.vote_any_sync(factor != 1.0):
        if cutlass.const_expr(plan.splits_columns):
            # The product before this one. The next one waits for this P, so that none is missed.
            wait(this.shared.signals.o_rests, done - 1)
            tmem.after_wait()
        _rescale(plan, this, factor)
    state.row_sum[0] = state.row_sum[0] * factor
    total = both(0.0)
    anchor = finite_reference(state.row_max[0])
    exponents = make_exponents(plan, scale, lead, anchor=anchor)
    if cutlass.const_expr(plan.loops_over_chunks):
        total = _exponentiate_in_a_loop(plan, this, context, at, None, exponents)
    else:
        for first in cutlass.range_constexpr(0, plan.softmax_columns, CHUNK_COLUMNS):
            chunk = values[first : first + CHUNK_COLUMNS]
            packed, total = exponentiate(plan, chunk, first, exponents, total)
            _give(plan, this, packed, first)
    state.row_sum[0] = state.row_sum[0] + (total[0] + total[1])


def _of_both_halves(
    this: _Stream, own_max: cutlass.Float32, done: cutlass.Int32
) -> cutlass.Float32:
    """Return the larger maximum of the two threads that share a row.

    Slots are used in turn. S two tiles on, with which one is written again, is there only once both
    threads have told of this tile's P.
    """
    slot = done & 1
    maxima = this.shared.maxima
    maxima[slot, this.group, this.row] = own_max
    warp = warp_in_warpgroup()
    cute.arch.barrier(barrier_id=_FIRST_PAIR_BARRIER + warp, number_of_threads=2 * WARP_SIZE)
    return larger(own_max, maxima[slot, this.group ^ 1, this.row])


def _new_reference(
    state: RowState, tile_max: cutlass.Float32, scale: cutlass.Float32, moves: cutlass.Int32
) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Take a tile's maximum into the state.

    Returns what the row's sum and O are multiplied by, and how far the maximum lies above the
    reference.
    """
    is_new = state.row_max[0] == -cutlass.Float32.inf
    row_max = larger(state.row_max[0], tile_max)
    reference = finite_reference(row_max) * scale
    # An infinite score makes the row NaN, whichever unit exponentiates its column.
    reference = cute.math.fma(reference, cutlass.Float32(0.0), reference)
    stays = reference - state.reference[0] <= LAZY_RESCALE_LOG2  # false for NaN
    takes = is_new | ((stays ^ cutlass.Boolean(True)) & (moves != 0))
    power = cute.math.exp2(state.reference[0] - reference, fastmath=True)
    one = cutlass.Float32(1.0)
    factor = select(takes & (is_new ^ cutlass.Boolean(True)), power, one)
    state.row_max[0] = row_max
    state.reference[0] = select(takes, reference, state.reference[0])
    return factor, reference - state.reference[0]


def _rescale(plan, this: _Stream, factor: cutlass.Float32) -> None:
    """Multiply the row of O, which no product touches until P is told."""
    for first in range(0, _output_columns(plan), CHUNK_COLUMNS):
        values = tmem.load(this.o + first, CHUNK_COLUMNS)
        tmem.store(this.o + first, [value * factor for value in values])


@cute.jit
def _keeping_step(
    plan: cutlass.Constexpr,
    this: _Stream,
    context: ScoreContext,
    at: Visit,
    tile: cutlass.Constexpr,
):
    """Exponentiate a tile chunk by chunk, relative to the reference that the row has."""
    state = this.state
    scores = TileScores(plan, context, at, tile, this.first_column)
    addend = scores.addend() if tile is TileKind.PLAIN else None
    if cutlass.const_expr(addend is None):
        exponents = make_exponents(plan, exponent_scale(plan, context.scalars), -state.reference[0])
    else:
        exponents = make_exponents(
            plan,
            context.scalars.scale_log2,
            addend.base * LOG2_E - state.reference[0],
            addend.step * LOG2_E,
        )
    total: Pair = both(0.0)
    if cutlass.const_expr(addend is None and plan.loops_over_chunks):
        total = _exponentiate_in_a_loop(plan, this, context, at, tile, exponents)
    else:
        coming = tmem.start_load(this.s, CHUNK_COLUMNS)
        for first in cutlass.range_constexpr(0, plan.softmax_columns, CHUNK_COLUMNS):
            if cutlass.const_expr(addend is None):
                scores.prefetch(first, CHUNK_COLUMNS)
            values = tmem.finish_load(coming)
            if cutlass.const_expr(first + CHUNK_COLUMNS < plan.softmax_columns):
                coming = tmem.start_load(this.s + first + CHUNK_COLUMNS, CHUNK_COLUMNS)
            if cutlass.const_expr(addend is None):
                values = scores.apply(values, first)
            packed, total = exponentiate(plan, values, first, exponents, total)
            _give(plan, this, packed, first)
    state.row_sum[0] = state.row_sum[0] + (total[0] + total[1])


@cute.jit
def _maximum_in_a_loop(
    plan: cutlass.Constexpr,
    this: _Stream,
    context: ScoreContext,
    at: Visit,
    tile: cutlass.Constexpr,
):
    """Return the maximum of a tile's scores, which replace S: registers hold a chunk at a time."""
    highest = cute.make_rmem_tensor(1, cutlass.Float32)
    highest[0] = -cutlass.Float32.inf
    for index in cutlass.range(plan.softmax_columns // _LOOP_COLUMNS, unroll=1):
        first = index * _LOOP_COLUMNS
        values = _scores_of_chunk(plan, this, context, at, tile, first)
        tmem.store(this.s + first, values)
        highest[0] = larger(highest[0], maximum(values))
    tmem.finish_stores()
    return highest[0]


@cute.jit
def _exponentiate_in_a_loop(
    plan: cutlass.Constexpr,
    this: _Stream,
    context: ScoreContext,
    at: Visit,
    tile: cutlass.Constexpr,
    exponents: Exponents,
):
    """Turn S into P, all told at once; return the sum. Without a tile's kind, S holds scores."""
    sums = cute.make_rmem_tensor(2, cutlass.Float32)
    sums[0] = cutlass.Float32(0.0)
    sums[1] = cutlass.Float32(0.0)
    for index in cutlass.range(plan.softmax_columns // _LOOP_COLUMNS, unroll=1):
        first = index * _LOOP_COLUMNS
        if cutlass.const_expr(tile is None):
            values = tmem.load(this.s + first, _LOOP_COLUMNS)
        else:
            values = _scores_of_chunk(plan, this, context, at, tile, first)
        packed, total = exponentiate(plan, values, 0, exponents, (sums[0], sums[1]))
        tmem.store(this.p + first // 2, packed)
        sums[0] = total[0]
        sums[1] = total[1]
    tmem.finish_stores()
    tell_products(this.shared.signals.p_full + this.stream, plan)
    return (sums[0], sums[1])


def _scores_of_chunk(
    plan, this: _Stream, context: ScoreContext, at: Visit, tile: TileKind, first: cutlass.Int32
) -> list[cutlass.Float32]:
    """Return the scores of the columns of a thread's part of a tile from `first` on."""
    scores = TileScores(plan, context, at, tile, this.first_column + first)
    scores.prefetch(0, _LOOP_COLUMNS)
    return scores.apply(tmem.load(this.s + first, _LOOP_COLUMNS), 0)


def _give(plan, this: _Stream, packed: list[cutlass.Int32], first: int) -> None:
    """Store a chunk of P; tell the tensor cores where a part, or this thread's share, ends."""
    tmem.store(this.p + first // 2, packed)
    end = first + CHUNK_COLUMNS
    parts = (plan.softmax_columns,) if plan.splits_columns else plan.p_parts
    for part in range(len(parts)):
        if sum(parts[: part + 1]) == end:
            tmem.finish_stores()
            p_full = this.shared.signals.p_full + this.stream * len(plan.p_parts) + part
            tell_products(p_full, plan)


@cute.jit
def _hand_over(plan: cutlass.Constexpr, this: _Stream, item: cutlass.Int32):
    """Give the row's numbers to the epilogue."""
    signals = this.shared.signals
    wait_before(signals.statistics_empty + this.group, item)
    this.shared.statistics[0, this.group, this.row] = this.state.row_sum[0]
    this.shared.statistics[1, this.group, this.row] = this.state.reference[0]
    if cutlass.const_expr(plan.joins_maxima):
        this.shared.statistics[2, this.group, this.row] = this.state.row_max[0]
    tell(signals.statistics_full + this.group)
