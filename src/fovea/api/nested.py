"""Jagged nested tensors in and out of a packed call.

Lives here: what torch's nested tensors mean for `fovea.attention`. Invariant: results are nested
like q, and a nested tensor that has no packed form raises.
"""

from typing import Any, cast

import torch
from torch import Tensor

from fovea.errors import UnsupportedError, invalid
from fovea.ops import attend
from fovea.problem import Request, Results, VarlenRequest, make_varlen


def is_jagged(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v are nested tensors of jagged layout.

    Raises:
        TypeError: some are, some are not, or the layout is another.
    """
    try:
        if not (q.is_nested or k.is_nested or v.is_nested):
            return False
    except AttributeError:  # no tensor: the checks of a dense call say so
        return False
    layouts = [getattr(tensor, "layout", None) for tensor in (q, k, v)]
    if all(layout is torch.strided for layout in layouts):
        raise TypeError(
            invalid(
                "layout of q, k, v",
                "nested tensor of strided layout",
                "dense tensors, or nested tensors of layout torch.jagged",
                "build them with torch.nested.nested_tensor(..., layout=torch.jagged)",
            )
        )
    is_each_jagged = [layout is torch.jagged for layout in layouts]
    if all(is_each_jagged):
        return True
    if any(is_each_jagged):
        raise TypeError(
            invalid(
                "layouts of q, k, v",
                tuple(str(layout) for layout in layouts),
                "all torch.jagged or all torch.strided",
                "make all three nested, or pack them for fovea.attention_varlen",
            )
        )
    return False  # anything else is refused, argument by argument, by the checks of a dense call


def attention_jagged(
    q: Tensor, k: Tensor, v: Tensor, request: Request, backend: str | None
) -> Results:
    """Return the results of a call on (batch, jagged, heads, head_dim) nested tensors.

    out is nested like q; lse and max_score are packed, (heads_q, total_q).
    """
    from fovea.api.attention import autocast

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or cast(Any, tensor)._ragged_idx != 1:
            raise ValueError(
                invalid(
                    f"{name}.shape",
                    tuple(str(extent) for extent in tensor.shape),
                    "(batch, jagged, heads, head_dim)",
                    f"move the jagged axis to place 1, e.g. with {name}.transpose(1, 2)",
                )
            )
        if cast(Any, tensor).lengths() is not None:
            raise UnsupportedError(
                f"{name} is a nested tensor with holes (allowed: contiguous jagged tensors); pass "
                f"{name}.contiguous(), or use fovea.attention_varlen with seqused."
            )
    offsets_q, offsets_kv, offsets_v = (_offsets(tensor) for tensor in (q, k, v))
    if offsets_v is not offsets_kv and not torch.equal(offsets_v, offsets_kv):
        raise ValueError(
            invalid("lengths in v", "other than those in k", "equal to those in k", "match them")
        )
    where = VarlenRequest(
        offsets_q.to(torch.int32),
        offsets_kv.to(torch.int32),
        cast(Any, q)._get_max_seqlen(),
        cast(Any, k)._get_max_seqlen(),
    )
    values = autocast(q.values(), k.values(), v.values())
    out, lse, max_score = attend(make_varlen(*values, where, request), backend)
    return torch.nested.nested_tensor_from_jagged(out, offsets=offsets_q), lse, max_score


def _offsets(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).offsets()
