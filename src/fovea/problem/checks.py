"""Checks and normal forms of single user arguments.

Lives here: one function an argument, each raising an error that names argument, value, allowed
values and way out. Not here: which arguments a call has (`build.py`), contents (`contents.py`).
Invariant: no check reads a device, and none turns a symbolic size or float into a constant.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fovea.errors import UnsupportedError, invalid
from fovea.mods.trace import TracedMod, trace_mask_mod, trace_score_mod
from fovea.problem.block_masks import known_lists, look_once
from fovea.problem.value import Causal, Window
from fovea.tiling.block_lists import BlockLists

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
MAX_HEAD_DIM = 576
_FLOAT32 = torch.finfo(torch.float32)
_UNLIMITED = 2**31 - 1  # keys on one side of the diagonal


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are strided tensors of one floating dtype on one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(invalid(name, _type_name(tensor), "a torch.Tensor", "pass a tensor"))
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise TypeError(
                invalid(
                    f"{name}.layout",
                    f"{tensor.layout}{', nested' if tensor.is_nested else ''}",
                    "torch.strided, or torch.jagged for all of q, k and v of fovea.attention",
                    f"pass {name}.to_dense(), or sequences packed for attention_varlen",
                )
            )
    if q.dtype not in DTYPES:
        if q.dtype.is_floating_point:
            raise UnsupportedError(
                invalid("q.dtype", q.dtype, _names(DTYPES), "cast q, k and v to one of these")
            )
        raise TypeError(invalid("q.dtype", q.dtype, _names(DTYPES), "cast q, k and v"))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                invalid(
                    f"{name}.dtype",
                    tensor.dtype,
                    f"{q.dtype}, the dtype of q",
                    f"cast {name}, or run under torch.autocast, which casts all three",
                )
            )
        check_device(name, tensor, q)


def check_layout(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless `tensor` is strided: not sparse, mkldnn or nested."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else tensor.layout
        remedy = f"pass {name}.to_dense(), or the values of a nested tensor"
        raise TypeError(invalid(f"{name}.layout", got, "torch.strided", remedy))


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise ValueError unless `tensor` is where q is."""
    if tensor.device != q.device:
        raise ValueError(
            invalid(
                f"{name}.device",
                tensor.device,
                f"{q.device}, the device of q",
                f"move it with {name}.to('{q.device}')",
            )
        )


def check_rank(name: str, tensor: Tensor, axes: str, remedy: str) -> None:
    """Raise ValueError unless `tensor` has one axis for each name in `axes`."""
    if tensor.dim() != axes.count(",") + 1:
        allowed = f"({axes})" if "," in axes else f"({axes},)"
        raise ValueError(invalid(f"{name}.shape", tuple(tensor.shape), allowed, remedy))


def check_heads(shape_q: torch.Size, shape_k: torch.Size, shape_v: torch.Size) -> None:
    """Raise ValueError unless head counts and head dims of q, k and v fit each other."""
    heads_q, head_dim, heads_kv, head_dim_v = shape_q[-2], shape_q[-1], shape_k[-2], shape_v[-1]
    if shape_v[-2] != heads_kv:
        raise ValueError(
            invalid("heads of v", shape_v[-2], f"{heads_kv}, the heads of k", "give k and v alike")
        )
    layouts = (
        "check the axis order: the layout is (batch, seqlen, heads, head_dim) except in "
        "fovea.flex_attention, which takes (batch, heads, seqlen, head_dim)"
    )
    if heads_kv < 1:
        raise ValueError(invalid("heads of k and v", heads_kv, "at least 1", layouts))
    if heads_q < 1 or heads_q % heads_kv != 0:
        allowed = f"a positive multiple of the {heads_kv} heads of k and v"
        raise ValueError(invalid("heads of q", heads_q, allowed, layouts))
    if shape_k[-1] != head_dim:
        raise ValueError(
            invalid("head_dim of k", shape_k[-1], f"{head_dim}, the head_dim of q", "match them")
        )
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        raise ValueError(
            invalid(
                "head_dim of q and k, head_dim of v",
                (head_dim, head_dim_v),
                f"1 to {MAX_HEAD_DIM}",
                "split the head into several",
            )
        )


def normal_causal(causal: object) -> Causal | None:
    """Return the corner of the diagonal that `causal` names, or None."""
    if causal is False or causal is None:
        return None
    # By type first: an array compares with a string element by element.
    if causal is True or (isinstance(causal, str) and causal == "bottom_right"):
        return "bottom_right"
    if isinstance(causal, str) and causal == "top_left":
        return "top_left"
    raise ValueError(
        invalid(
            "causal",
            repr(causal),
            'False, True (= "bottom_right"), "bottom_right", "top_left"',
            "name the corner where the diagonal ends",
        )
    )


