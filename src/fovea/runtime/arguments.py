"""The arguments of a forward launch, in the order of the kernel's host function.

Lives here: layouts that the copy engine takes, padding of odd head dimensions, run-time numbers.
Not here: their compile-time types (`kernels/portable/entry.py`). Invariant: nothing here waits
for a device; a tensor is copied only where its layout cannot run as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fovea.plan.captures import PAIR_ALIGNMENT, read_in_pairs
from fovea.plan.forward import ForwardPlan
from fovea.plan.numerics import LOG2_E
from fovea.plan.select import band_of, num_splits
from fovea.plan.sequences import table_words
from fovea.problem import AttentionProblem, Results, strides_in_order
from fovea.problem.known_mods import Scalars
from fovea.problem.parts import NO_SCALARS, Numbers
from fovea.runtime.stream_memory import StreamMemory
from fovea.tiling.exact_lists import bits_beside, ranges_beside
from fovea.tiling.key_ranges import GROUP_ROWS
from fovea.tiling.order import heads_in_flight, num_tiles, section_heads

_ALIGNMENT_BYTES = 16  # of base and strides, asked by the copy engine
_ALIGNMENT_ELEMENTS = 8
# What K and V of the heads in flight may fill of the H200's 60 MB of L2; the rest is for Q and O.
_L2_BYTES = 32 * 1024**2
# CTAs whose walks are long read only parts of K and V at a time; more heads end more evenly.
_L2_BYTES_LONG = 2 * _L2_BYTES
_LONG_KEYS = 8192
_FEW_TILES = 4  # of queries, of a head

_NUM_LISTS = 8  # tensors of a block mask

MemoryOf = Callable[[torch.device], StreamMemory | None]


class ForwardLaunch:
    """Forward launches of one kernel on one layout: everything but tensors and numbers is ready.

    `launcher` takes what the kernel's host function does, without the stream. `takes_as_is` says
    that q, k, v and out need no copy, whatever their addresses are aligned to; `has_layout_of_q`
    that out is laid out as q; `memory_of`, where given, gives what launches of a stream share;
    `has_plain_captures` that captures go along as they are; `partial_shapes` of what the parts of
    the keys leave, in plans that pack heads.
    """

    __slots__ = (
        "device",
        "dtype",
        "has_bits",
        "has_layout_of_q",
        "has_numbers",
        "has_plain_captures",
        "integers",
        "is_paired",
        "launcher",
        "lists",
        "lse_shape",
        "lse_strides",
        "memory_of",
        "needs_counter",
        "num_captures",
        "num_sequences",
        "out_shape",
        "out_strides",
        "partial_shapes",
        "query_tiles",
        "range_groups",
        "softcap",
        "takes_as_is",
        "wants_max_score",
    )

    def __init__(
        self,
        problem: AttentionProblem,
        plan: ForwardPlan,
        num_sms: int,
        launcher: Callable[..., Any],
        memory_of: MemoryOf | None = None,
        splits: int | None = None,
    ) -> None:
        """Prepare launches like one of `problem`; `splits` overrides the number of parts."""
        self.launcher = launcher
        self.memory_of = memory_of
        self.device = problem.device
        self.dtype = problem.dtype
        self.out_shape = (*problem.q.shape[:-1], problem.head_dim_v)
        self.out_strides = strides_in_order(self.out_shape, problem.q.stride())
        self.has_layout_of_q = (self.out_shape, self.out_strides) == (
            problem.q.shape,
            problem.q.stride(),
        )
        self.lse_shape = problem.lse_shape
        self.lse_strides = strides_in_order(self.lse_shape, (0,) * len(self.lse_shape))
        layouts = [(t.shape, t.stride()) for t in (problem.q, problem.k, problem.v)]
        self.takes_as_is = all(
            _is_whole(shape, strides)
            for shape, strides in (*layouts, (self.out_shape, self.out_strides))
        )
        # Fewer SMs than one cluster takes, as a caller of the emulator may say, run that cluster.
        self.integers = _integers(problem, plan, max(num_sms, plan.cluster))
        # A packed batch, and the rows behind it.
        self.num_sequences = 0 if problem.varlen is None else problem.batch + 1
        self.needs_counter = plan.needs_counter
        self.wants_max_score = plan.features.max_score
        splits = num_splits(problem, plan, num_sms) if splits is None else splits
        self.partial_shapes = _partial_shapes(problem, plan, splits)
        mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
        captures = [tensor for mod in mods if mod is not None for tensor in mod.captures]
        self.num_captures = len(captures)
        # Numbers of a mask that became limits are in `integers`.
        self.has_numbers = [mod is not None for mod in mods]
        self.has_plain_captures = has_plain_captures(problem)
        self.is_paired = tuple(
            paired for mod in mods if mod is not None for paired in read_in_pairs(mod.graph)
        )
        # Of a score_mod that is one; a call's own keyword comes with its numbers.
        self.softcap = problem.softcap if isinstance(problem.softcap, float) else 1.0
        # Of a query tile, in plans that read ranges of keys.
        self.range_groups = plan.tile_m // GROUP_ROWS if plan.features.key_ranges else 0
        self.has_bits = plan.features.block_bits
        lists = problem.block_lists
        self.lists = None if lists is None else (lists.block_q, lists.block_kv // plan.tile_n)
        # Per block of queries and in all.
        self.query_tiles = (
            (0, 0)
            if lists is None
            else (lists.block_q // plan.tile_m, -(-problem.seqlen_q // plan.tile_m))
        )

    def __call__(self, tensors: Sequence[Any], numbers: Numbers, keeps_lse: bool = True) -> Results:
        """Launch on the current stream of the tensors' device.

        Args:
            tensors, numbers: of the call, as `problem.parts` orders them.
            keeps_lse: False lets a later launch overwrite the lse.
        """
        q, k, v, sink = tensors[0], tensors[1], tensors[2], tensors[3]
        if self.has_layout_of_q:
            out = torch.empty_like(q)  # quicker than saying it all
        else:
            out = torch.empty_strided(
                self.out_shape, self.out_strides, dtype=self.dtype, device=self.device
            )
        target = out
        address = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        is_lazy = _is_lazy(q) or _is_lazy(k) or _is_lazy(v)
        if not self.takes_as_is or address % _ALIGNMENT_BYTES or is_lazy:
            q, k, v = loadable(q), loadable(k), loadable(v)
            if not _is_loadable(out):
                target = _padded_out(out, v.shape[-1])
        lse = counter = order = None
        lists = self._lists(tensors)
        memory = None
        if self.memory_of is not None and (
            self.needs_counter
            or self.lists is not None
            or self.partial_shapes is not None
            or not keeps_lse
            or not self.has_plain_captures
        ):
            memory = self.memory_of(self.device)
            if memory is not None:
                lse = None if keeps_lse else memory.scratch(self.lse_shape)
                counter = memory.counter() if self.needs_counter else None
                if self.lists is not None and not self.num_sequences:
                    counts, _, full_counts, *_ = lists
                    order = memory.tile_order(counts, full_counts, *self.query_tiles)
        if lse is None:
            lse = self._row_numbers()
        if counter is None and self.needs_counter:
            # A memset of four bytes, on the stream before the launch.
            counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        max_score = self._row_numbers() if self.wants_max_score else None
        softcap, scale, scalars = numbers
        self.launcher(
            q,
            k,
            v,
            target,
            lse,
            max_score,
            None if sink is None else _whole(sink).float(),
            None if self.partial_shapes is None else self._partials(memory),
            counter,
            self._keys(tensors, lists, order),
            self._sequences(tensors[-5:]) if self.num_sequences else None,
            (scale, scale * LOG2_E, self.softcap if softcap is None else softcap),
            self.integers,
            # None, not an empty tuple: the launcher has no type for nothing.
            self._captures(tensors, memory) if self.num_captures else None,
            None if scalars is NO_SCALARS else self._scalars(scalars),
        )
        if target is not out:
            out.copy_(target[..., : out.shape[-1]])
        return out, lse, max_score

    def _scalars(self, scalars: tuple[Scalars, Scalars, Scalars]) -> tuple[int | float, ...] | None:
        score, mask, listed = scalars
        has_score, has_mask, has_listed = self.has_numbers
        return (
            *(score if has_score else ()),
            *(mask if has_mask else ()),
            *(listed if has_listed else ()),
        ) or None

    def _lists(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the four block lists of the plan and, where it has them, bits and their starts."""
        if self.lists is None:
            return ()
        if self.has_bits:
            # The lists come last, and were exact when the call began.
            lists, words, starts = bits_beside(tensors[-_NUM_LISTS])
            return (*lists.tensors()[:4], words, starts)
        place = 4 + self.num_captures
        return (*tensors[place : place + 4], None, None)

    def _keys(
        self, tensors: Sequence[Any], lists: tuple[Any, ...], order: Tensor | None
    ) -> tuple[Any, ...] | None:
        """Return the block lists or the ranges of keys, whichever the plan reads, else None."""
        if self.range_groups:
            rows, groups, orders = ranges_beside(tensors[-_NUM_LISTS])
            return rows, groups, orders[self.range_groups - 1]
        if self.lists is None:
            return None
        if order is None:
            # Never read, but the launcher wants a vector.
            return (*lists, lists[0][0, 0], 0, *self.lists)
        return (*lists, order, 1, *self.lists)

    def _partials(self, memory: StreamMemory | None) -> tuple[Tensor, Tensor, int]:
        """Return memory for the parts of the keys, and their number."""
        assert self.partial_shapes is not None
        out, rows = (self._scratch(shape, memory) for shape in self.partial_shapes)
        return out, rows, self.partial_shapes[0][0]

    def _scratch(self, shape: tuple[int, ...], memory: StreamMemory | None) -> Tensor:
        shared = None if memory is None else memory.scratch(shape)
        if shared is not None:
            return shared
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _sequences(self, bounds: Sequence[Any]) -> tuple[Any, ...]:
        """Return memory for the table of sequences and where they lie; what is absent, replaced."""
        starts_q, starts_kv, used_q, used_kv, page_table = bounds
        table = torch.empty(table_words(self.num_sequences), dtype=torch.int32, device=self.device)
        return (
            *(table, page_table, starts_q),
            starts_q if starts_kv is None else starts_kv,
            starts_q if used_q is None else used_q,
            starts_q if used_kv is None else used_kv,
            *(int(used_q is not None), int(used_kv is not None)),
        )

    def _row_numbers(self) -> Tensor:
        return torch.empty_strided(
            self.lse_shape, self.lse_strides, dtype=torch.float32, device=self.device
        )

    def _captures(self, tensors: Sequence[Any], memory: StreamMemory | None) -> tuple[Tensor, ...]:
        captures = tensors[4 : 4 + self.num_captures]
        if self.has_plain_captures and not any(
            (is_paired and tensor.data_ptr() % PAIR_ALIGNMENT) or _is_lazy(tensor)
            for tensor, is_paired in zip(captures, self.is_paired, strict=True)
        ):
            return tuple(captures)
        return tuple(
            [
                _capture(tensor.detach(), self.device, memory, is_paired=is_paired)
                for tensor, is_paired in zip(captures, self.is_paired, strict=True)
            ]
        )


