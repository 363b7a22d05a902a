"""fovea.explain: the decisions, the figures, and that nothing runs."""

import pytest
import torch

import fovea
from fovea import dispatch
from fovea.api.explain import explain_problem
from fovea.problem import Request, make_dense
from fovea.tiling.block_lists import BlockLists


def tensors(dtype=torch.bfloat16, head_dim=128, device="cpu"):
    q = torch.randn(2, 64, 8, head_dim, dtype=dtype, device=device)
    k = torch.randn(2, 96, 2, head_dim, dtype=dtype, device=device)
    return q, k, k.clone()


def kernel_on(explanation, name):
    return next(kernel for kernel in explanation.kernels if kernel.arch.name == name)


def test_cpu_call_names_the_reference_and_what_hopper_would_run():
    explanation = fovea.explain(*tensors(), causal=True)
    assert (explanation.backend, explanation.backward_backend) == ("reference", "reference")
    assert explanation.second_order_backend == "reference"
    assert explanation.kernel is None
    kernel = kernel_on(explanation, "sm90")
    assert kernel.lack is None
    assert "d128" in kernel.name
    text = str(explanation)
    for part in (kernel.name, "the tensors are not on a GPU", "registers", "variants"):
        assert part in text


def test_wide_heads_are_said_to_be_read_in_slices_of_v():
    narrow, wide = tensors(head_dim=64), tensors(head_dim=512)
    explanation = fovea.explain(*narrow[:2], wide[2])
    kernel = kernel_on(explanation, "sm90")
    assert kernel.v_slices == 2
    assert "d64x512" in kernel.name
    assert "its columns in 2 slices" in str(explanation)
    assert "slices" not in str(fovea.explain(*narrow))
    assert "take up to 256" in kernel_on(explanation, "sm100").lack


def test_call_that_no_kernel_takes_says_what_is_lacking():
    kernel = kernel_on(fovea.explain(*tensors(torch.float32)), "sm90")
    assert "float32" in kernel.lack
    assert kernel.variants == ()


def test_explicit_backend_that_would_raise_is_explained():
    explanation = fovea.explain(*tensors(), backend="cuda")
    assert explanation.backend is None
    assert "UnsupportedError" in explanation.reason
    assert "q is on cpu" in str(explanation)


def test_backward_that_another_backend_runs_is_said_so(monkeypatch):
    monkeypatch.setattr(dispatch, "_missing_runtime", lambda backend: None)
    explanation = fovea.explain(*tensors(), backend="emulator:sm90")
    assert (explanation.backend, explanation.backward_backend) == ("emulator:sm90", "reference")
    assert explanation.kernel is kernel_on(explanation, "sm90")
    assert "reference, from the forward's lse" in str(explanation)


def test_wrong_input_raises_as_the_call_would():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="batch of k and v"):
        fovea.explain(q, k[:1], v)
    with pytest.raises(ValueError, match="backend='gpu'"):
        fovea.explain(q, k, v, backend="gpu")
    with pytest.raises(TypeError, match=r"keyword='casual'.*causal"):
        fovea.explain(q, k, v, casual=True)


@pytest.mark.parametrize(
    ("keywords", "visible"),
    [
        ({}, 64 * 96),
        ({"causal": True}, sum(i + 33 for i in range(64))),
        ({"causal": "top_left"}, sum(i + 1 for i in range(64))),
        ({"window": (3, 0)}, 64 * 4),
    ],
)
def test_work_counts_visible_pairs(keywords, visible):
    explanation = fovea.explain(*tensors(), **keywords)
    rows = 2 * 8
    assert explanation.visible_pairs == rows * visible
    assert explanation.total_pairs == rows * 64 * 96
    assert explanation.flops == 4 * 128 * rows * visible
    assert explanation.flops_dense == 4 * 128 * rows * 64 * 96
    assert explanation.sparsity == pytest.approx(1 - visible / (64 * 96))


def test_work_counts_listed_blocks():
    block_mask = fovea.create_block_mask(
        lambda b, h, i, j: i // 32 == j // 32, 1, 1, 64, 96, device="cpu", BLOCK_SIZE=32
    )
    explanation = fovea.explain(*tensors(), block_mask=block_mask)
    assert explanation.visible_pairs == 2 * 8 * 2 * 32 * 32
    assert explanation.sparsity == pytest.approx(2 / 3)


def test_work_counts_listed_blocks_wherever_they_can_be_fetched(monkeypatch):
    """On a GPU too, which a CPU can only pretend to be."""
    block_mask = fovea.create_block_mask(
        lambda b, h, i, j: i // 32 == j // 32, 1, 1, 64, 96, device="cpu", BLOCK_SIZE=32
    )
    q, k, v = tensors()
    problem = make_dense(q, k, v, Request(block_mask=block_mask))
    monkeypatch.setattr(BlockLists, "device", torch.device("cuda", 0))
    assert explain_problem(problem, "reference").visible_pairs == 2 * 8 * 2 * 32 * 32
    monkeypatch.undo()
    on_meta = (x.to("meta") for x in (q, k, v))
    unread = fovea.explain(*on_meta, block_mask=block_mask.to("meta"))
    assert unread.visible_pairs == unread.total_pairs


