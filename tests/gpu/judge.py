"""What a case's result is measured against, on whatever device its tensors are.

Lives here: errors against the float64 oracle beside those of plain attention in the inputs' dtype,
and the verdict. Not here: the budgets (`fovea.testing.budget`). Invariant: a verdict of None means
that every result was compared and is within its budget.
"""

from typing import NamedTuple

import torch
from call import Call
from torch import Tensor

import fovea
from fovea.problem import AttentionProblem, ForwardResult
from fovea.reference.dense import dense_forward, oracle, plain_precision, with_precision
from fovea.testing.budget import check_backward, check_forward
from fovea.testing.inputs import normal
from fovea.testing.problems import all_needs


class Judgement(NamedTuple):
    """Largest absolute errors of the output, and what is wrong if anything is."""

    error: float
    plain_error: float
    wrong: str | None


def run(call: Call, backend: str) -> ForwardResult:
    """Return the results of a call through the public function."""
    aux = fovea.AuxRequest(lse=True, max_score=call.case.wants_max_score)
    out, got = call.attend(call.q, call.k, call.v, return_aux=aux, backend=backend, **call.options)
    return ForwardResult(out, got.lse, got.max_score)


def judge(call: Call, result: ForwardResult) -> Judgement:
    """Compare a result with the oracle."""
    return judge_problem(call.problem(), result)


def judge_problem(problem: AttentionProblem, result: ForwardResult) -> Judgement:
    """Compare the result of a problem with the oracle."""
    exact = oracle(problem)
    precision = plain_precision(problem.dtype)
    with torch.no_grad():
        plain = dense_forward(with_precision(problem, precision), precision)
    wrong = _wrong_layout(problem, result)
    if wrong is None:
        try:
            check_forward(problem, result)
        except AssertionError as error:
            wrong = str(error)
    return Judgement(_error(result.out, exact.out), _error(plain.out, exact.out), wrong)


def _error(x: Tensor, exact: Tensor) -> float:
    if x.numel() == 0:
        return 0.0
    return float((x.double() - exact).abs().nan_to_num(nan=torch.inf).max())


def _wrong_layout(problem: AttentionProblem, result: ForwardResult) -> str | None:
    expected = problem.empty_out()
    if result.out.dtype != problem.dtype or result.out.stride() != expected.stride():
        return f"out is {result.out.dtype} with strides {result.out.stride()}"
    if result.lse.dtype != torch.float32 or not result.lse.is_contiguous():
        return f"lse is {result.lse.dtype} with strides {result.lse.stride()}"
    return None


def judge_gradients(call: Call, backend: str) -> str | None:
    """Return what is wrong with the gradients of a call, None if nothing is."""
    problem = call.problem()
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    options = dict(call.options)
    if "sink" in options:
        options["sink"] = options["sink"].detach().requires_grad_()
        leaves.append(options["sink"])
    aux = fovea.AuxRequest(lse=True)
    out, got = call.attend(*leaves[:3], return_aux=aux, backend=backend, **options)
    dout = normal(out.shape, seed=101, dtype=out.dtype, device=out.device)
    dlse = normal(got.lse.shape, seed=102, device=out.device)
    found = torch.autograd.grad([out, got.lse], leaves, [dout, dlse])
    needs = all_needs(problem)
    gradients = fovea.problem.Gradients(
        dq=found[0],
        dk=found[1],
        dv=found[2],
        dsink=found[3] if len(found) > 3 else None,
        score_captures=(None,) * len(needs.score_captures),
    )
    try:
        check_backward(problem, gradients, dout=dout, dlse=dlse, needs=needs)
    except AssertionError as error:
        return str(error)
    return None
