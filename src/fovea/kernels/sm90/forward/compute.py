"""The compute role: scores, online softmax and output of 64 query rows per warpgroup.

Lives here: the main loop and its overlap. Each step issues S = Q K^T of the next KV tile, then
O += P V of the previous one, and works on S while that second product runs (FlashAttention-3's
intra-warpgroup overlap, arXiv 2407.08608 section 3.2); with several warpgroups a turnstile lets one
multiply while another exponentiates (section 3.1). In optimistic plans only the first tile of a row
sets its reference (no maximum, no rescaling after it); a row whose sums leave the range in which
that is exact is computed again with the running maximum, see `epilogue.py`. Not here: the softmax's arithmetic
(`device/softmax.py`), the way out (`epilogue.py`). Invariant: P, row_sum and O of a
row refer to its `reference`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from fovea.kernels.device.kv_walk import Visit, Walk, is_cut, unpack_visit
from fovea.kernels.device.mod_affine import Affine
from fovea.kernels.device.mods import ModTable
from fovea.kernels.device.pipeline import release, stage_of, wait_full
from fovea.kernels.device.ptx import opaque, pack_pair
from fovea.kernels.device.score import (
    Scalars,
    ScoreContext,
    TileKind,
    apply_score,
    exponent_scale,
    make_score_context,
    prepare_tile,
    row_addends,
)
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    exponentiate_row,
    finite_reference,
    row_maximum,
    scale_row,
)
from fovea.kernels.device.values import is_in_all_lanes, select
from fovea.kernels.device.work import PAUSE, STOP, Work, receive, release_work
from fovea.kernels.sm90.forward import epilogue
from fovea.kernels.sm90.forward.arguments import Outputs, Problem, SharedTiles
from fovea.kernels.sm90.wgmma import issue, output_mma, scores_mma
from fovea.plan.numerics import LOG2_E
from fovea.plan.roles import WARPGROUP_THREADS
from fovea.plan.sm90 import WARPGROUP_ROWS

_TURNSTILE_BARRIER = 1  # named barriers 1..num_consumers; 0 is the CTA's own


class Products(NamedTuple):
    """The two products of one warpgroup with their operands and accumulators in registers."""

    scores: cute.TiledMma
    output: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    tOrP: cute.Tensor
    acc_s: cute.Tensor
    acc_o: cute.Tensor


class RowState(NamedTuple):
    """What the online softmax keeps per row of a thread, in registers (mutable fragments)."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    reference: cute.Tensor  # log2 units


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


class StepContext(NamedTuple):
    """What stays the same over the KV tiles of one query tile."""

    score: ScoreContext
    state: RowState
    products: Products
    shared: SharedTiles
    q_use: cutlass.Int32


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
    products = _make_products(plan, shared, thread)
    state = RowState(
        row_max=cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32),
        row_sum=cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32),
        reference=cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32),
    )
    if cutlass.const_expr(plan.is_pingpong):
        if consumer == plan.num_consumers - 1:
            _pass_turn(plan, consumer)

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
    walk = work.walk
    wait_full(shared.q, place.q_use, plan.q_edge)
    wait_full(shared.k, place.kv_use, plan.k_edge)
    _issue_scores(plan, role.products, place.q_use, place.kv_use)
    is_tile = cutlass.Boolean(True)
    while is_tile:
        _main_loop(plan, role, work, place)
        after = Place(
            use=place.use + 1,
            q_use=place.q_use + plan.num_consumers,
            kv_use=place.kv_use + work.walk.visits,
            staged=place.staged,
        )
        upcoming = work
        is_tile = cutlass.Boolean(False)
        if cutlass.const_expr(plan.looks_ahead):
            upcoming = receive(shared.work, after.use, plan.work_edge)
            is_tile = is_in_all_lanes(upcoming.tile_number >= 0)
            _last_product_and_next_scores(plan, role, after)
        else:
            _last_product(plan, role, after.kv_use - 1)
        finish = epilogue.Finish(
            walk=work.walk,
            first_row=_first_row(plan, role, work),
            thread=role.thread,
            consumer=role.consumer,
            is_redo=work.is_redo,
            slot=stage_of(place.use, plan.work_edge),
            q_stage=stage_of(place.q_use, plan.q_edge),
        )
        epilogue.run(plan, role.outputs, role.scalars, shared, role.products, role.state, role.problem.band, finish)
        release_work(shared.work, place.use, plan.work_edge)
        place = Place(after.use, after.q_use, after.kv_use, epilogue.staged_after(plan, finish))
        work = upcoming
    if cutlass.const_expr(plan.looks_ahead):
        _drain(plan, role, place)
        place = Place(
            place.use + 1, place.q_use + plan.num_consumers, place.kv_use + 1, cutlass.Int32(-1)
        )
    return place


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


