"""From q.k to the score that the softmax sees: scale, softcap, score_mod, then masks.

Lives here: the order of these steps (docs/semantics.md, rule 1) on a fragment of registers. Not
here: the mods' arithmetic (`mods.py`), limits by position (`masking.py`). Invariant: where nothing
needs the scaled score itself, the scale stays folded into the exponent and costs nothing.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import Visit, Walk
from fovea.kernels.device.masking import Band, column_of_register, mask_row
from fovea.kernels.device.mods import ModEvaluator, ModTable, Position
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    columns_per_thread,
    register_idx,
)
from fovea.kernels.device.values import select
from fovea.plan.numerics import LOG2_E
from fovea.plan.roles import WARP_SIZE

_LOADS_IN_FLIGHT = 16  # columns of a row whose captured values may be on their way at once


class Scalars(NamedTuple):
    """Run-time numbers of the score; `scale_log2` is scale * log2(e)."""

    scale: cutlass.Float32
    scale_log2: cutlass.Float32
    softcap: cutlass.Float32


class ScoreContext(NamedTuple):
    """What turns a register of S into a position and a score, for one query tile of one thread."""

    q_idx: cutlass.Int32  # this thread's first row; its second is 8 below
    lane_column: cutlass.Int32  # 2 * (lane % 4)
    walk: Walk
    band: Band
    scalars: Scalars
    mods: ModTable


def make_score_context(
    first_row: cutlass.Int32,
    thread: cutlass.Int32,
    walk: Walk,
    band: Band,
    scalars: Scalars,
    mods: ModTable,
) -> ScoreContext:
    """Return the context of a warpgroup whose rows start at `first_row`."""
    lane = thread % WARP_SIZE
    return ScoreContext(
        q_idx=first_row + 16 * (thread // WARP_SIZE) + lane // 4,
        lane_column=2 * (lane % 4),
        walk=walk,
        band=band,
        scalars=scalars,
        mods=mods,
    )


def exponent_scale(plan, scalars: Scalars) -> cutlass.Float32:
    """Return what a register of S is multiplied by to become a power of two."""
    return cutlass.Float32(LOG2_E) if plan.features.modifies_score else scalars.scale_log2


@cute.jit
def apply_score(
    plan: cutlass.Constexpr,
    acc: cute.Tensor,
    context: ScoreContext,
    at: Visit,
    masked: cutlass.Constexpr,
):
    """Turn q.k registers of one KV tile into masked scores in place."""
    features = plan.features
    first_column = at.n_idx * plan.tile_n + context.lane_column
    if cutlass.const_expr(features.modifies_score):
        _modify(plan, acc, context, first_column)
    if cutlass.const_expr(features.mask_mod is not None):
        _apply_mask_mod(plan, acc, context, first_column, "mask_mod")
    if cutlass.const_expr(masked):
        if cutlass.const_expr(features.block_mask_mod is not None):
            if at.is_partial:
                _apply_mask_mod(plan, acc, context, first_column, "block_mask_mod")
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            q_idx = context.q_idx + 8 * row
            mask_row(acc, row, q_idx, first_column, context.band, features)


def _modify(
    plan,
    acc: cute.Tensor,
    context: ScoreContext,
    first_column: cutlass.Int32,
) -> None:
    """Apply scale, softcap and score_mod to every register."""
    features = plan.features
    evaluator = None
    if features.score_mod is not None:
        evaluator = ModEvaluator(
            features.score_mod, context.mods.score_mod, wide_integers=features.wide_integers
        )
    # Columns outside: what depends on the column alone lives for two registers, not for all.
    for column in range(columns_per_thread(acc)):
        for row in range(ROWS_PER_THREAD):
            idx = register_idx(row, column)
            score = acc[idx] * context.scalars.scale
            if features.softcap:
                score = soft_cap(score, context.scalars.softcap)
            if evaluator is not None:
                position = _position(context, row, column, first_column)
                score = evaluator.score(score, position)
            acc[idx] = score


def _apply_mask_mod(
    plan,
    acc: cute.Tensor,
    context: ScoreContext,
    first_column: cutlass.Int32,
    name: str,
) -> None:
    """Set registers that a mask_mod hides to -inf."""
    evaluator = ModEvaluator(
        getattr(plan.features, name),
        getattr(context.mods, name),
        wide_integers=plan.features.wide_integers,
    )
    minus_inf = cutlass.Float32(-cutlass.Float32.inf)
    for column in range(columns_per_thread(acc)):
        if column % _LOADS_IN_FLIGHT == 0:
            # Keeps the compiler from starting every load of captured tensors at once, and spilling.
            cute.arch.sync_warp()
        for row in range(ROWS_PER_THREAD):
            idx = register_idx(row, column)
            visible = evaluator.mask(_position(context, row, column, first_column))
            acc[idx] = select(visible, acc[idx], minus_inf)


def _position(
    context: ScoreContext, row: int, column: int, first_column: cutlass.Int32
) -> Position:
    """Return where a register lies."""
    return Position(
        b=context.walk.batch,
        h=context.walk.head,
        q_idx=context.q_idx + 8 * row,
        first_kv_idx=first_column,
        column_offset=column_of_register(column),
        row=row,
        column=column,
    )


def soft_cap(score: cutlass.Float32, cap: cutlass.Float32) -> cutlass.Float32:
    """Return cap * tanh(score / cap).

    tanh(x) = 1 - 2 / (1 + e^(2x)): the hardware's tanh is only good to 2^-11, which at a cap of 50
    would be an error of 2 % in the probability.
    """
    power = cute.math.exp2(score * ((2.0 * LOG2_E) / cap), fastmath=True)
    return cap - (cap + cap) * cute.arch.rcp_approx(power + 1.0)
