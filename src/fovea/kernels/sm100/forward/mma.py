"""The MMA role: one warp issues every product, of the two streams in turn.

Lives here: the order of S = Q K^T and O += P V, and what each waits for and tells. While the
softmax of one stream works on its S, the tensor cores do O of the other stream's P and its next S.
Not here: how a product is issued (`sm100/umma.py`). Invariant: products of a stream run in the
order S, O, S, O, ...; P lies where S did, so no S is issued before the O that reads P.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import band_of_walk
from fovea.kernels.device.pipeline import stage_of, wait_full
from fovea.kernels.device.values import is_in_all_lanes, select
from fovea.kernels.device.work import STOP, Work, receive, release_work
from fovea.kernels.sm100 import tmem
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm100.forward.streams import num_turns, step_of, turns_of
from fovea.kernels.sm100.signals import wait, wait_before
from fovea.kernels.sm100.umma import (
    K_STEP,
    commit,
    descriptor_start,
    issue_from_shared,
    issue_from_tensor_memory,
    output_product,
    scores_product,
)
from fovea.plan.sm100_tiles import STREAMS

_UNIT_BYTES = 16  # of addresses in a descriptor


class _Starts(NamedTuple):
    """Address fields of descriptors: the first stage of each operand."""

    q: cutlass.Int32
    k: cutlass.Int32
    v: cutlass.Int32


class _Place(NamedTuple):
    """How far this role has come: query tiles, KV tiles, and each stream's own KV tiles."""

    item: cutlass.Int32
    kv_use: cutlass.Int32
    times: tuple  # by stream


class _Tile(NamedTuple):
    """One query tile: its place, the visits of its walk, and each stream's part of them."""

    place: _Place
    visits: cutlass.Int32
    turns: tuple  # by stream


@cute.jit
def run(plan: cutlass.Constexpr, problem: Problem, shared: SharedTiles):
    """Issue the products of every tile that this CTA works on.

    Run by one warp, of the first CTA in a pair. Waits on: work_full, q_full, k_full, v_full,
    p_full, o_empty. Signals, through commits: s_full, o_full, o_rests, q_empty, k_empty, v_empty;
    and work_empty.
    """
    starts = _Starts(
        descriptor_start(shared.sQ.iterator),
        descriptor_start(shared.sK.iterator),
        descriptor_start(shared.sV.iterator),
    )
    zero = cutlass.Int32(0)
    place = _Place(zero, zero, (zero, zero))
    use = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    is_begun = cutlass.Boolean(False)
    while is_in_all_lanes(work.tile_number != STOP):
        upcoming = work
        if is_in_all_lanes(work.tile_number >= 0):
            tile = _tile(plan, problem, work, place)
            if not is_begun:
                for stream in cutlass.range_constexpr(STREAMS):
                    _scores(plan, shared, starts, tile, cutlass.Int32(0), stream)
            place = _after(plan, tile)
            upcoming = _products(plan, problem, shared, starts, tile, place, use)
            is_begun = is_in_all_lanes(upcoming.tile_number >= 0)
        else:
            upcoming = receive(shared.work, use + 1, plan.work_edge)
            is_begun = cutlass.Boolean(False)
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = upcoming
    # The last O has been read: nobody needs tensor memory any more.
    for output in cutlass.range_constexpr(plan.num_outputs):
        wait_before(shared.signals.o_empty + output, place.item)


@cute.jit
def follow(plan: cutlass.Constexpr, shared: SharedTiles):
    """Hear every announcement where the other CTA of a pair issues the products. Run by one warp.

    Waits on: work_full. Signals: work_empty.
    """
    use = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = receive(shared.work, use, plan.work_edge)


def _tile(plan, problem: Problem, work: Work, place: _Place) -> _Tile:
    """Return what a query tile is to this role."""
    band = band_of_walk(problem.band, work.walk)
    turns = tuple(turns_of(plan, work.walk, band, stream) for stream in range(STREAMS))
    return _Tile(place, work.walk.visits, turns)


def _after(plan, tile: _Tile) -> _Place:
    """Return the place behind a query tile."""
    times = tuple(
        time + num_turns(plan, turns)
        for time, turns in zip(tile.place.times, tile.turns, strict=True)
    )
    return _Place(tile.place.item + 1, tile.place.kv_use + tile.visits, times)


@cute.jit
def _products(
    plan: cutlass.Constexpr,
    problem: Problem,
    shared: SharedTiles,
    starts: _Starts,
    tile: _Tile,
    after: _Place,
    use: cutlass.Int32,
):
    """Issue the products of a query tile whose first S are issued; return the work that follows.

    The first S of the next query tile are issued behind the last O of their stream, so that its
    softmax need not wait for the other stream's end.
    """
    num_rounds = (tile.visits + (step_of(plan) - 1)) // step_of(plan)
    for index in cutlass.range(num_rounds - 1, unroll=1):
        for stream in cutlass.range_constexpr(STREAMS):
            _output(plan, shared, starts, tile, index, stream)
            _scores(plan, shared, starts, tile, index + 1, stream)
    last = num_rounds - 1
    _output(plan, shared, starts, tile, last, 0)
    upcoming = receive(shared.work, use + 1, plan.work_edge)
    is_tile = is_in_all_lanes(upcoming.tile_number >= 0)
    following = _tile(plan, problem, upcoming, after)
    if is_tile:
        _scores(plan, shared, starts, following, cutlass.Int32(0), 0)
    _output(plan, shared, starts, tile, last, 1)
    if is_tile:
        _scores(plan, shared, starts, following, cutlass.Int32(0), 1)
    return upcoming


