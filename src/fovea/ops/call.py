"""One checked attention call: the quick eager path, or the operators.

Lives here: which of the two. Not here: calls that need no check any more (`warm.py`). Invariant:
both give the same results and the same gradients.
"""

import torch

from fovea import dispatch
from fovea.errors import UnsupportedError
from fovea.ops import eager, library, sharding, warm, watchers
from fovea.ops.functions import Attention
from fovea.ops.program import pack
from fovea.problem import AttentionProblem, ForwardResult, Results
from fovea.problem.parts import tensors_of

_has_transform = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]


def attend(
    problem: AttentionProblem, backend: str | None, passed: warm.Passed | None = None
) -> Results:
    """Run a problem, recorded by autograd where a gradient is needed.

    The lse is the caller's own where the problem wants it or the max_score.

    Args:
        problem: the call.
        backend: its name, or None to choose.
        passed: the call as the user made it, to be recognised by `warm.attend` next time.
    """
    if not torch.compiler.is_compiling() and eager.is_plain(tensors_of(problem)):
        result, call = eager.attend_problem(problem, dispatch.choose(problem, backend))
        if passed is not None:
            warm.remember(passed, problem, call)
        return result
    packed = pack(problem, dispatch.check_backend(backend))
    watchers.register()
    if torch.compiler.is_compiling():
        _check_no_transform()
        # The operator's own autograd formula. Dynamo would refuse the functions below, being given
        # one tensor twice, as self-attention does with q, k and v.
        out, lse, max_score = library.FORWARD(*packed)
    else:
        facts = (packed.program, tuple(packed.ints), len(packed.captures))
        tensors = (packed.q, packed.k, packed.v, packed.sink, *packed.captures, *packed.constants)
        try:
            out, lse, max_score = Attention.apply(*facts, *tensors)  # pyright: ignore
        except RuntimeError as error:
            problem_there = sharding.problem_of_mixed(error, problem)
            if problem_there is None:
                raise
            raise TypeError(problem_there) from error
    return ForwardResult(out, lse, max_score if problem.wants_max_score else None)


def _check_no_transform() -> None:
    """Raise under torch.compile of torch.func transforms.

    Dynamo drops the autograd function of an input that does not require grad by itself, and an
    operator's own formula cannot be transformed.
    """
    if _has_transform():
        raise UnsupportedError(
            "attention inside a torch.func transform inside torch.compile is not supported "
            "(allowed: either of the two); compile what is around the transform, or call the "
            "transformed function without torch.compile."
        )
