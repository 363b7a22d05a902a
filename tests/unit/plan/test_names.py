"""Names of kernels: one a variant, whatever the features and mods, and none changes by itself."""

import itertools

import pytest
import torch

import fovea
from fovea.api.variants import variants_of
from fovea.arch import ARCHS, SM90, SM100
from fovea.plan.features import ForwardFeatures
from fovea.plan.select import forward_plan
from fovea.problem import Request, make_dense

_SLOPES = torch.linspace(0.1, 1.0, 4)
MODS = (
    None,
    lambda s, b, h, i, j: s - _SLOPES[h] * (i - j),
    lambda s, b, h, i, j: s + _SLOPES[h] * (i - j),
    lambda s, b, h, i, j: torch.where(i > j, s, 2 * s),
)


def _problem(**keywords):
    q = torch.empty(1, 300, 4, 128, dtype=torch.bfloat16)
    return make_dense(q, q, q, Request(**keywords))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_no_two_variants_have_one_name(arch):
    texts = {}
    options = itertools.product(MODS, (False, True), (None, (50, None)), (None, 20.0))
    for score_mod, causal, window, softcap in options:
        problem = _problem(score_mod=score_mod, causal=causal, window=window, softcap=softcap)
        for plan, _ in variants_of(problem, arch):
            assert texts.setdefault(plan.name, plan.key_text()) == plan.key_text()
    assert len(texts) > 100


@pytest.mark.parametrize("arch", [SM90, SM100], ids=str)
def test_numbers_and_lengths_are_not_in_a_name(arch):
    def made(width):
        return lambda s, b, h, i, j: torch.where(i - j < width, s, s - 1.0)

    first, second = (forward_plan(_problem(score_mod=made(w)), arch).name for w in (3, 40))
    assert first == second


def test_plain_kernel_has_its_family_as_its_name():
    plan = forward_plan(_problem(), SM100)
    assert plan.name == plan.family
    assert ForwardFeatures().tag == ""


def test_name_depends_on_the_features_alone():
    # Written down, as hashes of Python's own would differ in every process.
    assert ForwardFeatures(limit_right=True, sink=True).tag == "_0eaeb7"


def test_precompile_and_explain_say_as_many_names_as_there_are_variants():
    q = torch.empty(1, 300, 4, 128, dtype=torch.bfloat16, device="meta")
    for kernel in fovea.explain(q, q, q, causal=True, score_mod=MODS[1]).kernels:
        names = [text.partition(":")[0] for text in kernel.variants]
        assert kernel.name == names[0]
        assert len(set(names)) == len(names) > 1