@cute.jit
def _main_loop(plan: cutlass.Constexpr, role: _Role, work: Work, place: Place):
    """Compute one query tile up to its last product, which is left to be issued.

    The first S is in flight on entry.
    """
    state, shared = role.state, role.shared
    walk = work.walk
    first_row = _first_row(plan, role, work)
    context = StepContext(
        score=make_score_context(
            plan, first_row, role.thread, walk, role.problem.band, role.scalars, role.mods
        ),
        state=state,
        products=role.products,
        shared=shared,
        q_use=place.q_use,
    )
    state.row_max.fill(-cutlass.Float32.inf)
    state.row_sum.fill(0.0)
    state.reference.fill(0.0)
    role.products.acc_o.fill(0.0)
    _first_step(plan, context, walk, place.kv_use, work.is_redo)
    epilogue.free_staged(plan, shared, place.staged)
    for visit in cutlass.range(1, walk.visits, unroll=1):
        use = place.kv_use + visit
        wait_full(shared.k, use, plan.k_edge)
        at = _visit_at(plan, shared, walk, visit, use)
        # Whole steps are chosen between, not parts of one: a branch while a product is in
        # flight would make the compiler wait for it.
        if _wants_any(plan, at, work.is_redo):
            _step(plan, context, at, use, role.consumer, TileKind.ANY, True)
        elif _wants_masked(plan, at):
            _step(plan, context, at, use, role.consumer, TileKind.MASKED, False)
        else:
            is_online = not plan.is_optimistic
            _step(plan, context, at, use, role.consumer, TileKind.PLAIN, is_online)


def _wants_any(plan, at: Visit, is_redo: cutlass.Int32) -> cutlass.Boolean | bool:
    """Return whether a tile gets the step that fits every tile and moves the reference.

    A Python bool where the variant never or always does.
    """
    if not plan.is_optimistic:
        # Without limits only the tile at the end of the keys is cut, and the first step had that.
        return (at.is_cut | at.is_partial) if plan.is_dynamic else False
    if plan.features.block_lists:
        return (is_redo != 0) | at.is_cut
    return is_redo != 0


def _wants_masked(plan, at: Visit) -> cutlass.Boolean | bool:
    """Return whether a tile gets the masked step, which leaves the reference alone."""
    if not (plan.is_optimistic and plan.is_dynamic):
        return False
    return at.is_partial if plan.features.block_lists else at.is_cut


def _visit_at(
    plan, shared: SharedTiles, walk: Walk, visit: cutlass.Int32, use: cutlass.Int32
) -> Visit:
    """Return the visit whose K lies in the stage of its use, already waited for."""
    if plan.features.block_lists:
        return unpack_visit(shared.visits[stage_of(use, plan.k_edge)])
    n_idx = walk.range_end - 1 - visit
    return Visit(n_idx, cutlass.Boolean(False), is_cut(walk, n_idx))


@cute.jit
def _make_products(plan: cutlass.Constexpr, shared: SharedTiles, thread: cutlass.Int32) -> Products:
    """Return the products' operand views and fresh register fragments."""
    scores = scores_mma(plan)
    output = output_mma(plan)
    scores_thread = scores.get_slice(thread)
    output_thread = output.get_slice(thread)
    acc_s_shape = scores_thread.partition_shape_C((WARPGROUP_ROWS, plan.tile_n))
    acc_o_shape = output_thread.partition_shape_C((WARPGROUP_ROWS, plan.head_dim_v))
    p_shape = output_thread.partition_shape_A((WARPGROUP_ROWS, plan.tile_n))
    return Products(
        scores=scores,
        output=output,
        tSrQ=scores_thread.make_fragment_A(scores_thread.partition_A(shared.sQ)),
        tSrK=scores_thread.make_fragment_B(scores_thread.partition_B(shared.sK)),
        tOrV=output_thread.make_fragment_B(output_thread.partition_B(shared.sV)),
        tOrP=cute.make_rmem_tensor(p_shape, shared.sV.element_type),
        acc_s=cute.make_rmem_tensor(acc_s_shape, cutlass.Float32),
        acc_o=cute.make_rmem_tensor(acc_o_shape, cutlass.Float32),
    )


