"""One attention call: the quick eager path, or the operators.

Lives here: which of the two. Invariant: both give the same results and the same gradients.
"""

import torch
from torch import Tensor

from fovea import dispatch
from fovea.ops import eager, watchers
from fovea.ops.functions import Attention
from fovea.ops.program import pack
from fovea.problem import AttentionProblem, ForwardResult


def attend(problem: AttentionProblem, backend: str | None) -> ForwardResult:
    """Run a problem, recorded by autograd where a gradient is needed."""
    if not torch.compiler.is_compiling():
        tensors = eager.tensors_of(problem)
        if eager.is_plain(tensors):
            return eager.attend(problem, dispatch.choose(problem, backend), tensors)
    return _by_operator(problem, dispatch.check_backend(backend))


def _by_operator(problem: AttentionProblem, backend: str | None) -> ForwardResult:
    packed = pack(problem, backend)
    tensors: list[Tensor | None] = [packed.q, packed.k, packed.v, packed.sink]
    tensors += [*packed.captures, *packed.constants]
    watchers.register()
    out, lse, max_score = Attention.apply(
        packed.program, tuple(packed.ints), len(packed.captures), *tensors
    )  # pyright: ignore[reportGeneralTypeIssues]
    return ForwardResult(out, lse, max_score if problem.wants_max_score else None)
