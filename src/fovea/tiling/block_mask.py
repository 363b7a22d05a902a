"""torch's BlockMask of a mask_mod, built block by block.

Lives here: `create_block_mask`, from a user's function to index lists. Not here: how block states
are found (`block_states.py`, `mask_intervals.py`) and how lists are laid out (`block_lists.py`).
Invariant: the result equals that of torch's own create_block_mask, entry for entry, and no tensor
over query x KV positions exists on the way.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fovea.errors import UnsupportedError, invalid
from fovea.mods.bands import band_of_mask
from fovea.mods.gathers import check_reach, direct_gathers, places
from fovea.mods.trace import TracedMod, trace_mask_mod
from fovea.tiling.block_lists import BlockLists
from fovea.tiling.block_states import BlockGrid, block_states
from fovea.tiling.exact_lists import record
from fovea.tiling.key_ranges import find_key_ranges
from fovea.tiling.mask_bits import BLOCK, MaskBits, are_whole, find_mask_bits
from fovea.tiling.traced_program import TracedProgram

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BlockLists", "create_block_mask"]


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> "BlockMask":
    """Return torch's BlockMask of `mask_mod`, for fovea's and for torch's flex_attention.

    Equal to what `torch.nn.attention.flex_attention.create_block_mask` returns, without its dense
    B x H x Q_LEN x KV_LEN mask: regions are settled by interval analysis of the traced mask, and
    only blocks that it leaves open are evaluated. A causal, windowed or document mask of a million
    tokens takes seconds; a mask without structure costs its full evaluation, block row by block
    row, with a progress bar when that takes longer than a second. Inside `torch.compile` it breaks
    the graph; under `fullgraph=True` build the mask outside.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, with any captured tensors.
        B: batch size; None is 1, for a mask that holds for every batch.
        H: number of query heads; None is 1.
        Q_LEN: query length.
        KV_LEN: key length.
        device: where the lists go and the work is done. None is where the captured tensors are,
            else the accelerator, else the CPU.
        BLOCK_SIZE: size of a block, or (query, KV) sizes.
        _compile: changes nothing: there is no dense mask to fuse away.
        separate_full_blocks: must be True; fovea's kernels skip the mask_mod in full blocks.
        compute_dq_write_order: must be False; it is for one of torch's own backward kernels.
        dq_kv_order: of `compute_dq_write_order`, without which it changes nothing.

    Raises:
        UnsupportedError: what must be so is not.
        TraceError: the mask cannot be traced; the text names the line.
        ValueError: a size is not valid, or captured tensors lie on another device.
        GatherError: the mask indexes a captured tensor beyond its end: found from the sizes alone
            where an index is a position, on a CPU or under FOVEA_CHECK=1 everywhere.
    """
    for name, got, allowed in (
        ("separate_full_blocks", separate_full_blocks, True),
        ("compute_dq_write_order", compute_dq_write_order, False),
    ):
        if got is not allowed:
            raise UnsupportedError(
                f"{name}={got!r} is not supported by fovea.create_block_mask (allowed: {allowed}); "
                "leave it out for fovea's flex_attention, whose results and deterministic "
                "gradients need it not, or make the mask with torch's create_block_mask, which "
                "fovea takes too."
            )
    if not isinstance(dq_kv_order, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            invalid("dq_kv_order", repr(dq_kv_order), "True or False", "leave it out: it is unused")
        )
    if torch.compiler.is_dynamo_compiling():
        # What is evaluated depends on data, so this ends a graph and runs between two.
        return _build_outside(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    return _build(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)


def _build_outside(*arguments: Any) -> "BlockMask":
    """Return `create_block_mask`'s result between two graphs."""
    outside: Any = torch.compiler.disable(_build)  # pyright: ignore[reportUnknownMemberType]
    return outside(*arguments)


# What torch.compiler.disable sets: Dynamo cannot call that itself, and it would import Dynamo here.
_build_outside._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
_build_outside._torchdynamo_disable_msg = (  # pyright: ignore[reportFunctionMemberAccess]
    "fovea.create_block_mask evaluates the mask, which a compiled graph cannot: call it outside "
    "the compiled function and pass the block_mask in, or drop fullgraph=True"
)


