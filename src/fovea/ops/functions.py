"""The operators as nested autograd functions, for functorch transforms, modes and subclasses.

Lives here: two functions with `setup_context`, so that torch.func.grad composes with them, and with
vmap rules. Not here: the quick path of plain eager calls (`eager.py`), the operators
(`library.py`).
Invariant: every tensor is an argument of its own, since autograd does not look into lists.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fovea.errors import UnsupportedError
from fovea.ops import folding, library
from fovea.ops.batched_grads import each_of_batch, is_batched
from fovea.ops.library import needs_of
from fovea.ops.program import Packed
from fovea.ops.second_order import second_order

_torch: Any = torch

_NO_FORWARD_MODE = (
    "attention under forward-mode differentiation (torch.func.jvp, jacfwd and hessian, "
    "forward_ad.make_dual) is not supported (allowed: reverse mode, to any order); use "
    "torch.func.vjp or jacrev, and torch.func.jacrev(torch.func.jacrev(...)) for a Hessian."
)

NUM_INPUTS = 4  # q, k, v, sink come first among the tensors of a call


class Attention(torch.autograd.Function):
    """(program, ints, num_captures, q, k, v, sink, *captures, *constants) -> out, lse,
    max_score.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        program, ints, num_captures, q, k, v, sink, *rest = args
        captures, constants = rest[:num_captures], rest[num_captures:]
        return library.FORWARD(q, k, v, sink, captures, constants, list(ints), program)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.program, ctx.ints, ctx.num_captures, *tensors = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0], output[1], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse, _ = grads
        out, lse, *tensors = ctx.saved_tensors
        num_tensors = NUM_INPUTS + ctx.num_captures
        num_constants = len(tensors) - num_tensors
        flags = [bool(flag) for flag in ctx.needs_input_grad[3 : 3 + num_tensors]]
        if dout is None and dlse is None:
            return (None,) * (3 + len(tensors))
        if is_batched(grads):
            return each_of_batch(partial(Attention.backward, ctx), grads)
        results = _backward(
            (ctx.program, ctx.ints, ctx.num_captures, flags), (dout, dlse, out, lse), tensors
        )
        asked = [grad if flag else None for grad, flag in zip(results, flags, strict=True)]
        return (None, None, None, *asked, *[None] * num_constants)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(_NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return folding.vmap_forward(_apply, info.batch_size, in_dims, args)


class AttentionBackward(torch.autograd.Function):
    """(program, ints, num_captures, flags, dout, dlse, out, lse, *tensors of the call) -> grads."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        program, ints, num_captures, flags, *results_and_tensors = args
        return _call_operator(
            (program, ints, num_captures, flags), results_and_tensors[:4], results_and_tensors[4:]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.program, ctx.ints, ctx.num_captures, ctx.flags, *tensors = inputs
        unasked = [grad for grad, flag in zip(output, ctx.flags, strict=True) if not flag]
        ctx.mark_non_differentiable(*unasked)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, out, lse, q, k, v, sink, *rest = ctx.saved_tensors
        captures, constants = rest[: ctx.num_captures], rest[ctx.num_captures :]
        packed = Packed(q, k, v, sink, captures, constants, list(ctx.ints), ctx.program)
        needs = needs_of(list(ctx.flags))
        grads = second_order(packed, (dout, dlse, out, lse), needs, cotangents)
        of_results = (grads.dout, grads.dlse, grads.out, grads.lse)
        return (
            *(None, None, None, None),
            *of_results,
            *grads.inputs,
            *grads.captures,
            *[None] * len(constants),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(_NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return folding.vmap_backward(_apply_backward, info.batch_size, in_dims, args)


def keep_dynamo_out(*functions: Any) -> None:
    """Let Dynamo run these functions, and what they call, as they are.

    They run eagerly, but under torch.compile (without fullgraph) autograd may call them where
    Dynamo would compile each Python frame by itself, and it misreads those of autograd functions.
    `torch.compiler.disable` does the same, but imports Dynamo.
    """
    frames = _torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, skip)


for _function in (Attention, AttentionBackward):
    keep_dynamo_out(_function.forward, _function.setup_context, _function.backward, _function.vmap)

_apply = cast(Any, Attention).apply
_apply_backward = cast(Any, AttentionBackward).apply


def differentiable_lse(packed: Packed) -> Tensor:
    """Return the lse of a call, itself differentiable."""
    facts = (packed.program, tuple(packed.ints), len(packed.captures))
    tensors = (packed.q, packed.k, packed.v, packed.sink, *packed.captures, *packed.constants)
    return _apply(*facts, *tensors)[1]


def differentiable_backward(
    packed: Packed, results: tuple[Any, ...], flags: list[bool]
) -> tuple[Tensor, ...]:
    """Return the gradients of a call, themselves differentiable.

    Args:
        packed: the call.
        results: dout, dlse, out, lse.
        flags: whether each of q, k, v, sink and the captures needs a gradient.
    """
    facts = (packed.program, packed.ints, len(packed.captures), flags)
    tensors = [packed.q, packed.k, packed.v, packed.sink, *packed.captures, *packed.constants]
    return _backward(facts, results, tensors)


def _backward(
    facts: tuple[Any, ...], results: tuple[Any, ...], tensors: list[Any]
) -> tuple[Tensor, ...]:
    program, ints, num_captures, flags = facts
    return _apply_backward(program, tuple(ints), num_captures, tuple(flags), *results, *tensors)


def _call_operator(facts: tuple[Any, ...], results: Any, tensors: list[Any]) -> tuple[Tensor, ...]:
    program, ints, num_captures, flags = facts
    dout, dlse, out, lse = results
    q, k, v, sink, *rest = tensors
    captures, constants = rest[:num_captures], rest[num_captures:]
    grads = library.BACKWARD(
        dout, dlse, q, k, v, sink, out, lse, captures, constants, list(ints), program, list(flags)
    )
    return tuple(grads)
