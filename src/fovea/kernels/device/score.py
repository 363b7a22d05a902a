"""From q.k to the score that the softmax sees: scale, softcap, score_mod, then masks.

Lives here: the order of these steps (docs/semantics.md, rule 1) on a fragment of registers. Not
here: the mods' arithmetic (`mods.py`), limits by position (`masking.py`). Invariant: where nothing
needs the scaled score itself, the scale stays folded into the exponent and costs nothing.
"""

import itertools
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.key_ranges import (
    KeyRangeTensors,
    RowRange,
    narrowed_limits,
    row_range,
)
from fovea.kernels.device.kv_walk import BlockListTensors, Visit, Walk
from fovea.kernels.device.masking import Band, RowLimits, inside, row_limits
from fovea.kernels.device.mod_affine import Affine
from fovea.kernels.device.mods import ModEvaluator, ModTable, Position
from fovea.kernels.device.packing import Row, packed_row
from fovea.kernels.device.polynomials import polynomial, tanh_factor
from fovea.kernels.device.ptx import bit, bits_of, hide_unless
from fovea.kernels.device.softmax import (
    ROWS_PER_THREAD,
    column_of_register,
    columns_per_thread,
    register_idx,
    row_in_warpgroup,
)
from fovea.kernels.device.values import select
from fovea.plan.numerics import CAP_COEFFICIENTS, CAP_LIMIT, LOG2_E, TANH_LARGEST_SQUARE
from fovea.tiling.mask_bits import BLOCK, LANES

# Captured values that may wait in registers for S; more would spill.
_PREFETCHED_REGISTERS = 32
# Captured values that may stay in registers for a whole query tile.
_HOISTED_REGISTERS = 16


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
    packed: tuple[Row, ...]  # this thread's rows where they are packed, else ()
    lists: BlockListTensors | None  # with bits
    ranges: tuple[RowRange, ...]  # the keys of this thread's rows, () where positions say all
    hoisted: tuple  # per mod, captured values that do not depend on the key; () if too many

    def row(self, row: int) -> Row:
        """Return what a row of this thread is about."""
        if self.packed:
            return self.packed[row]
        return Row(self.q_idx + 8 * row, self.walk.head)


def make_score_context(
    plan,
    first_row: cutlass.Int32,
    thread: cutlass.Int32,
    walk: Walk,
    band: Band,
    scalars: Scalars,
    mods: ModTable,
    group_size: cutlass.Int32,
) -> ScoreContext:
    """Return the context of a warpgroup whose rows start at `first_row`."""
    packed: tuple[Row, ...] = ()
    if plan.packs_heads:
        packed = tuple(
            packed_row(first_row + row_in_warpgroup(thread, row), walk.head, group_size)
            for row in range(ROWS_PER_THREAD)
        )
    context = ScoreContext(
        q_idx=first_row + row_in_warpgroup(thread, 0),
        lane_column=2 * (thread % 4),
        walk=walk,
        band=band,
        scalars=scalars,
        mods=mods,
        packed=packed,
        lists=None,
        ranges=(),
        hoisted=(),
    )
    hoisted: list[tuple] = []
    budget = _HOISTED_REGISTERS
    for name in ModTable._fields:
        evaluator = _evaluator(plan, context, name)
        needed = 0 if evaluator is None else evaluator.loads_by_row * ROWS_PER_THREAD
        is_hoisted = evaluator is not None and needed <= budget
        budget -= needed if is_hoisted else 0
        hoisted.append(evaluator.hoist(_rows(context)) if is_hoisted else ())
    return context._replace(hoisted=tuple(hoisted))


def with_key_ranges(context: ScoreContext, ranges: KeyRangeTensors) -> ScoreContext:
    """Return a context that knows the range of keys of each row."""
    walk = context.walk
    return context._replace(
        ranges=tuple(
            row_range(ranges, walk.batch, walk.head, context.row(row).q_idx)
            for row in range(ROWS_PER_THREAD)
        )
    )


def _rows(context: ScoreContext, first_column: cutlass.Int32 | int = 0) -> list[Position]:
    """Return the positions of this thread's rows, at the first key or at no particular one."""
    key = cutlass.Int32(first_column)
    return [_position(context, row, 0, key) for row in range(ROWS_PER_THREAD)]


def _evaluator(plan, context: ScoreContext, name: str) -> ModEvaluator | None:
    """Return the evaluator of a mod, None where the variant has no such mod."""
    graph = getattr(plan.features, name)
    if graph is None:
        return None
    return ModEvaluator(
        graph,
        getattr(context.mods, name),
        wide_integers=plan.features.wide_integers,
        packs_heads=plan.packs_heads,
    )


