"""The arguments of a forward launch, in the order of the kernel's host function.

Lives here: layouts that the copy engine takes, padding of odd head dimensions, run-time numbers.
Not here: their compile-time types (`kernels/sm90/forward/entry.py`). Invariant: nothing here waits
for a device; a tensor is copied only where its layout cannot run as it is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fovea.mods.trace import TracedMod
from fovea.plan.features import ForwardFeatures
from fovea.plan.numerics import LOG2_E
from fovea.plan.select import band_of
from fovea.plan.sm90 import ForwardPlan
from fovea.problem import AttentionProblem
from fovea.problem.value import strides_in_order
from fovea.tiling.block_lists import BlockLists
from fovea.tiling.order import section_heads

_ALIGNMENT_BYTES = 16  # of base and strides, asked by the copy engine
_ALIGNMENT_ELEMENTS = 8
# What K and V of the heads in flight may fill of the H200's 60 MB of L2; the rest is for Q and O.
_L2_BYTES = 32 * 1024**2


class ForwardCall(NamedTuple):
    """A launch ready to go, and where its results will be.

    `padded_out` has the head dimension rounded up to whole copies; None where `out` is written
    itself.
    """

    arguments: tuple[Any, ...]
    out: Tensor
    padded_out: Tensor | None
    lse: Tensor
    max_score: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What a launch needs that shapes, strides and features decide; kept between calls.

    `takes_as_is` says that q, k, v and out need no copy, whatever their addresses are aligned to.
    """

    plan: ForwardPlan
    integers: tuple[int, int, int, int, int]
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    takes_as_is: bool


def prepare(problem: AttentionProblem, plan: ForwardPlan, num_sms: int) -> Prepared:
    """Return what calls like this one share."""
    out_shape = (*problem.q.shape[:-1], problem.head_dim_v)
    out_strides = strides_in_order(out_shape, problem.q.stride())
    layouts = [(t.shape, t.stride()) for t in (problem.q, problem.k, problem.v)]
    return Prepared(
        plan=plan,
        integers=_integers(problem, num_sms),
        out_shape=out_shape,
        out_strides=out_strides,
        lse_shape=problem.lse_shape,
        takes_as_is=all(
            _is_whole(shape, strides) for shape, strides in (*layouts, (out_shape, out_strides))
        ),
    )


def forward_call(problem: AttentionProblem, prepared: Prepared) -> ForwardCall:
    """Return the launch of a problem, with fresh outputs."""
    plan = prepared.plan
    features = plan.features
    q, k, v = problem.q, problem.k, problem.v
    device = q.device
    out = torch.empty_strided(
        prepared.out_shape, prepared.out_strides, dtype=q.dtype, device=device
    )
    padded_out = None
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    if not prepared.takes_as_is or addresses % _ALIGNMENT_BYTES != 0:
        q, k, v = (loadable(tensor) for tensor in (q, k, v))
        if not _is_loadable(out):
            padded_out = _padded_out(out, v.shape[-1])
    lse = torch.empty(prepared.lse_shape, dtype=torch.float32, device=device)
    max_score = torch.empty_like(lse) if features.max_score else None
    lists = problem.block_lists
    arguments = (
        q,
        k,
        v,
        out if padded_out is None else padded_out,
        lse,
        max_score,
        problem.sink.float() if problem.sink is not None else None,
        # A memset of four bytes, on the stream before the launch.
        torch.zeros(1, dtype=torch.int32, device=device) if plan.is_dynamic else None,
        None if lists is None else _list_arguments(lists, plan),
        _scores(problem),
        prepared.integers,
        _captures(problem, features) if features.has_mods else None,
        _mod_scalars(problem, features) if features.has_mods else None,
    )
    return ForwardCall(arguments, out, padded_out, lse, max_score)


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


def loadable(tensor: Tensor) -> Tensor:
    """Return a tensor that the copy engine can read: itself, or a copy padded to whole rows."""
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


def _scores(problem: AttentionProblem) -> tuple[float, float, float]:
    scale, softcap = problem.scale, problem.softcap
    assert not isinstance(scale, Tensor) and not isinstance(softcap, Tensor)
    return (scale, scale * LOG2_E, 1.0 if softcap is None else softcap)


def _integers(problem: AttentionProblem, num_sms: int) -> tuple[int, int, int, int, int]:
    """Return offset, left, right, heads of an L2 section, CTAs."""
    band = band_of(problem)
    section = section_heads(
        seqlen_kv=problem.seqlen_kv,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=problem.q.element_size(),
        group_size=problem.group_size,
        l2_bytes=_L2_BYTES,
    )
    rows = problem.batch * problem.heads_q
    assert isinstance(band.offset, int)
    left = band.left if isinstance(band.left, int) else 0
    right = band.right if isinstance(band.right, int) else 0
    return (band.offset, left, right, min(section, rows), num_sms)


def _list_arguments(lists: BlockLists, plan: ForwardPlan) -> tuple[Any, ...]:
    """Return the block lists and their block sizes."""
    return (
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
        lists.block_q,
        lists.block_kv // plan.tile_n,
    )


def _mods(problem: AttentionProblem, features: ForwardFeatures) -> tuple[TracedMod, ...]:
    """Return the mods in the order of `features.graphs`."""
    named = (
        (features.score_mod, problem.score_mod),
        (features.mask_mod, problem.mask_mod),
        (features.block_mask_mod, problem.block_mask_mod),
    )
    return tuple(mod for graph, mod in named if graph is not None and mod is not None)


def _captures(problem: AttentionProblem, features: ForwardFeatures) -> tuple[Tensor, ...] | None:
    tensors = [t for mod in _mods(problem, features) for t in mod.captures]
    device = problem.device
    return tuple(_capture(tensor.detach(), device) for tensor in tensors) or None


def _capture(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a captured tensor as the kernel reads it."""
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    if tensor.numel() == 0:
        # A gather from nothing, at positions that nobody sees, reads 0 in the reference too.
        return torch.zeros([1] * tensor.dim(), dtype=tensor.dtype, device=device)
    if tensor.dim() > 0:
        return tensor
    # A single number may live on the host, as torch's own operations allow.
    return tensor.to(device, non_blocking=True).reshape(1)


def _mod_scalars(
    problem: AttentionProblem, features: ForwardFeatures
) -> tuple[int | float, ...] | None:
    mods = _mods(problem, features)
    return tuple(value for mod in mods for value in mod.scalars) or None
