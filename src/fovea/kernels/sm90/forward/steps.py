"""One KV tile of a query tile: its products, its softmax, and their overlap.

Lives here: the steps of the main loop. Each issues S = Q K^T of its tile, then O += P V of the one
before, and works on S while that second product runs (FlashAttention-3's intra-warpgroup overlap,
arXiv 2407.08608 section 3.2). Not here: the loop (`compute.py`), the softmax on a row (`rows.py`).
Invariant: between a product's issue and its wait no branch says which product it is; the compiler
would give up the overlap.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from fovea.kernels.device.kv_walk import Visit, Walk, is_cut, unpack_visit
from fovea.kernels.device.pipeline import release, stage_of, wait_full
from fovea.kernels.device.ptx import opaque
from fovea.kernels.device.score import (
    ScoreContext,
    SmallCap,
    TileKind,
    apply_score,
    exponent_scale,
    prepare_tile,
    row_addends,
)
from fovea.kernels.device.softmax import ROWS_PER_THREAD, scale_row
from fovea.kernels.sm90.forward.arguments import SharedTiles
from fovea.kernels.sm90.forward.products import Products, issue_output, issue_scores, store_p
from fovea.kernels.sm90.forward.rows import (
    RowState,
    default_reference,
    online_softmax,
    plain_softmax,
)
from fovea.kernels.sm90.forward.settle import settle
from fovea.kernels.sm90.forward.turnstile import pass_turn, wait_turn


class StepContext(NamedTuple):
    """What stays the same over the KV tiles of one query tile."""

    score: ScoreContext
    state: RowState
    products: Products
    shared: SharedTiles
    q_use: cutlass.Int32


def wants_any(plan, at: Visit, is_redo: cutlass.Int32) -> cutlass.Boolean | bool:
    """Return whether a tile gets the step that fits every tile and moves the reference.

    A Python bool where the variant never or always does.
    """
    if not plan.is_optimistic:
        # Without limits only the tile at the end of the keys is cut, and the first step had that.
        return (at.is_cut | at.is_partial) if plan.is_banded else False
    if plan.is_banded and (plan.features.block_lists or not plan.masks_later_tiles):
        return (is_redo != 0) | at.is_cut
    return is_redo != 0


def wants_masked(plan, at: Visit) -> cutlass.Boolean | bool:
    """Return whether a tile gets the masked step, which leaves the reference alone."""
    if not plan.masks_later_tiles:
        return False
    return at.is_partial if plan.features.block_lists else at.is_cut


def visit_at(
    plan, shared: SharedTiles, walk: Walk, visit: cutlass.Int32, use: cutlass.Int32
) -> Visit:
    """Return the visit whose K lies in the stage of its use, already waited for."""
    if plan.features.block_lists:
        stage = stage_of(use, plan.k_edge)
        at = unpack_visit(shared.visits[stage])
        return at._replace(partial=shared.partials[stage]) if plan.features.block_bits else at
    n_idx = walk.range_end - 1 - visit
    return Visit(n_idx, cutlass.Boolean(False), is_cut(walk, n_idx))


@cute.jit
def first_step(
    plan: cutlass.Constexpr,
    context: StepContext,
    walk: Walk,
    use: cutlass.Int32,
    is_redo: cutlass.Int32,
):
    """Do the softmax of the first KV tile, masked and online; its S is in flight."""
    at = visit_at(plan, context.shared, walk, cutlass.Int32(0), use)
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
    online_softmax(plan, context.products.acc_s, context.state, context.score.scalars)
    if cutlass.const_expr(plan.is_optimistic and not plan.settles_sums):
        default_reference(context.state, is_redo)
    store_p(context.products)


@cute.jit
def step(
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
    wait_turn(plan, consumer)
    issue_scores(plan, products, context.q_use, use)
    wait_full(shared.v, use - 1, plan.v_edge)
    issue_output(plan, products, use - 1)
    pass_turn(plan, consumer)
    mods = prepare_tile(plan, products.acc_s, context.score, at, tile)
    warpgroup.wait_group(1)
    release(shared.k, use, plan.k_edge)
    addends = None
    if cutlass.const_expr(tile is TileKind.PLAIN and not online):
        addends = row_addends(plan, context.score, mods)
    if cutlass.const_expr(addends is None):
        small = None
        if cutlass.const_expr(plan.caps_by_polynomial and not online):
            small = SmallCap(context.state.reference, context.state.peak)
        apply_score(plan, products.acc_s, context.score, mods, tile, small)
    if cutlass.const_expr(online):
        factors = online_softmax(plan, context.products.acc_s, context.state, context.score.scalars)
        warpgroup.wait_group(0)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            scale_row(products.acc_o, row, factors[row])
    else:
        plain_softmax(plan, context.products.acc_s, context.state, context.score.scalars, addends)
        warpgroup.wait_group(0)
        if cutlass.const_expr(plan.settles_sums):
            settle(products, context.state, exponent_scale(plan, context.score.scalars))
    release(shared.v, use - 1, plan.v_edge)
    store_p(products)


class Span(NamedTuple):
    """Where a warpgroup's visits of a query tile end: the last use, and how many it skips then."""

    last: cutlass.Int32
    behind: cutlass.Int32