def exponent_scale(plan, scalars: Scalars) -> cutlass.Float32:
    """Return what a register of S is multiplied by to become a power of two."""
    return cutlass.Float32(LOG2_E) if plan.features.modifies_score else scalars.scale_log2


class SmallCap(NamedTuple):
    """What turns q.k into exponents below a soft cap that small scores do not reach.

    The largest square of q.k of each row is kept, by its bits: numbers of one sign are in the order
    of their bits, and of those the hardware finds the maximum of three at once.
    """

    reference: cute.Tensor  # log2 units
    peak: cute.Tensor


class TileKind(Enum):
    """What may hide positions of a KV tile: the code that a step is compiled with."""

    PLAIN = "plain"  # nothing but mask_mod
    MASKED = "masked"  # in a variant with block lists the block's mask_mod, else band and lengths
    ANY = "any"  # all of them; the block's mask_mod where the block is partial


class TileMods(NamedTuple):
    """The mods of a variant, ready for the registers of one KV tile; None where there is none."""

    score_mod: ModEvaluator | None
    mask_mod: ModEvaluator | None
    block_mask_mod: ModEvaluator | None
    bits: tuple[cutlass.Int32, ...]  # of each row in a partial block, () without bits
    first_column: cutlass.Int32  # the key of this thread's first register
    is_full: cutlass.Boolean  # the block mask's mask_mod does not apply


def prepare_tile(
    plan, acc: cute.Tensor, context: ScoreContext, at: Visit, tile: TileKind
) -> TileMods:
    """Start what does not wait for S: loads of captured tensors that depend on the key alone.

    Called while the product that makes S is in flight, so their latency hides behind it.
    """
    evaluators: dict[str, ModEvaluator | None] = {}
    first_column = at.n_idx * plan.tile_n + context.lane_column
    budget = _PREFETCHED_REGISTERS
    for name, hoisted in zip(ModTable._fields, context.hoisted, strict=True):
        evaluator = _evaluator(plan, context, name)
        if name == "block_mask_mod" and tile is TileKind.PLAIN:
            evaluator = None
        evaluators[name] = evaluator
        if evaluator is None:
            continue
        if hoisted:
            evaluator.use_hoisted(_rows(context), hoisted)
        needed = evaluator.loads_by_key * columns_per_thread(acc)
        if needed <= budget:
            budget -= needed
            for column in range(0, columns_per_thread(acc), 2):
                pair = (column, column + 1)
                evaluator.prefetch(tuple(_position(context, 0, c, first_column) for c in pair))
    is_full = at.is_partial ^ cutlass.Boolean(True)
    bits = ()
    if plan.features.block_bits and tile is not TileKind.PLAIN:
        bits = tuple(_bits_of_row(plan, context, at, row) for row in range(ROWS_PER_THREAD))
    return TileMods(**evaluators, bits=bits, first_column=first_column, is_full=is_full)


