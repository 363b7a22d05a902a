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


@pytest.mark.parametrize("has_pages", [False, True])
def test_jobs_of_packed_sequences_are_the_variants_that_explain_prints(jobs, has_pages):
    q = torch.empty(8, 4, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(*((6, 16) if has_pages else (8,)), 2, 128, dtype=q.dtype, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    keywords = {"cu_seqlens_q": starts, "max_seqlen_q": 5, "max_seqlen_kv": 80, "causal": True}
    if has_pages:
        table = torch.empty(2, 5, dtype=torch.int32, device="meta")
        keywords |= {"page_table": table, "seqused_kv": starts[:2]}
    else:
        keywords |= {"cu_seqlens_kv": starts}
    fovea.precompile(q, k, k, **keywords)
    kernel = kernel_on(fovea.explain(q, k, k, **keywords), "sm90")
    assert len(jobs) == len(kernel.variants) > 0
    for (variant, _), text in zip(jobs, kernel.variants, strict=True):
        assert text.startswith(variant.name)
        assert variant.plan.features.varlen
        assert (variant.plan.page_box > 0) == has_pages


@pytest.mark.parametrize("call", [fovea.precompile, fovea.explain])
def test_one_name_for_archs_is_a_type_error(call):
    with pytest.raises(TypeError, match=r"archs='sm90' is not valid.*pass \('sm90',\)"):
        call(*meta(), archs="sm90")
