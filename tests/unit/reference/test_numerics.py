import importlib.util
import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fovea.plan.numerics import (
    CAP_COEFFICIENTS,
    CAP_LIMIT,
    CAP_RELATIVE_ERROR,
    COSINE_COEFFICIENTS,
    COSINE_RELATIVE_ERROR,
    EXP2_ARGUMENT_ERROR,
    EXP2_COEFFICIENTS,
    EXP2_HIGHEST,
    EXP2_RELATIVE_ERROR,
    HALF_PI_PARTS,
    SINE_COEFFICIENTS,
    SINE_RELATIVE_ERROR,
    TANH_COEFFICIENTS,
    TANH_LARGEST_SQUARE,
    TANH_RELATIVE_ERROR,
    TWO_OVER_PI,
    TWO_OVER_PI_BITS,
)
from fovea.reference.numerics import (
    accumulation_dtype,
    exp2_polynomial,
    exp_relative,
    exp_relative_,
    finite_reference,
    log_sum,
    round_operand,
    updated_reference,
)

SCRIPT = Path(__file__).parents[3] / "scripts" / "derive_polynomials.py"


def _derivation():
    spec = importlib.util.spec_from_file_location("derive_polynomials", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "known", "largest"),
    [
        ("exp2", EXP2_COEFFICIENTS, EXP2_RELATIVE_ERROR),
        ("tanh", TANH_COEFFICIENTS, TANH_RELATIVE_ERROR),
        ("cap", CAP_COEFFICIENTS, CAP_RELATIVE_ERROR),
        ("sine", SINE_COEFFICIENTS, SINE_RELATIVE_ERROR),
        ("cosine", COSINE_COEFFICIENTS, COSINE_RELATIVE_ERROR),
    ],
)
def test_coefficients_are_what_the_script_derives(name, known, largest):
    script = _derivation()
    function, degree = script.POLYNOMIALS[name]
    coefficients, error = script.derive(function, degree)
    assert coefficients == known
    assert error == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize(
    ("coefficients", "limit", "unit", "largest"),
    [
        (
            TANH_COEFFICIENTS,
            TANH_LARGEST_SQUARE**0.5,
            TANH_LARGEST_SQUARE**0.5,
            TANH_RELATIVE_ERROR,
        ),
        (CAP_COEFFICIENTS, CAP_LIMIT, CAP_LIMIT, CAP_RELATIVE_ERROR),
    ],
)
def test_tanh_polynomials_are_good_up_to_their_limits(coefficients, limit, unit, largest):
    x = torch.linspace(1e-3, limit, 10001, dtype=torch.float64)
    factor = torch.full_like(x, coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        factor = factor * (x / unit) ** 2 + coefficient
    assert (x * factor / torch.tanh(x) - 1).abs().max() <= 1.01 * largest


def test_two_over_pi_and_the_parts_of_its_inverse_are_those_numbers():
    one = 1 << 320

    def arctangent_of_inverse(x):
        terms = ((-1) ** k * one // ((2 * k + 1) * x ** (2 * k + 1)) for k in range(240))
        return sum(terms)

    pi = 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))  # Machin's
    assert (2 * one << TWO_OVER_PI_BITS) // pi == TWO_OVER_PI
    rest = Fraction(pi, 2 * one)
    for part in HALF_PI_PARTS:
        assert torch.tensor(part, dtype=torch.float32).item() == part
        rest -= Fraction(part)
    assert abs(rest) < 2e-23


def test_exp2_coefficients_level_the_error_at_five_places():
    # The mark of a minimax polynomial: equal errors, signs in turn, one more than coefficients.
    f = torch.linspace(0, 1, 100001, dtype=torch.float64)
    c1, c2, c3, c4 = EXP2_COEFFICIENTS
    error = ((((c4 * f + c3) * f + c2) * f + c1) * f + 1) / torch.exp2(f) - 1
    edges = [0, *(torch.nonzero(error[2:].sign() != error[1:-1].sign()).flatten() + 2), len(f)]
    peaks = [error[a:b][error[a:b].abs().argmax()] for a, b in itertools.pairwise(edges)]
    assert len(peaks) == 5
    assert all(a * b < 0 for a, b in itertools.pairwise(peaks))
    assert max(map(abs, peaks)) / min(map(abs, peaks)) < 1.01


def test_exp2_polynomial_error_stays_within_the_bound():
    x = torch.linspace(-62, 65, 1_000_003)
    exact = torch.exp2(x.double())
    error = (exp2_polynomial(x).double() / exact - 1).abs().max()
    bound = EXP2_RELATIVE_ERROR + EXP2_ARGUMENT_ERROR + 4 * torch.finfo(torch.float32).eps
    assert bound / 2 < error <= bound