def normal_window(window: Any) -> Window:
    """Return (left, right), each None or at least 0."""
    if window is None:
        return (None, None)
    if type(window) not in (tuple, list) or len(window) != 2:
        raise TypeError(
            invalid(
                "window",
                repr(window),
                "None or a pair (left, right)",
                "for the last n keys and the query's own pass window=(n, 0)",
            )
        )
    left, right = window
    return (_normal_extent("left", left), _normal_extent("right", right))


def _normal_extent(side: str, extent: object) -> int | None:
    if extent is None:
        return None
    if isinstance(extent, bool):
        raise TypeError(_bad_extent(side, extent))
    if not isinstance(extent, int):
        try:
            extent = operator.index(cast(Any, extent))
        except TypeError:
            raise TypeError(_bad_extent(side, extent)) from None
    if extent < 0:
        raise ValueError(_bad_extent(side, extent))
    # No sequence is that long, and operators and kernels have no wider integers for it.
    return None if type(extent) is int and extent >= _UNLIMITED else extent


def _bad_extent(side: str, extent: object) -> str:
    return invalid(
        f"window {side}",
        repr(extent),
        "None (unlimited) or an integer of at least 0",
        "pass None where FlashAttention takes -1; only fovea.flash_attn gives -1 that meaning",
    )


def normal_number(name: str, value: object, q: Tensor, *, is_positive: bool) -> float | Tensor:
    """Return `scale` or `softcap` as a host float, or as a 0-d tensor that only a kernel reads.

    A 0-d CPU tensor is read at once where it holds a value; under torch.compile, a functorch
    transform or a fake mode it stays a tensor and is checked when the operator runs.
    """
    if isinstance(value, Tensor):
        _check_number_tensor(name, value, q)
        if is_unreadable(value):
            return value
        value = value.item()
    elif isinstance(value, bool) or not isinstance(value, int | float):
        value = _float_of(name, value)
    number = cast(float, value)
    if torch.compiler.is_compiling():
        return number
    check_number(name, number, q.dtype, is_positive=is_positive)
    return float(number)


def _float_of(name: str, value: object) -> float:
    """Return a number of another library's, such as NumPy's, as a float."""
    has_imaginary = getattr(getattr(value, "dtype", None), "kind", "") == "c"
    is_number = not isinstance(value, bool) and hasattr(value, "__float__") and not has_imaginary
    if is_number and getattr(value, "shape", ()) == ():
        try:
            return float(cast(Any, value))
        except (TypeError, ValueError):
            pass  # an array of text or objects
    raise TypeError(
        invalid(name, repr(value), "a number or a 0-d tensor", "convert it with float(...)")
    )


def check_number(name: str, value: float, dtype: torch.dtype, *, is_positive: bool) -> None:
    """Raise ValueError unless `value` is finite, and positive where that is asked.

    It is finite and, where positive, not 0 in the dtype of the accumulation; times log2(e) too:
    scores are counted in powers of two.
    """
    is_wide = dtype == torch.float64
    least, most = (0.0, math.inf) if is_wide else (_FLOAT32.tiny, _FLOAT32.max / math.log2(math.e))
    if not abs(value) <= most or abs(value) == math.inf or (is_positive and value <= least):
        allowed = "a finite number above 0" if is_positive else "any finite number"
        if not is_wide:
            allowed += (
                f" of float32 ({f'{least:.3g} to ' if is_positive else ''}{most:.3g} in size)"
            )
        remedy = "pass None for no softcap" if is_positive else "pass None for 1/sqrt(head_dim)"
        got: object = value
        if type(value) is int and abs(value) > _FLOAT32.max:  # it has hundreds of digits
            got = f"an integer of {value.bit_length()} bits"
        raise ValueError(invalid(name, got, allowed, remedy))


def is_unreadable(tensor: Tensor) -> bool:
    """Return whether reading `tensor` on the host would sync, break a graph or fail."""
    return (
        torch.compiler.is_compiling()
        or tensor.device.type != "cpu"
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]
    )


