"""The MMA role: one warp issues every product, of the two streams in turn.

Lives here: the order of S = Q K^T and O += P V, and what each waits for and tells. While the
softmax of one stream works on its S, the tensor cores do O of the other stream's P and its next S.
Not here: how a product is issued (`sm100/umma.py`). Invariant: products of a stream run in the
order S, O, S, O, ...; P lies where S did, so no S is issued before the O that reads P.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.pipeline import stage_of, wait_full
from fovea.kernels.device.values import is_in_all_lanes, select
from fovea.kernels.device.work import STOP, receive, release_work
from fovea.kernels.sm100 import tmem
from fovea.kernels.sm100.forward.arguments import SharedTiles
from fovea.kernels.sm100.forward.streams import stream_visit, stream_visits
from fovea.kernels.sm100.signals import wait, wait_before
from fovea.kernels.sm100.umma import (
    commit,
    descriptor_start,
    issue_from_shared,
    issue_from_tensor_memory,
    k_major_steps,
    output_product,
    scores_product,
)
from fovea.plan.sm100 import STREAM_ROWS, STREAMS

_K_STEP = 16
_UNIT_BYTES = 16


class _Starts(NamedTuple):
    """Address fields of descriptors: the first stage of each operand."""

    q: cutlass.Int32
    k: cutlass.Int32
    v: cutlass.Int32


class _Place(NamedTuple):
    """How far this role has come: query tiles, KV tiles, and each stream's own KV tiles."""

    item: cutlass.Int32
    kv_use: cutlass.Int32
    time0: cutlass.Int32
    time1: cutlass.Int32


@cute.jit
def run(plan: cutlass.Constexpr, shared: SharedTiles):
    """Issue the products of every tile that this CTA works on.

    Run by one warp. Waits on: work_full, q_full, k_full, v_full, p_full, o_empty. Signals, through
    commits: s_full, o_full, q_empty, k_empty, v_empty; and work_empty.
    """
    starts = _Starts(
        descriptor_start(shared.sQ.iterator),
        descriptor_start(shared.sK.iterator),
        descriptor_start(shared.sV.iterator),
    )
    place = _Place(*(cutlass.Int32(0) for _ in _Place._fields))
    use = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        if is_in_all_lanes(work.tile_number >= 0):
            visits = work.walk.visits
            _query_tile(plan, shared, starts, place, visits)
            place = _Place(
                place.item + 1,
                place.kv_use + visits,
                place.time0 + stream_visits(plan, visits, 0),
                place.time1 + stream_visits(plan, visits, 1),
            )
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = receive(shared.work, use, plan.work_edge)
    # The last O has been read: nobody needs tensor memory any more.
    for stream in cutlass.range_constexpr(STREAMS):
        wait_before(shared.signals.o_empty + stream, place.item)


@cute.jit
def _query_tile(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    place: _Place,
    visits: cutlass.Int32,
):
    """Issue all products of one query tile."""
    for stream in cutlass.range_constexpr(STREAMS):
        if cutlass.const_expr(not plan.splits_keys):
            wait_full(shared.q, STREAMS * place.item + stream, plan.q_edge)
        elif cutlass.const_expr(stream == 0):
            wait_full(shared.q, place.item, plan.q_edge)
        _scores(plan, shared, starts, place, visits, cutlass.Int32(0), stream)
    for index in cutlass.range(stream_visits(plan, visits, 0), unroll=1):
        for stream in cutlass.range_constexpr(STREAMS):
            if index == 0:
                wait_before(shared.signals.o_empty + stream, place.item)
            _output(plan, shared, starts, place, visits, index, stream)
            _scores(plan, shared, starts, place, visits, index + 1, stream)


@cute.jit
def _scores(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    place: _Place,
    visits: cutlass.Int32,
    index: cutlass.Int32,
    stream: cutlass.Constexpr,
):
    """Issue S of a stream's index-th KV tile, if there is one.

    Signals: s_full; k_empty and, with the last tile, q_empty, once the last stream that reads them
    is through. Since a commit covers all earlier products of its stream, s_full tells that O rests.
    """
    visit = stream_visit(plan, index, stream)
    if visit < visits:
        use = place.kv_use + visit
        stage = stage_of(use, plan.k_edge)
        is_shared = not plan.splits_keys
        if cutlass.const_expr(stream == 0 or plan.splits_keys):
            wait_full(shared.k, use, plan.k_edge)
        q_use = STREAMS * place.item + stream if is_shared else place.item
        q_stage = stage_of(q_use, plan.q_edge)
        is_last = visit + 1 == visits
        with cute.arch.elect_one():
            issue_from_shared(
                scores_product(plan),
                shared.tensor_memory + plan.column("s", stream),
                starts.q + q_stage * (plan.q_edge.stage_bytes // _UNIT_BYTES),
                k_major_steps(STREAM_ROWS, plan.head_dim),
                starts.k + stage * (plan.k_edge.stage_bytes // _UNIT_BYTES),
            )
            commit(shared.signals.s_full + stream)
            if cutlass.const_expr(stream == STREAMS - 1 or plan.splits_keys):
                commit(shared.k.empty + stage)
            if is_last:
                commit(shared.q.empty + q_stage)


@cute.jit
def _output(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    place: _Place,
    visits: cutlass.Int32,
    index: cutlass.Int32,
    stream: cutlass.Constexpr,
):
    """Issue O += P V of a stream's index-th KV tile, if there is one, part by part as P comes.

    Signals: v_empty, once the last stream that reads it is through; o_full, with the last tile or
    where there is none.
    """
    visit = stream_visit(plan, index, stream)
    if visit < visits:
        use = place.kv_use + visit
        stage = stage_of(use, plan.v_edge)
        if cutlass.const_expr(stream == 0 or plan.splits_keys):
            wait_full(shared.v, use, plan.v_edge)
        time = (place.time0, place.time1)[stream] + index
        adds = select(index > 0, cutlass.Int32(1), cutlass.Int32(0))
        num_parts = len(plan.p_parts)
        first = 0
        for part in cutlass.range_constexpr(num_parts):
            wait(shared.signals.p_full + stream * num_parts + part, time)
            tmem.after_wait()
            with cute.arch.elect_one():
                issue_from_tensor_memory(
                    output_product(plan),
                    shared.tensor_memory + plan.column("o", stream),
                    shared.tensor_memory + plan.column("p", stream),
                    starts.v + stage * (plan.v_edge.stage_bytes // _UNIT_BYTES),
                    range(first // _K_STEP, (first + plan.p_parts[part]) // _K_STEP),
                    adds,
                )
            first = first + plan.p_parts[part]
        if cutlass.const_expr(stream == STREAMS - 1 or plan.splits_keys):
            with cute.arch.elect_one():
                commit(shared.v.empty + stage)
    if (index + 1 == stream_visits(plan, visits, stream)) | (
        visits <= stream_visit(plan, 0, stream)
    ):
        with cute.arch.elect_one():
            commit(shared.signals.o_full + stream)