class Start(NamedTuple):
    """Where those of the next query tile begin: its uses, and how many are skipped before."""

    q_use: cutlass.Int32
    kv_use: cutlass.Int32
    before: cutlass.Int32


@cute.jit
def skip_k(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    begin: cutlass.Int32,
    end: cutlass.Int32,
    consumer: cutlass.Int32,
):
    """Give back K of the uses [begin, end), hidden from this warpgroup, and its turns.

    Where those may be more than the ring has stages, V of all but the last is given back as well:
    otherwise the loads of K would end behind those of V.
    """
    if cutlass.const_expr(plan.skips_hidden):
        for use in cutlass.range(begin, end, unroll=1):
            wait_full(shared.k, use, plan.k_edge)
            release(shared.k, use, plan.k_edge)
            wait_turn(plan, consumer)
            pass_turn(plan, consumer)
            if cutlass.const_expr(plan.skips_far):
                if use > begin:
                    wait_full(shared.v, use - 1, plan.v_edge)
                    release(shared.v, use - 1, plan.v_edge)


@cute.jit
def skip_v(plan: cutlass.Constexpr, shared: SharedTiles, begin: cutlass.Int32, end: cutlass.Int32):
    """Give back V of the uses [begin, end), whose K was skipped, as far as `skip_k` did not."""
    if cutlass.const_expr(plan.skips_far):
        begin = cutlass.max(begin, end - 1)
    if cutlass.const_expr(plan.skips_hidden):
        for use in cutlass.range(begin, end, unroll=1):
            wait_full(shared.v, use, plan.v_edge)
            release(shared.v, use, plan.v_edge)


@cute.jit
def last_product(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    products: Products,
    end: Span,
    consumer: cutlass.Int32,
):
    """Add the last tile's P V."""
    wait_full(shared.v, end.last, plan.v_edge)
    issue_output(plan, products, end.last)
    warpgroup.wait_group(0)
    release(shared.v, end.last, plan.v_edge)
    skip_k(plan, shared, end.last + 1, end.last + 1 + end.behind, consumer)
    skip_v(plan, shared, end.last + 1, end.last + 1 + end.behind)


@cute.jit
def next_scores(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    products: Products,
    start: Start,
    consumer: cutlass.Int32,
):
    """Leave the first S of the next query tile in flight."""
    skip_k(plan, shared, start.kv_use - start.before, start.kv_use, consumer)
    wait_full(shared.q, start.q_use, plan.q_edge)
    wait_full(shared.k, start.kv_use, plan.k_edge)
    issue_scores(plan, products, start.q_use, start.kv_use)


@cute.jit
def last_product_and_next_scores(
    plan: cutlass.Constexpr,
    shared: SharedTiles,
    products: Products,
    end: Span,
    start: Start,
    consumer: cutlass.Int32,
):
    """Add the last tile's P V, and leave the first S of the next query tile in flight."""
    wait_turn(plan, consumer)
    wait_full(shared.v, end.last, plan.v_edge)
    issue_output(plan, products, end.last)
    if cutlass.const_expr(plan.skips_hidden):
        pass_turn(plan, consumer)
        skip_k(plan, shared, end.last + 1, end.last + 1 + end.behind, consumer)
        next_scores(plan, shared, products, start, consumer)
    else:
        next_scores(plan, shared, products, start, consumer)
        pass_turn(plan, consumer)
    warpgroup.wait_group(1)
    release(shared.v, end.last, plan.v_edge)
    skip_v(plan, shared, end.last + 1, end.last + 1 + end.behind)