def _bits_of_row(plan, context: ScoreContext, at: Visit, row: int) -> cutlass.Int32:
    """Return whether this thread's keys of a row are visible, a bit for every register."""
    mBits = context.lists.mBits
    row_in_block = context.row(row).q_idx % BLOCK
    word = mBits[at.partial, row_in_block, context.lane_column // 2]
    tiles = BLOCK // plan.tile_n  # of a block
    return word >> (at.n_idx % tiles * (BLOCK // LANES // tiles))


def row_addends(plan, context: ScoreContext, mods: TileMods) -> list[Affine] | None:
    """Return what a score_mod adds to each row of a plain tile, natural units, else None.

    A sum that is linear in the key costs one multiply-add a register, since it folds into the
    exponent; as a score it would cost four.
    """
    features = plan.features
    if mods.score_mod is None or mods.mask_mod is not None or features.softcap:
        return None
    lines = [mods.score_mod.addend(position) for position in _rows(context, mods.first_column)]
    return None if any(line is None for line in lines) else lines


def apply_score(
    plan,
    acc: cute.Tensor,
    context: ScoreContext,
    mods: TileMods,
    tile: TileKind,
    small: SmallCap | None = None,
) -> None:
    """Turn q.k registers of one KV tile into masked scores in place; with `small`, into exponents.

    The soft cap is then that of small scores.
    """
    features = plan.features
    is_masked_by_position = tile is TileKind.MASKED and not features.block_lists
    has_limits = tile is TileKind.ANY or is_masked_by_position
    tests = _Tests(plan, context, mods, has_limits=has_limits)
    terms = None if small is None else small_cap_terms(context.scalars)
    for row, column in _places(acc, mods):
        idx = register_idx(row, column)
        score = acc[idx]
        position = _position(context, row, column, mods.first_column)
        if terms is not None:
            square = score * score
            small.peak[row] = cutlass.max(small.peak[row], bits_of(square))
            score = cute.math.fma(score, polynomial(terms, square), -small.reference[row])
        elif features.modifies_score:
            score = score * context.scalars.scale
            if features.softcap:
                score = soft_cap(score, context.scalars.softcap)
            if mods.score_mod is not None:
                score = mods.score_mod.score(score, position)
        visible = tests.visible(position)
        acc[idx] = score if visible is None else hide_unless(visible, score)


def _places(acc: cute.Tensor, mods: TileMods) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of the registers in the order in which they are worked on.

    What depends on the column alone then lives for two registers, not for all. But bits are taken
    from a word in turn: then ptxas turns eight of them into predicates by one instruction.
    """
    rows, columns = range(ROWS_PER_THREAD), range(columns_per_thread(acc))
    if mods.bits and mods.score_mod is None:
        yield from itertools.product(rows, columns)
    else:
        yield from ((row, column) for column in columns for row in rows)


class _Tests:
    """Whether a register's position is visible: user masks and limits by position, as one test."""

    def __init__(self, plan, context: ScoreContext, mods: TileMods, *, has_limits: bool) -> None:
        self._mods = mods
        self._limits: list[RowLimits] | None = None
        if has_limits:
            self._limits = [
                row_limits(context.row(row).q_idx, mods.first_column, context.band, plan.features)
                for row in range(ROWS_PER_THREAD)
            ]
            for row, own in enumerate(context.ranges):
                limits = narrowed_limits(self._limits[row], own, mods.first_column)
                self._limits[row] = limits

    def visible(self, position: Position) -> cutlass.Boolean | None:
        """Return the test of one register, None where there is nothing to test."""
        mods = self._mods
        found: list[cutlass.Boolean] = []
        if mods.mask_mod is not None:
            found.append(mods.mask_mod.mask(position))
        if mods.block_mask_mod is not None:
            test = mods.block_mask_mod.mask(position)
            found.append(test | mods.is_full if self._limits is not None else test)
        if mods.bits:
            test = bit(mods.bits[position.row], position.column) != 0
            found.append(test | mods.is_full if self._limits is not None else test)
        if self._limits is not None:
            found.extend(inside(self._limits[position.row], position.column_offset))
        result: cutlass.Boolean | None = None
        for test in found:
            result = test if result is None else result & test
        return result


def _position(
    context: ScoreContext, row: int, column: int, first_column: cutlass.Int32
) -> Position:
    """Return where a register lies."""
    place = context.row(row)
    return Position(
        b=context.walk.batch,
        h=place.head,
        q_idx=place.q_idx,
        first_kv_idx=first_column,
        column_offset=column_of_register(column),
        row=row,
        column=column,
    )


def soft_cap(score: cutlass.Float32, cap: cutlass.Float32) -> cutlass.Float32:
    """Return cap * tanh(score / cap).

    tanh(x) = 1 - 2 / (1 + e^(2x)): the hardware's tanh is only good to 2^-11, which at a cap of 50
    would be an error of 2 % in the probability. Where x is small, the error of that difference
    counts `cap` times, so a polynomial has its place.
    """
    ratio = score * cute.arch.rcp_approx(cap)
    square = ratio * ratio
    power = cute.math.exp2(score * ((2.0 * LOG2_E) / cap), fastmath=True)
    large = cap - (cap + cap) * cute.arch.rcp_approx(power + 1.0)
    return select(square <= TANH_LARGEST_SQUARE, score * tanh_factor(square), large)


def small_cap_terms(scalars: Scalars) -> list[cutlass.Float32]:
    """Return t0, t1, ... of cap * tanh(score / cap) = x (t0 + t1 x^2 + ...), x being q.k.

    In log2 units. With scale and cap in the coefficients an exponent takes six multiplications and
    additions. Good where |score| <= CAP_LIMIT * cap.
    """
    ratio = scalars.scale * cute.arch.rcp_approx(scalars.softcap * CAP_LIMIT)
    power = scalars.scale_log2
    terms = [power]
    for coefficient in CAP_COEFFICIENTS:
        power = power * (ratio * ratio)
        terms.append(power * coefficient)
    return terms


def is_beyond_small_cap(peak: cutlass.Int32, scalars: Scalars) -> cutlass.Boolean:
    """Return whether the largest square of q.k is of a score that the terms are not good for."""
    largest = scalars.softcap * CAP_LIMIT * cute.arch.rcp_approx(scalars.scale)
    return peak > bits_of(largest * largest)
