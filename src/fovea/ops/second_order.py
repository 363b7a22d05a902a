"""Second-order gradients: the derivative of the reference's first-order backward.

Lives here: one vector-Jacobian product through `reference/tiled_backward.py`, which is written in
differentiable torch operations. Not here: which autograd node asks (`functions.py`, `library.py`).
Invariant: always the reference, whatever backend ran the forward and the first backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fovea import dispatch
from fovea.ops.program import Packed, unpack
from fovea.problem import GradientNeeds, Gradients


class SecondOrder(NamedTuple):
    """Gradients with respect to everything that the first-order backward read.

    Attributes:
        inputs: of q, k, v and sink; captures: of the tensors captured by the score_mod.
    """

    dout: Tensor | None
    dlse: Tensor | None
    inputs: tuple[Tensor | None, ...]
    out: Tensor | None
    lse: Tensor | None
    captures: tuple[Tensor | None, ...]


type_of_results = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


def second_order(
    packed: Packed,
    results: type_of_results,
    needs: GradientNeeds,
    cotangents: Sequence[Tensor | None],
) -> SecondOrder:
    """Pull the cotangents of a first-order backward back to its inputs.

    Args:
        packed: the call.
        results: dout, dlse, out, lse as the backward got them.
        needs: what the backward computed.
        cotangents: of dq, dk, dv, dsink and each capture's gradient; None for zero.
    """
    dout, dlse, out, lse = results
    sources = [dout, dlse, packed.q, packed.k, packed.v, packed.sink, out, lse, *packed.captures]
    places = [i for i, t in enumerate(sources) if t is not None and t.is_floating_point()]
    if packed.q.is_meta:
        shapes = [
            torch.empty_like(t) if t is not None and i in places else None
            for i, t in enumerate(sources)
        ]
        return _ordered(shapes)
    computed = [i for i, flag in enumerate(_flags(needs)) if flag]

    def first_order(*floats: Tensor) -> tuple[Tensor, ...]:
        full = list(sources)
        for place, tensor in zip(places, floats, strict=True):
            full[place] = tensor
        grads = _reference_backward(packed, full, needs)
        flat = (grads.dq, grads.dk, grads.dv, grads.dsink, *grads.score_captures)
        wanted = [flat[i] for i in computed]
        return tuple(tensor for tensor in wanted if tensor is not None)

    primals = [tensor for i in places if (tensor := sources[i]) is not None]
    linearised: Any = torch.func.vjp(first_order, *primals)
    values, pull = linearised
    given = [cotangents[i] for i in computed]
    full = tuple(
        torch.zeros_like(value) if tangent is None else tangent
        for value, tangent in zip(values, given, strict=True)
    )
    grads: list[Tensor | None] = [None] * len(sources)
    for place, grad in zip(places, pull(full), strict=True):
        grads[place] = grad
    return _ordered(grads)


def _ordered(grads: list[Tensor | None]) -> SecondOrder:
    """Return gradients in the order of `sources` by name."""
    return SecondOrder(
        dout=grads[0],
        dlse=grads[1],
        inputs=tuple(grads[2:6]),
        out=grads[6],
        lse=grads[7],
        captures=tuple(grads[8:]),
    )


def _flags(needs: GradientNeeds) -> tuple[bool, ...]:
    return (needs.q, needs.k, needs.v, needs.sink, *needs.score_captures)


def _reference_backward(
    packed: Packed, sources: list[Tensor | None], needs: GradientNeeds
) -> Gradients:
    dout, dlse, q, k, v, sink, out, lse, *captures = sources
    assert q is not None
    assert k is not None
    assert v is not None
    assert out is not None
    assert lse is not None
    problem = unpack(
        packed._replace(q=q, k=k, v=v, sink=sink, captures=[t for t in captures if t is not None])
    )
    choice = dispatch.choose(problem, "reference")
    return dispatch.backward(problem, choice, out=out, lse=lse, dout=dout, dlse=dlse, needs=needs)
