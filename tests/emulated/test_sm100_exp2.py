"""Software exponentials of the Blackwell kernels against the reference's formula and float64."""

import pytest
import torch
from exp2_variant import Exp2Variant

from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget
from fovea.plan.numerics import EXP2_ARGUMENT_ERROR, EXP2_RELATIVE_ERROR, SOFTWARE_SUM_LIMIT
from fovea.reference.numerics import exp2_polynomial
from fovea.runtime.emulated_module import load

EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def exp2():
    """Return the kernel as a function of a vector."""
    run = load(get_artifact(Exp2Variant(), CompileTarget(arch="sm_100a")))

    def power(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        run(x, out)
        return out

    return power


def test_exp2_is_the_references_polynomial_up_to_rounding(exp2):
    x = torch.linspace(-62, 65, 4000)
    found, expected = exp2(x), exp2_polynomial(x)
    assert ((found - expected).abs() <= 2 * EPSILON * expected).all()
    exact = torch.exp2(x.double())
    bound = EXP2_RELATIVE_ERROR + EXP2_ARGUMENT_ERROR + 2 * EPSILON
    assert ((found.double() / exact - 1).abs() <= bound).all()


def test_exp2_of_whole_numbers_is_exact(exp2):
    x = torch.arange(-62.0, 66.0)
    assert torch.equal(exp2(x), torch.exp2(x.double()).float())


def test_exp2_of_hidden_scores_is_zero(exp2):
    x = torch.tensor([-torch.inf, -1e30, -63.0, -200.5, -62.25, -62.5])
    assert torch.equal(exp2(x), torch.zeros(6))


def test_exp2_of_what_overflows_or_is_no_number_is_judged_bad(exp2):
    x = torch.tensor([torch.nan, torch.inf, 1e30, 128.0, 65.5, 64.0])
    assert not (exp2(x) < SOFTWARE_SUM_LIMIT).any()
