"""From q.k to the score that the softmax sees, for a thread that holds a whole row in order.

Lives here: scale, softcap, score_mod and masks on chunks of a row. It is the twin of
`device/score.py`, whose fragment is a wgmma accumulator's. Not here: the mods' arithmetic
(`device/mods.py`), limits by position (`device/masking.py`). Invariant: where nothing needs the
scaled score itself, the scale stays folded into the exponent and costs nothing.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fovea.kernels.device.kv_walk import BlockListTensors, Visit, Walk, partial_block
from fovea.kernels.device.masking import Band, RowLimits, inside, row_limits
from fovea.kernels.device.mod_affine import Affine
from fovea.kernels.device.mods import ModEvaluator, ModTable, Position
from fovea.kernels.device.packing import Row
from fovea.kernels.device.ptx import bit, hide_unless
from fovea.kernels.device.score import Scalars, TileKind, soft_cap
from fovea.kernels.device.values import select
from fovea.tiling.mask_bits import BLOCK, LANES

# Captured values that may wait in registers for a chunk of S; more would spill.
_PREFETCHED_REGISTERS = 32
# Captured values that may stay in registers for a whole query tile.
_HOISTED_REGISTERS = 16

_MODS = ("score_mod", "mask_mod", "block_mask_mod")


class ScoreContext(NamedTuple):
    """What turns a column of S into a position and a score, for one row of one query tile."""

    q_idx: cutlass.Int32
    head: cutlass.Int32
    walk: Walk
    band: Band
    scalars: Scalars
    mods: ModTable
    hoisted: tuple  # per mod, captured values that do not depend on the key; () if too many


class TileScores:
    """The scores of one KV tile in one row: mods and tests ready, values made chunk by chunk.

    Columns count from `first` on, where the thread's part of the tile begins.
    """

    def __init__(
        self, plan, context: ScoreContext, at: Visit, tile: TileKind, first: cutlass.Int32 | int
    ) -> None:
        self._plan = plan
        self._context = context
        self._first_column = at.n_idx * plan.tile_n + first
        self._is_full = at.is_partial ^ cutlass.Boolean(True)
        self._mods: dict[str, ModEvaluator | None] = {}
        for name, hoisted in zip(_MODS, context.hoisted, strict=True):
            evaluator = _evaluator(plan, context, name)
            if name == "block_mask_mod" and tile is TileKind.PLAIN:
                evaluator = None
            if evaluator is not None and hoisted:
                evaluator.use_hoisted([_position(context, 0, self._first_column)], hoisted)
            self._mods[name] = evaluator
        is_masked_by_position = tile is TileKind.MASKED and not plan.features.block_lists
        self._limits: RowLimits | None = None
        if tile is TileKind.ANY or is_masked_by_position:
            self._limits = row_limits(
                context.q_idx, self._first_column, context.band, plan.features
            )
        self._bits: tuple[cutlass.Int32, ...] = ()
        if tile is not TileKind.PLAIN:
            self._bits = _bits_of_part(plan, at, first, may_be_full=self._limits is not None)

    def prefetch(self, first: int, columns: int) -> None:
        """Start what columns need of captured tensors by key alone, before their S is there."""
        budget = _PREFETCHED_REGISTERS
        for evaluator in self._mods.values():
            if evaluator is None:
                continue
            needed = evaluator.loads_by_key * columns
            if needed > budget:
                continue
            budget -= needed
            for column in range(first, first + columns, 2):
                evaluator.prefetch((self._position(column), self._position(column + 1)))

    def addend(self) -> Affine | None:
        """Return what a score_mod adds to the row, natural units, where it is linear in the key.

        Such a sum costs one multiply-add for two columns, since it folds into the exponent.
        """
        score_mod = self._mods["score_mod"]
        if score_mod is None or self._mods["mask_mod"] is not None or self._plan.features.softcap:
            return None
        return score_mod.addend(self._position(0))

    def apply(self, values: list[cutlass.Float32], first: int) -> list[cutlass.Float32]:
        """Return the masked scores of the columns from `first` on, given q.k."""
        return [self._score(value, first + i) for i, value in enumerate(values)]

    def _score(self, score: cutlass.Float32, column: int) -> cutlass.Float32:
        features, scalars = self._plan.features, self._context.scalars
        position = self._position(column)
        if features.modifies_score:
            score = score * scalars.scale
        if features.softcap:
            score = soft_cap(score, scalars.softcap)
        score_mod = self._mods["score_mod"]
        if score_mod is not None:
            score = score_mod.score(score, position)
        visible = self._visible(position)
        return score if visible is None else hide_unless(visible, score)

    def _visible(self, position: Position) -> cutlass.Boolean | None:
        """Return the test of one column, None where there is nothing to test."""
        found: list[cutlass.Boolean] = []
        mask_mod, block_mask_mod = self._mods["mask_mod"], self._mods["block_mask_mod"]
        if mask_mod is not None:
            found.append(mask_mod.mask(position))
        if block_mask_mod is not None:
            test = block_mask_mod.mask(position)
            found.append(test | self._is_full if self._limits is not None else test)
        if self._bits:
            # `tiling/mask_bits.py` says which bit a key has.
            group, key = divmod(position.column_offset, 2 * LANES)
            found.append(bit(self._bits[key // 2], 2 * group + key % 2) != 0)
        if self._limits is not None:
            found.extend(inside(self._limits, position.column_offset))
        result: cutlass.Boolean | None = None
        for test in found:
            result = test if result is None else result & test
        return result

    def _position(self, column: int) -> Position:
        return _position(self._context, column, self._first_column)


def make_score_context(
    plan, row: Row, walk: Walk, band: Band, scalars: Scalars, mods: ModTable
) -> ScoreContext:
    """Return the context of one query row."""
    context = ScoreContext(row.q_idx, row.head, walk, band, scalars, mods, ())
    hoisted: list[tuple] = []
    budget = _HOISTED_REGISTERS
    for name in _MODS:
        evaluator = _evaluator(plan, context, name)
        is_hoisted = evaluator is not None and evaluator.loads_by_row <= budget
        budget -= evaluator.loads_by_row if is_hoisted else 0
        places = [_position(context, 0, cutlass.Int32(0))]
        hoisted.append(evaluator.hoist(places) if is_hoisted else ())
    return context._replace(hoisted=tuple(hoisted))


def start_bits(
    plan, lists: BlockListTensors | None, walk: Walk, visit: cutlass.Int32, q_idx: cutlass.Int32
) -> tuple[cutlass.Int32, ...]:
    """Return the bits of a row in the block of a visit, 16 bytes; () in plans without bits.

    In a full block they are those of some other block.
    """
    if not plan.features.block_bits:
        return ()
    words = cute.make_rmem_tensor(LANES, cutlass.Int32)
    block = partial_block(walk, visit, lists)
    cute.autovec_copy(lists.mBits[block, q_idx % BLOCK, None], words)
    return tuple(words[word] for word in range(LANES))


def _bits_of_part(
    plan, at: Visit, first: cutlass.Int32 | int, *, may_be_full: bool
) -> tuple[cutlass.Int32, ...]:
    """Return the bits of the columns from `first` on, which is a multiple of 8."""
    bits = at.bits
    if may_be_full:
        bits = tuple(select(at.is_partial, word, cutlass.Int32(-1)) for word in bits)
    tiles = BLOCK // plan.tile_n  # of a block
    if tiles == 1 and isinstance(first, int) and first == 0:
        return bits
    in_block = at.n_idx % tiles * plan.tile_n + first
    return tuple(word >> (in_block // LANES) for word in bits)


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


def _position(context: ScoreContext, column: int, first_column: cutlass.Int32) -> Position:
    """Return where a column of the tile lies."""
    return Position(
        b=context.walk.batch,
        h=context.head,
        q_idx=context.q_idx,
        first_kv_idx=first_column,
        column_offset=column,
        row=0,
        column=column,
    )
