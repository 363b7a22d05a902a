"""The operators fovea::attention_forward and fovea::attention_backward.

Lives here: schemas, kernels, fakes and the autograd formulas that graphs (torch.compile, export)
use. Not here: how eager calls are differentiated (`functions.py`, `eager.py`), packing
(`program.py`).
Invariant: no output shares memory with an input, and an output that is not wanted is an empty
    tensor.
"""

from typing import Any

import torch
from torch import Tensor

from fovea import dispatch
from fovea.ops.program import Packed, parse, unpack
from fovea.ops.second_order import second_order
from fovea.problem import GradientNeeds, check_gathers, strides_in_order

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_torch_library: Any = torch.library  # its decorators are typed for one use only

# Keeps the definitions alive: they are removed with this object.
library: Any = torch.library.Library("fovea", "FRAGMENT")
library.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] captures, "
    "Tensor[] constants, SymInt[] ints, str program) -> (Tensor out, Tensor lse, Tensor max_score)",
    tags=_TAGS,
)
library.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sink, "
    "Tensor out, Tensor lse, Tensor[] captures, Tensor[] constants, SymInt[] ints, str program, "
    "bool[] needs) -> Tensor[]",  # dq, dk, dv, dsink, then one a capture
    tags=_TAGS,
)
# For graphs alone: opaque, so that no loop over tiles is traced. Eager second orders call the
# reference directly and can be differentiated again.
library.define(
    "attention_second_order(Tensor?[] cotangents, Tensor? dout, Tensor? dlse, Tensor q, Tensor k, "
    "Tensor v, Tensor? sink, Tensor out, Tensor lse, Tensor[] captures, Tensor[] constants, "
    "SymInt[] ints, str program, bool[] needs) -> Tensor[]",
    tags=_TAGS,
)


def packed_of(args: tuple[Any, ...]) -> Packed:
    """Return the operator arguments (q, k, v, sink, captures, constants, ints, program) as one."""
    return Packed(*args)


def needs_of(flags: list[bool]) -> GradientNeeds:
    """Return `needs` of attention_backward as a value: q, k, v, sink, then one flag a capture."""
    return GradientNeeds(
        q=flags[0], k=flags[1], v=flags[2], sink=flags[3], score_captures=tuple(flags[4:])
    )


