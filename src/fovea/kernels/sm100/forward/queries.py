"""The query role: two warps that load packed rows of Q, (query, head of a group) pairs.

Lives here: the loads of plans that pack heads. The copy engine takes no box of such pairs unless
the group divides it; asynchronous copies of 16 bytes take any. Not here: which row is what
(`device/packing.py`), Q of other plans (`load.py`). Invariant: every byte of a stage is written,
zeros for rows past the queries and columns past head_dim.
"""

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import Walk
from fovea.kernels.device.packing import packed_row
from fovea.kernels.device.pipeline import stage_of, wait_empty
from fovea.kernels.device.values import is_in_all_lanes, select
from fovea.kernels.device.work import STOP, receive, release_work
from fovea.kernels.sm100.forward.arguments import Problem, SharedTiles
from fovea.plan.roles import WARP_SIZE, WARPGROUP_THREADS
from fovea.plan.sm100 import FIRST_QUERY_WARP, QUERY_WARPS
from fovea.plan.sm100_tiles import ELEMENT_BYTES, STREAM_ROWS

_THREADS = QUERY_WARPS * WARP_SIZE
_COPY_BYTES = 16
_COPY_COLUMNS = _COPY_BYTES // ELEMENT_BYTES
_SWIZZLE_BYTES = 128  # of a row of sQ, whose pieces of 16 bytes are exchanged by the row's number
_SWIZZLE_COPIES = _SWIZZLE_BYTES // _COPY_BYTES


@cute.jit
def run(plan: cutlass.Constexpr, problem: Problem, shared: SharedTiles):
    """Load Q of every tile that this CTA works on.

    Run by the query warps. Waits on: work_full, q_empty. Signals: q_full, work_empty. Owns: sQ
    while a stage is empty.
    """
    use = cutlass.Int32(0)
    item = cutlass.Int32(0)
    work = receive(shared.work, use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        if is_in_all_lanes(work.tile_number >= 0):
            _load_tile(plan, problem, shared, work.walk, item)
            item += 1
        release_work(shared.work, use, plan.work_edge)
        use += 1
        work = receive(shared.work, use, plan.work_edge)


@cute.jit
def _load_tile(
    plan: cutlass.Constexpr,
    problem: Problem,
    shared: SharedTiles,
    walk: Walk,
    item: cutlass.Int32,
):
    """Fill a stage of Q, all copies on their way at once."""
    edge = plan.q_edge
    stage = stage_of(item, edge)
    wait_empty(shared.q, item, edge)
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS - FIRST_QUERY_WARP * WARP_SIZE
    copies = plan.head_dim // _COPY_COLUMNS  # of a row
    first = shared.sQ.iterator.toint().to(cutlass.Int32) + stage * edge.stage_bytes
    for step in cutlass.range(STREAM_ROWS * copies // _THREADS, unroll=4):
        index = step * _THREADS + thread
        row = index // copies
        copy = index - row * copies
        block = copy // _SWIZZLE_COPIES
        piece = (copy - block * _SWIZZLE_COPIES) ^ (row & (_SWIZZLE_COPIES - 1))
        offset = block * (STREAM_ROWS * _SWIZZLE_BYTES) + row * _SWIZZLE_BYTES
        _copy_row_piece(
            plan, problem, walk, row, copy * _COPY_COLUMNS, first + offset + piece * _COPY_BYTES
        )
    cute.arch.inline_ptx("cp.async.wait_all;")
    # The products read through the async proxy what was stored through the generic one.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(shared.q.full + stage)


def _copy_row_piece(
    plan,
    problem: Problem,
    walk: Walk,
    row: cutlass.Int32,
    column: cutlass.Int32,
    target: cutlass.Int32,
) -> None:
    """Start to copy 16 bytes of a row; nothing is read where there is nothing, and zeros stored."""
    mQ = problem.packing.mQ
    in_head = walk.m_idx * plan.tile_m + row
    place = packed_row(in_head, walk.head, problem.group_size)
    zero = cutlass.Int32(0)
    if plan.features.varlen:
        is_there = (place.q_idx < walk.sequence.seqlen_q) & (column < mQ.shape[-1])
        q_row = walk.sequence.row_begin + place.q_idx
        source = mQ[select(is_there, q_row, zero), place.head, None].iterator
    else:
        is_there = (place.q_idx < mQ.shape[1]) & (column < mQ.shape[-1])
        source = mQ[walk.batch, select(is_there, place.q_idx, zero), place.head, None].iterator
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {_COPY_BYTES}, {{$r2}};",
        read_only_args=[
            target,
            (source + select(is_there, column, zero)).toint().to(cutlass.Int64),
            select(is_there, cutlass.Int32(_COPY_BYTES), zero),
        ],
    )