@cute.jit
def _first_step(
    plan: cutlass.Constexpr,
    context: StepContext,
    walk: Walk,
    use: cutlass.Int32,
    is_redo: cutlass.Int32,
):
    """Do the softmax of the first KV tile, masked and online; its S is in flight."""
    at = _visit_at(plan, context.shared, walk, cutlass.Int32(0), use)
    acc_s = context.products.acc_s
    mods = prepare_tile(plan, acc_s, context.score, at, TileKind.MASKED)
    warpgroup.wait_group(0)
    release(context.shared.k, use, plan.k_edge)
    if cutlass.const_expr(plan.features.block_lists):
        if at.is_partial & (at.is_cut ^ cutlass.Boolean(True)):
            apply_score(plan, acc_s, context.score, mods, TileKind.MASKED)
        else:
            apart = at._replace(n_idx=opaque(at.n_idx))
            unknown = prepare_tile(plan, acc_s, context.score, apart, TileKind.ANY)
            apply_score(plan, acc_s, context.score, unknown, TileKind.ANY)
    else:
        apply_score(plan, acc_s, context.score, mods, TileKind.MASKED)
    _online_softmax(plan, context)
    if cutlass.const_expr(plan.is_optimistic):
        _default_reference(context.state, is_redo)
    _store_p(context.products)


@cute.jit
def _default_reference(state: RowState, is_redo: cutlass.Int32):
    """Let rows that saw nothing in the first tile refer to 0; `redo.py` judges what comes of it."""
    zero = cutlass.Float32(0.0)
    for row in cutlass.range_constexpr(ROWS_PER_THREAD):
        lacks_maximum = (state.row_max[row] == -cutlass.Float32.inf) & (is_redo == 0)
        state.row_max[row] = select(lacks_maximum, zero, state.row_max[row])


@cute.jit
def _step(
    plan: cutlass.Constexpr,
    context: StepContext,
    at: Visit,
    use: cutlass.Int32,
    consumer: cutlass.Int32,
    tile: cutlass.Constexpr,
    online: cutlass.Constexpr,
):
    """Do S of this tile and O += P V of the previous one, softmax while the second runs.

    K of this use has been waited for. `tile` says what may be hidden in it; with `online` the
    reference moves to the running maximum.
    """
    shared = context.shared
    products = context.products
    if cutlass.const_expr(plan.is_pingpong):
        _wait_turn(consumer)
    _issue_scores(plan, products, context.q_use, use)
    wait_full(shared.v, use - 1, plan.v_edge)
    _issue_output(plan, products, use - 1)
    if cutlass.const_expr(plan.is_pingpong):
        _pass_turn(plan, consumer)
    mods = prepare_tile(plan, products.acc_s, context.score, at, tile)
    warpgroup.wait_group(1)
    release(shared.k, use, plan.k_edge)
    addends = None
    if cutlass.const_expr(tile is TileKind.PLAIN and not online):
        addends = row_addends(plan, context.score, mods)
    if cutlass.const_expr(addends is None):
        apply_score(plan, products.acc_s, context.score, mods, tile)
    if cutlass.const_expr(online):
        factors = _online_softmax(plan, context)
        warpgroup.wait_group(0)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            scale_row(products.acc_o, row, factors[row])
    else:
        _plain_softmax(plan, context, addends)
        warpgroup.wait_group(0)
    release(shared.v, use - 1, plan.v_edge)
    _store_p(products)


@cute.jit
def _last_product(plan: cutlass.Constexpr, role: _Role, kv_use: cutlass.Int32):
    """Add the last tile's P V."""
    shared = role.shared
    wait_full(shared.v, kv_use, plan.v_edge)
    _issue_output(plan, role.products, kv_use)
    warpgroup.wait_group(0)
    release(shared.v, kv_use, plan.v_edge)