def attention_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward: the kernel of fovea::attention_forward on every device."""
    if args[0].is_meta:
        return _forward_fake(*args)
    packed = packed_of(args)
    problem = unpack(packed)
    check_gathers(problem)  # torch.compile traced the call with sizes that it did not know
    choice = dispatch.choose(problem, parse(packed.program).backend)
    out, lse, max_score = dispatch.forward(problem, choice)
    return out, lse, lse.new_empty(0) if max_score is None else max_score


def attention_backward(*args: Any) -> list[Tensor]:
    """Run the first-order backward: the kernel of fovea::attention_backward on every device."""
    dout, dlse, q, k, v, sink, out, lse, captures, constants, ints, program, flags = args
    if q.is_meta:
        return _backward_fake(*args)
    packed = Packed(q, k, v, sink, captures, constants, ints, program)
    problem = unpack(packed)
    choice = dispatch.choose(problem, parse(program).backend)
    grads = dispatch.backward(
        problem, choice, out=out, lse=lse, dout=dout, dlse=dlse, needs=needs_of(flags)
    )
    flat = (grads.dq, grads.dk, grads.dv, grads.dsink, *grads.score_captures)
    return [_or_empty(grad, q) for grad in flat]


def attention_second_order(*args: Any) -> list[Tensor]:
    """Run the derivative of the backward; results as `second_order.SecondOrder`, in its order."""
    cotangents, dout, dlse, *inputs, out, lse, captures, constants, ints, program, flags = args
    packed = packed_of((*inputs, captures, constants, ints, program))
    with torch.enable_grad():
        grads = second_order(packed, (dout, dlse, out, lse), needs_of(flags), cotangents)
    flat = (grads.dout, grads.dlse, *grads.inputs, grads.out, grads.lse, *grads.captures)
    # A copy where autograd hands out views or shared zeros: outputs own their memory.
    return [
        packed.q.new_empty(0)
        if g is None
        else g.detach().clone(memory_format=torch.contiguous_format)
        for g in flat
    ]


def _or_empty(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if grad is None else grad


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_, text = args
    program = parse(text)
    shape = (*q.shape[:-1], v.shape[-1])
    out = q.new_empty_strided(shape, strides_in_order(shape, q.stride()))
    rows = (q.shape[0], q.shape[2], q.shape[1])
    if program.varlen_tensors:
        rows = (q.shape[1], q.shape[0])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(rows, dtype=dtype)
    max_score = q.new_empty(rows if program.wants_max_score else (0,), dtype=dtype)
    return out, lse, max_score


def _backward_fake(*args: Any) -> list[Tensor]:
    _, _, q, k, v, sink, _, _, captures, _, _, _, flags = args

    def gradient(tensor: Tensor | None, is_needed: bool) -> Tensor:
        if tensor is None or not is_needed:
            return q.new_empty(0)
        return tensor.new_empty_strided(
            tensor.shape, strides_in_order(tensor.shape, tensor.stride())
        )

    tensors = (q, k, v, sink, *captures)
    return [gradient(tensor, flag) for tensor, flag in zip(tensors, flags, strict=True)]


def _second_order_fake(*args: Any) -> list[Tensor]:
    _, *tensors, captures, _, _, _, _ = args
    return [
        args[3].new_empty(0)
        if tensor is None or not tensor.is_floating_point()
        else tensor.new_empty(tensor.shape)
        for tensor in (*tensors, *captures)
    ]


def _no_gradient(ints: list[int]) -> list[None] | None:
    """Return what stands for `ints` among gradients: to torch, an empty list holds tensors."""
    return None if ints else []


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, captures, constants, ints, program = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, output[0], output[1], *captures, *constants)
    ctx.ints, ctx.program, ctx.num_captures = ints, program, len(captures)
    ctx.flags = [
        tensor is not None and tensor.requires_grad for tensor in (q, k, v, sink, *captures)
    ]


def _differentiate_forward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object
) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, *rest = ctx.saved_tensors
    captures, constants = rest[: ctx.num_captures], rest[ctx.num_captures :]
    flags = ctx.flags
    if dout is None and dlse is None:
        asked: list[Any] = [None] * len(flags)
        return (*asked[:4], asked[4:], [None] * len(constants), _no_gradient(ctx.ints), None)
    grads = BACKWARD(
        dout, dlse, q, k, v, sink, out, lse, captures, constants, ctx.ints, ctx.program, flags
    )
    asked = [grad if flag else None for grad, flag in zip(grads, flags, strict=True)]
    return (*asked[:4], asked[4:], [None] * len(constants), _no_gradient(ctx.ints), None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dout, dlse, q, k, v, sink, out, lse, captures, constants, ints, program, flags = inputs
    del output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dout, dlse, q, k, v, sink, out, lse, *captures, *constants)
    ctx.ints, ctx.program, ctx.flags, ctx.num_captures = ints, program, flags, len(captures)


def _differentiate_backward(ctx: Any, cotangents: Any) -> tuple[Any, ...]:
    dout, dlse, q, k, v, sink, out, lse, *rest = ctx.saved_tensors
    captures, constants = rest[: ctx.num_captures], rest[ctx.num_captures :]
    sources = [dout, dlse, q, k, v, sink, out, lse]
    grads = SECOND_ORDER(
        list(cotangents), *sources, captures, constants, ctx.ints, ctx.program, ctx.flags
    )
    first_grads = [
        None if source is None else grad for source, grad in zip(sources, grads[:8], strict=True)
    ]
    of_captures = [
        grad if capture.is_floating_point() else None
        for capture, grad in zip(captures, grads[8:], strict=True)
    ]
    no_ints = _no_gradient(ctx.ints)
    return (*first_grads, of_captures, [None] * len(constants), no_ints, None, None)


def _register(name: str, kernel: Any, fake: Any) -> Any:
    """Register one operator's kernel and fake; return the operator."""
    library.impl(name, kernel, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"fovea::{name}", fake, lib=library)
    return getattr(torch.ops.fovea, name).default


FORWARD = _register("attention_forward", attention_forward, _forward_fake)
BACKWARD = _register("attention_backward", attention_backward, _backward_fake)
SECOND_ORDER = _register("attention_second_order", attention_second_order, _second_order_fake)
_torch_library.register_autograd(
    FORWARD, _differentiate_forward, setup_context=_save_forward, lib=library
)
_torch_library.register_autograd(
    BACKWARD, _differentiate_backward, setup_context=_save_backward, lib=library
)
