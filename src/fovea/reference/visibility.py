"""Which keys a query sees: band, block lists and mask mods of one piece, tile by tile.

Lives here: design rule 2 as code. Not here: the integer formulas of the band
(`tiling/bounds.py`), the lists themselves (`tiling/block_lists.py`), scores of -inf
(`scores.py`). Invariant: a tile that is not visited holds no visible pair, and a tile without a
mask holds no hidden one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fovea.mods.evaluate import Positions, evaluate, is_checked
from fovea.mods.out_of_range import may_lack_values
from fovea.mods.trace import TracedMod
from fovea.problem import AttentionProblem
from fovea.reference.sequences import Piece
from fovea.tiling.bounds import Band, kv_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Query rows q_begin..q_end against keys kv_begin..kv_end, ends excluded."""

    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int


def positions_of(piece: Piece, tile: Tile) -> Positions:
    """Return the indices of one tile of a piece.

    Shapes:
        b (batch, 1, 1, 1), h (1, heads_q, 1, 1), q_idx (1, 1, M, 1), kv_idx (1, 1, 1, N); int64.
    """
    device = piece.q.device

    def span(begin: int, end: int) -> Tensor:
        return torch.arange(begin, end, dtype=torch.int64, device=device)

    return Positions(
        b=piece.batch_index,
        h=span(0, piece.heads_q).view(1, -1, 1, 1),
        q_idx=span(tile.q_begin, tile.q_end).view(1, 1, -1, 1),
        kv_idx=span(tile.kv_begin, tile.kv_end).view(1, 1, 1, -1),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockStates:
    """A BlockMask as a matrix of block states, and what the host may know of it.

    Shapes:
        states: (batch or 1, heads or 1, blocks_q, blocks_kv) int8: 0 unlisted, 1 partial, 2 full.
        lowest, highest: (blocks_q, blocks_kv) on the CPU, over batch and heads; None while a CUDA
            graph is captured, which forbids the transfer.
    """

    states: Tensor
    lowest: Tensor | None
    highest: Tensor | None
    block_q: int
    block_kv: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> "BlockStates | None":
        """Return the states of a problem's block lists; None where it has none."""
        lists = problem.block_lists
        if lists is None:
            return None
        states = lists.states()
        lowest = highest = None
        if not _is_capturing(states.device) and states.numel() > 0:
            lowest = states.amin(dim=(0, 1)).cpu()
            highest = states.amax(dim=(0, 1)).cpu()
        return cls(
            states=states,
            lowest=lowest,
            highest=highest,
            block_q=lists.block_q,
            block_kv=lists.block_kv,
        )

    def block_slices(self, tile: Tile) -> tuple[slice, slice]:
        """Return the block rows and columns that a tile touches."""
        return (
            slice(tile.q_begin // self.block_q, (tile.q_end - 1) // self.block_q + 1),
            slice(tile.kv_begin // self.block_kv, (tile.kv_end - 1) // self.block_kv + 1),
        )

    def is_empty(self, tile: Tile) -> bool:
        """Return whether no head of any sequence lists a block of this tile."""
        return self.highest is not None and int(self.highest[self.block_slices(tile)].max()) == 0

    def is_full(self, tile: Tile) -> bool:
        """Return whether every block of this tile is full for all heads and sequences."""
        return self.lowest is not None and int(self.lowest[self.block_slices(tile)].min()) == 2

    def lookup(self, tile: Tile, sequence: int | None) -> Tensor:
        """Return the state of each position, (batch or 1, heads or 1, M, N) int8."""
        states = self.states
        if sequence is not None and states.shape[0] > 1:
            states = states[sequence : sequence + 1]
        block_rows, block_columns = self.block_slices(tile)
        rows = torch.arange(tile.q_begin, tile.q_end, device=states.device) // self.block_q
        columns = torch.arange(tile.kv_begin, tile.kv_end, device=states.device) // self.block_kv
        part = states[:, :, block_rows, block_columns]
        part = part.index_select(2, rows - block_rows.start)
        return part.index_select(3, columns - block_columns.start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visibility:
    """Which pairs of one piece are visible, before scores of -inf are known."""

    piece: Piece
    band: Band
    mask_mod: TracedMod | None
    block_mask_mod: TracedMod | None
    blocks: BlockStates | None

    @classmethod
    def of(
        cls, problem: AttentionProblem, piece: Piece, blocks: BlockStates | None
    ) -> "Visibility":
        """Return the visibility of one piece; the diagonal goes by its used lengths."""
        return cls(
            piece=piece,
            band=Band.of(
                problem.causal,
                problem.window,
                seqlen_q=piece.seqlen_q,
                seqlen_kv=piece.seqlen_kv,
            ),
            mask_mod=problem.mask_mod,
            block_mask_mod=problem.block_mask_mod,
            blocks=blocks,
        )

    def tiles(self, q_begin: int, q_end: int, tile_n: int) -> Iterator[tuple[Tile, Tensor | None]]:
        """Yield (tile, hidden) for the KV tiles that rows q_begin..q_end have to visit, ascending.

        hidden is True where a pair is not visible, broadcastable to (batch, heads_q, M, N); None
        where all are visible.
        """
        piece = self.piece
        # A row chunk need not start at a multiple of its size, so it is tile 0 of a shifted band.
        shifted = Band(
            offset=cast(int, self.band.offset) + q_begin,
            left=self.band.left,
            right=self.band.right,
        )
        visited = kv_range(
            0,
            shifted,
            seqlen_q=q_end - q_begin,
            seqlen_kv=piece.seqlen_kv,
            tile_m=q_end - q_begin,
            tile_n=tile_n,
        )
        for index in range(cast(int, visited.first), cast(int, visited.end)):
            tile = Tile(
                q_begin=q_begin,
                q_end=q_end,
                kv_begin=index * tile_n,
                kv_end=min((index + 1) * tile_n, piece.seqlen_kv),
            )
            if self.blocks is not None and self.blocks.is_empty(tile):
                continue
            is_inside = cast(int, visited.full_begin) <= index < cast(int, visited.full_end)
            visible = self._visible(tile, needs_band=not is_inside)
            if visible is None:
                yield tile, None
            elif visible.is_cuda or bool(visible.any()):
                # On CUDA the test would wait for the device; a hidden tile adds exactly nothing.
                yield tile, visible.logical_not()

    def _visible(self, tile: Tile, *, needs_band: bool) -> Tensor | None:
        """Return which pairs of a tile are visible, or None when all are."""
        indices = positions_of(self.piece, tile)
        visible: Tensor | None = None
        if needs_band:
            for condition in self._band_conditions(indices):
                visible = _both(visible, condition)
        state: Tensor | None = None
        if self.blocks is not None and not self.blocks.is_full(tile):
            state = self.blocks.lookup(tile, self.piece.sequence)
            visible = _both(visible, state > 0)
        # The user's functions come last, so that they are checked on what is left alone.
        if state is not None and self.block_mask_mod is not None:
            is_partial = _both(visible, state == 1)
            visible = _both(
                visible, (state == 2) | mask_of(self.block_mask_mod, indices, is_partial)
            )
        if self.mask_mod is not None:
            visible = _both(visible, mask_of(self.mask_mod, indices, visible))
        return visible

    def _band_conditions(self, indices: Positions) -> list[Tensor]:
        diagonal = indices.q_idx + self.band.offset
        conditions: list[Tensor] = []
        if self.band.left is not None:
            conditions.append(indices.kv_idx >= diagonal - self.band.left)
        if self.band.right is not None:
            conditions.append(indices.kv_idx <= diagonal + self.band.right)
        return conditions


def _both(visible: Tensor | None, condition: Tensor) -> Tensor:
    return condition if visible is None else visible & condition


def mask_of(mod: TracedMod, indices: Positions, candidates: Tensor | None) -> Tensor:
    """Return a mask_mod's value on one tile, broadcastable to (batch, heads_q, M, N).

    Args:
        candidates: pairs that nothing else hides; None = all of them.

    Raises:
        GatherError: a candidate gathers out of range, where that is checked.
    """
    check: Tensor | None = None
    if is_checked(indices.q_idx) and may_lack_values(mod.graph):
        everywhere = torch.ones((), dtype=torch.bool, device=indices.q_idx.device)
        check = everywhere if candidates is None else candidates
    return evaluate(
        mod.graph,
        indices,
        captures=mod.captures,
        scalars=mod.scalars,
        check=check,
        source=mod.source,
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
