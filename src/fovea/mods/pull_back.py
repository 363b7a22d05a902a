"""Run a derivative graph: gradients of a score_mod's score and of the tensors it captured.

Lives here: what a `ScoreDerivative` means beside its nodes, which are `evaluate.py`'s. Not here:
how one is made from a graph (`derivative.py`), sums over tiles (`reference/score_gradients.py`).
Invariant: every sum has a fixed order, and where the incoming gradient is 0 everything is 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.mods.evaluate import Positions, Scalar, flat_index, run_nodes, surround
from fovea.mods.graph import Scatter, ScoreDerivative


def evaluate_derivative(
    derivative: ScoreDerivative,
    positions: Positions,
    *,
    score: Tensor,
    grad: Tensor,
    captures: Sequence[Tensor],
    scalars: Sequence[Scalar],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return dL/dscore, and dL/dcapture in grad's dtype for captures that require grad.

    Where `grad` is 0 both are 0, whatever the mod's own derivative is there.

    Shapes: as `evaluate`; `grad` has the full broadcast shape; the first result has it too.
    """
    scattered = {scatter.capture for scatter in derivative.scatters}
    totals = tuple(
        torch.zeros(capture.shape, dtype=torch.float64, device=capture.device)
        if spec.requires_grad or number in scattered
        else None
        for number, (capture, spec) in enumerate(zip(captures, derivative.captures, strict=True))
    )
    inputs = positions.inputs() | {"score": score, "grad": grad}
    d_score = pull_back_(derivative, inputs, totals, captures, scalars)
    return d_score, tuple(None if total is None else total.to(grad.dtype) for total in totals)


def pull_back_(
    derivative: ScoreDerivative,
    inputs: dict[str, Tensor | None],
    totals: Sequence[Tensor | None],
    captures: Sequence[Tensor],
    scalars: Sequence[Scalar],
) -> Tensor:
    """Return dL/dscore; add dL/dcapture to `totals`, where there is one.

    Args:
        derivative: of a score_mod's graph.
        inputs: positions, score and grad by name.
        totals: one contiguous tensor of a capture's shape, or None, each.
        captures: the tensors of `TracedMod.captures`, in order.
        scalars: the numbers of `TracedMod.scalars`, or 0-d tensors.
    """
    score, grad = inputs["score"], inputs["grad"]
    assert score is not None
    assert grad is not None
    if score.dtype == torch.float64 and derivative.nodes[derivative.d_score].dtype == "f32":
        derivative = derivative.widened
    found = run_nodes(derivative, surround(inputs, captures, scalars), keep_axes=True)
    values = dict(zip(derivative.outputs, found, strict=True))
    for scatter in derivative.scatters:
        total = totals[scatter.capture]
        if total is None:
            continue
        shape = (*_free_extents(derivative, scatter), *grad.shape)
        index = [values[number] for number in scatter.index]
        scatter_add_(total, index, values[scatter.value], shape)
    d_score = values[derivative.d_score]
    # what was reduced has left axes of extent 1 in front
    kept = d_score.shape[max(d_score.dim() - grad.dim(), 0) :]
    return d_score.reshape(kept).to(grad.dtype).expand(grad.shape)


def _free_extents(derivative: ScoreDerivative, scatter: Scatter) -> tuple[int, ...]:
    """Return the leading extents of a scatter that runs over axes of the program."""
    lead = [1] * (max(scatter.axes) + 1 if scatter.axes else 0)
    for axis in scatter.axes:
        lead[-(axis + 1)] = derivative.axis_extent(axis)
    return tuple(lead)


def scatter_add_(
    total: Tensor, index: Sequence[Tensor], value: Tensor, shape: tuple[int, ...]
) -> None:
    """Add value to the indexed elements of total, for every position of `shape`, repeats included.

    Dimensions on which no index depends are summed first, so a bias per head costs one addition a
    head and tile. In place on a tensor whose old value no derivative needs.

    Shapes:
        index, value: broadcastable to `shape`; more axes, all of extent 1, may stand in front.
    """
    rank = max(len(shape), value.dim(), *(number.dim() for number in index))
    shape = (1,) * (rank - len(shape)) + shape
    if 0 in shape or total.numel() == 0:
        return
    if not index:
        total.add_(value.expand(shape).sum(dtype=total.dtype))
        return
    padded = [number.reshape((1,) * (rank - number.dim()) + number.shape) for number in index]
    kept = tuple(max(number.shape[axis] for number in padded) for axis in range(rank))
    summed = [axis for axis in range(rank) if kept[axis] == 1 and shape[axis] != 1]
    value = value.expand(shape)
    value = value.sum(summed, keepdim=True, dtype=total.dtype) if summed else value.to(total.dtype)
    inside = [
        number.clamp(-extent, extent - 1).expand(kept)
        for number, extent in zip(padded, total.shape, strict=True)
    ]
    if total.is_cuda:
        # index_put sorts on CUDA and so adds in a fixed order; index_add uses atomics there.
        total.index_put_(tuple(inside), value, accumulate=True)
        return
    # On a CPU it is the other way round.
    flat = flat_index(inside, total.shape)
    total.view(-1).index_add_(0, flat.reshape(-1), value.reshape(-1))