@cute.jit
def _last_product_and_next_scores(plan: cutlass.Constexpr, role: _Role, after: Place):
    """Add the last tile's P V, and leave the first S of the next query tile in flight."""
    shared = role.shared
    if cutlass.const_expr(plan.is_pingpong):
        _wait_turn(role.consumer)
    wait_full(shared.v, after.kv_use - 1, plan.v_edge)
    _issue_output(plan, role.products, after.kv_use - 1)
    wait_full(shared.q, after.q_use, plan.q_edge)
    wait_full(shared.k, after.kv_use, plan.k_edge)
    _issue_scores(plan, role.products, after.q_use, after.kv_use)
    if cutlass.const_expr(plan.is_pingpong):
        _pass_turn(plan, role.consumer)
    warpgroup.wait_group(1)
    release(shared.v, after.kv_use - 1, plan.v_edge)


def _issue_scores(
    plan, products: Products, q_use: cutlass.Int32, kv_use: cutlass.Int32
) -> None:
    q_stage = products.tSrQ[None, None, None, stage_of(q_use, plan.q_edge)]
    k_stage = products.tSrK[None, None, None, stage_of(kv_use, plan.k_edge)]
    issue(scores_mma(plan), products.acc_s, q_stage, k_stage, accumulate=False)


def _issue_output(plan, products: Products, kv_use: cutlass.Int32) -> None:
    v_stage = products.tOrV[None, None, None, stage_of(kv_use, plan.v_edge)]
    issue(output_mma(plan), products.acc_o, products.tOrP, v_stage, accumulate=True)


def _online_softmax(plan, context: StepContext) -> list[cutlass.Float32]:
    """Turn S into P in place with the running maximum; return the factors O must be scaled by."""
    state = context.state
    acc_s = context.products.acc_s
    scale_log2 = exponent_scale(plan, context.score.scalars)
    one = cutlass.Float32(1.0)
    factors = []
    for row in range(ROWS_PER_THREAD):
        is_new = state.row_max[row] == -cutlass.Float32.inf
        row_max = row_maximum(acc_s, row, state.row_max[row])
        reference = finite_reference(row_max) * scale_log2
        power = cute.math.exp2(state.reference[row] - reference, fastmath=True)
        factor = select(is_new, one, power)
        row_sum = exponentiate_row(acc_s, row, scale_log2, reference)
        row_sum = state.row_sum[row] * factor + row_sum
        state.row_max[row] = row_max
        state.reference[row] = reference
        state.row_sum[row] = row_sum
        factors.append(factor)
    return factors


def _plain_softmax(plan, context: StepContext, addends: list[Affine] | None) -> None:
    """Turn S into P in place with the reference that each row already has.

    With `addends`, S holds q.k alone and a row's scores are scale * S plus its addend.
    """
    state, scalars = context.state, context.score.scalars
    scale_log2 = exponent_scale(plan, scalars) if addends is None else scalars.scale_log2
    for row in range(ROWS_PER_THREAD):
        reference, slope = state.reference[row], None
        if addends is not None:
            reference = reference - addends[row].base * LOG2_E
            slope = addends[row].step * LOG2_E
        row_sum = exponentiate_row(context.products.acc_s, row, scale_log2, reference, slope)
        state.row_sum[row] = state.row_sum[row] + row_sum


def _store_p(products: Products) -> None:
    """Round P into the A operand of the second product; both hold a row's values in one order."""
    pairs = cute.make_tensor(
        cute.recast_ptr(products.tOrP.iterator, dtype=cutlass.Int32),
        cute.make_layout(cute.size(products.tOrP) // 2),
    )
    acc_s = products.acc_s
    for pair in range(cute.size(acc_s) // 2):
        pairs[pair] = pack_pair(acc_s[2 * pair], acc_s[2 * pair + 1], products.tOrP.element_type)


def _wait_turn(consumer: cutlass.Int32) -> None:
    """Wait until the warpgroup before this one has issued its products."""
    cute.arch.barrier(
        barrier_id=_TURNSTILE_BARRIER + consumer, number_of_threads=2 * WARPGROUP_THREADS
    )


def _pass_turn(plan, consumer: cutlass.Int32) -> None:
    """Let the next warpgroup issue its products."""
    cute.arch.barrier_arrive(
        barrier_id=_TURNSTILE_BARRIER + (consumer + 1) % plan.num_consumers,
        number_of_threads=2 * WARPGROUP_THREADS,
    )
