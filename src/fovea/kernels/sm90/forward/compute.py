"""The compute role: scores, online softmax and output of 64 query rows per warpgroup.

Lives here: the walk through query tiles and their KV tiles. With several warpgroups a turnstile
lets one multiply while another exponentiates (FlashAttention-3, arXiv 2407.08608 section 3.1). In
optimistic plans only the first KV tile sets the reference of a row (no maximum, no rescaling after
it); a row whose sums leave the range in which that is exact is computed again with the running
maximum, see `redo.py`. Not here: what happens on a KV tile (`steps.py`), the way out
(`epilogue.py`). Invariant: every warpgroup walks the tiles that the load role announced, in order.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from fovea.kernels.device.kv_walk import Walk, band_of_walk, use_of, uses_of
from fovea.kernels.device.mods import ModTable
from fovea.kernels.device.own_visits import OwnVisits, own_visits
from fovea.kernels.device.pipeline import count_own_fills, release, stage_of, wait_full
from fovea.kernels.device.scheduler import split_of
from fovea.kernels.device.score import Scalars, TileKind, make_score_context, with_key_ranges
from fovea.kernels.device.values import is_in_all_lanes
from fovea.kernels.device.work import PAUSE, STOP, Work, receive, release_work, span_of
from fovea.kernels.portable.tensors import Outputs
from fovea.kernels.sm90.forward import epilogue, packed, rows
from fovea.kernels.sm90.forward.arguments import Problem, SharedTiles
from fovea.kernels.sm90.forward.products import Products, issue_scores, make_products
from fovea.kernels.sm90.forward.rows import RowState, make_state
from fovea.kernels.sm90.forward.steps import (
    Span,
    Start,
    StepContext,
    first_step,
    last_product,
    last_product_and_next_scores,
    next_scores,
    skip_k,
    skip_v,
    step,
    visit_at,
    wants_any,
    wants_masked,
)
from fovea.kernels.sm90.forward.turnstile import pass_turn
from fovea.plan.roles import WARPGROUP_THREADS
from fovea.plan.sm90_tiles import WARPGROUP_ROWS


class _Role(NamedTuple):
    """What stays the same over all tiles of one warpgroup."""

    problem: Problem
    scalars: Scalars
    mods: ModTable
    outputs: Outputs
    shared: SharedTiles
    products: Products
    state: RowState
    thread: cutlass.Int32  # in this warpgroup
    consumer: cutlass.Int32


class Place(NamedTuple):
    """How far a warpgroup has come: counts of announcements, Q stages and KV tiles before it."""

    use: cutlass.Int32
    q_use: cutlass.Int32
    kv_use: cutlass.Int32
    staged: cutlass.Int32  # where the output before may still be on its way out, or -1


@cute.jit
def run(
    plan: cutlass.Constexpr,
    problem: Problem,
    scalars: Scalars,
    mods: ModTable,
    outputs: Outputs,
    shared: SharedTiles,
):
    """Compute every tile that this CTA works on.

    Run by all consumer warpgroups, each on 64 rows. Waits on: work_full, q_full, k_full, v_full,
    its turn. Signals: k_empty, v_empty, the next warpgroup's turn, q_empty (in the epilogue),
    work_empty.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    consumer = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP_THREADS) - 1
    if cutlass.const_expr(plan.passes_uses):
        shared = shared._replace(k=count_own_fills(shared.k), v=count_own_fills(shared.v))
    products = make_products(plan, shared, thread)
    state = make_state(plan)
    if consumer == plan.num_consumers - 1:
        pass_turn(plan, consumer)

    place = Place(
        use=cutlass.Int32(0),
        q_use=cutlass.Int32(0) + consumer,
        kv_use=cutlass.Int32(0),
        staged=cutlass.Int32(-1),
    )
    role = _Role(problem, scalars, mods, outputs, shared, products, state, thread, consumer)
    work = receive(shared.work, place.use, plan.work_edge)
    while is_in_all_lanes(work.tile_number != STOP):
        if is_in_all_lanes(work.tile_number == PAUSE):
            release_work(shared.work, place.use, plan.work_edge)
            place = Place(place.use + 1, place.q_use, place.kv_use, place.staged)
        else:
            place = _tiles(plan, role, work, place)
        work = receive(shared.work, place.use, plan.work_edge)
    epilogue.free_staged(plan, shared, place.staged)


