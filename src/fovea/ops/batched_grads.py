"""Batches of cotangents: `torch.autograd.grad(..., is_grads_batched=True)` and what builds on it.

Lives here: taking such a batch apart, one backward an entry. Not here: `torch.vmap`
(`folding.py`), which autograd does not use for this. Invariant: what comes back is batched as what
came in was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch
_is_batched: Callable[[Tensor], bool] = _torch._C._functorch.is_legacy_batchedtensor


def is_batched(grads: tuple[Tensor | None, ...]) -> bool:
    """Return whether a cotangent stands for a whole batch of them."""
    return any(grad is not None and _is_batched(grad) for grad in grads)


def each_of_batch(
    backward: Callable[..., tuple[Any, ...]], grads: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Return the results of `backward(*grads)` for each entry of a batch, as one batch."""
    level = _torch._C._vmapmode_increment_nesting() - 1
    _torch._C._vmapmode_decrement_nesting()
    batched = [grad for grad in grads if grad is not None and _is_batched(grad)]
    size = _torch._remove_batch_dim(batched[0], level, 0, 0).shape[0]
    stacks = [
        None if grad is None else _torch._remove_batch_dim(grad, level, size, 0) for grad in grads
    ]
    calls = [
        backward(*(None if stack is None else stack[entry] for stack in stacks))
        for entry in range(size)
    ]
    # A subclass would make views of the batch, which has none.
    with _torch._C.DisableTorchFunctionSubclass():
        return tuple(
            None if column[0] is None else _torch._add_batch_dim(torch.stack(column), 0, level)
            for column in zip(*calls, strict=True)
        )