def has_plain_captures(problem: AttentionProblem) -> bool:
    """Return whether a kernel reads every captured tensor as it is."""
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    return all(
        tensor.dtype != torch.bool and tensor.numel() > 0 and _is_readable(tensor, is_paired)
        for mod in mods
        if mod is not None
        for tensor, is_paired in zip(mod.captures, read_in_pairs(mod.graph), strict=True)
    )


def _is_readable(tensor: Tensor, is_paired: bool) -> bool:
    """Return whether a kernel reads the layout of a captured tensor, the address apart."""
    return tensor.dim() > 0 and tensor.stride(-1) == 1 and not (is_paired and tensor.shape[0] % 2)


def _is_whole(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a layout is one that the copy engine takes, the address apart."""
    return (
        strides[-1] == 1
        and shape[-1] % _ALIGNMENT_ELEMENTS == 0
        and all(s > 0 and s % _ALIGNMENT_ELEMENTS == 0 for s in strides[:-1])
    )


def _is_loadable(tensor: Tensor) -> bool:
    """Return whether the copy engine takes a tensor as it is, axes of one element aside."""
    strides = tensor.stride()
    meaningful = [i for i, size in enumerate(tensor.shape[:-1]) if size != 1]
    shape = (*(tensor.shape[i] for i in meaningful), tensor.shape[-1])
    return tensor.data_ptr() % _ALIGNMENT_BYTES == 0 and _is_whole(
        shape, (*(strides[i] for i in meaningful), strides[-1])
    )


def _is_lazy(tensor: Tensor) -> bool:
    """Return whether a tensor's memory does not hold its values: a negated or a zero view."""
    return tensor.is_neg() or tensor._is_zerotensor()


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg()


def loadable(tensor: Tensor) -> Tensor:
    """Return a tensor that the copy engine can read: itself, or a copy padded to whole rows."""
    tensor = _whole(tensor)
    missing = -tensor.shape[-1] % _ALIGNMENT_ELEMENTS
    if missing:
        return functional.pad(tensor, (0, missing))
    if not _is_loadable(tensor):
        return tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()
    if any(stride % _ALIGNMENT_ELEMENTS for stride in tensor.stride()[:-1]):
        # Strides of axes with one element mean nothing, but the launcher checks them.
        return tensor.as_strided(tensor.shape, strides_in_order(tensor.shape, tensor.stride()))
    return tensor


def _padded_out(out: Tensor, head_dim_v: int) -> Tensor:
    shape = (*out.shape[:-1], head_dim_v)
    return out.new_empty_strided(shape, strides_in_order(shape, out.stride()))


def _partial_shapes(
    problem: AttentionProblem, plan: ForwardPlan, splits: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of partial outputs and of their rows' numbers; None without parts.

    One part leaves nothing, so that both are as small as can be.
    """
    if plan.combine is None:
        return None
    rows = (1, 1, 1)
    if splits > 1:
        # Packed sequences are one batch entry of all rows.
        *batch, seqlen_q, heads_q, _ = problem.q.shape
        rows = (*(batch or (1,)), heads_q, seqlen_q)
    return (splits, *rows, plan.head_dim_v), (plan.combine.num_planes, splits, *rows)


def _section(problem: AttentionProblem, plan: ForwardPlan, num_sms: int) -> int:
    """Return how many query heads run together; measured in docs/notes/hopper_forward.md."""
    tiles, group_size = num_tiles(problem.seqlen_q, plan.tile_m), problem.group_size
    if not (plan.is_dynamic or plan.packs_heads):
        return heads_in_flight(num_tiles=tiles, group_size=group_size, num_ctas=num_sms)
    if plan.needs_counter and tiles <= _FEW_TILES:
        # Tiles of a head differ little here: it counts more that they run together.
        return heads_in_flight(num_tiles=tiles, group_size=group_size, num_ctas=2 * num_sms)
    return section_heads(
        seqlen_kv=problem.seqlen_kv,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=problem.q.element_size(),
        group_size=problem.group_size,
        l2_bytes=_L2_BYTES if problem.seqlen_kv < _LONG_KEYS else _L2_BYTES_LONG,
    )


def _integers(
    problem: AttentionProblem, plan: ForwardPlan, num_sms: int
) -> tuple[int, int, int, int, int]:
    """Return offset, left, right, heads of an L2 section, CTAs.

    The offset of a packed batch is 1 where each sequence's diagonal ends at its last key, else 0.
    """
    band = band_of(problem)
    section = _section(problem, plan, num_sms)
    is_packed = problem.varlen is not None
    rows = problem.heads_q if is_packed else problem.batch * problem.heads_q
    assert isinstance(band.offset, int)
    offset = int(problem.causal != "top_left") if is_packed else band.offset
    left = band.left if isinstance(band.left, int) else 0
    right = band.right if isinstance(band.right, int) else 0
    return (offset, left, right, min(section, rows), num_sms)


def _capture(
    tensor: Tensor, device: torch.device, memory: StreamMemory | None, *, is_paired: bool
) -> Tensor:
    """Return a captured tensor as the kernel reads it.

    With a unit last stride and, where it is read two elements at a time, aligned for that and of an
    even extent: the element past the end is for positions that nobody sees.
    """
    tensor = _whole(tensor)
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    if tensor.numel() == 0:
        # A gather from nothing, at positions that nobody sees, reads 0 in the reference too.
        return torch.zeros([2] * tensor.dim(), dtype=tensor.dtype, device=device)
    if tensor.dim() > 0:
        is_aligned = not (is_paired and tensor.data_ptr() % PAIR_ALIGNMENT)
        if is_aligned and _is_readable(tensor, is_paired):
            return tensor
        if not is_paired:
            return tensor.new_empty(tensor.shape).copy_(tensor)
        extent = tensor.shape[0]
        padded = tensor.new_zeros(extent + extent % 2)
        padded[:extent].copy_(tensor)
        return padded
    if tensor.device == device:
        return tensor.reshape(1)
    # One number on the host, as torch's own operations allow. Its value goes along as an argument
    # of a fill: a copy from pageable memory may wait, and a CUDA graph would repeat it from memory
    # that is gone.
    if memory is not None:
        return memory.number(tensor.item(), tensor.dtype)
    return torch.full((1,), tensor.item(), dtype=tensor.dtype, device=device)
