"""One validated attention call, as the value that every layer below the API speaks.

Lives here: `AttentionProblem` and its parts, and the results that backends return. Not here: how
one is built and checked (`build.py`, `checks.py`), limits of one backend (beside that backend) and
how a problem crosses the operator boundary (`ops/program.py`). Invariant: nothing here looks at
contents.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fovea.mods.trace import TracedMod
from fovea.tiling.block_lists import BlockLists
from fovea.tiling.key_ranges import KeyRanges
from fovea.tiling.mask_bits import MaskBits

Causal = Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Varlen:
    """Where each sequence of a packed batch lies.

    Shapes:
        cu_seqlens_q, cu_seqlens_kv: (batch + 1,) int32; cu_seqlens_kv is None when paged.
        seqused_q, seqused_kv: (batch,) int32, lengths actually used of each sequence.
        page_table: (batch, max_pages) int32, physical page of each logical page.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    seqused_q: Tensor | None
    seqused_kv: Tensor | None
    page_table: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionProblem:
    """Everything that defines one attention call.

    Shapes:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with varlen.
        k: (batch, seqlen_kv, heads_kv, head_dim), (total_kv, heads_kv, head_dim), or paged
            (pages, page_size, heads_kv, head_dim); v likewise with head_dim_v.
        sink: (heads_q,), natural units.

    Attributes:
        causal: None, or the corner where the diagonal ends.
        window: keys visible left and right of the diagonal, None = unlimited.
        limits: least and largest kv_idx - q_idx that is visible, beside causal and window; None =
            unlimited. Of masks that are bands, see `plan/kernel_calls.py`.
        mask_bits: what `block_mask_mod` says of partial blocks, in its place; the block lists are
            then those beside the bits.
        key_ranges: the keys that each row sees, in place of block lists that say the same.
        softcap, scale: host numbers, or 0-d tensors on the device of q that only a kernel reads.
        has_default_scale: whether scale is 1/sqrt(head_dim), and so no run-time number.
        block_mask_mod: the BlockMask's own mask_mod, skipped on full blocks.
        deterministic_warns: whether a backend that cannot be deterministic warns instead of raising
            (torch.use_deterministic_algorithms(True, warn_only=True)).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    causal: Causal | None = None
    window: Window = (None, None)
    limits: Window = (None, None)
    mask_bits: MaskBits | None = None
    key_ranges: KeyRanges | None = None
    softcap: float | Tensor | None = None
    scale: float | Tensor
    has_default_scale: bool = False
    score_mod: TracedMod | None = None
    mask_mod: TracedMod | None = None
    block_lists: BlockLists | None = None
    block_mask_mod: TracedMod | None = None
    varlen: Varlen | None = None
    deterministic: bool = False
    deterministic_warns: bool = False
    wants_lse: bool = False
    wants_max_score: bool = False

    @property
    def batch(self) -> int:
        """Number of sequences."""
        if self.varlen is not None:
            return self.varlen.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        """Query rows of the longest sequence."""
        return self.varlen.max_seqlen_q if self.varlen is not None else self.q.shape[1]

    @property
    def seqlen_kv(self) -> int:
        """Keys of the longest sequence."""
        return self.varlen.max_seqlen_kv if self.varlen is not None else self.k.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[-2]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q.shape[-2] // max(self.k.shape[-2], 1)

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_paged(self) -> bool:
        return self.varlen is not None and self.varlen.page_table is not None

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, seqlen_q), or (heads_q, total_q) with varlen; of max_score too."""
        if self.varlen is not None:
            return (self.q.shape[1], self.q.shape[0])
        return (self.q.shape[0], self.q.shape[2], self.q.shape[1])

    def empty_out(self) -> Tensor:
        """Return an uninitialised output: dense, with the stride order of q."""
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        return self.q.new_empty_strided(shape, strides_in_order(shape, self.q.stride()))


class ForwardResult(NamedTuple):
    """What a backend's forward returns.

    Shapes:
        out: shape of q with head_dim_v last, dense, in the stride order of q (`empty_out`).
        lse, max_score: fp32 (fp64 for fp64 inputs), `AttentionProblem.lse_shape`, contiguous.
            lse is always there; max_score is None unless wanted.

    Units:
        natural logarithm; lse includes the sink, max_score does not.
    """

    out: Tensor
    lse: Tensor
    max_score: Tensor | None


# out, lse and max_score: a ForwardResult, or a plain tuple where one is made in every call; the lse
# may be None where nobody asked for it.
Results = tuple[Tensor, Tensor | None, Tensor | None]


class GradientNeeds(NamedTuple):
    """Which gradients a backward has to compute; score_captures has one flag a captured tensor."""

    q: bool
    k: bool
    v: bool
    sink: bool
    score_captures: tuple[bool, ...]


class Gradients(NamedTuple):
    """What a backend's backward returns; None where `GradientNeeds` did not ask.

    Shapes:
        dq, dk, dv, dsink, score_captures: as the input they belong to, in its dtype; dq, dk, dv
            dense in that input's stride order.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsink: Tensor | None
    score_captures: tuple[Tensor | None, ...]


def strides_in_order(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of `shape` whose axes nest as the strides `like` do.

    Axes of stride 0 (expanded ones) say nothing of an order: they go outside all others, so that
    the last axis stays innermost wherever its stride is 1; a last axis of stride 0 goes innermost.
    Axes of one stride keep their positions among each other.
    """
    # An insertion sort, not `sorted(key=...)`: with symbolic sizes each comparison is one guard.
    order: list[int] = []
    for axis in range(len(shape)):
        place = len(order)
        if axis < len(shape) - 1 or like[axis] != 0:
            while place > 0 and _is_outside(like[axis], like[order[place - 1]]):
                place -= 1
        order.insert(place, axis)
    strides = [1] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(shape[axis], 1)
    return tuple(strides)


def _is_outside(stride: int, other: int) -> bool:
    """Return whether an axis of one stride has to nest outside one of another."""
    if other == 0:
        return False
    return stride == 0 or stride > other
