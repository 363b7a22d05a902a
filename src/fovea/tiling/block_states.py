"""The state of every block of a mask, found from coarse to fine.

Lives here: the descent over a pyramid of regions. A region whose interval analysis says "nothing
visible" or "all visible" settles all its blocks; an undecided one is cut into 8 x 8; an undecided
block is sampled, and only if all samples agree is it evaluated whole, in batches of bounded size.
Not here: what a mask means (`mods/`), index lists (`block_lists.py`). Invariant: memory is one
byte per block plus a constant; no tensor over query x KV positions exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fovea.tiling.progress import Progress

EMPTY, PARTIAL, FULL, UNDECIDED = 0, 1, 2, 3

# Children of an undecided region, per axis.
_FAN_OUT = 8
# Positions evaluated at a time: small enough that int64 temporaries stay in the cache of a core.
_BATCH_POSITIONS_CPU = 1 << 18
_BATCH_POSITIONS_ACCELERATOR = 1 << 24
# Regions classified at a time, and blocks scanned for undecided ones at a time.
_BATCH_REGIONS = 1 << 16
_BATCH_BLOCKS = 1 << 20
# Positions per axis at which an undecided block is tried before it is evaluated whole. One visible
# and one hidden sample prove "partial", which is what most undecided blocks are.
_SAMPLES = (4, 16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """Boxes of the index space, inclusive at both ends.

    Shapes:
        every field: (n,) int64 on the device of the work.
    """

    b: Tensor
    h: Tensor
    q_first: Tensor
    q_last: Tensor
    kv_first: Tensor
    kv_last: Tensor


class MaskProgram(Protocol):
    """A mask as the descent needs it; `width` is how many values one position needs at once."""

    @property
    def width(self) -> int: ...

    def classify(self, boxes: Boxes) -> Tensor:
        """Return (n,) int8: EMPTY or FULL where proved for the whole box, else UNDECIDED."""
        ...

    def evaluate(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the mask at broadcast positions, bool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """Sizes of the problem; batch and heads count only where the mask depends on them."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_kv: int
    block_q: int
    block_kv: int
    device: torch.device

    def blocks(self, level: int) -> tuple[int, int]:
        """Return (rows, columns) of regions at `level`; a region is 8**level blocks a side."""
        side = _FAN_OUT**level
        return (
            -(-self.seqlen_q // (self.block_q * side)),
            -(-self.seqlen_kv // (self.block_kv * side)),
        )

    @property
    def top_level(self) -> int:
        """Return the lowest level with at most 8 regions a side."""
        level = 0
        while max(self.blocks(level)) > _FAN_OUT:
            level += 1
        return level

    def boxes(self, regions: Tensor, level: int) -> Boxes:
        """Return the positions of regions (n, 4) = (b, h, row, column), cut to the lengths."""
        side_q = self.block_q * _FAN_OUT**level
        side_kv = self.block_kv * _FAN_OUT**level
        b, h, row, column = regions.unbind(1)
        return Boxes(
            b=b,
            h=h,
            q_first=row * side_q,
            q_last=(row * side_q + (side_q - 1)).clamp(max=self.seqlen_q - 1),
            kv_first=column * side_kv,
            kv_last=(column * side_kv + (side_kv - 1)).clamp(max=self.seqlen_kv - 1),
        )


def block_states(program: MaskProgram, grid: BlockGrid) -> Tensor:
    """Return (batch, heads, blocks_q, blocks_kv) int8: EMPTY, PARTIAL or FULL.

    A block cut by the end of a sequence is never FULL, as in torch: its missing positions are
    hidden.
    """
    level = grid.top_level
    rows, columns = grid.blocks(level)
    shape = (grid.batch, grid.heads, rows, columns)
    states = torch.full(shape, UNDECIDED, dtype=torch.int8, device=grid.device)
    if states.numel() == 0:
        return states
    regions = torch.cartesian_prod(*(torch.arange(n, device=grid.device) for n in shape))
    _settle(program, grid, states, regions, level)
    while level > 0:
        parents = (states == UNDECIDED).nonzero()
        level -= 1
        states = _refine(states, grid.blocks(level))
        for regions in _children(parents, grid.blocks(level)):
            _settle(program, grid, states, regions, level)
    _evaluate_undecided(program, grid, states)
    if grid.seqlen_q % grid.block_q:
        states[:, :, -1].clamp_(max=PARTIAL)
    if grid.seqlen_kv % grid.block_kv:
        states[:, :, :, -1].clamp_(max=PARTIAL)
    return states


def _settle(
    program: MaskProgram, grid: BlockGrid, states: Tensor, regions: Tensor, level: int
) -> None:
    """Write what interval analysis says of `regions` into `states`."""
    for part in pieces(regions, _BATCH_REGIONS):
        states[tuple(part.unbind(1))] = program.classify(grid.boxes(part, level))


def _refine(states: Tensor, size: tuple[int, int]) -> Tensor:
    """Return states of the next finer level, each region's copied to its children."""
    batch, heads, rows, columns = states.shape
    spread = states[:, :, :, None, :, None].expand(-1, -1, -1, _FAN_OUT, -1, _FAN_OUT)
    fine = spread.reshape(batch, heads, rows * _FAN_OUT, columns * _FAN_OUT)
    return fine[:, :, : size[0], : size[1]].contiguous()


def _children(parents: Tensor, size: tuple[int, int]) -> Iterator[Tensor]:
    """Yield (n, 4) children of the parent regions that exist, a bounded number at a time."""
    step = torch.arange(_FAN_OUT, device=parents.device)
    offsets = torch.cartesian_prod(
        torch.zeros_like(step[:1]), torch.zeros_like(step[:1]), step, step
    )
    scale = torch.tensor([1, 1, _FAN_OUT, _FAN_OUT], device=parents.device)
    limit = torch.tensor(size, device=parents.device)
    for part in pieces(parents, _BATCH_REGIONS // _FAN_OUT**2):
        children = ((part * scale)[:, None] + offsets).reshape(-1, 4)
        yield children[(children[:, 2:] < limit).all(1)]


def _evaluate_undecided(program: MaskProgram, grid: BlockGrid, states: Tensor) -> None:
    """Settle every undecided block of `states`, some block rows at a time, in place."""
    columns = states.shape[-1]
    lines = states.view(-1, columns)
    step = max(1, _BATCH_BLOCKS // columns)
    total = sum(int((part == UNDECIDED).sum()) for part in pieces(lines, step))
    if total == 0:
        return
    with Progress("create_block_mask", total) as progress:
        for begin in range(0, lines.shape[0], step):
            part = lines[begin : begin + step]
            line, column = (part == UNDECIDED).nonzero().unbind(1)
            head, row = _divmod(line + begin, states.shape[2])
            b, h = _divmod(head, grid.heads)
            boxes = grid.boxes(torch.stack((b, h, row, column), 1), 0)
            part[line, column] = _exact_states(program, grid, boxes, progress)


def _divmod(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    return a // b, a % b


def _exact_states(
    program: MaskProgram, grid: BlockGrid, boxes: Boxes, progress: Progress
) -> Tensor:
    """Return the states (n,) int8 of blocks: by samples first, then by every position."""
    states = torch.full_like(boxes.b, UNDECIDED, dtype=torch.int8)
    area = grid.block_q * grid.block_kv
    batch = batch_positions(grid.device) // program.width
    for samples in (*_SAMPLES, None):
        if samples is not None and 2 * samples**2 > area:
            continue
        rest = (states == UNDECIDED).nonzero().squeeze(1)
        positions = area if samples is None else samples**2
        for part in pieces(rest, max(1, batch // positions)):
            some = take(boxes, part)
            if samples is None:
                q_idx = every(some.q_first, some.q_last, grid.block_q)
                kv_idx = every(some.kv_first, some.kv_last, grid.block_kv)
            else:
                q_idx = _spread(some.q_first, some.q_last, samples)
                kv_idx = _spread(some.kv_first, some.kv_last, samples)
            found = _states_at(program, some, q_idx, kv_idx)
            if samples is not None:
                # Samples that agree prove nothing.
                found = torch.where(found == PARTIAL, PARTIAL, UNDECIDED)
            states[part] = found.to(torch.int8)
            progress.advance(part.numel() if samples is None else int((found == PARTIAL).sum()))
    return states


def _states_at(program: MaskProgram, boxes: Boxes, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return (n,) EMPTY, PARTIAL or FULL over the positions q_idx (n, M) x kv_idx (n, N)."""
    visible = program.evaluate(
        boxes.b[:, None, None], boxes.h[:, None, None], q_idx[:, :, None], kv_idx[:, None, :]
    ).expand(q_idx.shape[0], q_idx.shape[1], kv_idx.shape[1])
    # Reduced over both axes at once; a flattening would copy an expanded result.
    any_visible = visible.any(2).any(1)
    all_visible = visible.all(2).all(1)
    return any_visible.to(torch.int8) + all_visible.to(torch.int8)


def pieces(tensor: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield views of at most `rows` rows each."""
    for begin in range(0, tensor.shape[0], rows):
        yield tensor[begin : begin + rows]


def take(boxes: Boxes, index: Tensor | slice) -> Boxes:
    """Return the boxes at `index`."""
    return Boxes(
        b=boxes.b[index],
        h=boxes.h[index],
        q_first=boxes.q_first[index],
        q_last=boxes.q_last[index],
        kv_first=boxes.kv_first[index],
        kv_last=boxes.kv_last[index],
    )


def every(first: Tensor, last: Tensor, size: int) -> Tensor:
    """Return (n, size) positions from `first` on; `last` is repeated, which is harmless."""
    step = torch.arange(size, device=first.device)
    return torch.minimum(first[:, None] + step, last[:, None])


def is_new(positions: Tensor) -> Tensor:
    """Return where rows of ascending positions do not repeat the one before."""
    result = torch.ones_like(positions, dtype=torch.bool)
    result[:, 1:] = positions[:, 1:] != positions[:, :-1]
    return result


def _spread(first: Tensor, last: Tensor, samples: int) -> Tensor:
    """Return (n, samples) positions from `first` to `last`, both included."""
    step = torch.arange(samples, device=first.device)
    return first[:, None] + (last - first)[:, None] * step // (samples - 1)


def batch_positions(device: torch.device) -> int:
    """Return how many positions are evaluated at a time."""
    return _BATCH_POSITIONS_CPU if device.type == "cpu" else _BATCH_POSITIONS_ACCELERATOR
