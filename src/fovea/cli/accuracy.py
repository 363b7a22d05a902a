"""Distance of an output from the float64 oracle, beside that of plain attention.

Lives here: the two figures that the terminal shows. Budgets of tests are in `fovea.testing`.
Invariant: plain attention runs in the problem's own precision on the same inputs.
"""

from dataclasses import dataclass

from torch import Tensor

from fovea.problem import AttentionProblem
from fovea.reference import dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Largest absolute errors against float64.

    Attributes:
        error: of the output that was judged.
        plain_error: of plain attention (scores and softmax in fp32, P and output rounded).
    """

    error: float
    plain_error: float

    def __str__(self) -> str:
        return (
            f"{self.error:.2e}; of unfused attention in the same dtype and on the same inputs "
            f"{self.plain_error:.2e}"
        )


def judge(out: Tensor, problem: AttentionProblem) -> Accuracy:
    """Return the accuracy of an output of a problem."""
    exact = dense.oracle(problem).out
    precision = dense.plain_precision(problem.dtype)
    plain = dense.dense_forward(dense.with_precision(problem, precision), precision).out
    return Accuracy(error=_largest(out, exact), plain_error=_largest(plain, exact))


def _largest(out: Tensor, exact: Tensor) -> float:
    distance = (out.to(exact.dtype) - exact).abs()
    return distance.max().item() if distance.numel() else 0.0  # a call without rows
