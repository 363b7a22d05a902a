"""Which blocks of the score matrix are listed, as index lists: torch's BlockMask, validated.

Lives here: `BlockLists`, its validation against an attention call, conversion from and to a dense
block matrix. Not here: the passes over big lists (`list_layout.py`), how states are computed from
a mask_mod (`block_mask.py`). Invariant: visible(q, kv) = kv's block is listed in q's row
and (the block is full or mask_mod is true); a list entry at or after its row's count means nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from fovea import env
from fovea.errors import invalid
from fovea.tiling.list_layout import lists_of, mark

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class TorchBlockMask(Protocol):
    """The fields of `torch.nn.attention.flex_attention.BlockMask` that fovea reads.

    Fields of newer versions (`dq_write_order` and others) order atomic additions inside torch's
    kernels; ours need none of them.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLists:
    """Listed blocks of each query block row, and transposed, of each KV block column.

    Shapes:
        kv_num_blocks: (batch, heads, blocks_q) int32; kv_indices: (batch, heads, blocks_q, width)
            int32, blocks that need mask_mod. full_kv_*: the same for blocks that do not; None when
            there are none.
        q_num_blocks: (batch, heads, blocks_kv); q_indices: (batch, heads, blocks_kv, width), the
            transposed lists for a backward, or None; full_q_* likewise.
        batch and heads are 1 or those of the call; width is usually the number of blocks.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    block_q: int
    block_kv: int
    seqlen_q: int
    seqlen_kv: int
    batch: int
    heads: int

    @classmethod
    def from_torch(
        cls,
        block_mask: object,
        *,
        batch: int | None = None,
        heads: int | None = None,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
    ) -> "BlockLists":
        """Return the lists of a torch BlockMask, checked against the call where that is given.

        Tensor contents are read under FOVEA_CHECK=1 alone, see `check_contents`; otherwise nothing
        waits for a device.

        Args:
            block_mask: torch's BlockMask, of any torch version that has flex_attention.
            batch, heads, seqlen_q, seqlen_kv: of the call; None leaves that one unchecked.

        Raises:
            TypeError: it is no BlockMask, or its lists are no integer tensors.
            ValueError: its lists, lengths, batch or heads do not fit each other or the call.
        """
        mask = _as_block_mask(block_mask)
        block_q, block_kv = _pair("BLOCK_SIZE", mask.BLOCK_SIZE)
        seqlen_pair = _pair("seq_lengths", mask.seq_lengths)
        lists = cls(
            kv_num_blocks=_int32("kv_num_blocks", mask.kv_num_blocks),
            kv_indices=_int32("kv_indices", mask.kv_indices),
            full_kv_num_blocks=_optional("full_kv_num_blocks", mask.full_kv_num_blocks),
            full_kv_indices=_optional("full_kv_indices", mask.full_kv_indices),
            q_num_blocks=_optional("q_num_blocks", mask.q_num_blocks),
            q_indices=_optional("q_indices", mask.q_indices),
            full_q_num_blocks=_optional("full_q_num_blocks", mask.full_q_num_blocks),
            full_q_indices=_optional("full_q_indices", mask.full_q_indices),
            block_q=int(block_q),
            block_kv=int(block_kv),
            seqlen_q=seqlen_pair[0],
            seqlen_kv=seqlen_pair[1],
            batch=mask.kv_indices.shape[0] if mask.kv_indices.dim() == 4 else 0,
            heads=mask.kv_indices.shape[1] if mask.kv_indices.dim() == 4 else 0,
        )
        lists.check_shapes()
        lists.check_call(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        is_readable = not torch.compiler.is_compiling() and lists.device.type != "meta"
        if env.check() and is_readable:
            lists.check_contents()
        return lists

    @classmethod
    def from_states(
        cls, states: Tensor, *, seqlen_q: int, seqlen_kv: int, block_q: int, block_kv: int
    ) -> "BlockLists":
        """Return full-width lists, ascending, from a matrix of block states.

        Entries behind a count are the unlisted blocks in ascending order, as torch has them, since
        `BlockMask._adjust` reads them.

        Shapes:
            states: (batch, heads, blocks_q, blocks_kv) int8: 0 unlisted, 1 needs mask_mod, 2 full.
        """
        transposed = states.transpose(-2, -1)
        kv_num_blocks, kv_indices = lists_of(states, 1)
        full_kv_num_blocks, full_kv_indices = lists_of(states, 2)
        q_num_blocks, q_indices = lists_of(transposed, 1)
        full_q_num_blocks, full_q_indices = lists_of(transposed, 2)
        return cls(
            kv_num_blocks=kv_num_blocks,
            kv_indices=kv_indices,
            full_kv_num_blocks=full_kv_num_blocks,
            full_kv_indices=full_kv_indices,
            q_num_blocks=q_num_blocks,
            q_indices=q_indices,
            full_q_num_blocks=full_q_num_blocks,
            full_q_indices=full_q_indices,
            block_q=block_q,
            block_kv=block_kv,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            batch=states.shape[0],
            heads=states.shape[1],
        )

    @property
    def blocks_q(self) -> int:
        """Number of query block rows."""
        return -(-self.seqlen_q // self.block_q)

    @property
    def blocks_kv(self) -> int:
        """Number of KV block columns."""
        return -(-self.seqlen_kv // self.block_kv)

    @property
    def device(self) -> torch.device:
        return self.kv_indices.device

    @property
    def has_transposed(self) -> bool:
        """Whether the lists that a block-sparse backward walks are there."""
        return self.q_indices is not None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the eight list tensors in field order."""
        return (
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            self.q_num_blocks,
            self.q_indices,
            self.full_q_num_blocks,
            self.full_q_indices,
        )

    def check_shapes(self) -> None:
        """Raise ValueError unless the lists fit each other and the lengths."""
        if self.block_q <= 0 or self.block_kv <= 0:
            size = (self.block_q, self.block_kv)
            raise ValueError(
                invalid("block_mask.BLOCK_SIZE", size, "positive integers", "rebuild the BlockMask")
            )
        pairs = (
            ("kv", self.kv_num_blocks, self.kv_indices, self.blocks_q),
            ("full_kv", self.full_kv_num_blocks, self.full_kv_indices, self.blocks_q),
            ("q", self.q_num_blocks, self.q_indices, self.blocks_kv),
            ("full_q", self.full_q_num_blocks, self.full_q_indices, self.blocks_kv),
        )
        for name, counts, indices, rows in pairs:
            self._check_pair(name, counts, indices, rows)
        if self.q_indices is not None and (self.full_kv_indices is None) != (
            self.full_q_indices is None
        ):
            raise ValueError(
                "block_mask has full blocks in only one of its kv and q lists; build it with "
                "BlockMask.from_kv_blocks or fovea.create_block_mask, which make both."
            )

    def _check_pair(
        self, name: str, counts: Tensor | None, indices: Tensor | None, rows: int
    ) -> None:
        if counts is None and indices is None:
            return
        if counts is None or indices is None:
            raise ValueError(
                f"block_mask.{name}_num_blocks and block_mask.{name}_indices must both be given or "
                "both be None; rebuild the BlockMask with BlockMask.from_kv_blocks."
            )
        expected = (self.batch, self.heads, rows)
        if indices.dim() != 4 or tuple(indices.shape[:3]) != expected:
            raise ValueError(
                invalid(
                    f"block_mask.{name}_indices.shape",
                    tuple(indices.shape),
                    f"(batch, heads, {rows}, width) for seq_lengths "
                    f"{(self.seqlen_q, self.seqlen_kv)} and BLOCK_SIZE "
                    f"{(self.block_q, self.block_kv)}, batch and heads as in kv_indices",
                    "slicing a BlockMask keeps its old seq_lengths: set block_mask.seq_lengths to "
                    "the sliced lengths, or rebuild the mask",
                )
            )
        if tuple(counts.shape) != expected:
            raise ValueError(
                invalid(
                    f"block_mask.{name}_num_blocks.shape",
                    tuple(counts.shape),
                    f"{expected}, as {name}_indices has",
                    "rebuild the BlockMask",
                )
            )
        if counts.device != self.device or indices.device != self.device:
            raise ValueError(
                invalid(
                    f"block_mask.{name}_indices.device",
                    indices.device,
                    f"{self.device}, where kv_indices is",
                    "move the whole mask with block_mask.to(device)",
                )
            )

    def check_call(
        self,
        *,
        batch: int | None = None,
        heads: int | None = None,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
    ) -> None:
        """Raise ValueError unless the lists fit a call with these sizes (None = unchecked)."""
        for name, mine, call in (("batch", self.batch, batch), ("heads", self.heads, heads)):
            if call is not None and mine not in (1, call):
                letter = "B" if name == "batch" else "H"
                sizes = (1,) if call == 1 else (1, call)
                raise ValueError(
                    invalid(
                        f"block_mask.shape ({name})",
                        mine,
                        " or ".join(map(str, sizes)),
                        f"build the block mask with {letter}={' or '.join(map(str, sizes[::-1]))}",
                    )
                )
        mine_q_kv = (self.seqlen_q, self.seqlen_kv)
        call_q_kv = (
            self.seqlen_q if seqlen_q is None else seqlen_q,
            self.seqlen_kv if seqlen_kv is None else seqlen_kv,
        )
        if mine_q_kv != call_q_kv:
            raise ValueError(
                invalid(
                    "block_mask.seq_lengths",
                    mine_q_kv,
                    f"{call_q_kv}, the lengths of q and k",
                    "build the block mask with these Q_LEN and KV_LEN",
                )
            )

    def check_contents(self) -> None:
        """Raise ValueError unless every count and listed index is in range; reads the tensors.

        Waits for the device, so `from_torch` calls it under FOVEA_CHECK=1 alone.
        """
        pairs = (
            ("kv", self.kv_num_blocks, self.kv_indices, self.blocks_kv),
            ("full_kv", self.full_kv_num_blocks, self.full_kv_indices, self.blocks_kv),
            ("q", self.q_num_blocks, self.q_indices, self.blocks_q),
            ("full_q", self.full_q_num_blocks, self.full_q_indices, self.blocks_q),
        )
        for name, counts, indices, limit in pairs:
            if counts is None or indices is None or counts.numel() == 0:
                continue
            low, high = int(counts.min()), int(counts.max())
            if low < 0 or high > min(indices.shape[-1], limit):
                raise ValueError(
                    invalid(
                        f"block_mask.{name}_num_blocks",
                        f"values from {low} to {high}",
                        f"0 to {min(indices.shape[-1], limit)}",
                        "rebuild the BlockMask",
                    )
                )
            entry = torch.arange(indices.shape[-1], device=indices.device)
            is_listed = entry < counts.unsqueeze(-1)
            is_bad = is_listed & ((indices < 0) | (indices >= limit))
            if bool(is_bad.any()):
                where = tuple(int(x) for x in is_bad.nonzero()[0])
                raise ValueError(
                    invalid(
                        f"block_mask.{name}_indices{list(where)}",
                        int(indices[where]),
                        f"0 to {limit - 1}",
                        "rebuild the BlockMask",
                    )
                )
            _check_distinct(name, torch.where(is_listed, indices, limit), limit)

    def states(self) -> Tensor:
        """Return (batch, heads, blocks_q, blocks_kv) int8: 0 unlisted, 1 needs mask_mod, 2 full.

        A block in both lists is full.
        """
        shape = (self.batch, self.heads, self.blocks_q, self.blocks_kv)
        out = torch.zeros(shape, dtype=torch.int8, device=self.device)
        mark(out, self.kv_num_blocks, self.kv_indices, 1)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            mark(out, self.full_kv_num_blocks, self.full_kv_indices, 2)
        return out

    def visible_blocks(self) -> Tensor:
        """Return (batch, heads, blocks_q, blocks_kv) bool: the block is listed, full or not."""
        return self.states() > 0

    def full_blocks(self) -> Tensor:
        """Return (batch, heads, blocks_q, blocks_kv) bool: the block needs no mask_mod."""
        return self.states() == 2

    def lookup(self, states: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return (is_listed, is_full) of each position, from the matrix that `states` returned.

        Shapes:
            q_idx, kv_idx: (..., M, 1) and (..., 1, N) positions in range, without batch and head;
            results (batch, heads, ..., M, N) bool.
        """
        found = states[:, :, q_idx // self.block_q, kv_idx // self.block_kv]
        return found > 0, found == 2

    def expanded(self, batch: int, heads: int) -> "BlockLists":
        """Return lists of `batch` and `heads`, dense, from lists that have 1 there or the same."""
        if (self.batch, self.heads) == (batch, heads):
            return self

        def spread(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.expand(batch, heads, *tensor.shape[2:]).contiguous()

        kv_num_blocks, kv_indices = spread(self.kv_num_blocks), spread(self.kv_indices)
        assert kv_num_blocks is not None
        assert kv_indices is not None
        return replace(
            self,
            kv_num_blocks=kv_num_blocks,
            kv_indices=kv_indices,
            full_kv_num_blocks=spread(self.full_kv_num_blocks),
            full_kv_indices=spread(self.full_kv_indices),
            q_num_blocks=spread(self.q_num_blocks),
            q_indices=spread(self.q_indices),
            full_q_num_blocks=spread(self.full_q_num_blocks),
            full_q_indices=spread(self.full_q_indices),
            batch=batch,
            heads=heads,
        )

    def to_torch(self, mask_mod: Callable[..., Any]) -> "BlockMask":
        """Return torch's BlockMask with these lists, sharing their memory.

        Through the constructor: `BlockMask.from_kv_blocks` would rebuild the q lists through a
        dense int32 block matrix and two sorts (16 s and 2.6 GB for a million tokens).
        """
        from torch.nn.attention.flex_attention import BlockMask

        return BlockMask(
            seq_lengths=(self.seqlen_q, self.seqlen_kv),
            kv_num_blocks=self.kv_num_blocks,
            kv_indices=self.kv_indices,
            full_kv_num_blocks=self.full_kv_num_blocks,
            full_kv_indices=self.full_kv_indices,
            q_num_blocks=self.q_num_blocks,
            q_indices=self.q_indices,
            full_q_num_blocks=self.full_q_num_blocks,
            full_q_indices=self.full_q_indices,
            BLOCK_SIZE=(self.block_q, self.block_kv),
            mask_mod=mask_mod,
        )

    def with_transposed(self) -> "BlockLists":
        """Return these lists with the q lists present, rebuilt from the kv lists if missing."""
        if self.has_transposed:
            return self
        whole = BlockLists.from_states(
            self.states(),
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            block_q=self.block_q,
            block_kv=self.block_kv,
        )
        has_full = self.full_kv_indices is not None
        return replace(
            self,
            q_num_blocks=whole.q_num_blocks,
            q_indices=whole.q_indices,
            full_q_num_blocks=whole.full_q_num_blocks if has_full else None,
            full_q_indices=whole.full_q_indices if has_full else None,
        )


def _check_distinct(name: str, listed: Tensor, limit: int) -> None:
    """Raise ValueError where a row lists a block twice; `limit` stands for no block."""
    ordered = listed.sort(dim=-1).values
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < limit)
    if bool(is_repeated.any()):
        where = tuple(int(x) for x in is_repeated.nonzero()[0])
        raise ValueError(
            invalid(
                f"block_mask.{name}_indices{list(where[:-1])}",
                f"block {int(ordered[where])} more than once",
                "each block once a row",
                "rebuild the BlockMask; a kernel would count the block's keys twice",
            )
        )


def _as_block_mask(block_mask: object) -> TorchBlockMask:
    needed = ("kv_num_blocks", "kv_indices", "seq_lengths", "BLOCK_SIZE", "mask_mod")
    if not all(hasattr(block_mask, name) for name in needed):
        raise TypeError(
            invalid(
                "block_mask",
                type(block_mask).__name__,
                "torch.nn.attention.flex_attention.BlockMask or None",
                "build one with fovea.create_block_mask; a dense bool mask belongs in a mask_mod "
                "that reads it",
            )
        )
    return cast(TorchBlockMask, block_mask)


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return (of queries, of keys); raise TypeError unless it is a pair."""
    pair = tuple(cast(Any, value)) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2:
        raise TypeError(
            invalid(
                f"block_mask.{name}",
                cast(Any, value),
                "a pair of ints, of queries and of keys",
                "leave it as create_block_mask made it",
            )
        )
    return pair[0], pair[1]


def _int32(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            invalid(f"block_mask.{name}", got, "an integer tensor", "rebuild the BlockMask")
        )
    return tensor.to(torch.int32)


def _optional(name: str, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _int32(name, tensor)