@cute.jit
def _tiles(plan: cutlass.Constexpr, role: _Role, work: Work, place: Place):
    """Compute query tiles until the load role announces something else; return the place after.

    With a second Q buffer the next tile's S is issued behind this one's last product and runs
    during its epilogue. A pause comes with a Q and K of its own, so that this needs no branch: the
    compiler gives up on overlap where a product may or may not be in flight.
    """
    shared = role.shared
    own = _own_visits(plan, role, work, place.use)
    if cutlass.const_expr(plan.packs_heads):
        first_row = _first_row(plan, role, work)
        packed.load_queries(plan, role.problem.packing, shared, work.walk, first_row, role.thread)
    else:
        wait_full(shared.q, place.q_use, plan.q_edge)
    first_use = use_of(plan, work.walk, place.kv_use, own.before)
    skip_k(plan, shared, first_use - own.before, first_use, role.consumer)
    wait_full(shared.k, first_use, plan.k_edge)
    issue_scores(plan, role.products, place.q_use, first_use)
    is_tile = cutlass.Boolean(True)
    while is_tile:
        first_use = use_of(plan, work.walk, place.kv_use, own.before)
        skip_v(plan, shared, first_use - own.before, first_use)
        _main_loop(plan, role, work, own.walk, first_use, place)
        after = Place(
            use=place.use + 1,
            q_use=place.q_use + plan.num_consumers,
            kv_use=place.kv_use + uses_of(plan, work.walk),
            staged=place.staged,
        )
        upcoming, next_own = work, own
        is_tile = cutlass.Boolean(False)
        end = Span(last=first_use + own.walk.visits - 1, behind=own.behind)
        if cutlass.const_expr(plan.looks_ahead):
            if cutlass.const_expr(plan.ends_first):
                last_product(plan, shared, role.products, end, role.consumer)
            upcoming = receive(shared.work, after.use, plan.work_edge)
            is_tile = is_in_all_lanes(upcoming.tile_number >= 0)
            next_own = _own_visits(plan, role, upcoming, after.use)
            start = Start(
                q_use=after.q_use,
                kv_use=use_of(plan, upcoming.walk, after.kv_use, next_own.before),
                before=next_own.before,
            )
            if cutlass.const_expr(plan.ends_first):
                next_scores(plan, shared, role.products, start, role.consumer)
            else:
                last_product_and_next_scores(plan, shared, role.products, end, start, role.consumer)
        else:
            last_product(plan, shared, role.products, end, role.consumer)
        finish = epilogue.Finish(
            walk=own.walk,
            first_row=_first_row(plan, role, work),
            thread=role.thread,
            consumer=role.consumer,
            is_redo=work.is_redo,
            split=split_of(work.tile_number, role.problem.order),
            slot=stage_of(place.use, plan.work_edge),
            q_stage=stage_of(place.q_use, plan.q_edge),
        )
        _finish(plan, role, finish)
        release_work(shared.work, place.use, plan.work_edge)
        place = Place(after.use, after.q_use, after.kv_use, epilogue.staged_after(plan, finish))
        work, own = upcoming, next_own
    if cutlass.const_expr(plan.looks_ahead):
        _drain(plan, role, place)
        place = Place(
            place.use + 1, place.q_use + plan.num_consumers, place.kv_use + 1, cutlass.Int32(-1)
        )
    return place


@cute.jit
def _finish(plan: cutlass.Constexpr, role: _Role, finish: epilogue.Finish):
    """Write what came of a query tile."""
    if cutlass.const_expr(plan.packs_heads):
        packed.finish_tile(
            plan,
            role.problem.packing,
            role.outputs,
            role.scalars,
            role.products,
            role.state,
            finish,
        )
    else:
        epilogue.run(
            plan,
            role.outputs,
            role.scalars,
            role.shared,
            role.products,
            role.state,
            band_of_walk(role.problem.band, finish.walk),
            finish,
        )


@cute.jit
def _drain(plan: cutlass.Constexpr, role: _Role, place: Place):
    """Give back all that came with a pause, and the stage of the last output: a redo needs both."""
    shared = role.shared
    epilogue.free_staged(plan, shared, place.staged)
    warpgroup.wait_group(0)
    release(shared.k, place.kv_use, plan.k_edge)
    wait_full(shared.v, place.kv_use, plan.v_edge)
    release(shared.v, place.kv_use, plan.v_edge)
    epilogue.free_unused(plan, shared, role.consumer, stage_of(place.q_use, plan.q_edge))
    release_work(shared.work, place.use, plan.work_edge)


def _first_row(plan, role: _Role, work: Work) -> cutlass.Int32:
    """Return the first query row of this warpgroup."""
    return work.walk.m_idx * plan.tile_m + role.consumer * WARPGROUP_ROWS


def _own_visits(plan, role: _Role, work: Work, use: cutlass.Int32) -> OwnVisits:
    """Return what this warpgroup visits of the CTA's walk, announced as the use-th."""
    first_row = _first_row(plan, role, work)
    band = band_of_walk(role.problem.band, work.walk)
    span = None
    if plan.features.key_ranges:
        span = span_of(role.shared.work, use, role.consumer, plan.work_edge)
    return own_visits(plan, work.walk, band, first_row, WARPGROUP_ROWS, span)


@cute.jit
def _main_loop(
    plan: cutlass.Constexpr,
    role: _Role,
    work: Work,
    walk: Walk,
    first_use: cutlass.Int32,
    place: Place,
):
    """Compute one query tile up to its last product, which is left to be issued.

    `walk` is this warpgroup's own. The first S is in flight on entry.
    """
    state, shared = role.state, role.shared
    first_row = _first_row(plan, role, work)
    score = make_score_context(
        plan,
        first_row,
        role.thread,
        walk,
        band_of_walk(role.problem.band, walk),
        role.scalars,
        role.mods,
        role.problem.group_size,
    )
    if cutlass.const_expr(plan.features.key_ranges):
        score = with_key_ranges(score, role.problem.key_ranges)
    if cutlass.const_expr(plan.features.block_bits):
        score = score._replace(lists=role.problem.block_lists)
    context = StepContext(
        score=score,
        state=state,
        products=role.products,
        shared=shared,
        q_use=place.q_use,
    )
    rows.begin(state)
    role.products.acc_o.fill(0.0)
    first_step(plan, context, walk, first_use, work.is_redo)
    epilogue.free_staged(plan, shared, place.staged)
    for visit in cutlass.range(1, walk.visits, unroll=1):
        use = first_use + visit
        wait_full(shared.k, use, plan.k_edge)
        at = visit_at(plan, shared, walk, visit, use)
        # Whole steps are chosen between, not parts of one: a branch while a product is in
        # flight would make the compiler wait for it.
        if wants_any(plan, at, work.is_redo):
            step(plan, context, at, use, role.consumer, TileKind.ANY, True)
        elif wants_masked(plan, at):
            step(plan, context, at, use, role.consumer, TileKind.MASKED, False)
        else:
            is_online = not plan.is_optimistic
            step(plan, context, at, use, role.consumer, TileKind.PLAIN, is_online)