@cute.jit
def _scores(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    tile: _Tile,
    index: cutlass.Int32,
    stream: cutlass.Constexpr,
):
    """Issue S of a stream's KV tile in one round of the walk, if it takes one.

    It goes part by part, as K comes. Signals: s_full; k_empty and, in the last round, q_empty, once
    the last stream that may read them is through. Since a commit covers all products before it,
    s_full tells that the stream's own O rests.
    """
    place, turns = tile.place, tile.turns[stream]
    is_shared = not plan.splits_keys
    visit = index if is_shared else STREAMS * index + stream
    if visit < tile.visits:
        q_use = STREAMS * place.item + stream if is_shared else place.item
        q_stage = stage_of(q_use, plan.q_edge)
        if index == 0:
            wait_full(shared.q, q_use, plan.q_edge)
        takes = (visit >= turns.begin) & (visit < turns.end)
        for part in cutlass.range_constexpr(plan.k_parts):
            use = plan.k_use(place.kv_use + visit, part)
            stage = stage_of(use, plan.k_edge)
            if cutlass.const_expr(stream == 0 or plan.splits_keys):
                wait_full(shared.k, use, plan.k_edge)
            if takes:
                with cute.arch.elect_one():
                    issue_from_shared(
                        scores_product(plan),
                        shared.tensor_memory + plan.column("s", stream),
                        starts.q + q_stage * (plan.q_edge.stage_bytes // _UNIT_BYTES),
                        starts.k + stage * (plan.k_edge.stage_bytes // _UNIT_BYTES),
                        part,
                    )
                    if cutlass.const_expr(part + 1 == plan.k_parts):
                        commit(plan, shared.signals.s_full + stream)
            if cutlass.const_expr(stream == STREAMS - 1 or plan.splits_keys):
                with cute.arch.elect_one():
                    commit(plan, shared.k.empty + stage)
        if visit + 1 == tile.visits:
            with cute.arch.elect_one():
                commit(plan, shared.q.empty + q_stage)


@cute.jit
def _output(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    tile: _Tile,
    index: cutlass.Int32,
    stream: cutlass.Constexpr,
):
    """Issue O += P V of a stream's KV tile in one round of the walk, if it takes one.

    It goes part by part, as P and V come. Signals: v_empty, once the last stream that may read it
    is through; o_full, in the stream's last round, or where the streams share an O with the last
    visit of all; then, too, o_rests after every product.
    """
    place, turns = tile.place, tile.turns[stream]
    visit = STREAMS * index + stream if plan.splits_keys else index
    output = stream % plan.num_outputs
    if index == 0:
        if cutlass.const_expr(stream < plan.num_outputs):
            wait_before(shared.signals.o_empty + output, place.item)
    is_last = (index + 1) * step_of(plan) >= tile.visits
    if cutlass.const_expr(plan.splits_columns):
        is_last = visit + 1 == tile.visits
    if visit < tile.visits:
        takes = (visit >= turns.begin) & (visit < turns.end)
        time = place.times[stream] + (visit - turns.begin) // step_of(plan)
        begin = cutlass.Int32(0) if plan.splits_columns else turns.begin
        adds = select(visit > begin, cutlass.Int32(1), cutlass.Int32(0))
        for part in cutlass.range_constexpr(plan.v_parts):
            use = plan.v_use(place.kv_use + visit, part)
            stage = stage_of(use, plan.v_edge)
            if cutlass.const_expr(stream == 0 or plan.splits_keys):
                wait_full(shared.v, use, plan.v_edge)
            if takes:
                _output_part(plan, shared, starts, part, stage, stream, time, adds)
            if cutlass.const_expr(stream == STREAMS - 1 or plan.splits_keys):
                with cute.arch.elect_one():
                    commit(plan, shared.v.empty + stage)
        if cutlass.const_expr(plan.splits_columns):
            with cute.arch.elect_one():
                commit(plan, shared.signals.o_rests)
    if is_last:
        with cute.arch.elect_one():
            commit(plan, shared.signals.o_full + output)


@cute.jit
def _output_part(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    part: cutlass.Constexpr,
    stage: cutlass.Int32,
    stream: cutlass.Constexpr,
    time: cutlass.Int32,
    adds: cutlass.Int32,
):
    """Issue O += P V for the keys of one part of V, each part of P once it is there."""
    num_parts = len(plan.p_parts)
    keys = plan.tile_n // plan.v_parts
    for p_part in cutlass.range_constexpr(num_parts):
        p_first = sum(plan.p_parts[:p_part])
        first = max(p_first, part * keys)
        end = min(p_first + plan.p_parts[p_part], (part + 1) * keys)
        if cutlass.const_expr(first < end):
            if cutlass.const_expr(first == p_first):
                wait(shared.signals.p_full + stream * num_parts + p_part, time)
                tmem.after_wait()
            with cute.arch.elect_one():
                issue_from_tensor_memory(
                    output_product(plan),
                    shared.tensor_memory + plan.column("o", stream),
                    shared.tensor_memory + plan.column("p", stream),
                    starts.v + stage * (plan.v_edge.stage_bytes // _UNIT_BYTES),
                    range(first // K_STEP, end // K_STEP),
                    adds,
                )
