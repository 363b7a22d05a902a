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
    use = cutlass.Int32(0)
    kv_use = cutlass.Int32(0)
    item = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        if is_in_all_lanes(work.tile_number >= 0):
            _query_tile(plan, shared, starts, item, kv_use, work.walk.visits)
            kv_use += work.walk.visits
            item += 1
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = receive(shared.work, use, plan.work_edge)
    # The last O has been read: nobody needs tensor memory any more.
    for stream in cutlass.range_constexpr(STREAMS):
        wait_before(shared.signals.o_empty + stream, item)


@cute.jit
def _query_tile(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    item: cutlass.Int32,
    kv_use: cutlass.Int32,
    visits: cutlass.Int32,
):
    """Issue all products of one query tile."""
    wait_full(shared.k, kv_use, plan.k_edge)
    for stream in cutlass.range_constexpr(STREAMS):
        wait_full(shared.q, STREAMS * item + stream, plan.q_edge)
        _scores(plan, shared, starts, kv_use, visits == 1, stream)
    for visit in cutlass.range(visits, unroll=1):
        use = kv_use + visit
        wait_full(shared.v, use, plan.v_edge)
        for stream in cutlass.range_constexpr(STREAMS):
            if visit == 0:
                wait_before(shared.signals.o_empty + stream, item)
            _output(plan, shared, starts, use, visit > 0, stream)
            if visit + 1 < visits:
                if cutlass.const_expr(stream == 0):
                    wait_full(shared.k, use + 1, plan.k_edge)
                _scores(plan, shared, starts, use + 1, visit + 2 == visits, stream)
            else:
                with cute.arch.elect_one():
                    commit(shared.signals.o_full + stream)


@cute.jit
def _scores(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    use: cutlass.Int32,
    is_last: cutlass.Boolean,
    stream: cutlass.Constexpr,
):
    """Issue S of one stream, its K and Q waited for.

    Signals: s_full; k_empty, with the last stream; q_empty, with the last tile. Since a commit
    covers this stream's earlier products, s_full tells that O rests.
    """
    product = scores_product(plan)
    stage = stage_of(use, plan.k_edge)
    q_start = starts.q + stream * (plan.q_edge.stage_bytes // _UNIT_BYTES)
    with cute.arch.elect_one():
        issue_from_shared(
            product,
            shared.tensor_memory + plan.column("s", stream),
            q_start,
            k_major_steps(STREAM_ROWS, plan.head_dim),
            starts.k + stage * (plan.k_edge.stage_bytes // _UNIT_BYTES),
        )
        commit(shared.signals.s_full + stream)
        if cutlass.const_expr(stream == STREAMS - 1):
            commit(shared.k.empty + stage)
        if is_last:
            commit(shared.q.empty + stream)


@cute.jit
def _output(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    starts: _Starts,
    use: cutlass.Int32,
    accumulates: cutlass.Boolean,
    stream: cutlass.Constexpr,
):
    """Issue O += P V of one stream, part by part as P comes.

    Signals: v_empty, with the last stream.
    """
    product = output_product(plan)
    stage = stage_of(use, plan.v_edge)
    adds = select(accumulates, cutlass.Int32(1), cutlass.Int32(0))
    num_parts = len(plan.p_parts)
    first = 0
    for part in cutlass.range_constexpr(num_parts):
        wait(shared.signals.p_full + stream * num_parts + part, use)
        tmem.after_wait()
        with cute.arch.elect_one():
            issue_from_tensor_memory(
                product,
                shared.tensor_memory + plan.column("o", stream),
                shared.tensor_memory + plan.column("p", stream),
                starts.v + stage * (plan.v_edge.stage_bytes // _UNIT_BYTES),
                range(first // _K_STEP, (first + plan.p_parts[part]) // _K_STEP),
                adds,
            )
        first = first + plan.p_parts[part]
    if cutlass.const_expr(stream == STREAMS - 1):
        with cute.arch.elect_one():
            commit(shared.v.empty + stage)