def test_work_of_packed_sequences_is_their_sum():
    q, k, v = (torch.randn(10, 8, 64), torch.randn(12, 2, 64), torch.randn(12, 2, 64))
    cu_q = torch.tensor([0, 4, 10], dtype=torch.int32)
    cu_kv = torch.tensor([0, 7, 12], dtype=torch.int32)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "max_seqlen_q": 6, "max_seqlen_kv": 7}
    full = fovea.explain(q, k, v, **options)
    assert full.visible_pairs == full.total_pairs == 8 * (4 * 7 + 6 * 5)
    assert full.flops == 4 * 64 * full.visible_pairs
    used = torch.tensor([3, 0], dtype=torch.int32)
    part = fovea.explain(q, k, v, **options, seqused_kv=used, causal="top_left")
    assert part.total_pairs == 8 * 4 * 3
    assert part.visible_pairs == 8 * (1 + 2 + 3 + 3)
    on_meta = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    assert fovea.explain(*(x.to("meta") for x in (q, k, v)), **on_meta).visible_pairs is None


def test_scalars_and_specialised_numbers_are_told_apart():
    slope, mode = 0.5, 3

    def mod(score, b, h, q_idx, kv_idx):
        return score * slope if mode == 3 else score

    explanation = fovea.explain(*tensors(), score_mod=mod)
    assert explanation.scalars == ("0.5",)
    assert len(explanation.specialised) == 1
    assert "mode" in explanation.specialised[0]
    assert "a new value is a new kernel" in str(explanation)


def test_variants_are_a_finite_list_that_starts_with_this_calls_kernel():
    slope = 0.5

    def mod(score, b, h, q_idx, kv_idx):
        return score * slope

    for scale, text in ((None, "scale > 0"), (-1.0, "scale <= 0")):
        kernel = kernel_on(fovea.explain(*tensors(), score_mod=mod, scale=scale), "sm90")
        assert kernel.variants[0].startswith(kernel.name)
        assert text in kernel.variants[0]
        conditions = [text for variant in kernel.variants for text in variant.split("; or ")]
        assert sum("64-bit" in condition for condition in conditions) == 4  # few queries and many
        assert len(conditions) == len(set(conditions))


def test_own_kernel_is_listed_first_for_every_length():
    for seqlen in (1, 64, 5000, 2**28):
        q = torch.empty(1, 1, 4, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(1, seqlen, 4, 128, dtype=torch.bfloat16, device="meta")
        kernel = kernel_on(fovea.explain(q, k, k, mask_mod=lambda b, h, i, j: i >= j), "sm90")
        assert kernel.variants[0].startswith(kernel.name)
        assert "this call" not in str(kernel.variants)


def test_flex_options_are_explained():
    q, k, v = (t.transpose(1, 2) for t in tensors())
    options = {"num_warps": 4, "backend": "reference"}
    explanation = fovea.explain(q, k, v, kernel_options=options, enable_gqa=True)
    assert explanation.ignored_options == ("num_warps",)
    assert (explanation.backend, explanation.reason) == ("reference", "asked for")
    assert "kernel_options num_warps" in str(explanation)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "max_seqlen_q", "max_seqlen_kv"])
def test_packed_call_with_an_argument_missing_raises(name):
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    options = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    options |= {"max_seqlen_q": 4, "max_seqlen_kv": 4}
    del options[name]
    x = torch.randn(4, 2, 8)
    with pytest.raises(TypeError, match=f"{name}=missing.*allowed"):
        fovea.explain(x, x, x, **options)


def test_return_aux_of_another_kind_raises():
    for function in (fovea.explain, fovea.precompile):
        with pytest.raises(TypeError, match="return_aux=bool"):
            function(*tensors(), return_aux=True)
        with pytest.raises(TypeError, match="keyword='cuasal'"):
            function(*tensors(), cuasal=True)


def test_varlen_call_is_explained():
    q, k = torch.randn(10, 4, 64), torch.randn(12, 2, 64)
    bounds = torch.tensor([0, 10], dtype=torch.int32)
    explanation = fovea.explain(
        q, k, k, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=10, max_seqlen_kv=12
    )
    assert explanation.visible_pairs == explanation.total_pairs
    assert "varlen" in explanation.call


def test_inputs_that_a_kernel_would_copy_are_listed():
    q, k, v = tensors()
    explanation = fovea.explain(q.mT.contiguous().mT, k, v)
    assert len(explanation.copies) == 1
    assert explanation.copies[0].startswith("q ")


def test_nothing_runs_and_nothing_warns(monkeypatch, recwarn):
    def fail(*_):
        raise AssertionError("explain ran a backend")

    monkeypatch.setattr(dispatch, "_forward", fail)
    fovea.explain(*tensors(device="meta"), causal=True)
    assert len(recwarn) == 0


def test_text_fits_a_terminal_and_says_no_condition_twice():
    q = torch.empty(1, 4096, 16, 64, dtype=torch.bfloat16, device="meta")
    text = str(fovea.explain(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: 2 * score))
    assert max(map(len, text.splitlines())) <= 100
    assert "at most 1024 keys" not in text
    words = " ".join(text.split())
    assert "scale > 0, at most 64 queries, mods in 32-bit integers" in words


@pytest.mark.parametrize("num_queries", [1, 100])
def test_every_variant_of_a_paged_call_has_its_page_size(num_queries):
    q = torch.empty(4 * num_queries, 8, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(40, 16, 2, 128, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(5, dtype=torch.int32, device="meta")
    found = fovea.explain(
        *(q, pages, pages),
        cu_seqlens_q=starts,
        max_seqlen_q=num_queries,
        max_seqlen_kv=160,
        seqused_kv=starts[1:],
        page_table=torch.empty(4, 10, dtype=torch.int32, device="meta"),
    )
    for kernel in found.kernels:
        assert len(kernel.variants) > 1
        assert all("_pages16_" in text.partition(":")[0] for text in kernel.variants)
