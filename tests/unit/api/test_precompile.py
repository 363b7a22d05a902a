"""fovea.precompile: which kernels it asks the compiler for. Compiling itself is tests/compile's."""

import pytest
import torch

import fovea
from fovea.compile import aot, pool


@pytest.fixture
def jobs(monkeypatch):
    """Record what would be compiled."""
    seen = []
    monkeypatch.setattr(pool, "compile_many", lambda wanted, workers=None: seen.extend(wanted))
    return seen


def meta(head_dim=128, dtype=torch.bfloat16):
    q = torch.empty(1, 1, 8, head_dim, dtype=dtype, device="meta")
    return q, q[:, :, :2], q[:, :, :2]


def kernel_on(explanation, arch):
    return next(kernel for kernel in explanation.kernels if kernel.arch.name == arch)


def test_jobs_are_the_variants_that_explain_prints(jobs):
    table = torch.randn(8)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h]

    names = fovea.precompile(*meta(), causal=True, score_mod=mod)
    kernel = kernel_on(fovea.explain(*meta(), causal=True, score_mod=mod), "sm90")
    assert len(jobs) == len(kernel.variants) > 1
    assert len({variant.key_text() for variant, _ in jobs}) == len(jobs)
    for (variant, _), text in zip(jobs, kernel.variants, strict=True):
        assert text.startswith(variant.name)
    assert set(names) == {variant.name for variant, _ in jobs}
    assert {target.arch for _, target in jobs} == {"sm_90a"}


def test_call_without_a_kernel_raises(jobs):
    with pytest.raises(fovea.UnsupportedError, match=r"float64.*fovea\.explain"):
        fovea.precompile(*meta(dtype=torch.float64))
    assert jobs == []


def test_unknown_arch_raises(jobs):
    with pytest.raises(ValueError, match="sm80"):
        fovea.precompile(*meta(), archs=("sm80",))


def test_bundle_gets_all_variants(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(aot, "write_bundle", lambda *a, **k: seen.append((a, k)))
    fovea.precompile(*meta(64), bundle=tmp_path, workers=1)
    ((variants, targets, folder), keywords) = seen[0]
    kernel = kernel_on(fovea.explain(*meta(64)), "sm90")
    assert (len(variants), len(targets), folder) == (len(kernel.variants), 1, tmp_path)
    assert keywords == {"workers": 1}
