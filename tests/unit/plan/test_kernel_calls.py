"""Mods that become limits, ranges or a soft cap: nothing else changes, others are honoured."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import fovea
from fovea import mods
from fovea.arch import SM90, SM100, Arch
from fovea.plan import select
from fovea.plan.kernel_calls import as_kernel_call
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.reference.dense import oracle

LENGTH = 300


def _problem(seqlen_q: int = LENGTH, **options: Any) -> AttentionProblem:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, length, 2, 16, generator=generator, dtype=torch.float64)
        for length in (seqlen_q, LENGTH, LENGTH)
    )
    return make_dense(q, k, v, Request(wants_lse=True, **options))


def _visible(problem: AttentionProblem) -> torch.Tensor:
    """Return what the limits of a call without masks show."""
    assert problem.mask_mod is None
    assert problem.block_lists is None
    band = select.band_of(problem)
    row = torch.arange(problem.seqlen_q)[:, None] + band.offset
    key = torch.arange(problem.seqlen_kv)
    visible = torch.ones(problem.seqlen_q, problem.seqlen_kv, dtype=torch.bool)
    if band.left is not None:
        visible &= key >= row - band.left
    if band.right is not None:
        visible &= key <= row + band.right
    return visible


@pytest.mark.parametrize("seqlen_q", [LENGTH, 170, 420])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "window": (70, 3)},
        {"window": (20, None)},
        {"window": (None, 9)},
    ],
)
def test_limits_of_a_mask_meet_those_of_causal_and_window(
    options: dict[str, Any], seqlen_q: int
) -> None:
    mask = mods.sliding_window(40, 17)
    problem = _problem(seqlen_q, mask_mod=mask, **options)
    band = as_kernel_call(problem)
    zero = torch.zeros((), dtype=torch.int64)
    plain = _visible(as_kernel_call(_problem(seqlen_q, **options)))
    rows = torch.arange(seqlen_q)[:, None]
    assert torch.equal(_visible(band), plain & mask(zero, zero, rows, torch.arange(LENGTH)))


def test_exact_lists_of_a_band_are_not_read() -> None:
    block_mask = fovea.create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cpu")
    band = as_kernel_call(_problem(block_mask=block_mask))
    assert band.block_lists is None
    assert band.block_mask_mod is None
    assert band.limits == (None, 0)


def test_lists_made_by_others_are_read() -> None:
    block_mask = torch_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cpu")
    problem = _problem(block_mask=block_mask)
    assert as_kernel_call(problem) is problem


def test_lists_changed_after_they_were_made_are_read() -> None:
    block_mask = fovea.create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cpu")
    first = as_kernel_call(_problem(block_mask=block_mask))
    block_mask.kv_num_blocks.zero_()
    problem = _problem(block_mask=block_mask)
    assert first.block_lists is None
    assert as_kernel_call(problem) is problem


def test_lists_of_another_number_are_read() -> None:
    def window(left: int) -> Any:
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= left)

    block_mask = fovea.create_block_mask(window(130), None, None, LENGTH, LENGTH, "cpu")
    block_mask.mask_mod = window(260)
    problem = _problem(block_mask=block_mask)
    assert as_kernel_call(problem) is problem


def test_lists_for_another_mask_are_read() -> None:
    block_mask = fovea.create_block_mask(mods.sliding_window(9), None, None, LENGTH, LENGTH, "cpu")
    block_mask.mask_mod = mods.causal
    problem = _problem(block_mask=block_mask)
    assert as_kernel_call(problem) is problem


def test_a_slice_of_lists_is_read() -> None:
    block_mask = fovea.create_block_mask(mods.causal, None, 2, LENGTH, LENGTH, "cpu")
    part = block_mask[:, :1]
    part.mask_mod = mods.causal  # torch leaves the choice to the caller
    problem = _problem(block_mask=part)
    assert as_kernel_call(problem) is problem


def test_another_mask_beside_exact_lists_stays() -> None:
    block_mask = fovea.create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cpu")
    ids = torch.arange(LENGTH) // 77
    band = as_kernel_call(_problem(block_mask=block_mask, mask_mod=mods.document(ids)))
    assert band.block_lists is None
    assert band.mask_mod is not None
    assert band.limits == (None, 0)


def test_a_band_call_compiles_the_kernel_of_causal() -> None:
    block_mask = fovea.create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cpu")
    q = torch.zeros(1, LENGTH, 2, 64, dtype=torch.bfloat16)
    plans = [
        select.forward_plan(make_dense(q, q, q, Request(**options)), SM90)
        for options in ({"block_mask": block_mask}, {"mask_mod": mods.causal}, {"causal": True})
    ]
    assert plans[0] == plans[1] == plans[2]


def test_the_reference_takes_a_band_call_as_it_was_written() -> None:
    mask = mods.sliding_window(40, 17)
    block_mask = fovea.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu")
    a, b = oracle(_problem(block_mask=block_mask)), oracle(_problem(window=(40, 17)))
    assert torch.equal(a.out, b.out)


def test_score_mod_that_is_a_soft_cap_becomes_the_number() -> None:
    found = as_kernel_call(_problem(score_mod=mods.softcap(20.0)))
    assert found.score_mod is None
    assert found.softcap == 20.0


@pytest.mark.parametrize("cap", [0.0, float("inf"), float("nan"), 1e-30])
def test_soft_cap_of_an_odd_number_stays_a_mod(cap: float) -> None:
    problem = _problem(score_mod=lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    assert as_kernel_call(problem) is problem


def test_soft_cap_behind_the_keyword_stays_a_mod() -> None:
    problem = _problem(score_mod=mods.softcap(20.0), softcap=5.0)
    assert as_kernel_call(problem) is problem


def test_exact_lists_become_ranges_where_kernels_take_them() -> None:
    ids = torch.arange(LENGTH) // 77
    block_mask = fovea.create_block_mask(mods.document(ids), None, None, LENGTH, LENGTH, "cpu")
    problem = _problem(block_mask=block_mask)
    found = as_kernel_call(problem, SM90)
    assert found.key_ranges is not None
    assert found.block_lists is None
    assert found.block_mask_mod is None
    for arch in (None, SM100):
        assert as_kernel_call(problem, arch) is problem


def test_ranges_are_not_read_beside_another_mask() -> None:
    ids = torch.arange(LENGTH) // 77
    block_mask = fovea.create_block_mask(mods.document(ids), None, None, LENGTH, LENGTH, "cpu")
    block_mask.mask_mod = mods.document(ids.clone())
    problem = _problem(block_mask=block_mask)
    assert as_kernel_call(problem, SM90) is problem


@pytest.mark.parametrize("block_size", [64, (128, 32)])
def test_exact_lists_of_small_blocks_become_bits_where_kernels_take_no_ranges(
    block_size: Any,
) -> None:
    mask = mods.document(torch.arange(LENGTH) // 77)
    sizes = (None, None, LENGTH, LENGTH, "cpu", block_size)
    problem = _problem(block_mask=fovea.create_block_mask(mask, *sizes))
    by_ranges, by_bits = (as_kernel_call(problem, arch) for arch in (SM90, SM100))
    assert by_ranges.key_ranges is not None
    assert by_ranges.mask_bits is by_ranges.block_lists is None
    assert by_bits.key_ranges is None
    assert by_bits.mask_bits is not None
    assert by_bits.block_lists is by_bits.mask_bits.lists
    assert as_kernel_call(problem) is problem


@pytest.mark.parametrize("arch", [SM90, SM100], ids=str)
@pytest.mark.parametrize("block_size", [128, 32])
def test_other_exact_lists_bring_bits(block_size: int, arch: Arch) -> None:
    sizes = (None, None, LENGTH, LENGTH, "cpu", block_size)
    block_mask = fovea.create_block_mask(mods.natten_2d(15, 20, 3, 3), *sizes)
    problem = _problem(block_mask=block_mask)
    found = as_kernel_call(problem, arch)
    assert found.mask_bits is not None
    assert found.block_lists is found.mask_bits.lists
    assert (found.block_lists.block_q, found.block_lists.block_kv) == (128, 128)
    assert found.block_mask_mod is None
    assert as_kernel_call(problem) is problem
    block_mask.mask_mod = mods.natten_2d(15, 20, 5, 3)
    changed = _problem(block_mask=block_mask)
    assert as_kernel_call(changed, arch) is changed


@pytest.mark.parametrize("reads", ["b", "h"])
def test_lists_of_one_head_or_batch_entry_are_read_where_their_mask_looks_at_each(
    reads: str,
) -> None:
    reach = torch.tensor([60, 5])

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = reach[b if reads == "b" else h]
        return (kv_idx <= q_idx) & (kv_idx > q_idx - near)

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, LENGTH, 2, 16, generator=generator, dtype=torch.float64)
    for batch, heads in ((None, None), (1, 1), (2, 2)):
        block_mask = fovea.create_block_mask(mask, batch, heads, LENGTH, LENGTH, "cpu")
        problem = make_dense(q, q, q, Request(block_mask=block_mask))
        found = as_kernel_call(problem, SM90)
        assert (found.key_ranges is not None) == (batch == 2)