def _check_number_tensor(name: str, value: Tensor, q: Tensor) -> None:
    check_layout(name, value)
    if value.dim() != 0 or value.dtype == torch.bool or value.dtype.is_complex:
        raise ValueError(
            invalid(
                name,
                f"tensor of shape {tuple(value.shape)} and {value.dtype}",
                "a number, or a 0-d tensor of a real dtype",
                "put values that differ by head or position into a score_mod",
            )
        )
    if value.requires_grad:
        raise ValueError(
            invalid(
                name,
                "tensor that requires grad",
                "a number, or a 0-d tensor without grad",
                f"put a learnable {name} into a score_mod, or pass {name}.detach()",
            )
        )
    if value.device.type != "cpu":
        check_device(name, value, q)


def check_sink(sink: object, q: Tensor) -> None:
    """Raise unless `sink` holds one floating logit for each query head, on the device of q."""
    if not isinstance(sink, Tensor):
        raise TypeError(
            invalid("sink", _type_name(sink), "None or a tensor (heads_q,)", "pass a tensor")
        )
    check_layout("sink", sink)
    if sink.dim() != 1 or sink.shape[0] != q.shape[-2]:
        raise ValueError(
            invalid(
                "sink.shape",
                tuple(sink.shape),
                f"({q.shape[-2]},), one logit for each query head",
                "expand a shared logit with sink.expand(heads_q)",
            )
        )
    if sink.dtype not in DTYPES:
        raise TypeError(invalid("sink.dtype", sink.dtype, _names(DTYPES), "cast sink"))
    check_device("sink", sink, q)


def trace_score(score_mod: object, q: Tensor) -> TracedMod | None:
    """Return the traced score_mod, its captured tensors checked."""
    if score_mod is None:
        return None
    function = _check_callable("score_mod", score_mod, "(score, b, h, q_idx, kv_idx) -> score")
    score_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return check_captures("score_mod", trace_score_mod(function, score_dtype, q.device), q)


def trace_mask(name: str, mask_mod: object, q: Tensor) -> TracedMod | None:
    """Return the traced mask_mod, its captured tensors checked."""
    if mask_mod is None:
        return None
    function = _check_callable(name, mask_mod, "(b, h, q_idx, kv_idx) -> bool")
    return check_captures(name, trace_mask_mod(function, q.device), q)


def _check_callable(name: str, mod: object, signature: str) -> Callable[..., Any]:
    if not callable(mod):
        raise TypeError(
            invalid(name, _type_name(mod), f"None or a function {signature}", "pass a function")
        )
    return mod


def check_captures(name: str, mod: TracedMod, q: Tensor) -> TracedMod:
    """Return `mod`; raise unless its captured tensors are strided and on the device of q."""
    for capture in mod.captures:
        if capture.layout is not torch.strided:
            raise TypeError(
                invalid(
                    f"layout of a tensor captured by {name} ({mod.source})",
                    f"{capture.layout}, shape {tuple(capture.shape)}",
                    "torch.strided",
                    "capture .to_dense(), or a nested tensor's .values() and .offsets()",
                )
            )
        if capture.device != q.device and not _may_differ(capture, q):
            raise ValueError(
                invalid(
                    f"device of a tensor captured by {name} ({mod.source})",
                    f"{capture.device}, shape {tuple(capture.shape)}",
                    f"{q.device}, the device of q, or cpu for one number without grad",
                    f"move it with .to('{q.device}') before the call",
                )
            )
    return mod


def _may_differ(capture: Tensor, q: Tensor) -> bool:
    """Return whether a captured tensor may be on another device than q.

    Torch's own operations take one number from the host too; and meta tensors stand for a call that
    is only explained or compiled.
    """
    is_number = capture.dim() == 0 and capture.device.type == "cpu" and not capture.requires_grad
    return is_number or q.device.type == "meta"


def read_block_mask(
    block_mask: object, q: Tensor, *, batch: int, lengths: tuple[int, int]
) -> tuple[BlockLists, TracedMod | None]:
    """Return the lists of a BlockMask and its traced mask_mod, both checked against the call."""
    lists = known_lists(block_mask)
    lists.check_call(batch=batch, heads=q.shape[-2], seqlen_q=lengths[0], seqlen_kv=lengths[1])
    if lists.device != q.device:
        raise ValueError(
            invalid(
                "block_mask.device",
                lists.device,
                f"{q.device}, the device of q",
                f"move it with block_mask.to('{q.device}')",
            )
        )
    mask_mod = trace_mask("block_mask.mask_mod", cast(Any, block_mask).mask_mod, q)
    if mask_mod is not None:
        look_once(block_mask, lists, mask_mod)
    return lists, mask_mod


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype) for dtype in dtypes))


def _type_name(value: object) -> str:
    return type(value).__name__