def _build(
    mask_mod: Callable[..., Any],
    batch_size: int | None,
    num_heads: int | None,
    q_len: int,
    kv_len: int,
    device: torch.device | str | int | None,
    block_size: int | tuple[int, int],
) -> "BlockMask":
    """Return `create_block_mask`'s result, in eager code."""
    block_q, block_kv = _block_sizes(block_size)
    batch = _count("B", batch_size, 1)
    heads = _count("H", num_heads, 1)
    seqlen_q = _count("Q_LEN", q_len, 0)
    seqlen_kv = _count("KV_LEN", kv_len, 0)
    place = None if device is None else _usable(device)
    mask = trace_mask_mod(mask_mod, place)
    if place is None:
        place = _default_device(mask)
    if batch * heads * seqlen_q * seqlen_kv > 0:
        _check_gathers(mask, (batch, heads, seqlen_q, seqlen_kv))
    with torch.no_grad():
        program = TracedProgram(mask, place)
        if place.type == "meta":
            raise ValueError(
                invalid(
                    "device",
                    place,
                    "a device whose tensors hold something",
                    "build the mask on the CPU, and move it with block_mask.to('meta')",
                )
            )
        grid = BlockGrid(
            batch=batch if program.reads("b") else 1,
            heads=heads if program.reads("h") else 1,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            block_q=block_q,
            block_kv=block_kv,
            device=place,
        )
        states = block_states(program, grid)
        # A band needs none: kernels take its limits.
        is_band = band_of_mask(mask.graph) is not None
        ranges = None if is_band else find_key_ranges(program, grid, states)
        lists = BlockLists.from_states(
            states,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            block_q=block_q,
            block_kv=block_kv,
        )
        # Not all kernels take ranges, and those read lists of whole blocks alone.
        does_without = is_band or (ranges is not None and are_whole(block_q, block_kv))
        bits = None if does_without else _bits(program, grid, states)
    lists = lists.expanded(batch, heads)
    record(lists, mask, ranges, bits, shows_mask=True)
    return lists.to_torch(mask_mod)


def _bits(program: TracedProgram, grid: BlockGrid, states: Tensor) -> MaskBits | None:
    """Return the bits of a mask whose blocks of the user's size have these states."""
    if states.numel() == 0:
        return None
    if (grid.block_q, grid.block_kv) != (BLOCK, BLOCK):
        grid = replace(grid, block_q=BLOCK, block_kv=BLOCK)
        states = block_states(program, grid)
    return find_mask_bits(program, grid, states)


def _usable(device: torch.device | str | int) -> torch.device:
    """Return the device that tensors made there say they are on."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            invalid(
                "device", repr(device), "a device that torch can use here", f"torch says: {reason}"
            )
        ) from error


def _check_gathers(mask: TracedMod, sizes: tuple[int, int, int, int]) -> None:
    """Raise GatherError where the sizes alone say that an index leaves its tensor."""
    names = ("b", "h", "q_idx", "kv_idx")
    last = {name: size - 1 for name, size in zip(names, sizes, strict=True)}
    for gather in direct_gathers(mask.graph):
        name = gather.position
        probes = partial(places, last, name)
        check_reach("mask_mod", mask, gather, (0, last[name]), probes)


def _default_device(mask: TracedMod) -> torch.device:
    for tensor in mask.captures:
        if tensor.dim() > 0:
            return tensor.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.empty(0, device=accelerator).device


def _block_sizes(size: int | tuple[int, int]) -> tuple[int, int]:
    sizes = size if isinstance(size, (tuple, list)) else (size, size)
    if len(sizes) != 2 or any(_as_int(s) is None or int(s) < 1 for s in sizes):
        raise ValueError(
            invalid("BLOCK_SIZE", size, "a positive int, or a pair (query, KV)", "pass 128, say")
        )
    return int(sizes[0]), int(sizes[1])


def _count(name: str, value: int | None, least: int) -> int:
    if value is None and least == 1:
        return 1
    count = _as_int(value)
    if count is None or count < least:
        raise ValueError(
            invalid(name, value, f"an int of at least {least}", "pass the size of q or k")
        )
    return count


def _as_int(value: object) -> int | None:
    """Return an int, a symbolic int's value or an integer scalar; None for anything else."""
    if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
        return None
    return int(value)  # pyright: ignore[reportArgumentType]
