"""vmap of an attention call: the mapped dimension joins the batch, or the call is repeated.

Lives here: vmap rules of `functions.py`. Invariant: the batch dimension may grow only where nothing
looks at a batch index: no mod reads `b`, block lists have batch 1, and no capture is mapped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fovea.ops.program import Program, parse

type_of_dims = tuple[Any, ...]


def vmap_forward(
    apply: Callable[..., Any], size: int, in_dims: type_of_dims, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Map a forward: args are (program, ints, num_captures, q, k, v, sink, *others)."""
    program = parse(args[0])
    facts, inputs, others = args[:3], args[3:6], args[6:]
    if not can_fold(program, args[3:], in_dims[6:]):
        return _loop(apply, size, in_dims, args)
    batch = _batch_of(inputs[0], in_dims[3])
    folded = [_fold(t, d, size) for t, d in zip(inputs, in_dims[3:6], strict=True)]
    out, lse, max_score = apply(*facts, *folded, *others)
    lead = (size, batch)
    if not program.wants_max_score:
        return (out.unflatten(0, lead), lse.unflatten(0, lead), max_score), (0, 0, None)
    return tuple(result.unflatten(0, lead) for result in (out, lse, max_score)), (0, 0, 0)


def vmap_backward(
    apply: Callable[..., Any], size: int, in_dims: type_of_dims, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Map a backward: args are (program, ints, num_captures, flags, dout, dlse, out, lse, ...).

    A gradient of something shared by the batch (sink, captures) is one per mapped entry here, and a
    folded call would add them up: such calls are repeated.
    """
    program = parse(args[0])
    facts, rows, others = args[:4], args[4:11], args[11:]
    if any(facts[3][3:]) or not can_fold(program, args[8:], in_dims[11:]):
        return _loop(apply, size, in_dims, args)
    folded = [_fold(t, d, size) for t, d in zip(rows, in_dims[4:11], strict=True)]
    grads = apply(*facts, *folded, *others)
    lead = (size, _batch_of(args[8], in_dims[8]))
    dims = tuple(0 if flag else None for flag in facts[3])
    return (
        tuple(g.unflatten(0, lead) if f else g for g, f in zip(grads, facts[3], strict=True)),
        dims,
    )


def can_fold(program: Program, tensors: tuple[Any, ...], dims_of_others: type_of_dims) -> bool:
    """Return whether the batch of a call can grow without changing its meaning."""
    if program.varlen_tensors or any(dim is not None for dim in dims_of_others):
        return False
    if any(mod is not None and any(n.op == "b" for n in mod[0].nodes) for mod in program.mods):
        return False
    # Lists are the last constants of a dense call, kv_num_blocks (batch, heads, blocks) the first.
    num_lists = program.list_tensors.count("1")
    return not num_lists or tensors[-num_lists].shape[0] == 1


def _fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if tensor is None:
        return None
    if dim is None:
        tensor = tensor.unsqueeze(0).expand(size, *tensor.shape)
    else:
        tensor = tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _batch_of(q: Tensor, dim: int | None) -> int:
    """Return the batch of one mapped call."""
    return q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]


def _loop(
    apply: Callable[..., Any], size: int, in_dims: type_of_dims, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Repeat the call for each mapped entry and stack the results."""
    if size == 0:  # one call on zeros tells the shapes
        args = tuple(
            arg.new_zeros((*arg.shape[:dim], 1, *arg.shape[dim + 1 :]))
            if isinstance(arg, Tensor) and dim is not None
            else arg
            for arg, dim in zip(args, in_dims, strict=True)
        )
        results, dims = _loop(apply, 1, in_dims, args)
        return tuple(result[:0] for result in results), dims
    calls = [
        apply(
            *(
                arg.select(dim, i) if isinstance(arg, Tensor) and dim is not None else arg
                for arg, dim in zip(args, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    results = tuple(torch.stack(column) for column in zip(*calls, strict=True))
    return results, (0,) * len(results)