def test_exp2_polynomial_of_whole_numbers_is_exact():
    x = torch.arange(-62.0, 66.0)
    assert torch.equal(exp2_polynomial(x), torch.exp2(x.double()).float())


def test_exp2_polynomial_of_hidden_scores_is_zero():
    x = torch.tensor([-torch.inf, -1e30, -127.0, -63.0, -62.5])
    assert torch.equal(exp2_polynomial(x), torch.zeros(5))


def test_exp2_polynomial_of_what_overflows_or_is_no_number_is_the_highest_power():
    x = torch.tensor([torch.nan, torch.inf, 1e30, 65.5])
    assert torch.equal(exp2_polynomial(x), torch.full((4,), 2.0**EXP2_HIGHEST))


def test_exp2_polynomial_rounded_to_bfloat16_is_off_by_one_ulp_at_most():
    x = torch.linspace(-20, 0, 200_001)
    exact = torch.exp2(x.double()).bfloat16().view(torch.int16).int()
    ours = exp2_polynomial(x).bfloat16().view(torch.int16).int()
    assert (exact - ours).abs().max() <= 1
    assert (exact != ours).float().mean() < 0.02


def test_exp2_polynomial_of_float64_raises():
    with pytest.raises(TypeError, match=r"float64.*use torch.exp2"):
        exp2_polynomial(torch.zeros(1, dtype=torch.float64))


def test_accumulation_dtype_is_float64_for_float64_alone():
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert [accumulation_dtype(d) for d in dtypes] == [torch.float64] + [torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_operand_of_16_bit_inputs_rounds_and_keeps_the_dtype(dtype):
    x = torch.rand(1000)
    rounded = round_operand(x, dtype)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, x.to(dtype).float())
    assert not torch.equal(rounded, x)


def test_round_operand_of_wide_inputs_changes_nothing():
    x = torch.rand(10, dtype=torch.float64)
    assert round_operand(x, torch.float64) is x


def test_exp_relative_of_huge_scores_keeps_full_precision():
    scores = torch.tensor([[60000.0, 59999.5, 59990.25]])
    reference = torch.tensor([[60000.0]])
    exact = (scores.double() - 60000.0).exp().float()
    torch.testing.assert_close(exp_relative(scores, reference), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(exp_relative_(scores.clone(), reference), exact, rtol=1e-6, atol=0)


def test_finite_reference_of_a_row_without_keys_is_zero():
    x = torch.tensor([-torch.inf, torch.inf, torch.nan, -3.0])
    assert finite_reference(x)[0] == 0
    assert torch.equal(finite_reference(x)[1:].nan_to_num(7.0), x[1:].nan_to_num(7.0))


def test_updated_reference_without_threshold_is_the_running_maximum():
    old = torch.tensor([-torch.inf, 0.0, 3.0])
    new = torch.tensor([1.0, 0.5, 2.0])
    assert torch.equal(updated_reference(old, new, 0.0), torch.tensor([1.0, 0.5, 3.0]))


def test_updated_reference_with_threshold_keeps_the_old_while_the_rise_is_small():
    ln2 = 0.6931471805599453
    old = torch.tensor([0.0, 0.0, -torch.inf, 5.0])
    new = torch.tensor([7.9 * ln2, 8.1 * ln2, 1.0, 2.0])
    expected = torch.tensor([0.0, 8.1 * ln2, 1.0, 5.0])
    assert torch.equal(updated_reference(old, new, 8.0), expected)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_updated_reference_of_nan_scores_is_nan(threshold):
    nan = torch.tensor([torch.nan])
    assert updated_reference(torch.zeros(1), nan, threshold).isnan()
    assert updated_reference(nan, torch.zeros(1), threshold).isnan()


@pytest.mark.parametrize("threshold", [0.0, 8.0, 64.0])
def test_online_softmax_does_not_depend_on_the_threshold(threshold):
    scores = torch.randn(50, 64, dtype=torch.float64).cumsum(dim=1) * 3
    reference = torch.full((50, 1), -torch.inf, dtype=torch.float64)
    row_sum = torch.zeros(50, 1, dtype=torch.float64)
    for tile in scores.split(8, dim=1):
        new = updated_reference(reference, tile.amax(dim=1, keepdim=True), threshold)
        row_sum = row_sum * exp_relative(reference, new) + exp_relative(tile, new).sum(1, True)
        reference = new
    torch.testing.assert_close(log_sum(reference, row_sum)[:, 0], scores.logsumexp(1))
